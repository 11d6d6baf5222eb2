"""Drafts from a request's own tokens and from earlier answers: which tenants share them, and their memory."""

from __future__ import annotations

import tracemalloc
from array import array

import numpy as np
import pytest
from allocations import allocated_in

from octavo.config import SpeculativeConfig
from octavo.errors import ConfigError
from octavo.speculative import answers, create_proposer, suffix
from octavo.speculative.answers import BYTES_PER_ANSWER, Answers
from octavo.speculative.interface import DraftTask, EndedRequest
from octavo.speculative.suffix import SuffixProposer
from octavo.speculative.suffix_index import BYTES_PER_TOKEN, MAX_MATCH

ANSWER = [50, 51, 52, 53, 54, 55, 56]
PROMPT = [1, 2, 3, 4]


def make_proposer(max_model_len: int = 1 << 12, max_num_seqs: int = 16, **options) -> SuffixProposer:
    defaults = {"suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_max_cached_bytes": 1 << 20}
    config = SpeculativeConfig(method="suffix", **{**defaults, **options})
    return SuffixProposer(config, max_num_seqs=max_num_seqs, max_model_len=max_model_len)


def propose(proposer, token_ids, name="a", salt=None, max_drafts=99) -> list[int]:
    (drafts,) = proposer.propose([DraftTask(name, np.array(token_ids, dtype=np.int32), max_drafts, salt)])
    return drafts


def finish(proposer, token_ids, num_prompt_tokens=4, name="a", salt=None) -> None:
    proposer.finish([EndedRequest(name, np.array(token_ids, dtype=np.int32), num_prompt_tokens, salt)])


def test_request_is_drafted_from_its_tokens_as_it_grows():
    proposer = make_proposer()
    text = [*ANSWER, 9, 8]
    assert propose(proposer, text) == []
    assert propose(proposer, [*text, 50, 51, 52]) == [53, 54, 55], "as many as match"
    assert propose(proposer, [*text, 50, 51, 52, 53]) == [54, 55, 56, 9]
    assert propose(proposer, [*text, 50, 51, 52, 53, 54], max_drafts=2) == [55, 56]
    assert propose(proposer, [50, 51, 52], "b") == [], "not from another one that runs"


def test_answer_is_drafted_only_after_its_request_finished():
    proposer = make_proposer()
    propose(proposer, [*PROMPT, *ANSWER])
    assert propose(proposer, PROMPT, "b") == []
    finish(proposer, [*PROMPT, *ANSWER])
    assert propose(proposer, PROMPT, "b") == ANSWER[:4], "from its first token on, by the end of the prompt"
    assert propose(proposer, [7, 50, 51, 52], "c") == [53, 54, 55]


def test_prompt_is_matched_but_never_drafted():
    proposer = make_proposer()
    prompt = list(range(1000, 1100))
    finish(proposer, [*prompt, *ANSWER], len(prompt))
    finish(proposer, list(range(2000, 2100)), 100)  # ended before its first token
    assert propose(proposer, prompt[:50], "b") == []
    assert propose(proposer, prompt[-40:], "b") == ANSWER
    assert propose(proposer, [2050, 2051, 2052], "c") == []
    assert len(proposer._answers) == 1


@pytest.mark.parametrize("salts", [("alice", "bob"), ("alice", None), (None, "alice"), ("", "x")])
def test_answers_are_never_drafted_across_salts(salts):
    """Neither an answer nor a prompt, matched by the middle of the answer or by the end of the prompt."""
    owner, other = salts
    proposer = make_proposer()
    finish(proposer, [*PROMPT, *ANSWER], salt=owner)
    for text in (PROMPT, [*PROMPT, 50, 51, 52], [50, 51, 52]):
        assert propose(proposer, text, "b", other) == []
        assert propose(proposer, text, "c", owner) != []
        proposer.forget(["b", "c"])
    finish(proposer, [*PROMPT, 60, 61, 62], salt=other)
    assert propose(proposer, PROMPT, "b", other) == [60, 61, 62]
    assert propose(proposer, PROMPT, "c", owner) == ANSWER[:4]


