"""Blocks evicted to host memory are found and copied back: in the KV cache manager and in steps."""

from __future__ import annotations

import pytest
from stores import Store

from octavo.core import invariants
from octavo.core.kv.block_hash import hash_block_tokens
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.prefix_cache import ComputedBlocks
from octavo.data import events
from octavo.data.core_output import EngineCoreOutput
from octavo.data.request import Request
from octavo.data.scheduler_output import BlockCopies
from octavo.sampling_params import SamplingParams

PROMPT = list(range(100, 113))  # three blocks of four tokens, and one token


def make_request(name, tokens, **options):
    return Request(name, list(tokens), SamplingParams(), **options)


def start(manager, request):
    """Look up and allocate all tokens of a request; return what the lookup found."""
    computed = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - computed.num_tokens, computed) is not None
    return computed


def compute(manager, name, tokens, **options):
    """Compute and end a request; return the copies of its step."""
    request = make_request(name, tokens, **options)
    start(manager, request)
    copies = manager.take_copies()
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)
    manager.free(request)
    return copies


def full(num_host_blocks=8, num_blocks=4, **options):
    """Return a manager that has the blocks of `PROMPT` in host memory, and other content on the device."""
    manager = KVCacheManager(num_blocks, 4, num_host_blocks=num_host_blocks, **options)
    compute(manager, "first", PROMPT)
    compute(manager, "other", range(4 * num_blocks))
    return manager


# --- to host memory ---------------------------------------------------------------------------------------------------


def test_evicted_blocks_are_copied_to_host_memory_and_reported():
    told = []
    manager = KVCacheManager(
        4,
        4,
        num_host_blocks=8,
        emit=lambda *event: told.append(event),
    )
    assert not compute(manager, "first", PROMPT)
    copies = compute(manager, "other", range(16))
    assert copies.swap_out == [(0, 2, 0), (0, 1, 1), (0, 0, 2)]  # tail first
    assert [event for event in told if event[0] is not events.BlockCached] == [
        event
        for _, block_id, host_block_id in copies.swap_out
        for event in ((events.BlockEvicted, block_id), (events.BlockOffloaded, block_id, host_block_id, (0,)))
    ]
    assert not manager.take_copies()


def test_block_in_host_memory_is_not_copied_again():
    manager = full(num_blocks=5)
    for _ in range(2):
        compute(manager, "again", PROMPT)
        copies = compute(manager, "other", range(20))
        assert copies.swap_out == []
    assert manager.host.num_cached_blocks == 7


def test_uncommitted_blocks_are_never_copied_to_host_memory():
    manager = full()
    request = make_request("again", PROMPT)
    start(manager, request)  # they are still to be copied in, and no token is computed yet
    manager.free(request)
    manager.take_copies()
    assert manager.pool.num_cached_blocks == 0
    assert manager.allocate_slots(make_request("next", range(16)), 16) is not None
    assert manager.take_copies().swap_out == []


def test_chain_without_head_is_not_kept_in_host_memory():
    manager = KVCacheManager(4, 4, num_host_blocks=1)
    compute(manager, "first", PROMPT)
    head, second, tail = (manager.pool.indexed(name) for name in hashes(PROMPT))
    [saved] = manager.host.take(1)  # host memory is full
    manager.pool.evict(head)
    manager.host.release([saved])
    manager.pool.evict(second)
    assert manager.take_copies().swap_out == []
    assert manager.host.num_cached_blocks == 0
    assert tail.hash is not None


