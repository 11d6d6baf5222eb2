"""Blocks that the end of a prompt fills in part: when they are copied, and how long they are offered."""

from __future__ import annotations

import pytest

from octavo.core.kv.manager import KVCacheManager
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def make_request(request_id, tokens, **options):
    return Request(request_id, tokens, SamplingParams(), **options)


def compute(manager, request, num_tokens=None):
    """Look up, allocate and compute `num_tokens` tokens (default: all) of a request; return its block table."""
    computed = manager.get_computed_blocks(request)
    count = (num_tokens or request.num_tokens) - computed.num_tokens
    assert manager.allocate_slots(request, count, computed) is not None
    request.num_computed_tokens = computed.num_tokens + count
    manager.commit(request)
    return request.sequence.block_table


def weak(_parent, _tokens, _extra_keys=()):
    return b"one name for all"


@pytest.mark.parametrize("other", [[1, 2, 9], [1, 2, 3, 4]])
def test_partial_block_with_other_content_is_not_copied_despite_equal_hash(other):
    manager = KVCacheManager(8, 5)
    manager.prefix_cache.chains.hash_function = weak
    holder = make_request("holder", [1, 2, 3])
    table = compute(manager, holder)
    same = manager.get_computed_blocks(make_request("same", [1, 2, 3]))
    assert same.source is manager.pool.blocks[table[0]]
    assert same.num_tokens == 2
    assert manager.get_computed_blocks(make_request("other", other)).source is None
    salted = make_request("salted", [1, 2, 3], cache_salt="s")
    assert manager.get_computed_blocks(salted).source is None


def test_partial_block_is_copied_only_after_equal_prefix_blocks():
    manager = KVCacheManager(8, 2)
    manager.prefix_cache.chains.hash_function = lambda _parent, tokens, _keys: bytes(tokens[-1:])
    compute(manager, make_request("a", [1, 2, 5, 6, 8]))
    assert manager.num_tracked_requests == 1  # a tail of one token is not worth a copy
    manager = KVCacheManager(8, 3)
    manager.prefix_cache.chains.hash_function = lambda _parent, tokens, _keys: bytes(tokens[-1:])
    holder = make_request("a", [1, 2, 3, 7, 8])
    other = make_request("b", [1, 2, 4, 7, 8])
    compute(manager, holder)
    compute(manager, other)
    assert manager.get_computed_blocks(make_request("c", [1, 2, 3, 7, 8])).num_tokens == 4
    found = manager.get_computed_blocks(make_request("d", [1, 2, 4, 7, 8]))
    assert (found.num_tokens, found.source) == (3, None)  # the first tail with this hash follows another block


@pytest.mark.parametrize("tail", [[6, 8, 9], [7, 6, 9], [7, 8, 6], [7, 8], [7, 8, 9, 10]])
def test_partial_block_is_copied_only_if_all_its_tokens_match(tail):
    manager = KVCacheManager(8, 5)
    manager.prefix_cache.chains.hash_function = weak
    compute(manager, make_request("a", [1, 2, 3, 4, 5, 7, 8, 9]))
    assert manager.num_tracked_requests == 2  # the request, and its partial block that may be copied
    found = manager.get_computed_blocks(make_request("b", [1, 2, 3, 4, 5, *tail]))
    assert (found.num_tokens, found.source) == (5, None)


def test_resumed_or_scored_request_copies_no_partial_block():
    manager = KVCacheManager(8, 4)
    assert manager.get_computed_blocks(make_request("alone", [1, 2, 3])).num_tokens == 0
    compute(manager, make_request("a", [1, 2, 3]))
    resumed = make_request("resumed", [1, 2, 3])
    resumed.sequence.token_ids.append(9)
    assert manager.get_computed_blocks(resumed).num_tokens == 0
    scored = Request("scored", [1, 2, 3], SamplingParams(prompt_logprobs=1))
    assert manager.get_computed_blocks(scored).num_tokens == 0
    assert manager.get_computed_blocks(make_request("b", [1, 2, 3])).num_tokens == 2


def test_block_of_one_token_is_recomputed_and_not_copied():
    manager = KVCacheManager(8, 1)
    compute(manager, make_request("a", [1, 2, 3]))
    found = manager.get_computed_blocks(make_request("b", [1, 2, 3]))
    assert (len(found.blocks), found.num_tokens, found.source) == (2, 2, None)


@pytest.mark.parametrize("other", [[9, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]])
def test_equal_tails_after_different_blocks_can_both_be_copied(other):
    manager = KVCacheManager(16, 3)
    for name, blocks in (("a", [1, 2, 3, 4, 5, 6]), ("b", other)):
        table = compute(manager, make_request(name, [*blocks, 7, 8]))
        found = manager.get_computed_blocks(make_request(f"same as {name}", [*blocks, 7, 8]))
        assert found.source is manager.pool.blocks[table[-1]]


def test_full_blocks_and_scored_prompts_are_not_offered_as_partial_blocks():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(6)))
    request.sequence.token_ids += [50, 51, 52]
    compute(manager, request, 8)
    assert manager.num_tracked_requests == 1
    assert manager.get_computed_blocks(make_request("b", list(range(6)))).source is None
    scored = Request("c", [7, 8, 9], SamplingParams(prompt_logprobs=1))
    compute(manager, scored)
    assert manager.num_tracked_requests == 3  # partial blocks are not counted
    assert manager.get_computed_blocks(make_request("d", [7, 8, 9])).source is None


def test_partial_block_is_offered_until_full_or_released():
    manager = KVCacheManager(8, 4)
    request = make_request("a", list(range(6)))
    request.sequence.token_ids += [50, 51, 52]
    table = compute(manager, request, 7)
    assert manager.num_tracked_requests == 2
    assert manager.get_computed_blocks(make_request("b", list(range(6)))).source is manager.pool.blocks[table[1]]
    manager.release(request)
    assert manager.num_tracked_requests == 2  # the requests themselves, because they may resume
    assert manager.get_computed_blocks(make_request("b", list(range(6)))).source is None
