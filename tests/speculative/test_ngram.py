"""Prompt lookup by an index finds the drafts that a search finds."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest

from octavo.config import SpeculativeConfig
from octavo.errors import ConfigError
from octavo.speculative import create_proposer, ngram
from octavo.speculative.interface import DraftTask
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.none import NoProposer


def make_proposer(most: int = 3, lengths: tuple[int, int] = (2, 4), max_tokens: int = 1 << 16) -> NgramProposer:
    return NgramProposer(
        num_speculative_tokens=most, prompt_lookup_min=lengths[0], prompt_lookup_max=lengths[1], max_tokens=max_tokens
    )


def propose(proposer: NgramProposer, token_ids: list[int], name: str = "a", max_drafts: int = 99) -> list[int]:
    (drafts,) = proposer.propose([DraftTask(name, np.array(token_ids, dtype=np.int32), max_drafts, None)])
    return drafts


def search(token_ids: list[int], most: int, lengths: tuple[int, int]) -> list[int]:
    """The definition."""
    for length in range(lengths[1], lengths[0] - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[len(token_ids) - length :]:
                found = token_ids[:]
                while len(found) < len(token_ids) + most:
                    found.append(found[end + len(found) - len(token_ids)])
                return found[len(token_ids) :]
    return []


def test_tokens_after_latest_match_are_proposed():
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3]
    assert propose(make_proposer(), text) == [5, 6, 7]
    assert propose(make_proposer(), [9, *text[:5], 0, 4, 9]) == [0, 4, 9], "the text repeats from there"
    assert propose(make_proposer(), [5, 5, 5, 5]) == [5, 5, 5]
    assert propose(make_proposer(), text, max_drafts=2) == [5, 6]
    assert propose(make_proposer(), [1, 2, 3, 4]) == []
    assert propose(make_proposer(), [7, 1, 7]) == [], "one token alone is too short"


def test_longest_suffix_match_wins():
    text = [1, 2, 3, 4, 8, 0, 9, 3, 4, 7, 0, 1, 2, 3, 4]
    assert propose(make_proposer(lengths=(2, 4)), text) == [8, 0, 9]
    assert propose(make_proposer(lengths=(2, 2)), text) == [7, 0, 1]


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (2, 5), (4, 4)])
@pytest.mark.parametrize("vocab_size", [2, 3, 30])
def test_ngram_index_equals_linear_search(lengths, vocab_size):
    """The tokens include 0; the text grows by a few tokens at a time."""
    rng = random.Random(vocab_size)
    proposer, text = make_proposer(4, lengths), []
    for _ in range(120):
        text += [rng.randrange(vocab_size) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
        assert propose(proposer, text) == search(text, 4, lengths), text


def test_large_token_ids_are_distinguished():
    big = 2**31 - 1
    assert propose(make_proposer(lengths=(2, 2)), [big, 0, 5, big, big, 6, big, 0]) == [5, big, big]


def test_requests_share_no_ngram_drafts():
    proposer = make_proposer()
    assert propose(proposer, [1, 2, 3, 1, 2], "a") == [3, 1, 2]
    assert propose(proposer, [1, 2], "b") == []
    proposer.forget(["a", "never heard of"])
    assert propose(proposer, [4, 1, 2], "a") == []


def test_ngram_indices_share_token_limit():
    """A request that arrives when the room is used up gets no drafts until other requests have ended."""
    proposer = make_proposer(max_tokens=12)
    text = [1, 2, 1, 2, 1, 2]
    assert propose(proposer, text, "a") == propose(proposer, text, "b") == [1, 2, 1]
    assert propose(proposer, text, "c") == []
    assert propose(proposer, [*text, 1], "a") == []
    assert propose(proposer, text, "c") == [1, 2, 1], "the one that was too long has let go"
    proposer.forget(["b"])
    assert propose(proposer, [1, 1, 1], "d") == [1, 1, 1]


@pytest.mark.parametrize("lengths", [(2, 4), (1, 1), (30, 32)])
def test_ngram_memory_stays_within_num_bytes(lengths):
    num_tokens = 6000
    proposer = make_proposer(lengths=lengths, max_tokens=num_tokens)
    tokens = np.random.default_rng(0).integers(0, 150_000, num_tokens).astype(np.int32)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    most = 0.0
    for count in range(500, num_tokens + 1, 100):
        proposer.propose([DraftTask("a", tokens[:count], 5, None)])
        most = max(most, (tracemalloc.get_traced_memory()[0] - before) / count)
    tracemalloc.stop()
    assert 0.5 * proposer.num_bytes < most * num_tokens < proposer.num_bytes


def test_create_proposer_follows_speculative_config():
    sizes = {"max_num_seqs": 2, "max_model_len": 100}
    none = create_proposer(None, **sizes)
    assert isinstance(none, NoProposer)
    assert (none.num_bytes, none.num_speculative_tokens, none.propose([])) == (0, 0, [])
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=7, prompt_lookup_max=3)
    proposer = create_proposer(config, **sizes)
    assert proposer.num_speculative_tokens == 7
    assert proposer.num_bytes == 200 * (2 * ngram._ENTRY_BYTES + 4 * 2 + 4 * 3)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (2, 4)),
        ({"prompt_lookup_min": 1}, (1, 4)),
        ({"prompt_lookup_min": 6}, (6, 6)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 9}, (2, 9)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 5}, (3, 5)),
    ],
)
def test_lookup_lengths_have_defaults(given, lengths):
    assert SpeculativeConfig(method="ngram", **given).lookup_lengths == lengths


NONSENSE = [
    ({"method": "telepathy"}, "must be one of auto, none, ngram, suffix, draft_model, quantized, got 'telepathy'"),
    ({"num_speculative_tokens": 4}, "must be an object with a method"),
    ([], "must be an object with a method"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 32, got 0"),
    ({"method": "ngram", "num_speculative_tokens": 1000}, "from 1 to 32, got 1000"),
    ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 32, got True"),
    ({"method": "ngram", "num_speculative_tokens": "4"}, "from 1 to 32, got '4'"),
    ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min must be an integer from 1 to 32, got 0"),
    ({"method": "ngram", "prompt_lookup_max": 1.5}, "prompt_lookup_max must be an integer from 1 to 32, got 1.5"),
    ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, r"prompt_lookup_min \(5\) must be at most"),
    ({"method": "ngram", "device": "gpu"}, "a field of speculative_config must be one of method, .*got 'device'"),
    (
        {"method": "ngram", "model": "owner/name"},
        "model is a field of method draft_model, suffix, auto, but the method is ngram",
    ),
    ({"method": "quantized", "model": "owner/name"}, "but the method is quantized"),
    ({"method": "draft_model"}, "draft_model needs a model: a directory .* or octavo-demo-draft"),
    ({"method": "draft_model", "model": 7}, "model of speculative_config must be a path or a hub id, got 7"),
    ({"method": "draft_model", "model": ""}, "must be a path or a hub id, got ''"),
    ({"method": "draft_model", "model": "a", "num_speculative_tokens": 1000}, "from 1 to 32, got 1000"),
    ({"method": "draft_model", "model": "a", "num_speculative_tokens": 0}, "from 1 to 32, got 0"),
    (
        {"method": "draft_model", "model": "a", "quantization": "int3"},
        "quantization of speculative_config must be one of",
    ),
    ({"method": "suffix", "quantization": "int4"}, "of a model that drafts, but the method is suffix"),
    ({"method": "none", "verification": "rejection"}, "verification has no effect with method none"),
]


@pytest.mark.parametrize(("given", "message"), NONSENSE)
def test_invalid_speculative_config_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse(given)


@pytest.mark.parametrize(
    ("given", "exact", "reference"),
    [
        (None, ("suffix", 8), None),
        ({"method": "auto", "num_speculative_tokens": 3}, ("suffix", 3), None),
        ({"method": "none"}, None, None),
        ({"method": "ngram"}, ("ngram", 8), ("ngram", 8)),
        ({"method": "auto", "model": "a", "quantization": "int8"}, ("suffix", 8), None),
        ({"method": "quantized"}, ("quantized", 8), ("quantized", 8)),
        ({"method": "suffix", "num_speculative_tokens": 2}, ("suffix", 2), ("suffix", 2)),
    ],
)
def test_auto_method_depends_on_exact_kernels(given, exact, reference):
    for is_exact, expected in ((True, exact), (False, reference)):
        resolved = SpeculativeConfig.parse(given).resolved(is_exact=is_exact)
        assert (resolved and (resolved.method, resolved.num_speculative_tokens)) == expected


def test_auto_method_accepts_suffix_fields_only():
    config = SpeculativeConfig.parse({"method": "auto", "suffix_decoding_max_cached_requests": 7})
    assert config.resolved(is_exact=True).suffix_decoding_max_cached_requests == 7
    with pytest.raises(ConfigError, match="a field of method ngram, but the method is auto"):
        SpeculativeConfig.parse({"method": "auto", "prompt_lookup_max": 3})
