"""A listener knows at each step which blocks lookups find."""

from __future__ import annotations

import random

import pytest
from cache_mirror import CacheMirror

from octavo.core.kv.block_hash import hash_block_tokens
from octavo.core.kv.cache_listener import CacheListener
from octavo.core.kv.manager import KVCacheManager
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams

PROMPT = list(range(100, 113))  # three blocks of four tokens, and one token
BLOCKS = [tuple(PROMPT[start : start + 4]) for start in (0, 4, 8)]


class Recorder(CacheListener):
    """Records the calls of a listener."""

    def __init__(self):
        self.calls = []

    def block_stored(self, block_hash, parent, token_ids, cache_salt):
        self.calls.append(("stored", block_hash, parent, token_ids, cache_salt))

    def block_removed(self, block_hash):
        self.calls.append(("removed", block_hash))

    def host_block_stored(self, block_hash, token_ids):
        self.calls.append(("host stored", block_hash, token_ids))

    def host_block_removed(self, block_hash):
        self.calls.append(("host removed", block_hash))

    def cleared(self):
        self.calls.append(("cleared",))

    def take(self):
        """Return the calls since the last call."""
        calls, self.calls = self.calls, []
        return calls


def hashes_of(salt=None, blocks=BLOCKS):
    """Return the blocks' hashes."""
    hashes, keys = [], () if salt is None else (f"salt:{salt}",)
    for tokens in blocks:
        hashes.append(hash_block_tokens(hashes[-1] if hashes else None, tokens, keys))
    return hashes


def run(manager, name="a", tokens=PROMPT, **options):
    """Compute the tokens of a request; return it with its blocks."""
    request = Request(name, list(tokens), SamplingParams(), **options)
    computed = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - computed.num_tokens, computed) is not None
    manager.take_copies()
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)
    return request


@pytest.mark.parametrize("salt", [None, "s"])
def test_full_blocks_are_stored_with_parents_tokens_and_salt_of_the_first(salt):
    recorder = Recorder()
    run(KVCacheManager(8, 4, listener=recorder), cache_salt=salt)
    first, second, third = hashes_of(salt)
    assert recorder.take() == [
        ("stored", first, None, BLOCKS[0], salt),
        ("stored", second, first, BLOCKS[1], None),
        ("stored", third, second, BLOCKS[2], None),
    ]


def test_second_block_with_the_same_content_is_neither_stored_nor_removed():
    recorder = Recorder()
    manager = KVCacheManager(8, 4, listener=recorder)
    requests = [Request(name, PROMPT[:9], SamplingParams()) for name in "ab"]
    for request in requests:  # both are computed at the same time
        assert manager.allocate_slots(request, 9) is not None
    for request in requests:
        request.num_computed_tokens = 9
        manager.commit(request)
    assert [call[0] for call in recorder.take()] == ["stored", "stored"]
    manager.free(requests[1])
    run(manager, "c", range(200, 208))  # takes the duplicates
    assert [call[0] for call in recorder.take()] == ["stored", "stored"]


def test_evicted_blocks_are_removed():
    recorder = Recorder()
    manager = KVCacheManager(4, 4, listener=recorder)
    manager.free(run(manager))
    recorder.take()
    run(manager, "b", range(200, 209))  # needs three of four blocks
    evicted = [call for call in recorder.take() if call[0] == "removed"]
    assert evicted == [("removed", hashes_of()[2]), ("removed", hashes_of()[1])]


def test_block_after_an_evicted_one_is_removed_and_stored_again():
    recorder = Recorder()
    manager = KVCacheManager(8, 4, listener=recorder)
    manager.free(run(manager))
    manager.pool.evict(manager.pool.indexed(hashes_of()[0]))
    recorder.take()
    run(manager, "b")
    first, second, third = hashes_of()
    assert [call[:2] for call in recorder.take()] == [
        ("stored", first),
        ("removed", second),
        ("stored", second),
        ("removed", third),
        ("stored", third),
    ]


def test_evicted_blocks_are_stored_in_host_memory_until_they_are_evicted_there():
    recorder = Recorder()
    manager = KVCacheManager(3, 4, num_host_blocks=2, listener=recorder)
    manager.free(run(manager, tokens=PROMPT[:12]))
    recorder.take()
    manager.free(run(manager, "b", range(200, 212)))
    first, second, third = hashes_of()
    assert [call for call in recorder.take() if call[0] != "stored"] == [
        ("host stored", third, BLOCKS[2]),
        ("removed", third),
        ("host stored", second, BLOCKS[1]),
        ("removed", second),
        ("host removed", third),
        ("host stored", first, BLOCKS[0]),
        ("removed", first),
    ]


def test_reset_clears_the_listener_after_all_else():
    recorder = Recorder()
    manager = KVCacheManager(8, 4, listener=recorder)
    request = run(manager)
    recorder.take()
    assert not manager.reset_prefix_cache()  # the request holds blocks
    assert recorder.take() == []
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert recorder.take()[-1] == ("cleared",)


def test_quarantined_block_is_removed_once():
    recorder = Recorder()
    manager = KVCacheManager(8, 4, listener=recorder)
    request = run(manager)
    recorder.take()
    for block_id in request.sequence.block_table[:1] * 2:
        manager.pool.quarantine(manager.pool.blocks[block_id])
    assert recorder.take() == [("removed", hashes_of()[0])]


@pytest.mark.parametrize("options", [{}, {"num_host_blocks": 6}, {"num_window_blocks": 8, "window": 6}])
def test_listener_agrees_with_the_cache_after_each_step(make_core, options):
    rng, mirror = random.Random(str(options)), CacheMirror()
    core = make_core(
        num_blocks=14, max_num_seqs=4, max_num_batched_tokens=24, preemption="auto", cache_listener=mirror, **options
    )
    prompts = [[rng.randrange(50) for _ in range(24)] for _ in range(4)]
    for number in range(150):
        prompt = [*rng.choice(prompts)[: rng.randrange(24)], rng.randrange(50)]
        core.add(str(number), prompt, max_tokens=rng.randint(1, 8), cache_salt=rng.choice([None, None, "s"]))
        while len(core.scheduler.requests) >= 5:
            core.step()
            assert mirror.mistakes(core.scheduler.kv_cache_manager) == []
        if rng.random() < 0.03:
            core.run()
            assert core.scheduler.reset_prefix_cache()
            assert mirror.device == {}
    core.run()
    assert mirror.mistakes(core.scheduler.kv_cache_manager) == []
    assert min(mirror.num_removed, mirror.num_stored, mirror.num_cleared) > 0
    assert bool(mirror.host) == ("num_host_blocks" in options)