def hashes(tokens):
    names = []
    for index in range(len(tokens) // 4):
        names.append(hash_block_tokens(names[-1] if names else None, tokens[4 * index : 4 * index + 4]))
    return names


def test_recomputed_chain_replaces_host_chain_without_head():
    manager = full(num_host_blocks=4)
    head = manager.host.indexed(hashes(PROMPT)[0])
    manager.host.drop(head.block_id)
    assert manager.get_computed_blocks(make_request("a", PROMPT)).num_tokens == 0
    manager.pool.reset()
    compute(manager, "a", PROMPT)
    names = [manager.pool.indexed(name).name for name in hashes(PROMPT)]
    compute(manager, "other", range(50, 66))
    assert [manager.host.indexed(name).name for name in hashes(PROMPT)] == names
    assert manager.get_computed_blocks(make_request("a", PROMPT)).num_tokens == 12


def test_chain_is_kept_if_its_head_was_offloaded_first():
    manager = KVCacheManager(4, 4, num_host_blocks=8)
    compute(manager, "first", PROMPT)
    for name in hashes(PROMPT):
        manager.pool.evict(manager.pool.indexed(name))
    assert [block for _, block, _ in manager.take_copies().swap_out] == [0, 1, 2]
    assert manager.get_computed_blocks(make_request("a", PROMPT)).num_tokens == 12


def test_child_of_unindexed_block_is_not_found_as_first_block():
    manager = KVCacheManager(8, 4)
    manager.prefix_cache.chains.hash_function = lambda _parent, tokens, _keys: bytes(tokens[-1:])
    compute(manager, "first", [1, 2, 3, 9, 0])
    compute(manager, "second", [4, 5, 6, 9, 7, 7, 7, 8, 0])  # its first block has the hash of another block
    assert manager.get_computed_blocks(make_request("a", [7, 7, 7, 8, 0])).num_tokens == 0


@pytest.mark.parametrize("same", [True, False])
def test_host_lookup_distinguishes_content_with_equal_hashes(same):
    manager = KVCacheManager(2, 4, num_host_blocks=8)
    manager.prefix_cache.chains.hash_function = lambda *_: b"one name for all"
    compute(manager, "first", PROMPT[:5])
    compute(manager, "other", range(5))
    manager.pool.reset()
    found = manager.get_computed_blocks(make_request("a", PROMPT[:5] if same else range(5)))
    assert found.num_tokens == (4 if same else 0)


# --- back to the device -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_on_device", [0, 1, 2])
def test_prefix_hit_continues_from_device_into_host_memory(num_on_device):
    manager = full(num_blocks=5)
    manager.pool.reset()
    if num_on_device:
        compute(manager, "beginning", PROMPT[: 4 * num_on_device + 1])
    request = make_request("again", PROMPT)
    found = start(manager, request)
    on_host = [manager.host.indexed(name).block_id for name in hashes(PROMPT)]
    assert (found.num_tokens, len(found.blocks), found.num_blocks) == (12, num_on_device, 3)
    assert found.host_blocks == on_host[num_on_device:]
    assert manager.num_host_tokens(found) == 12 - 4 * num_on_device
    assert manager.num_swapped_in(request, found) == [3 - num_on_device]
    assert request.sequence.num_cached_tokens == 12
    table = request.sequence.block_table
    assert manager.take_copies().swap_in == list(zip([0] * 3, found.host_blocks, table[num_on_device:3], strict=False))
    request.num_computed_tokens = 13
    manager.commit(request)
    manager.free(request)
    on_device = manager.get_computed_blocks(make_request("next", PROMPT))
    assert (len(on_device.blocks), on_device.host_blocks) == (3, [])
    assert manager.num_host_tokens(on_device) == 0


def test_copy_on_device_counts_no_host_tokens():
    manager = KVCacheManager(8, 4, num_host_blocks=8)
    compute(manager, "first", PROMPT)
    found = manager.get_computed_blocks(make_request("same", PROMPT[:12]))
    assert (found.num_tokens, found.source is None) == (11, False)
    assert manager.num_host_tokens(found) == 0


def test_full_hit_in_host_memory_still_computes_one_token():
    manager = full()
    request = make_request("again", PROMPT[:12])
    found = start(manager, request)
    assert (found.num_tokens, len(found.host_blocks), found.source) == (11, 3, None)
    assert manager.num_host_tokens(found) == 11
    assert len(request.sequence.block_table) == 3
    assert manager.prefix_cache.why_missed(make_request("again", PROMPT[:12]), found) is None


def test_host_blocks_of_hit_are_not_overwritten_by_evicted_blocks():
    manager = full(num_host_blocks=3)
    request = make_request("again", PROMPT)
    found = start(manager, request)
    copies = manager.take_copies()
    assert len(copies.swap_in) == 3
    assert copies.swap_out == []  # no room: every host block is the source of a copy
    assert manager.host.num_cached_blocks == 3
    assert manager.host.lent == {}
    assert found.host_blocks == [block.block_id for block in reversed(manager.host.cached_blocks())]


def test_host_hit_requires_same_salt_and_adapter_and_no_prompt_logprobs():
    manager = full()
    found = manager.get_computed_blocks
    assert found(make_request("salted", PROMPT, cache_salt="x")).num_tokens == 0
    assert found(make_request("adapted", PROMPT, adapter="x")).num_tokens == 0
    assert found(Request("scored", list(PROMPT), SamplingParams(prompt_logprobs=1))).num_tokens == 0
    assert found(make_request("plain", PROMPT)).num_tokens == 12


def test_miss_after_host_hit_is_reported_as_never_seen():
    manager = full(num_host_blocks=2)
    compute(manager, "more", range(200, 216))
    request = make_request("a", [*PROMPT[:4], *range(9)])
    manager = full()
    found = manager.get_computed_blocks(request)
    assert found.num_tokens == 4
    miss = manager.prefix_cache.why_missed(request, found)
    assert (miss.reason, miss.position) == ("never seen", None)


def test_request_waits_for_block_that_another_request_swaps_in():
    manager = full()
    first, second = make_request("a", PROMPT), make_request("b", PROMPT)
    assert manager.prefix_cache.awaited_block(first, manager.get_computed_blocks(first)) is None
    start(manager, first)
    found = manager.get_computed_blocks(second)
    assert found.num_tokens == 12
    assert manager.prefix_cache.awaited_block(second, found) == (hashes(PROMPT)[0], "a")


@pytest.mark.parametrize(("num_saved", "expected"), [(12, False), (13, True)])
def test_resumed_request_uses_saved_kv_if_longer_than_cache_hit(num_saved, expected):
    manager = full(num_host_blocks=12, num_blocks=5)
    request = make_request("preempted", [*PROMPT, 5, 6])
    start(manager, request)
    manager.take_copies()
    request.num_computed_tokens = num_saved
    assert manager.swap_out(request)
    manager.release(request)
    request.num_computed_tokens = 0
    saved = manager.saved_blocks()["preempted"]
    found = start(manager, request)
    assert (found.num_tokens, found.is_saved) == (num_saved, expected)
    assert (found.host_blocks == saved) is expected
    assert manager.num_host_tokens(found) == (0 if expected else 12)
    cache = manager.prefix_cache
    cache._computing[hashes(PROMPT)[0]] = "other"
    assert cache.awaited_block(request, found) == (None if expected else (hashes(PROMPT)[0], "other"))
    assert cache.awaited_block(request, manager.get_computed_blocks(make_request("x", PROMPT[:12]))) is not None
    assert manager.saved_blocks() == {}
    assert set(saved) <= set(manager.host.lent)  # until it is copied
    manager.take_copies()
    assert set(saved) <= set(manager.host.free_block_ids())


def test_swap_out_evicts_cached_host_blocks():
    told = []
    manager = full(
        num_host_blocks=3, emit=lambda kind, *of: told.append(of) if kind is events.HostBlockEvicted else None
    )
    request = make_request("preempted", range(50, 60))
    start(manager, request)
    manager.take_copies()
    before = list(told)
    request.num_computed_tokens = 10
    assert manager.swap_out(request)
    assert len(told) == len(before) + 3
    assert manager.host.num_cached_blocks == 0


# --- evicted from host memory -----------------------------------------------------------------------------------------


def test_failed_copies_remove_their_host_blocks():
    manager = KVCacheManager(4, 4, num_host_blocks=8)
    compute(manager, "first", PROMPT)
    copies = compute(manager, "other", range(16))
    manager.fail_copies(BlockCopies(swap_out=copies.swap_out[:1]))
    assert manager.get_computed_blocks(make_request("a", PROMPT)).num_tokens == 8
    manager.fail_copies(copies)
    assert manager.get_computed_blocks(make_request("a", PROMPT)).num_tokens == 0
    assert manager.host.num_free_blocks == 8
    assert manager.host.num_cached_blocks == 0


@pytest.mark.parametrize("forget", [KVCacheManager.reset_prefix_cache, KVCacheManager.advance_weights_epoch])
def test_device_and_host_cache_are_reset_together(forget):
    manager = full(num_blocks=5)
    manager.pool.reset()
    request = make_request("runs", range(5))
    start(manager, request)
    assert forget(manager) is False
    assert manager.host.num_cached_blocks == 3
    manager.free(request)
    assert forget(manager) is True
    assert (manager.host.num_cached_blocks, manager.host.num_free_blocks) == (0, 8)
    assert manager.get_computed_blocks(make_request("a", PROMPT)).num_tokens == 0


def test_quarantined_block_and_its_child_are_not_copied_to_host_memory():
    manager = KVCacheManager(4, 4, num_host_blocks=8)
    compute(manager, "first", PROMPT)
    head = manager.pool.indexed(hashes(PROMPT)[0])
    manager.pool.quarantine(head)
    assert not manager.pool.has_name((head.block_id, head.generation))
    manager.allocate_slots(make_request("other", range(12)), 12)
    assert [block for _, block, _ in manager.take_copies().swap_out] == [2]  # the previous block is still reachable
    assert manager.get_computed_blocks(make_request("a", PROMPT)).num_tokens == 0


# --- through steps ----------------------------------------------------------------------------------------------------


def run(core, name, prompt, **options):
    core.add(name, list(prompt), max_tokens=1, **options)
    core.run()
    assert invariants.check(core.scheduler) == []


def make_full(make_core, **options):
    """Return a core with the blocks of `PROMPT` in host memory."""
    core = make_core(**{"num_blocks": 5, "num_host_blocks": 16, **options})
    run(core, "first", PROMPT)
    run(core, "other", range(19))
    return core


def test_step_events_report_offloads_host_hits_and_host_evictions(make_core):
    core = make_full(make_core, num_host_blocks=4)
    out = core.log.of_type(events.BlockOffloaded)
    assert [(event.block_id, event.host_block_id) for event in out] == [(2, 0), (1, 1), (0, 2)]
    core.add("again", PROMPT, max_tokens=1)
    scheduled = core.step()
    [found] = core.log.of_type(events.HostBlocksFound)
    assert (found.request_id, found.num_blocks, found.num_tokens) == ("again", 3, 12)
    assert [host for _, host, _ in scheduled.copies.swap_in] == [2, 1, 0]
    assert [event.num_hit_tokens for event in core.log.of_type(events.PrefixCacheQueried)] == [0, 0, 12]
    assert core.log.of_type(events.RequestAdmitted)[-1].num_cached_tokens == 12
    told = [event.host_block_id for event in core.log.of_type(events.HostBlockEvicted)]
    assert told == [host for _, _, host in scheduled.copies.swap_out[1:]]  # one block was free


def test_step_with_only_copies_is_not_empty(make_core):
    core = make_core(num_blocks=5, num_host_blocks=4)
    run(core, "first", PROMPT)
    while core.step().finished_req_ids:
        pass
    pool = core.scheduler.kv_cache_manager.pool
    pool.evict(pool.cached_blocks()[0])
    scheduled = core.step()
    assert (len(scheduled.copies.swap_out), scheduled.is_empty) == (1, False)
    assert core.scheduler.schedule().is_empty


def test_failed_step_discards_its_offloaded_blocks(make_core):
    core = make_core(num_blocks=5, num_host_blocks=16)
    run(core, "first", PROMPT)
    core.add("other", list(range(19)), max_tokens=1)
    scheduled = core.scheduler.schedule()
    assert len(scheduled.copies.swap_out) == 3
    outputs = core.scheduler.fail_step(scheduled, "broken")
    assert [each.request_id for each in outputs if isinstance(each, EngineCoreOutput)] == ["other"]
    assert core.scheduler.kv_cache_manager.host.num_cached_blocks == 0
    run(core, "again", PROMPT)
    assert core.log.of_type(events.HostBlocksFound) == []


def test_shared_prefix_is_swapped_in_once(make_core):
    core = make_full(make_core, num_blocks=12)
    run(core, "evicts", range(200, 247))
    for name in "abc":
        core.add(name, [*PROMPT, ord(name)], max_tokens=1)
    scheduled = core.step()
    assert list(scheduled.num_scheduled_tokens) == ["a"]
    assert len(scheduled.copies.swap_in) == 3
    scheduled = core.step()
    assert (list(scheduled.num_scheduled_tokens), scheduled.copies.swap_in) == (["b", "c"], [])


# --- with a store outside ---------------------------------------------------------------------------------------------


def test_store_load_continues_after_host_hit(make_core):
    store = Store(num_tokens=20, prefix="loads")
    core = make_core(num_blocks=8, num_host_blocks=16, connector=store)
    run(core, "first", PROMPT)
    run(core, "other", range(31))
    core.add("loads", [*PROMPT[:12], *range(200, 212)], max_tokens=1)
    scheduled = core.step()
    [order] = scheduled.kv_transfers
    table = core.scheduler.requests["loads"].sequence.block_table
    assert ("asked", "loads", 12) in store.told
    assert [block for _, _, block in scheduled.copies.swap_in] == table[:3]
    assert order.block_ids == [table[3:5]]
    assert order.keys == core.scheduler.requests["loads"].block_hashes[3:5]
    [event] = core.log.of_type(events.HostBlocksFound)
    assert event.num_tokens == 12


@pytest.mark.parametrize("computed", [
    ComputedBlocks([], 8, [0, 1], is_saved=True),
    ComputedBlocks([], 7, [0, 1]),
])  # fmt: skip
def test_store_loads_nothing_after_partial_block_or_saved_kv(make_core, computed):
    core = make_core(connector=Store(num_tokens=20), num_host_blocks=4)
    request = make_request("a", range(24))
    assert core.scheduler.transfers.num_external_tokens(request, computed, may_wait=True) == 0
