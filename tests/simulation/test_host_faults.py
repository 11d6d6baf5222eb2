"""The simulation detects known faults of caches in host memory, each injected on purpose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cache_mirror import CacheMirror

from octavo.core.kv.host_block_pool import HostBlock, HostBlockPool
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import PrefixCache
from simulation.world import SimulationError, World, draw_config, run_world

NUM_WORLDS = 30


def run_worlds() -> int:
    """Run worlds with small caches and few recurring texts; return the number of hits in host memory."""
    num_hits = 0
    for index in range(NUM_WORLDS):
        config = draw_config(random.Random(index), 200)
        config = replace(config, num_blocks=10, block_size=2, num_host_blocks=(6, 24)[index % 2])
        config = replace(config, enable_prefix_caching=True, longest_prompt=12, longest_output=8, remote_rate=0.0)
        config = replace(config, hash_bits=(None, None, 3)[index % 3])
        config = replace(config, max_num_waiting=None, max_num_waiting_tokens=None, mixed_step_ms=None)
        config = replace(config, arrival_rate=(0.8, 0.15, 0.8)[index % 3], step_failure_rate=0.02 * (index % 3))
        num_hits += run_world(f"host:{index}", config).host_hits
    return num_hits


def find_more(agrees):
    """Return a patch: lookups in host memory compare only the fields in `agrees`, not the hash."""

    def patch_lookups(patch: pytest.MonkeyPatch) -> None:
        look_up = PrefixCache._find_in_host

        def trusting(self, request, found):
            def find(block_hash, token_ids, parent, extra_keys):
                wanted = HostBlock(0, block_hash, token_ids, extra_keys, parent, None, frozenset({0}))
                return next((each for each in self._host._index.values() if agrees(each, wanted)), None)

            with pytest.MonkeyPatch.context() as during:
                during.setattr(self._host, "find", find)
                return look_up(self, request, found)

        patch.setattr(PrefixCache, "_find_in_host", trusting)

    return patch_lookups


def ignore_keys(block: HostBlock, wanted: HostBlock) -> bool:
    return (block.token_ids, block.parent) == (wanted.token_ids, wanted.parent)


def believe_the_hash(block: HostBlock, wanted: HostBlock) -> bool:
    return block.hash == wanted.hash


def overwrite_what_is_copied_from(patch: pytest.MonkeyPatch) -> None:
    """A block that is about to be copied back is overwritten by one evicted in the same step."""
    lend = HostBlockPool.lend
    patch.setattr(
        HostBlockPool, "lend", lambda self, ids: lend(self, [each for each in ids if each not in self._cached])
    )


def free_what_is_copied_from(patch: pytest.MonkeyPatch) -> None:
    """KV of a resumed request makes room for blocks evicted in the same step."""
    lend = HostBlockPool.lend

    def hasty(self, block_ids):
        lend(self, block_ids)
        for block_id in [each for each, content in self.lent.items() if content is None]:
            del self.lent[block_id]
            if block_id not in self._free:
                self._free.append(block_id)

    patch.setattr(HostBlockPool, "lend", hasty)


def copy_what_was_given_away(patch: pytest.MonkeyPatch) -> None:
    """Evicted blocks are copied one step later, after other requests have written into them."""
    take_copies = KVCacheManager.take_copies

    def late(self):
        copies = take_copies(self)
        saved = {block_id for blocks in self.saved_blocks().values() for block_id in blocks}
        self._copies.swap_out.extend(each for each in copies.swap_out if each[2] not in saved)
        copies.swap_out[:] = [each for each in copies.swap_out if each[2] in saved]
        return copies

    patch.setattr(KVCacheManager, "take_copies", late)


def believe_a_step_that_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "fail_copies", lambda _self, _copies: None)


def keep_what_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """New weights keep the content of host memory, and are not part of hashes."""
    patch.setattr(HostBlockPool, "reset", lambda _self: None)
    patch.setattr(CacheMirror, "cleared", lambda self: self.device.clear())  # wrong tokens must show the fault
    advance = KVCacheManager.advance_weights_epoch

    def unnamed(self):
        done = advance(self)
        self.prefix_cache.chains._weights_epoch = 0
        return done

    patch.setattr(KVCacheManager, "advance_weights_epoch", unnamed)
    disturb = World._disturb

    def restless(self):
        """Change the weights whenever no request exists."""
        if not (self.scheduler.requests or self.scheduler.has_work()):
            self.epoch += self.scheduler.kv_cache_manager.advance_weights_epoch()
        disturb(self)

    patch.setattr(World, "_disturb", restless)


@pytest.mark.turn(12)
def test_host_cache_worlds_without_injected_fault_pass():
    assert run_worlds() > 80


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fault",
    [
        find_more(ignore_keys),
        find_more(believe_the_hash),
        overwrite_what_is_copied_from,
        free_what_is_copied_from,
        copy_what_was_given_away,
        believe_a_step_that_failed,
        keep_what_is_forgotten,
    ],
    ids=[
        "no salt",
        "a hash is believed",
        "overwritten while it is copied",
        "freed while it is copied",
        "copied when it was given away",
        "a failed step is believed",
        "old weights",
    ],
)
def test_injected_host_cache_fault_is_detected(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SimulationError, match=r"wrong token|the cache has more"):
        run_worlds()
