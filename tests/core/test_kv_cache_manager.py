"""What the manager keeps, under which names, and what it remembers of what was cached."""

from __future__ import annotations

import pytest

from octavo.core.block_hash import hash_block_tokens
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def make_request(request_id, tokens, **options):
    return Request(request_id, tokens, SamplingParams(), **options)


def compute(manager, request, num_tokens=None):
    """Look up, allocate and compute the first tokens of a request, by default all; return its block table."""
    computed = manager.get_computed_blocks(request)
    count = (num_tokens or request.num_tokens) - computed.num_tokens
    assert manager.allocate_slots(request, count, computed) is not None
    request.num_computed_tokens = computed.num_tokens + count
    manager.commit(request)
    return request.sequence.block_table


def test_what_a_plain_manager_has():
    manager = KVCacheManager(8, 4)
    assert (manager.host.num_blocks, manager.capacity_tokens) == (0, 32)
    assert (manager.enable_prefix_caching, manager.cache_decoded_blocks) == (True, True)


@pytest.mark.parametrize(("num_blocks", "capacity"), [(8, 1024), (256, 1024), (300, 1200)])
def test_history_remembers_four_times_the_cache_and_a_thousand_blocks_at_least(num_blocks, capacity):
    history = KVCacheManager(num_blocks, 4).history
    for index in range(capacity + 1):
        history.add(0, (index,), b"%d" % index, None, ())
    assert history.why_missed(0, [-1], b"0", b"other", ()).reason == "never seen"
    assert history.why_missed(0, [-1], b"1", b"other", ()).reason == "evicted"


def test_names_are_of_the_engine_the_salt_the_adapter_and_the_weights():
    manager = KVCacheManager(8, 2, extra_keys=("model:m",))
    for name, options, keys in (
        ("plain", {}, ("model:m",)),
        ("own", {"cache_salt": "s", "adapter": "a"}, ("model:m", "salt:s", "adapter:a")),
    ):
        request = make_request(name, [1, 2], **options)
        compute(manager, request)
        assert manager.pool.indexed(hash_block_tokens(None, [1, 2], keys)) is not None
        manager.free(request)
    for epoch in ("1", "2"):
        assert manager.advance_weights_epoch()
        assert manager.num_cached_blocks == 0
        request = make_request(epoch, [1, 2])
        compute(manager, request)
        assert manager.pool.indexed(hash_block_tokens(None, [1, 2], ("model:m", f"weights:{epoch}"))) is not None
        manager.free(request)


def weak(_parent, _tokens, _extra_keys=()):
    return b"one name for all"


@pytest.mark.parametrize("other", [[1, 2, 9], [1, 2, 3, 4]])
def test_a_partly_filled_block_of_other_content_is_not_copied_whatever_its_name(other):
    manager = KVCacheManager(8, 5, hash_function=weak)
    holder = make_request("holder", [1, 2, 3])
    table = compute(manager, holder)
    same = manager.get_computed_blocks(make_request("same", [1, 2, 3]))
    assert same.source is manager.pool.blocks[table[0]]
    assert same.num_tokens == 2
    assert manager.get_computed_blocks(make_request("other", other)).source is None
    salted = make_request("salted", [1, 2, 3], cache_salt="s")
    assert manager.get_computed_blocks(salted).source is None


def test_a_partly_filled_block_is_copied_only_behind_the_same_blocks():
    manager = KVCacheManager(8, 2, hash_function=lambda _parent, tokens, _keys: bytes(tokens[-1:]))
    compute(manager, make_request("a", [1, 2, 5, 6, 8]))
    assert manager.num_tracked_requests == 1  # a tail of one token is not worth a copy
    manager = KVCacheManager(8, 3, hash_function=lambda _parent, tokens, _keys: bytes(tokens[-1:]))
    holder = make_request("a", [1, 2, 3, 7, 8])
    other = make_request("b", [1, 2, 4, 7, 8])
    compute(manager, holder)
    compute(manager, other)
    assert manager.get_computed_blocks(make_request("c", [1, 2, 3, 7, 8])).num_tokens == 4
    found = manager.get_computed_blocks(make_request("d", [1, 2, 4, 7, 8]))
    assert (found.num_tokens, found.source) == (3, None)  # the tail of one name that came first is behind another block


