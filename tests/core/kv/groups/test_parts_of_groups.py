"""Blocks of the groups after the first. The tests of window blocks cover the rest."""

from __future__ import annotations

import pytest

from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.groups.parts import Parts
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates


class OldestFirst(Parts):
    """Parts whose least recently used one is evicted."""

    def _evict(self):
        part = next(iter(self._cached))
        self._evict_from(self._cached, part)
        return part


class Made:
    """Three parts, and four blocks of the first group, which are findable."""

    def __init__(self, kind=OldestFirst):
        self.pool, self.evicted = BlockPool(4), []
        for block in self.pool.take(4):
            self.pool.register(block, bytes([block.block_id]), (block.block_id,), None)
        spec = KVGroupSpec(RecurrentStates(), 3)
        self.parts = kind(2, spec, block_size=1, blocks=self.pool.blocks, on_evict=self.evicted.append)

    def join(self, *block_ids):
        """Take a part for each block; return the parts."""
        taken = [self.parts._take() for _ in block_ids]
        for block_id, part in zip(block_ids, taken, strict=True):
            self.parts._join(block_id, part)
        return taken


@pytest.fixture
def made():
    return Made()


def test_new_parts_are_free(made):
    parts = made.parts
    assert (parts.index, parts.num_blocks, parts.kind, parts.quarantined) == (2, 3, RecurrentStates(), set())
    assert (parts.free_ids(), parts.cached_ids(), parts.parts()) == ([2, 1, 0], [], {})
    assert (parts.num_free_blocks, parts.usage) == (3, 0)


def test_part_without_holder_stays_cached_while_its_block_is_found(made):
    parts = made.parts
    assert made.join(3, 1) == [0, 1]
    assert (parts.num_free_blocks, parts.usage) == (1, 1 - 1 / 3)
    parts.unpin([0, 1])
    assert (parts.cached_ids(), parts.num_free_blocks, parts.usage) == ([1, 0], 3, 0)  # the last one is older
    assert [parts.id_of(block) for block in made.pool.blocks] == [None, 1, None, 0]
    assert [parts.block_of(part) for part in range(3)] == [3, 1, None]


def test_part_of_unfindable_block_becomes_free(made):
    parts = made.parts
    made.join(3)
    made.pool.release([made.pool.blocks[3]])
    made.pool.evict(made.pool.blocks[3])
    parts.unpin([0])
    assert (parts.free_ids(), parts.cached_ids(), parts.parts()) == ([2, 1, 0], [], {})


def test_pinned_part_is_not_evictable(made):
    parts = made.parts
    made.join(0, 1)
    parts.pin([0])
    parts.unpin([0, 1])
    assert (parts.num_holders(0), parts.num_holders(1), parts.cached_ids()) == (1, 0, [1])
    parts.pin([1])
    assert (parts.cached_ids(), parts.num_free_blocks) == ([], 1)
    parts.unpin([1])
    parts.unpin([0])
    assert parts.cached_ids() == [1, 0]
    with pytest.raises(AssertionError, match="double free of block 0 of group 2"):
        parts.unpin([0])


def test_eviction_callback_gets_first_group_block(made):
    parts = made.parts
    made.join(3, 1, 0)
    parts.unpin([0, 1])
    assert parts._take() == 1
    assert made.evicted == [made.pool.blocks[1]]
    assert (parts.block_of(1), parts.id_of(made.pool.blocks[1]), parts.num_holders(1)) == (None, None, 1)


def test_parts_without_eviction_order_raise_instead_of_evicting():
    made = Made(Parts)
    made.join(0, 1, 2)
    made.parts.unpin([0])
    with pytest.raises(NotImplementedError):
        made.parts._take()


def test_quarantined_held_part_stays_out_of_use(made):
    parts = made.parts
    made.join(3)
    parts.quarantine(0)
    assert (parts.quarantined, parts.parts(), parts.block_of(0)) == ({0}, {}, None)
    parts.unpin([0])
    assert (parts.free_ids(), parts.cached_ids(), parts.num_free_blocks) == ([2, 1], [], 2)


def test_block_keeps_its_part_when_doubled_block_has_one(made):
    parts = made.parts
    made.join(3, 1)
    parts.block_doubled(made.pool.blocks[3], made.pool.blocks[1])
    assert parts.parts() == {3: 0, 1: 1}
    parts.block_doubled(made.pool.blocks[3], made.pool.blocks[2])
    assert parts.parts() == {1: 1, 2: 0}
