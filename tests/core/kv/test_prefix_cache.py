from __future__ import annotations

import hashlib

import pytest

from octavo.core.kv.block_hash import hash_block_tokens
from octavo.core.kv.block_pool import BlockPool
from octavo.core.kv.manager import KVCacheManager
from octavo.data.events import BlockCached, BlockEvicted, PrefixCacheQueried
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates
from octavo.data.request import ContentSpan, Request
from octavo.sampling_params import SamplingParams


def make_request(request_id: str, tokens: list[int], **options) -> Request:
    return Request(request_id, tokens, SamplingParams(), **options)


def noting(kind: type, told: list[int]):
    """Return an `emit` that appends the blocks of the events of one kind."""
    return lambda emitted, block_id, *_: told.append(block_id) if emitted is kind else None


def admit(manager: KVCacheManager, request: Request) -> list[int] | None:
    """Look up, allocate and compute a whole request; return its block table."""
    computed = manager.get_computed_blocks(request)
    count = request.num_tokens - computed.num_tokens
    block_ids = manager.allocate_slots(request, count, computed)
    if block_ids is not None:
        request.num_computed_tokens = request.num_tokens
        manager.commit(request)
    return block_ids


def test_empty_cache_has_no_hit():
    manager = KVCacheManager(8, 4)
    assert manager.get_computed_blocks(make_request("a", list(range(10)))).num_tokens == 0


def test_freed_full_blocks_are_prefix_hits():
    manager = KVCacheManager(8, 4)
    first = make_request("a", list(range(10)))
    assert admit(manager, first) == [0, 1, 2]
    manager.free(first)
    computed = manager.get_computed_blocks(make_request("b", list(range(10))))
    assert computed.num_tokens == 8
    assert [block.block_id for block in computed.blocks] == [0, 1]


def test_uncommitted_blocks_are_not_shared():
    manager = KVCacheManager(8, 4)
    first = make_request("a", list(range(10)))
    manager.allocate_slots(first, 10)
    assert manager.get_computed_blocks(make_request("b", list(range(10)))).num_tokens == 0


def test_prefix_hit_ends_before_first_different_block():
    manager = KVCacheManager(8, 4)
    admit(manager, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    computed = manager.get_computed_blocks(make_request("b", [1, 2, 3, 4, 5, 6, 0, 8, 9]))
    assert computed.num_tokens == 4


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 3), (7, 4), (8, 7), (9, 8), (12, 11), (13, 12), (16, 15)])
def test_full_hit_still_computes_one_token(length, hit):
    manager = KVCacheManager(16, 4)
    admit(manager, make_request("a", list(range(16))))
    assert manager.get_computed_blocks(make_request("b", list(range(length)))).num_tokens == hit