@pytest.mark.parametrize("tail", [[6, 8, 9], [7, 6, 9], [7, 8, 6], [7, 8], [7, 8, 9, 10]])
def test_a_partly_filled_block_is_copied_only_for_all_its_tokens(tail):
    manager = KVCacheManager(8, 5, hash_function=weak)
    compute(manager, make_request("a", [1, 2, 3, 4, 5, 7, 8, 9]))
    assert manager.num_tracked_requests == 2  # the request, and what others may copy of it
    found = manager.get_computed_blocks(make_request("b", [1, 2, 3, 4, 5, *tail]))
    assert (found.num_tokens, found.source) == (5, None)


def test_who_has_generated_scores_or_is_alone_copies_no_partly_filled_block():
    manager = KVCacheManager(8, 4)
    assert manager.get_computed_blocks(make_request("alone", [1, 2, 3])).num_tokens == 0
    compute(manager, make_request("a", [1, 2, 3]))
    resumed = make_request("resumed", [1, 2, 3])
    resumed.sequence.token_ids.append(9)
    assert manager.get_computed_blocks(resumed).num_tokens == 0
    scored = Request("scored", [1, 2, 3], SamplingParams(prompt_logprobs=1))
    assert manager.get_computed_blocks(scored).num_tokens == 0
    assert manager.get_computed_blocks(make_request("b", [1, 2, 3])).num_tokens == 2


def test_a_block_of_one_token_is_computed_again_and_not_copied():
    manager = KVCacheManager(8, 1)
    compute(manager, make_request("a", [1, 2, 3]))
    found = manager.get_computed_blocks(make_request("b", [1, 2, 3]))
    assert (len(found.blocks), found.num_tokens, found.source) == (2, 2, None)


def test_without_a_cache_nothing_is_found_awaited_or_missed():
    manager = KVCacheManager(8, 4, enable_prefix_caching=False)
    first, second = (make_request(name, list(range(9))) for name in "ab")
    manager.allocate_slots(first, 9)
    found = manager.get_computed_blocks(second)
    assert found.num_tokens == 0
    assert manager.awaited_block(second, found) is None
    assert manager.why_missed(second, found) is None
    assert manager.num_tracked_requests == 0
    first.num_computed_tokens = 9
    manager.commit(first)
    assert manager.get_computed_blocks(second).num_tokens == 0
    assert manager.num_tracked_requests == 0


# --- swapped ----------------------------------------------------------------------------------------------------------


def swapped(manager, tokens, num_computed):
    """Return a request of which so many tokens are in host memory."""
    request = make_request("swapped", tokens)
    manager.allocate_slots(request, num_computed)
    request.num_computed_tokens = num_computed
    assert manager.swap_out(request)
    manager.release(request)
    manager.take_copies()
    request.num_computed_tokens = 0
    request.num_preemptions = 1
    return request


@pytest.mark.parametrize(
    ("cached", "num_tokens", "num_blocks", "num_host_blocks"),
    [(0, 9, 0, 3), (4, 9, 1, 2), (8, 9, 2, 1), (12, 12, 3, 0)],
)
def test_what_is_cached_comes_before_what_is_saved_if_it_is_not_more(cached, num_tokens, num_blocks, num_host_blocks):
    manager = KVCacheManager(16, 4, num_host_blocks=4)
    request = swapped(manager, list(range(14)), 9)
    host_blocks = manager.saved_blocks()["swapped"]
    if cached:
        compute(manager, make_request("other", [*range(cached), 99]))
    found = manager.get_computed_blocks(request)
    assert (found.num_tokens, len(found.blocks)) == (num_tokens, num_blocks)
    assert found.host_blocks == host_blocks[3 - num_host_blocks :]
    table = compute(manager, request)
    copies = manager.take_copies()
    assert copies.swap_in == list(zip(found.host_blocks, table[num_blocks : num_blocks + num_host_blocks], strict=True))
    assert "swapped" not in manager.saved_blocks()
    assert manager.host.num_free_blocks == 4
    assert request.sequence.num_cached_tokens == 0  # it found of itself, not of its prompt


def test_more_is_copied_than_was_saved():
    manager = KVCacheManager(16, 4, num_host_blocks=4)
    request = swapped(manager, list(range(11)), 8)
    compute(manager, make_request("other", list(range(11))))
    found = manager.get_computed_blocks(request)
    assert (found.num_tokens, found.host_blocks) == (10, [])
    assert found.source is not None


# --- who waits for what, and why nothing was found --------------------------------------------------------------------


@pytest.mark.parametrize("other", [[9, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]])
def test_two_tails_of_one_content_behind_other_blocks_can_both_be_copied(other):
    manager = KVCacheManager(16, 3)
    for name, blocks in (("a", [1, 2, 3, 4, 5, 6]), ("b", other)):
        table = compute(manager, make_request(name, [*blocks, 7, 8]))
        found = manager.get_computed_blocks(make_request(f"same as {name}", [*blocks, 7, 8]))
        assert found.source is manager.pool.blocks[table[-1]]