def test_preempted_request_adds_its_answer_once():
    proposer = make_proposer()
    propose(proposer, [*PROMPT, *ANSWER[:4]])
    proposer.forget(["a", "never heard of"])
    assert propose(proposer, PROMPT, "b") == [], "it has not ended"
    propose(proposer, [*PROMPT, *ANSWER[:5]])
    finish(proposer, [*PROMPT, *ANSWER])
    assert len(proposer._answers) == 1
    assert propose(proposer, PROMPT, "c") == ANSWER[:4]
    indices = proposer._indices
    assert indices.num_tokens == sum(indices.get(each).capacity for each in indices._kept)


def test_better_of_request_and_answer_draft_wins():
    proposer = make_proposer()
    finish(proposer, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 0)
    own = [5, 6, 7, 0, 0]
    assert propose(proposer, [*own, 3, 4, 5, 6, 7], "b") == [8, 9, 10, 11, 12], "more of them match"
    assert propose(proposer, [5, 6, 7, 1, 1, 5, 6, 7], "c") == [1, 1, 5]
    for _ in range(4):
        finish(proposer, [5, 6, 7, 9, 9, 9, 9], 0)
    assert propose(proposer, [1, 5, 6, 7], "d") == [9, 9, 9], "what followed most often"


def test_min_token_prob_and_spec_factor_limit_drafts():
    proposer = make_proposer(suffix_decoding_min_token_prob=0.6, suffix_decoding_max_spec_factor=2.0)
    finish(proposer, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 0)
    assert propose(proposer, [1, 2, 3]) == [4, 5, 6, 7, 8, 9]
    finish(proposer, [1, 2, 3, 4, 0], 0)
    assert propose(proposer, [1, 2, 3], "b") == [4]


def test_zero_max_cached_requests_keeps_no_answers():
    proposer = make_proposer(20, 5, suffix_decoding_max_cached_requests=0)
    finish(proposer, [*PROMPT, *ANSWER])
    assert propose(proposer, PROMPT, "b") == []
    assert proposer.num_bytes == 100 * BYTES_PER_TOKEN
    assert propose(proposer, [*ANSWER, *ANSWER[:3]], "c") == [53, 54, 55]


def test_request_indices_share_token_limit(monkeypatch):
    """A request that outgrows the room keeps its newest tokens; one that arrives when no room remains gets none."""
    monkeypatch.setattr(suffix, "_MIN_CAPACITY", 4)
    proposer = make_proposer(30, 1)
    text = list(range(20))
    for count in range(3, 20):
        propose(proposer, text[:count])
    assert proposer._indices.num_tokens <= 30
    assert propose(proposer, [*text, 3, 4, 5]) == [6, 7, 8]
    assert propose(proposer, [*text, 3, 4, 5, *range(100, 120), 3, 4, 5]) == [100, 101, 102], "of the newer ones"
    assert propose(proposer, [*text, 3, 4, 5, *range(100, 120), 3, 4, 5, 15, 16, 17]) == []
    assert propose(proposer, [7, 8, 9, 7, 8, 9], "b") == []
    proposer.forget(["a"])
    assert propose(proposer, [7, 8, 9, 7, 8, 9], "b") == [7, 8, 9]


def test_oldest_answers_are_evicted_by_count_and_bytes():
    kept = Answers(BYTES_PER_TOKEN * 100, 3)

    def drafts(salt, first):
        return kept.propose(three_from(first), 3, salt, factor=1.0, min_probability=0.0)[0]

    for number in range(5):
        kept.add([number * 10 + i for i in range(9)], f"salt {number % 4}")
    assert len(kept) == len(kept._owners) == 3
    assert drafts("salt 0", 0) == drafts("salt 1", 10) == [], "salt 0 has another one since"
    assert (drafts("salt 2", 20), drafts("salt 3", 30), drafts("salt 0", 40)) == (
        [23, 24, 25],
        [33, 34, 35],
        [43, 44, 45],
    )
    kept.add(list(range(500, 599)), "salt 1")
    assert len(kept) == len(kept._owners) == 1
    assert drafts("salt 0", 40) == []
    assert drafts("salt 1", 550) == [553, 554, 555]


