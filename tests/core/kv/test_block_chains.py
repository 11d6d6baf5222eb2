"""The hashes that a request's blocks have, and how long they are kept."""

from __future__ import annotations

import pytest

from octavo.core.kv.block_chains import BlockChains
from octavo.core.kv.block_hash import hash_block_tokens
from octavo.data.request import ContentSpan, Request
from octavo.sampling_params import SamplingParams


def make_request(request_id="a", tokens=(1, 2), **options):
    return Request(request_id, list(tokens), SamplingParams(), **options)


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, ("model:m",)),
        ({"cache_salt": "s"}, ("model:m", "salt:s")),
        ({"cache_salt": "s", "adapter": "a"}, ("model:m", "salt:s", "adapter:a")),
    ],
)
def test_block_hash_includes_engine_salt_adapter_and_weights_epoch(options, keys):
    chains = BlockChains(2, ("model:m",))
    for epoch in ((), ("weights:1",), ("weights:2",)):
        request = make_request(**options)
        assert chains.extended(request).hashes == [hash_block_tokens(None, [1, 2], (*keys, *epoch))]
        chains.advance_weights_epoch()
        assert chains.get("a") is None


def test_extended_chain_has_hashes_of_all_full_blocks():
    chains, request = BlockChains(2), make_request(tokens=[1, 2, 3])
    assert chains.of(request).hashes == []
    chain = chains.extended(request)
    assert chain.hashes == [hash_block_tokens(None, [1, 2])]
    request.sequence.token_ids.append(4)
    assert chains.of(request) is chains.extended(request) is chain
    assert request.block_hashes is chain.hashes
    assert len(chain.hashes) == 2


def test_forget_removes_chain_of_request():
    chains = BlockChains(2)
    assert chains.get("a") is None
    first, second = make_request("a"), make_request("b")
    assert chains.of(first) is not chains.of(second)
    assert chains.request_ids == {"a", "b"}
    chains.forget("a")
    chains.forget("unknown")
    assert chains.request_ids == {"b"}
    assert chains.get("a") is None


def test_block_hash_includes_content_of_span():
    chains, tokens = BlockChains(2, ("model:m",)), [1, 9, 9, 9, 5, 6, 7, 8]
    request = make_request(tokens=tokens, spans=(ContentSpan(1, 4, "image"),))
    chain = chains.extended(request)
    assert [chain.keys(index) for index in range(4)] == [
        ("model:m", "span:1:4:image"), ("model:m", "span:-1:2:image"), ("model:m",), ("model:m",)
    ]  # fmt: skip
    other = chains.extended(make_request("b", tokens, spans=(ContentSpan(1, 4, "other"),))).hashes
    assert all(mine != its for mine, its in zip(chain.hashes, other, strict=True))
    later = chains.extended(make_request("c", tokens, spans=(ContentSpan(2, 4, "image"),))).hashes
    assert later[0] == chains.extended(make_request("d", tokens)).hashes[0] != chain.hashes[0]
    longer = chains.extended(make_request("e", tokens, spans=(ContentSpan(1, 5, "image"),))).hashes
    assert longer[0] != chain.hashes[0], "the span has another content at each of its positions"


def test_block_hash_includes_multidimensional_rotary_positions():
    chains, hashes = BlockChains(2), []
    text, image = [[0, 1, 2, 3]] * 2, [[0, 1, 1, 2], [0, 1, 2, 1]]
    for index, each in enumerate([None, text, image, [list(row) for row in image]]):
        request = make_request(str(index), [1, 2, 3, 4], rotary_positions=each)
        request.sequence.token_ids += [5, 6]
        hashes.append(chains.extended(request).hashes)
    assert hashes[2] == hashes[3]
    assert hashes[1][0] == hashes[2][0] != hashes[0][0]
    assert hashes[1][1] != hashes[2][1]
    assert hashes[1][2] != hashes[2][2], "what follows the prompt depends on it"
    chain = chains.of(make_request("2", [1, 2, 3, 4], rotary_positions=image))
    assert [chain.keys(index) for index in range(3)] == [
        ("positions:[[0, 1], [0, 1]]",), ("positions:[[1, 2], [2, 1]]",), ()
    ]  # fmt: skip
    with pytest.raises(ValueError, match="one position of each dimension for each token"):
        make_request("short", [1, 2, 3], rotary_positions=[[0, 1]] * 2)