def test_a_request_waits_for_the_next_block_that_another_computes():
    manager = KVCacheManager(16, 4)
    prompt = list(range(9))
    first, second = make_request("a", prompt), make_request("b", prompt)
    name = hash_block_tokens(None, prompt[:4])
    assert not manager.is_being_computed(name)
    nothing = manager.get_computed_blocks(first)
    manager.allocate_slots(first, 4, nothing)
    assert manager.is_being_computed(name) is True
    assert manager.awaited_block(second, manager.get_computed_blocks(second)) == (name, "a")
    assert manager.awaited_block(first, nothing) is None  # not for itself
    scored = Request("c", prompt, SamplingParams(prompt_logprobs=1))
    assert manager.awaited_block(scored, manager.get_computed_blocks(scored)) is None
    assert manager.awaited_block(make_request("short", prompt[:3]), nothing) is None
    first.num_computed_tokens = 4
    manager.commit(first)
    assert not manager.is_being_computed(name)
    behind = hash_block_tokens(name, prompt[4:8])
    assert manager.awaited_block(second, manager.get_computed_blocks(second)) == (behind, "a")
    manager.free(first)
    assert not manager.is_being_computed(behind)
    assert manager.awaited_block(second, manager.get_computed_blocks(second)) is None


def test_why_the_first_block_was_missed():
    manager = KVCacheManager(16, 4)
    compute(manager, make_request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    for prompt, expected in (
        ([1, 2, 9, 4, 5], ("different token", 2)),
        ([1, 2, 3, 4, 5, 9, 7, 8, 9], ("different token", 5)),
        ([9, 2, 3, 4, 5], ("never seen", None)),
        ([1, 2, 3], ("shorter than a block", None)),
    ):
        request = make_request("b", prompt)
        miss = manager.why_missed(request, manager.get_computed_blocks(request))
        assert (miss.reason, miss.position) == expected
        manager.free(request)
    whole = make_request("whole", [1, 2, 3, 4, 5])
    assert manager.why_missed(whole, manager.get_computed_blocks(whole)) is None
    copied = make_request("copied", [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.why_missed(copied, manager.get_computed_blocks(copied)) is None


# --- tables -----------------------------------------------------------------------------------------------------------


def test_blocks_are_added_only_where_the_table_ends():
    manager = KVCacheManager(6, 4)
    request = make_request("a", list(range(20)))
    assert manager.allocate_slots(request, 4) == [0]
    request.num_computed_tokens = 4
    assert manager.allocate_slots(request, 1) == [1]
    assert manager.allocate_slots(request, 4) == []
    assert manager.allocate_slots(request, 5) == [2]
    assert manager.allocate_slots(request, 21) is None
    assert request.sequence.block_table == [0, 1, 2]
    assert manager.allocate_slots(request, 20) == [3, 4, 5]


def test_room_is_made_for_what_is_reserved_if_that_is_more():
    manager = KVCacheManager(6, 4)
    assert manager.allocate_slots(make_request("a", [1, 2, 3]), 3, num_reserved_tokens=9) == [0, 1, 2]
    assert manager.allocate_slots(make_request("b", [1, 2, 3, 4, 5]), 5, num_reserved_tokens=4) == [3, 4]


def test_what_fits_counts_free_blocks_and_those_held_already():
    manager = KVCacheManager(6, 4)
    holder = make_request("a", list(range(9)))
    compute(manager, holder)
    found = manager.get_computed_blocks(make_request("b", list(range(21))))
    assert len(found.blocks) == 2
    assert manager.can_hold(20, found, 0)  # 2 of 5 blocks are held, 3 are free
    assert not manager.can_hold(21, found, 0)
    assert manager.can_hold(16, found, 1)
    assert not manager.can_hold(17, found, 1)
    manager.free(holder)
    assert manager.can_hold(24, found, 0)
    assert not manager.can_hold(25, found, 0)


def test_pins_hold_blocks_and_are_let_go_of_once():
    manager = KVCacheManager(4, 4)
    request = make_request("a", list(range(8)))
    table = list(compute(manager, request))
    manager.pin(7, table)
    assert (manager.num_transfers, [block.block_id for block in manager.pinned_blocks()]) == (1, table)
    manager.free(request)
    assert manager.pool.num_free_blocks == 2
    assert manager.unpin(7) is True
    assert manager.unpin(7) is False
    assert (manager.num_transfers, manager.pool.num_free_blocks) == (0, 4)
    assert [block.block_id for block in manager.pool.cached_blocks()] == table[::-1]  # the tail is evicted first


def test_new_weights_forget_all_and_wait_for_holders():
    manager = KVCacheManager(8, 4, num_host_blocks=4)
    request = swapped(manager, list(range(9)), 8)
    holder = make_request("holder", [1, 2, 3])
    compute(manager, holder)
    assert manager.advance_weights_epoch() is False
    assert "swapped" in manager.saved_blocks()
    assert manager.num_tracked_requests == 3
    manager.release(holder)
    assert manager.advance_weights_epoch() is True
    assert manager.host.num_free_blocks == 4
    assert manager.num_tracked_requests == 0
    assert manager.get_computed_blocks(request).num_tokens == 0


def test_reset_waits_for_holders():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(9)))
    compute(manager, request)
    assert manager.reset_prefix_cache() is False
    manager.free(request)
    assert manager.num_cached_blocks == 2
    assert manager.reset_prefix_cache() is True
    assert manager.num_cached_blocks == 0


@pytest.mark.parametrize(("num_computed", "num_blocks"), [(1, 1), (4, 1), (5, 2)])
def test_swapped_out_is_what_is_computed(num_computed, num_blocks):
    manager = KVCacheManager(8, 4, num_host_blocks=2)
    request = make_request("a", list(range(12)))
    manager.allocate_slots(request, 12)
    assert manager.swap_out(request) is False  # nothing is computed
    request.num_computed_tokens = 12
    assert manager.swap_out(request) is False  # no room for three
    assert manager.host.num_free_blocks == 2
    request.num_computed_tokens = num_computed
    assert manager.swap_out(request) is True
    assert manager.take_copies().swap_out == list(zip(range(num_blocks), manager.saved_blocks()["a"], strict=True))
    assert len(manager.saved_blocks()["a"]) == num_blocks
    manager.release(request)
    manager.drop_saved("a")
    manager.drop_saved("a")
    assert manager.host.num_free_blocks == 2


# --- commit -----------------------------------------------------------------------------------------------------------


def test_each_block_is_told_of_once_and_hangs_on_the_one_before_it():
    told: list[int] = []
    manager = KVCacheManager(16, 2, on_cached=told.append)
    compute(manager, make_request("a", [1, 2, 3, 4, 5]))
    assert told == [0, 1]
    longer = make_request("b", [1, 2, 3, 4, 5, 6, 7])
    table = compute(manager, longer)
    assert told == [0, 1, table[2]]
    found = manager.get_computed_blocks(make_request("c", [1, 2, 3, 4, 5, 6, 7]))
    assert [block.block_id for block in found.blocks] == table[:3]


def test_a_block_that_stays_private_is_not_told_of_and_not_remembered():
    told: list[int] = []
    manager = KVCacheManager(8, 2, hash_function=weak, on_cached=told.append)
    compute(manager, make_request("a", [1, 2, 9]))
    compute(manager, make_request("b", [3, 4, 9]))
    assert told == [0]
    salted = make_request("c", [3, 4, 9], cache_salt="s")
    assert manager.history.why_missed(0, [3, 4], b"other", None, ("salt:s",)).reason == "never seen"
    assert manager.history.why_missed(0, [1, 2], b"other", None, ("salt:s",)).reason == "other salt"
    assert manager.get_computed_blocks(salted).num_tokens == 0


def test_a_copy_goes_into_the_first_of_the_new_blocks():
    manager = KVCacheManager(8, 4)
    table = compute(manager, make_request("a", [1, 2, 3]))
    again = make_request("b", [1, 2, 3])
    new = manager.allocate_slots(again, 1, manager.get_computed_blocks(again), num_reserved_tokens=12)
    assert len(new) == 3
    assert manager.take_copies().block_copies == [(table[0], new[0])]


def test_a_source_that_became_its_copy_is_not_copied():
    manager = KVCacheManager(2, 4)
    first = make_request("a", [1, 2, 3, 4])
    compute(manager, first)
    manager.free(first)
    again = make_request("b", [1, 2, 3, 4])
    found = manager.get_computed_blocks(again)
    assert found.source is not None
    manager.pool.take(1)  # the other one
    assert manager.allocate_slots(again, 1, found) == [0]
    assert not manager.take_copies()


def test_a_source_that_became_another_of_the_new_blocks_is_copied_before_it_is_written():
    manager = KVCacheManager(2, 4)
    for name, expected, copies in (("a", [0, 1], []), ("b", [1, 0], [(0, 1)])):
        request = make_request(name, [1, 2, 3, 4])
        found = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 4 - found.num_tokens, found, num_reserved_tokens=8) == expected
        assert manager.take_copies().block_copies == copies
        request.num_computed_tokens = 4
        manager.commit(request)
        manager.free(request)