def test_reused_owner_number_exposes_no_earlier_answers():
    kept = Answers(BYTES_PER_TOKEN * 1000, 1)
    for number in range(100):
        kept.add([1, 2, 3, 1000 + number], f"salt {number}")
        for other in (number - 1, number + 1):
            assert kept.propose(three_from(1), 3, f"salt {other}", factor=1.0, min_probability=0.0)[0] == []
        found = kept.propose(three_from(1), 3, f"salt {number}", factor=1.0, min_probability=0.0)[0]
        assert found == [1000 + number]
    assert kept._owners.keys() == {answers._digest("salt 99")}
    assert len(kept._free) <= 1


def three_from(first: int) -> array[int]:
    return array("i", [first, first + 1, first + 2])


@pytest.mark.turn(12)
def test_suffix_memory_stays_within_num_bytes():
    """Each answer has its own salt, and running requests use up the room."""
    num_answers, max_bytes = 1000, 1 << 19
    proposer = make_proposer(
        1000,
        20,
        suffix_decoding_max_cached_requests=num_answers,
        suffix_decoding_max_cached_bytes=max_bytes,
    )
    assert proposer.num_bytes == 20_000 * BYTES_PER_TOKEN + max_bytes + num_answers * BYTES_PER_ANSWER
    rng = np.random.default_rng(0)
    tracemalloc.start()
    for number in range(3 * num_answers):
        tokens = rng.integers(0, 150_000, 12).astype(np.int32)
        proposer.finish([EndedRequest(str(number), tokens, 4, f"{'a long salt ' * 80} {number}")])
    of_answers = allocated_in("speculative")
    for number in range(40):
        proposer.propose([DraftTask(str(number), rng.integers(0, 150_000, 700).astype(np.int32), 8, None)])
    held = allocated_in("speculative")
    tracemalloc.stop()
    assert len(proposer._answers) == num_answers
    assert 0.5 < (of_answers - max_bytes) / (num_answers * BYTES_PER_ANSWER) < 1
    assert 0.8 * proposer.num_bytes < held < proposer.num_bytes


def test_create_proposer_returns_suffix_proposer_without_allocating():
    tracemalloc.start()
    proposer = create_proposer(SpeculativeConfig(method="suffix"), max_num_seqs=2, max_model_len=100)
    held = allocated_in("octavo")
    tracemalloc.stop()
    assert isinstance(proposer, SuffixProposer)
    assert proposer.num_bytes == 200 * BYTES_PER_TOKEN + (32 << 20) + 10_000 * BYTES_PER_ANSWER
    assert held < 1 << 20
    assert proposer.num_speculative_tokens <= MAX_MATCH


NONSENSE = [
    ({"suffix_decoding_max_cached_requests": -1}, "max_cached_requests must be an integer from 0 to 1000000, got -1"),
    (
        {"suffix_decoding_max_cached_bytes": 100},
        "max_cached_bytes must be an integer from 65536 to 17179869184, got 100",
    ),
    ({"suffix_decoding_max_spec_factor": -1}, "max_spec_factor must be a number of 0 or more, got -1"),
    ({"suffix_decoding_max_spec_factor": 1e308}, "max_spec_factor must be at most 32, got 1e"),
    ({"suffix_decoding_max_spec_factor": "1"}, "max_spec_factor must be a number of 0 or more, got '1'"),
    ({"suffix_decoding_min_token_prob": 1.1}, "min_token_prob must be at most 1, got 1.1"),
    ({"prompt_lookup_min": 2}, "prompt_lookup_min is a field of method ngram, but the method is suffix"),
    (
        {"method": "ngram", "suffix_decoding_max_cached_requests": 5},
        "is a field of method suffix, but the method is ngram",
    ),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 32, got 0"),
]


@pytest.mark.parametrize(("given", "message"), NONSENSE)
def test_invalid_suffix_config_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig.parse({"method": "suffix", **given})