@pytest.mark.parametrize(("size", "length", "hit"), [(16, 48, 47), (256, 256, 255), (2, 4, 3), (1, 4, 3), (1, 1, 0)])
def test_block_aligned_prompt_hits_all_but_one_token(size, length, hit):
    manager = KVCacheManager(16, size)
    first = make_request("a", list(range(length)))
    admit(manager, first)
    manager.free(first)
    again = make_request("b", list(range(length)))
    computed = manager.get_computed_blocks(again)
    assert computed.num_tokens == hit
    assert manager.prefix_cache.why_missed(again, computed) is None or length == 1
    assert [block.block_id for block in computed.blocks] == list(range(hit // size))


def test_full_hit_copies_last_block_into_private_block():
    manager = KVCacheManager(8, 4)
    first = make_request("a", list(range(8)))
    admit(manager, first)
    manager.free(first)
    again = make_request("b", list(range(8)))
    table = admit(manager, again)
    assert table[0] == 0
    assert table[1] not in {0, 1}
    assert manager.take_copies().block_copies == [(0, 1, table[1])]
    assert not manager.take_copies()
    assert again.sequence.num_cached_tokens == 7
    assert manager.pool.blocks[table[1]].hash is None  # the source of the copy keeps its own content
    assert manager.pool.num_cached_blocks == 2
    longer = manager.get_computed_blocks(make_request("c", list(range(9))))
    assert [block.block_id for block in longer.blocks] == [0, 1]


def test_copy_source_is_not_evicted_for_its_copy():
    evicted: list[int] = []
    manager = KVCacheManager(4, 4, emit=noting(BlockEvicted, evicted))
    for name, start in (("a", 0), ("b", 100)):
        request = make_request(name, list(range(start, start + 8)))
        admit(manager, request)
        manager.free(request)
    table = admit(manager, make_request("again", list(range(8))))  # of the least recently used blocks
    assert evicted == [3]  # b's tail
    assert manager.take_copies().block_copies == [(0, 1, table[1])] == [(0, 1, 3)]
    assert manager.get_computed_blocks(make_request("c", list(range(9)))).num_tokens == 8


def test_full_hit_without_free_block_overwrites_source_block():
    manager = KVCacheManager(3, 4)
    first = make_request("a", list(range(8)))
    admit(manager, first)
    manager.free(first)
    admit(manager, make_request("other", [77, 78]))  # of 3 blocks two remain, both cached
    again = make_request("again", list(range(8)))
    computed = manager.get_computed_blocks(again)
    assert manager.can_hold(8, computed, 0)
    assert manager.allocate_slots(again, 1, computed) == [0, 1]
    assert not manager.take_copies()
    assert manager.pool.blocks[1].hash is None  # it is found only after its step succeeded
    assert manager.get_computed_blocks(make_request("c", list(range(9)))).num_tokens == 4
    again.num_computed_tokens = 8
    manager.commit(again)
    assert manager.get_computed_blocks(make_request("d", list(range(9)))).num_tokens == 8


def test_other_salt_and_scored_prompts_copy_no_block():
    manager = KVCacheManager(20, 4)
    admit(manager, make_request("a", list(range(8)), cache_salt="tenant"))
    assert manager.get_computed_blocks(make_request("b", list(range(8)), cache_salt="other")).num_tokens == 0
    scored = Request("c", list(range(8)), SamplingParams(prompt_logprobs=1), cache_salt="tenant")
    assert manager.get_computed_blocks(scored).num_tokens == 0
    assert manager.get_computed_blocks(make_request("d", list(range(8)), cache_salt="tenant")).num_tokens == 7


def test_least_recently_used_blocks_are_evicted_first():
    evicted: list[int] = []
    manager = KVCacheManager(4, 4, emit=noting(BlockEvicted, evicted))
    old, new = make_request("old", list(range(8))), make_request("new", list(range(100, 108)))
    admit(manager, old)
    admit(manager, new)
    manager.free(old)
    manager.free(new)
    assert admit(manager, make_request("c", list(range(200, 208)))) == [1, 0]  # old's tail, then old's head
    assert evicted == [1, 0]
    assert manager.get_computed_blocks(make_request("d", list(range(100, 110)))).num_tokens == 8


def test_tails_are_evicted_before_heads():
    manager = KVCacheManager(4, 4)
    first = make_request("a", list(range(16)))
    admit(manager, first)
    manager.free(first)
    admit(manager, make_request("b", [77] * 3))
    assert manager.get_computed_blocks(make_request("c", list(range(16)))).num_tokens == 12


def test_canonical_block_is_evicted_after_its_successors():
    manager = KVCacheManager(6, 4)
    first = make_request("a", list(range(8)))
    admit(manager, first)
    manager.free(first)  # 0 and 1 are cached
    second = make_request("b", list(range(8)))
    admit(manager, second)
    second.sequence.token_ids += [50, 51, 52, 53]
    manager.allocate_slots(second, 4)
    second.num_computed_tokens = 12
    manager.commit(second)
    manager.free(second)
    assert manager.get_computed_blocks(make_request("c", [*range(8), 50, 51, 52, 53, 9])).num_tokens == 12
    admit(manager, make_request("filler", [77] * 16))  # all blocks but 0 and 1: their successors are evicted first
    assert manager.get_computed_blocks(make_request("d", [*range(8), 50, 51, 52, 53, 9])).num_tokens == 8


def test_requests_share_blocks_of_common_prefix():
    manager = KVCacheManager(20, 4)
    prefix = list(range(8))
    requests = [make_request(str(index), [*prefix, 50 + index, 60 + index]) for index in range(5)]
    tables = [admit(manager, request) for request in requests]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert len({table[2] for table in tables}) == 5
    assert manager.pool.blocks[tables[0][0]].ref_count == 5
    for request in requests[:4]:
        manager.free(request)
    assert manager.pool.blocks[tables[0][0]].ref_count == 1


def test_referenced_blocks_are_not_evicted():
    manager = KVCacheManager(4, 4)
    holder = make_request("a", list(range(8)))
    admit(manager, holder)
    assert admit(manager, make_request("b", list(range(100, 108)))) is not None
    assert admit(manager, make_request("c", list(range(200, 204)))) is None
    assert manager.get_computed_blocks(make_request("d", list(range(9)))).num_tokens == 8


def test_hit_blocks_are_held_before_eviction():
    manager = KVCacheManager(3, 4)
    first = make_request("a", list(range(8)))
    admit(manager, first)
    manager.free(first)  # cached: 0, 1; free: 2
    second = make_request("b", [*range(8), 50, 51])
    assert admit(manager, second) == [0, 1, 2]
    manager.free(second)
    too_long = make_request("c", [*range(8), *range(60, 69)])
    before = manager.pool.free_block_ids()
    assert admit(manager, too_long) is None
    assert manager.pool.free_block_ids() == before
    assert too_long.sequence.block_table == []


def test_other_salt_and_prompt_logprobs_get_no_hit():
    manager = KVCacheManager(20, 4)
    admit(manager, make_request("a", list(range(9)), cache_salt="tenant"))
    assert manager.get_computed_blocks(make_request("b", list(range(9)))).num_tokens == 0
    assert manager.get_computed_blocks(make_request("c", list(range(9)), cache_salt="other")).num_tokens == 0
    assert manager.get_computed_blocks(make_request("d", list(range(9)), cache_salt="tenant")).num_tokens == 8
    scored = Request("e", list(range(9)), SamplingParams(prompt_logprobs=1), cache_salt="tenant")
    assert manager.get_computed_blocks(scored).num_tokens == 0


def test_s17_weak_hash_never_gives_wrong_hit():
    def weak(parent, tokens, extra_keys=()):
        return bytes([hashlib.sha256(hash_block_tokens(parent, tokens, extra_keys)).digest()[0] & 3])

    manager = KVCacheManager(200, 2)
    manager.prefix_cache.chains.hash_function = weak
    content: dict[int, tuple[int, ...]] = {}
    for index in range(60):
        tokens = [index % 3, index % 5, index % 7, index % 2, index % 4, 9]
        request = make_request(str(index), tokens)
        computed = manager.get_computed_blocks(request)
        for number, block in enumerate(computed.blocks):
            assert content[block.block_id] == tuple(tokens[: 2 * number + 2])
        table = admit(manager, request)
        for number in range(3):
            content[table[number]] = tuple(tokens[: 2 * number + 2])


def test_f13_double_free_is_refused_and_changes_nothing():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="double free"):
        pool.release([block])
    assert pool.num_free_blocks == 2
    assert len(pool.take(2)) == 2


def test_allocation_is_all_or_nothing():
    pool = BlockPool(3)
    assert pool.take(4) is None
    assert pool.num_free_blocks == 3


def test_equal_blocks_of_two_requests_share_one_entry():
    manager = KVCacheManager(8, 4)
    first, second = make_request("a", list(range(9))), make_request("b", list(range(9)))
    for request in (first, second):
        manager.allocate_slots(request, 9)
    for request in (first, second):
        request.num_computed_tokens = 9
        manager.commit(request)
    assert manager.pool.num_cached_blocks == 2
    manager.free(first)
    manager.free(second)
    assert manager.get_computed_blocks(make_request("c", list(range(9)))).num_tokens == 8
    assert manager.pool.num_free_blocks == 8


def test_disabled_prefix_cache_finds_awaits_and_misses_nothing():
    manager = KVCacheManager(8, 4, enable_prefix_caching=False)
    first, second = (make_request(name, list(range(9))) for name in "ab")
    manager.allocate_slots(first, 9)
    found = manager.get_computed_blocks(second)
    assert found.num_tokens == 0
    assert manager.prefix_cache.awaited_block(second, found) is None
    assert manager.prefix_cache.why_missed(second, found) is None
    assert manager.num_tracked_requests == 0
    first.num_computed_tokens = 9
    manager.commit(first)
    assert manager.get_computed_blocks(second).num_tokens == 0
    assert manager.num_tracked_requests == 0


def test_request_waits_for_next_block_that_another_request_computes():
    manager = KVCacheManager(16, 4)
    prompt = list(range(9))
    first, second = make_request("a", prompt), make_request("b", prompt)
    name = hash_block_tokens(None, prompt[:4])
    assert not manager.prefix_cache.is_being_computed(name)
    nothing = manager.get_computed_blocks(first)
    manager.allocate_slots(first, 4, nothing)
    assert manager.prefix_cache.is_being_computed(name) is True
    assert manager.prefix_cache.awaited_block(second, manager.get_computed_blocks(second)) == (name, "a")
    assert manager.prefix_cache.awaited_block(first, nothing) is None  # a request does not wait for itself
    scored = Request("c", prompt, SamplingParams(prompt_logprobs=1))
    assert manager.prefix_cache.awaited_block(scored, manager.get_computed_blocks(scored)) is None
    assert manager.prefix_cache.awaited_block(make_request("short", prompt[:3]), nothing) is None
    first.num_computed_tokens = 4
    manager.commit(first)
    assert not manager.prefix_cache.is_being_computed(name)
    behind = hash_block_tokens(name, prompt[4:8])
    assert manager.prefix_cache.awaited_block(second, manager.get_computed_blocks(second)) == (behind, "a")
    manager.free(first)
    assert not manager.prefix_cache.is_being_computed(behind)
    assert manager.prefix_cache.awaited_block(second, manager.get_computed_blocks(second)) is None


def test_why_missed_reports_reason_for_first_missed_block():
    manager = KVCacheManager(16, 4)
    admit(manager, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    for prompt, expected in (
        ([1, 2, 9, 4, 5], ("different token", 2)),
        ([1, 2, 3, 4, 5, 9, 7, 8, 9], ("different token", 5)),
        ([9, 2, 3, 4, 5], ("never seen", None)),
        ([1, 2, 3], ("shorter than a block", None)),
    ):
        request = make_request("b", prompt)
        miss = manager.prefix_cache.why_missed(request, manager.get_computed_blocks(request))
        assert (miss.reason, miss.position) == expected
        manager.free(request)
    whole = make_request("whole", [1, 2, 3, 4, 5])
    assert manager.prefix_cache.why_missed(whole, manager.get_computed_blocks(whole)) is None
    copied = make_request("copied", [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.prefix_cache.why_missed(copied, manager.get_computed_blocks(copied)) is None


@pytest.mark.parametrize(("cache_decoded_blocks", "is_announced"), [(True, True), (False, False)])
def test_decoded_blocks_are_announced_only_with_cache_decoded_blocks(cache_decoded_blocks, is_announced):
    manager = KVCacheManager(8, 4, cache_decoded_blocks=cache_decoded_blocks)
    request = make_request("a", [1, 2, 3, 4, 5])
    request.sequence.token_ids += [6, 7, 8, 9]
    manager.allocate_slots(request, 9)
    first = hash_block_tokens(None, [1, 2, 3, 4])
    assert manager.prefix_cache.is_being_computed(first)
    assert manager.prefix_cache.is_being_computed(hash_block_tokens(first, [5, 6, 7, 8])) == is_announced


def test_released_request_no_longer_computes_its_announced_blocks():
    manager = KVCacheManager(8, 4)
    first, second = make_request("a", list(range(12))), make_request("b", list(range(12)))
    names = [hash_block_tokens(None, [0, 1, 2, 3])]
    names.append(hash_block_tokens(names[0], [4, 5, 6, 7]))
    manager.allocate_slots(first, 12)
    manager.allocate_slots(second, 12)
    first.num_computed_tokens = 4
    manager.commit(first)
    assert [manager.prefix_cache.is_being_computed(name) for name in names] == [False, True]
    manager.release(second)
    still = [manager.prefix_cache.is_being_computed(name) for name in names]
    assert still == [False, True]  # the first one computes it
    manager.release(first)
    assert [manager.prefix_cache.is_being_computed(name) for name in names] == [False, False]
    manager.release(make_request("unknown", [1]))


def test_each_cached_block_is_reported_once():
    told: list[int] = []
    manager = KVCacheManager(16, 2, emit=noting(BlockCached, told))
    admit(manager, make_request("a", [1, 2, 3, 4, 5]))
    assert told == [0, 1]
    longer = make_request("b", [1, 2, 3, 4, 5, 6, 7])
    table = admit(manager, longer)
    assert told == [0, 1, table[2]]
    found = manager.get_computed_blocks(make_request("c", [1, 2, 3, 4, 5, 6, 7]))
    assert [block.block_id for block in found.blocks] == table[:3]


def test_private_block_is_neither_reported_nor_added_to_history():
    told: list[int] = []
    manager = KVCacheManager(8, 2, emit=noting(BlockCached, told))
    manager.prefix_cache.chains.hash_function = lambda *_: b"one name for all"
    admit(manager, make_request("a", [1, 2, 9]))
    admit(manager, make_request("b", [3, 4, 9]))
    assert told == [0]
    salted = make_request("c", [3, 4, 9], cache_salt="s")
    assert manager.prefix_cache.history.why_missed(0, [3, 4], b"other", None, ("salt:s",)).reason == "never seen"
    assert manager.prefix_cache.history.why_missed(0, [1, 2], b"other", None, ("salt:s",)).reason == "other salt"
    assert manager.get_computed_blocks(salted).num_tokens == 0


def test_scheduler_resets_prefix_cache_only_without_held_blocks(make_core):
    core = make_core()
    core.add("a", 8, max_tokens=1)
    assert core.scheduler.reset_prefix_cache()
    core.step()
    core.add("b", 8, max_tokens=4)
    core.step()
    assert not core.scheduler.reset_prefix_cache()
    core.run()
    assert core.scheduler.kv_cache_manager.pool.num_cached_blocks > 0
    assert core.scheduler.reset_prefix_cache()
    assert core.scheduler.kv_cache_manager.pool.num_cached_blocks == 0


def hit_rate(core) -> float:
    queries = core.log.of_type(PrefixCacheQueried)
    return sum(each.num_hit_tokens for each in queries) / sum(each.num_query_tokens for each in queries)


def test_hit_rate_counts_tokens_once(make_core):
    core = make_core(num_blocks=9, block_size=4)
    core.add("a", list(range(9)), max_tokens=1)
    core.run()
    core.add("holder", 24, max_tokens=3)
    core.step()
    core.add("b", list(range(9)), max_tokens=1)
    core.step()
    assert core.scheduler.get_request_counts() == (1, 1)  # b waits for blocks: its lookup is not counted yet
    core.run()
    assert hit_rate(core) == 8 / (9 + 24 + 9)


def test_full_hit_counts_all_tokens_except_last(make_core):
    core = make_core(block_size=16)
    prompt = list(range(48))
    core.add("a", prompt, max_tokens=1)
    core.run()
    again = core.add("b", prompt, max_tokens=1)
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {"b": 1}
    assert scheduled.scheduled_new_reqs[0].num_computed_tokens == again.sequence.num_cached_tokens == 47
    assert scheduled.copies.block_copies == [(0, 2, scheduled.scheduled_new_reqs[0].block_ids[0][2])]
    assert hit_rate(core) == 47 / 96


def test_equal_prompts_wait_for_last_block_and_copy_it(make_core):
    core = make_core(block_size=4, max_num_seqs=8)
    for index in range(8):
        core.add(f"r{index}", list(range(8)), max_tokens=3)
    assert core.step().num_scheduled_tokens == {"r0": 8}
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {f"r{index}": 1 for index in range(8)}
    targets = [data.block_ids[0][1] for data in scheduled.scheduled_new_reqs]
    assert scheduled.copies.block_copies == [(0, 1, target) for target in targets]
    assert len({1, *targets}) == 8
    core.run()
    assert set(core.finished.values()) == {"length"}


@pytest.mark.parametrize("prompt_length", [7, 8, 9])
@pytest.mark.parametrize("output", [3, 4, 5])
def test_f17_block_table_covers_exactly_computed_tokens(make_core, prompt_length, output):
    core = make_core(num_blocks=8, block_size=4)
    request = core.add("a", prompt_length, max_tokens=output)
    while core.scheduler.has_work():
        core.step()
        if request.is_finished:
            break
        held = len(request.sequence.block_table)
        assert held == -(-request.num_computed_tokens // 4)
    assert len(request.sequence.token_ids) == prompt_length + output


def test_hit_of_resumed_request_is_not_counted_as_cached_prompt(make_core):
    core = make_core(num_blocks=5, block_size=4)
    core.add("old", 8, max_tokens=6)
    young = core.add("young", 7, max_tokens=9)
    core.run()
    assert young.num_preemptions > 0
    assert young.sequence.num_cached_tokens == 0
    assert hit_rate(core) == 0.0


def test_block_with_evicted_parent_is_replaced_by_equal_block():
    manager = KVCacheManager(6, 4)
    first, second = make_request("a", list(range(5))), make_request("b", list(range(9)))
    for request in (first, second):  # both compute block 0's content; a's block is registered
        manager.allocate_slots(request, request.num_tokens)
    for request in (first, second):
        request.num_computed_tokens = request.num_tokens
        manager.commit(request)
    manager.free(first)
    admit(manager, make_request("filler", [77] * 9))  # takes a's blocks: the parent of b's second block is evicted
    again = make_request("again", list(range(9)))
    manager.free(second)
    admit(manager, again)
    manager.free(again)
    assert manager.get_computed_blocks(make_request("c", list(range(9)))).num_tokens == 8
    pool = manager.pool
    assert sum(block.ref_count == 0 for block in pool.blocks) == len(pool.free_block_ids()) == pool.num_free_blocks


@pytest.mark.parametrize(("length", "position"), [(8, 5), (10, 5), (10, 9)])
def test_span_content_distinguishes_blocks_with_equal_tokens(length, position):
    """This includes the partly filled block at the end of a prompt."""
    manager, tokens = KVCacheManager(16, 4), list(range(length))

    def num_found(*keys):
        spans = tuple(ContentSpan(position, position + 1, key) for key in keys)
        return manager.get_computed_blocks(make_request(str(keys), tokens, spans=spans)).num_tokens

    admit(manager, make_request("a", tokens, spans=(ContentSpan(position, position + 1, "image"),)))
    assert num_found("image") == length - 1
    assert num_found() == num_found("another") == position // 4 * 4


# --- with recurrent states --------------------------------------------------------------------------------------------


def with_states(num_slots: int = 8, **options) -> KVCacheManager:
    return KVCacheManager(40, 4, bounded_groups=[KVGroupSpec(RecurrentStates(), num_slots)], **options)


def start(manager: KVCacheManager, request: Request):
    """Look up and allocate a whole request; return its prefix hit."""
    manager.add_tables(request)
    computed = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - computed.num_tokens, computed) is not None
    request.num_computed_tokens = computed.num_tokens
    return computed


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Compute a request's tokens before `num_tokens` in one step."""
    manager.checkpoints.plan(request, num_tokens)
    request.num_computed_tokens = num_tokens
    manager.commit(request)


def end_hash(tokens: list[int], num_blocks: int) -> bytes:
    """Return the hash of the last of a prompt's first blocks."""
    name = None
    for index in range(num_blocks):
        name = hash_block_tokens(name, tokens[4 * index : 4 * index + 4])
    return name


def test_hit_with_states_copies_no_partly_filled_or_last_block():
    for length in (8, 10):
        manager = with_states()
        first, again = (make_request(name, list(range(length))) for name in "ab")
        start(manager, first)
        compute(manager, first, length)
        computed = start(manager, again)
        assert (computed.num_tokens, computed.source) == ({8: 4, 10: 8}[length], None)
        assert computed.num_shared == 2


def test_hit_with_states_counts_cached_blocks_after_its_checkpoint():
    manager = with_states()
    first = make_request("a", list(range(23)))  # saves 4 and 20
    start(manager, first)
    compute(manager, first, 12)
    request = make_request("b", list(range(23)))
    computed = manager.get_computed_blocks(request)
    assert ([block.block_id for block in computed.blocks], computed.num_tokens) == ([0], 4)
    assert computed.num_shared == 3
    nothing = manager.get_computed_blocks(make_request("c", [9] * 23))
    assert (nothing.blocks, nothing.num_tokens, nothing.num_shared) == ([], 0, 0)


def test_request_waits_for_last_checkpoint_that_another_request_will_save():
    manager, prompt = with_states(), list(range(23))
    first, second = (make_request(name, prompt) for name in "ab")
    cache, names = manager.prefix_cache, [end_hash(prompt, count) for count in range(6)]

    def awaited(request):
        return cache.awaited_block(request, manager.get_computed_blocks(request))

    assert awaited(second) is None
    start(manager, first)
    assert [cache.is_being_computed(name) for name in names[1:]] == [True, False, False, False, True]
    assert awaited(second) == (names[5], "a")
    assert awaited(first) is None
    assert awaited(make_request("c", prompt[:20])) == (names[1], "a")  # cannot start at 20
    assert awaited(make_request("d", prompt[:21])) == (names[5], "a")
    assert awaited(make_request("e", [*prompt[:4], 0])) == (names[1], "a")
    assert awaited(make_request("f", prompt[:4])) is None
    assert awaited(Request("g", prompt, SamplingParams(prompt_logprobs=1))) is None
    compute(manager, first, 8)
    assert [cache.is_being_computed(name) for name in names[1:]] == [False, False, False, False, True]
    assert awaited(make_request("h", prompt[:20])) is None
    assert manager.get_computed_blocks(second).num_tokens == 4
    assert awaited(second) == (names[5], "a")
    compute(manager, first, 23)
    assert not cache.is_being_computed(names[5])
    assert awaited(second) is None


def test_skipped_checkpoint_is_no_longer_awaited():
    manager, prompt = with_states(num_slots=1), list(range(9))
    first, second = (make_request(name, prompt) for name in "ab")
    start(manager, first)
    assert manager.prefix_cache.is_being_computed(end_hash(prompt, 2))
    compute(manager, first, 9)
    assert not manager.prefix_cache.is_being_computed(end_hash(prompt, 2))
    assert manager.get_computed_blocks(second).num_tokens == 0


def test_checkpoint_belongs_to_the_first_request_that_announced_it():
    manager, prompt = with_states(), list(range(9))
    first, second = (make_request(name, prompt) for name in "ab")
    start(manager, first)
    start(manager, second)
    name = end_hash(prompt, 2)
    assert manager.prefix_cache._saving == {name: "a"}
    manager.release(second)
    assert manager.prefix_cache._saving == {name: "a"}
    start(manager, second)
    compute(manager, second, 9)
    assert manager.prefix_cache.is_being_computed(name)
    manager.release(first)
    assert not manager.prefix_cache.is_being_computed(name)


def test_ended_request_leaves_no_record_of_its_checkpoints():
    manager = with_states()
    request = make_request("a", list(range(23)))
    start(manager, request)
    manager.prefix_cache._computing.clear()
    manager.prefix_cache.chains._chains.clear()
    assert manager.num_tracked_requests == 1  # announced checkpoints are records, too
    manager = with_states()
    start(manager, request)
    manager.free(request)
    assert (manager.prefix_cache._saving, manager.num_tracked_requests) == ({}, 0)


@pytest.mark.parametrize(
    ("prompt", "num_found", "expected"),
    [
        ([*range(23)], 20, None),
        ([*range(20)], 4, ("no state was saved there", None)),
        ([*range(12), 0, 0], 4, ("no state was saved there", None)),
        ([*range(8)], 4, None),  # one more block would leave no token to compute
        ([*range(9)], 4, ("no state was saved there", None)),
        ([*range(5), 0, 0, 0, 0], 4, ("different token", 5)),
        ([*range(3), 0, 0], 0, ("different token", 3)),
        ([9] * 9, 0, ("never seen", None)),
        ([*range(4)], 0, ("shorter than a block", None)),
    ],
)
def test_why_missed_tells_missing_states_from_missing_blocks(prompt, num_found, expected):
    manager = with_states()
    first = make_request("a", list(range(23)))  # saves 4 and 20
    start(manager, first)
    compute(manager, first, 23)
    manager.free(first)
    request = make_request("b", prompt)
    computed = manager.get_computed_blocks(request)
    assert computed.num_tokens == num_found
    miss = manager.prefix_cache.why_missed(request, computed)
    assert (miss and (miss.reason, miss.position)) == expected


def test_equal_prompts_wait_for_the_last_checkpoint(make_core):
    core = make_core(block_size=4, num_state_slots=10)
    for index in range(4):
        core.add(f"r{index}", list(range(30)), max_tokens=3)
    assert core.step().num_scheduled_tokens == {"r0": 30}
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {"r0": 1, "r1": 2, "r2": 2, "r3": 2}
    [checkpoint] = {source for _, source, _ in scheduled.copies.block_copies}
    targets = [data.block_ids[1][0] for data in scheduled.scheduled_new_reqs]
    assert scheduled.copies.block_copies == [(1, checkpoint, target) for target in targets]
    assert len({checkpoint, *targets}) == 4
    core.run()
    assert set(core.finished.values()) == {"length"}