@pytest.mark.parametrize(("cache_decoded_blocks", "is_announced"), [(True, True), (False, False)])
def test_announced_are_the_blocks_that_will_be_shared(cache_decoded_blocks, is_announced):
    manager = KVCacheManager(8, 4, cache_decoded_blocks=cache_decoded_blocks)
    request = make_request("a", [1, 2, 3, 4, 5])
    request.sequence.token_ids += [6, 7, 8, 9]
    manager.allocate_slots(request, 9)
    first = hash_block_tokens(None, [1, 2, 3, 4])
    assert manager.is_being_computed(first)
    assert manager.is_being_computed(hash_block_tokens(first, [5, 6, 7, 8])) == is_announced


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_when_the_next_commit_has_anything_to_do(enable_prefix_caching):
    manager = KVCacheManager(8, 4, enable_prefix_caching=enable_prefix_caching)
    request = make_request("a", list(range(9)))
    manager.allocate_slots(request, 20)
    request.sequence.token_ids += range(50, 60)
    expected = {4: 0, 8: 0, 9: 12, 11: 12, 12: 16} if enable_prefix_caching else {4: 8, 8: 12, 9: 12, 11: 12, 12: 16}
    for num_computed, next_commit in expected.items():
        request.num_computed_tokens = num_computed
        manager.commit(request)
        assert request.sequence.next_commit == next_commit
    manager.release(request)
    assert request.sequence.next_commit == 0
    assert manager.num_cached_blocks == (3 if enable_prefix_caching else 0)


def test_a_block_that_is_full_by_now_and_those_of_scored_prompts_are_not_offered_as_partly_filled():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(6)))
    request.sequence.token_ids += [50, 51, 52]
    compute(manager, request, 8)
    assert manager.num_tracked_requests == 1
    assert manager.get_computed_blocks(make_request("b", list(range(6)))).source is None
    scored = Request("c", [7, 8, 9], SamplingParams(prompt_logprobs=1))
    compute(manager, scored)
    assert manager.num_tracked_requests == 3  # and none of them for a part of a block
    assert manager.get_computed_blocks(make_request("d", [7, 8, 9])).source is None


def test_a_partly_filled_block_is_offered_while_it_has_room():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(6)))
    request.sequence.token_ids += [50, 51, 52]
    table = compute(manager, request, 7)
    assert manager.num_tracked_requests == 2
    assert manager.get_computed_blocks(make_request("b", list(range(6)))).source is manager.pool.blocks[table[1]]
    manager.release(request)
    assert manager.num_tracked_requests == 2  # the requests themselves: they may come back
    assert manager.get_computed_blocks(make_request("b", list(range(6)))).source is None


def test_what_comes_back_commits_its_blocks_anew():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(12)))
    compute(manager, request, 9)
    manager.release(request)
    request.num_computed_tokens = 0
    assert manager.reset_prefix_cache()
    table = compute(manager, request)
    assert manager.num_cached_blocks == 3
    assert [block.block_id for block in manager.get_computed_blocks(make_request("b", list(range(13)))).blocks] == table


def test_what_is_released_unfinished_is_no_longer_being_computed():
    manager = KVCacheManager(8, 4)
    first, second = make_request("a", list(range(12))), make_request("b", list(range(12)))
    names = [hash_block_tokens(None, [0, 1, 2, 3])]
    names.append(hash_block_tokens(names[0], [4, 5, 6, 7]))
    manager.allocate_slots(first, 12)
    manager.allocate_slots(second, 12)
    first.num_computed_tokens = 4
    manager.commit(first)
    assert [manager.is_being_computed(name) for name in names] == [False, True]
    manager.release(second)
    assert [manager.is_being_computed(name) for name in names] == [False, True]  # the first one computes it
    manager.release(first)
    assert [manager.is_being_computed(name) for name in names] == [False, False]
    manager.release(make_request("unknown", [1]))


def test_other_weights_give_blocks_other_keys():
    manager, request = KVCacheManager(4, 4), Request("a", list(range(8)), SamplingParams())
    manager.update_block_hashes(request)
    before = list(request.block_hashes)
    assert manager.advance_weights_epoch()
    manager.update_block_hashes(request)
    assert len(request.block_hashes) == len(before) == 2
    assert not set(before) & set(request.block_hashes)
