"""Limits on stored tokens and lookups, eviction, and the owners of drafts after it."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from octavo.config import SpeculativeConfig
from octavo.speculative import create_proposer
from octavo.speculative.answers import BYTES_PER_ANSWER, Answers
from octavo.speculative.interface import DraftTask, EndedRequest
from octavo.speculative.model import ModelProposer
from octavo.speculative.ngram import NgramProposer
from octavo.speculative.none import NoProposer
from octavo.speculative.prediction import PredictionProposer, find_following
from octavo.speculative.suffix import SuffixProposer
from octavo.speculative.suffix_index import BYTES_PER_TOKEN, SuffixIndex


def index_of(*texts, capacity=1000):
    index = SuffixIndex(capacity)
    for text in texts:
        index.extend(text)
        index.close()
    return index


def propose(index, suffix, most=8, **options):
    return index.propose(array("i", suffix), most, **options)


def suffix_proposer(max_num_seqs=4, max_model_len=100, **options):
    config = SpeculativeConfig(method="suffix", **{"suffix_decoding_max_spec_factor": 1.0, **options})
    return SuffixProposer(config, max_num_seqs=max_num_seqs, max_model_len=max_model_len)


def task(name, token_ids, max_drafts=99, **options):
    return DraftTask(name, np.array(token_ids, dtype=np.int32), max_drafts, None, **options)


def ended(name, token_ids, num_prompt_tokens=0):
    return EndedRequest(name, np.array(token_ids, dtype=np.int32), num_prompt_tokens, None)


class TestSuffixIndex:
    def test_new_index_is_empty(self):
        index = SuffixIndex(10)
        assert (index.oldest, index.num_tokens, propose(index, [1, 2, 3])) == (0, 0, ([], 0.0))

    def test_match_score_is_at_most_32_tokens(self):
        draft, score = propose(index_of(range(100)), range(60), most=99)
        assert (draft, score) == ([*range(60, 92)], 32.0)

    def test_newest_six_matches_count(self):
        index = index_of(*[[1, 2, 3, 8]] * 4, *[[1, 2, 3, 9]] * 3)
        assert propose(index, [1, 2, 3]) == ([9], 0.5)

    def test_two_longest_match_lengths_are_compared(self):
        """The draft of the third match would have the best score."""
        index = index_of([1, 2, 3, 7, 7, 7], [1, 2, 3, 7, 7, 7], [0, 1, 2, 3, 8], [4, 0, 1, 2, 3, 9])
        assert propose(index, [5, 4, 0, 1, 2, 3], min_probability=0.9) == ([9], 1.0)

    def test_longer_match_wins_at_equal_score(self):
        index = index_of([5, 1, 2, 3, 7], [6, 1, 2, 3, 7], [0, 1, 2, 3, 8], [0, 1, 2, 3, 9])
        assert propose(index, [0, 1, 2, 3], most=1) == ([9], 0.5)

    def test_draft_is_read_across_ring_end(self):
        index = SuffixIndex(20)
        index.extend(range(100, 113))
        index.extend(range(1, 11))
        assert propose(index, [4, 5, 6]) == ([7, 8, 9], 3.0)
        assert propose(index, [3, 4, 5]) == ([6, 7, 8], 3.0)

    def test_draft_past_newest_token_repeats(self):
        index = SuffixIndex(20)
        index.extend([1, 2, 3, 4, 1, 2, 3])
        assert propose(index, [4, 1, 2, 3], factor=2.0) == ([4, 1, 2, 3, 4, 1], 6.0)

    def test_end_marker_overwriting_token_ends_text(self):
        index = SuffixIndex(10)
        index.extend(range(10))
        index.extend([1, 2, 3])
        index.close()
        index.extend([7, 8, 9])
        assert propose(index, [1, 2, 3]) == ([], 0.0)

    def test_most_frequent_token_wins_over_newest(self):
        draft, score = propose(index_of([1, 2, 3, 9], [1, 2, 3, 9], [1, 2, 3, 8]), [1, 2, 3])
        assert (draft, score) == ([9], 2 / 3)

    def test_token_id_zero_is_matched_and_drafted(self):
        assert propose(index_of([0, 0, 0, 0, 5]), [7, 0, 0, 0, 0]) == ([5], 1.0)

    def test_index_capacity_is_at_least_two_ngrams(self):
        assert SuffixIndex(1).capacity == 6
        assert SuffixIndex(7).capacity == 7


class TestAnswers:
    def test_oldest_answer_above_limit_is_evicted(self):
        answers = Answers(1 << 16, 1)
        answers.add([1, 2, 3, 4], None)
        answers.add([5, 6, 7, 8], None)
        assert len(answers) == 1
        options = {"factor": 1.0, "min_probability": 0.0}
        assert answers.propose(array("i", [1, 2, 3]), 9, None, **options) == ([], 0.0)
        assert answers.propose(array("i", [5, 6, 7]), 9, None, **options) == ([8], 1.0)
        assert answers.propose(array("i", [5, 6, 7]), 9, "other", **options) == ([], 0.0)

    def test_salts_added_after_eviction_share_no_answers(self):
        answers = Answers(1 << 16, 2)
        salts = [f"salt {number}" for number in range(7)]
        for number, salt in enumerate(salts):
            answers.add([1, 2, 3, 100 + number], salt)
        found = {
            salt: answers.propose(array("i", [1, 2, 3]), 1, salt, factor=1.0, min_probability=0.0) for salt in salts
        }
        assert {salt: draft for salt, (draft, _) in found.items() if draft} == {"salt 5": [105], "salt 6": [106]}

    def test_salt_owner_is_kept_while_it_has_answers(self):
        answers = Answers(1 << 16, 2)
        for token_id, salt in ((10, "a"), (11, "a"), (12, "b"), (13, "c")):
            answers.add([1, 2, 3, token_id], salt)
        drafts = [answers.propose(array("i", [1, 2, 3]), 1, salt, factor=1.0, min_probability=0.0) for salt in "abc"]
        assert drafts == [([], 0.0), ([12], 1.0), ([13], 1.0)]

    def test_overwritten_answers_are_not_counted(self):
        answers = Answers(10 * BYTES_PER_TOKEN, 99)
        for first in (0, 10, 20):
            answers.add([*range(first, first + 4)], None)
        assert len(answers) == 2

    def test_bytes_of_adds_ring_and_answers(self):
        assert Answers.bytes_of(1000, 3) == 1000 + 3 * BYTES_PER_ANSWER == 2200


class TestSuffixProposer:
    def test_index_grows_by_half_or_at_least_256_tokens(self):
        proposer = suffix_proposer(max_model_len=10_000)
        for num_tokens, capacity in ((10, 266), (300, 556), (1000, 1500), (8000, 10_000)):
            proposer.propose([task("a", range(num_tokens))])
            assert (proposer._indices.get("a").capacity, proposer._indices.num_tokens) == (capacity, capacity)

    def test_all_indices_share_memory_limit(self):
        assert (
            suffix_proposer(1000, 1000, suffix_decoding_max_cached_requests=0).num_bytes == (1 << 17) * BYTES_PER_TOKEN
        )
        assert suffix_proposer(2, 100, suffix_decoding_max_cached_requests=0).num_bytes == 200 * BYTES_PER_TOKEN

    def test_request_without_index_is_drafted_from_answers(self):
        proposer = suffix_proposer(max_num_seqs=1, max_model_len=100)
        proposer.finish([ended("x", [1, 2, 3, 4, 5])])
        proposer.propose([task("a", range(50))])  # its index takes all the room
        assert proposer.propose([task("b", [9, 1, 2, 3], max_drafts=1)]) == [[4]]
        assert set(proposer._indices._kept) == {"a"}
        proposer.forget(["a"])
        proposer.propose([task("b", [9, 1, 2, 3])])
        assert set(proposer._indices._kept) == {"b"}

    def test_request_tokens_win_without_answer_of_same_salt(self):
        """The request's own text continues in two ways. Without an answer under its salt, the newest continuation is
        taken.
        """
        proposer = suffix_proposer()
        proposer.finish([EndedRequest("x", np.array([7, 8, 9, 1], dtype=np.int32), 0, "salt")])
        assert proposer.propose([task("a", [1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 1, 2, 3], max_drafts=1)]) == [[5]]

    def test_text_without_draftable_continuation_is_not_stored(self):
        proposer = suffix_proposer()
        proposer.finish([ended("a", [1, 2, 3]), ended("b", [1, 2, 3, 4], num_prompt_tokens=4)])
        assert proposer._answers is None
        proposer.finish([ended("c", [1, 2, 3, 4], num_prompt_tokens=3)])
        assert len(proposer._answers) == 1

    def test_num_speculative_tokens_limits_suffix_draft(self):
        proposer = suffix_proposer(num_speculative_tokens=2)
        assert proposer.propose([task("a", [1, 2, 3, 4, 5, 1, 2, 3, 4])]) == [[5, 1]]


class TestNgramProposer:
    def test_all_indices_share_memory_limit(self):
        options = {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
        assert NgramProposer(**options, max_tokens=1 << 20).num_bytes == (1 << 17) * (120 + 8 + 120 + 12)
        assert NgramProposer(**options, max_tokens=10).num_bytes == 10 * (120 + 8 + 120 + 12)

    @pytest.mark.parametrize("big", [2**31 - 1, 2**31 - 2])
    def test_largest_token_ids_are_distinguished(self, big):
        proposer = NgramProposer(num_speculative_tokens=1, prompt_lookup_min=2, prompt_lookup_max=3, max_tokens=100)
        assert proposer.propose([task("a", [big, 0, 5, 1, 0, 6, big, 0])]) == [[5]]

    def test_index_above_limit_is_dropped_and_rebuilt_later(self):
        proposer = NgramProposer(num_speculative_tokens=1, prompt_lookup_min=2, prompt_lookup_max=2, max_tokens=10)
        assert proposer.propose([task("a", [1, 2, 3, 1, 2])]) == [[3]]
        assert proposer.propose([task("b", [1, 2, 3, 1, 2])]) == [[3]]  # exactly the available room
        assert proposer.propose([task("a", [1, 2, 3, 1, 2, 3])]) == [[]]
        assert proposer.propose([task("a", [1, 2, 3, 1, 2])]) == [[3]]


class TestOthers:
    @pytest.mark.parametrize("method", ["draft_model", "quantized"])
    def test_draft_model_methods_create_no_lookup_proposer(self, method):
        options = {"model": "small"} if method == "draft_model" else {}
        config = SpeculativeConfig(method=method, **options)
        assert isinstance(create_proposer(config, max_num_seqs=1, max_model_len=10), NoProposer)
        assert isinstance(create_proposer(None, max_num_seqs=1, max_model_len=10), NoProposer)

    def test_lookup_proposers_report_no_model_passes(self):
        ngram = NgramProposer(num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=3, max_tokens=10)
        for proposer in (NoProposer(), ngram, suffix_proposer(), PredictionProposer(ngram)):
            assert (proposer.num_passes, proposer.computed, proposer.computes) == (0, frozenset(), False)
        assert (NoProposer.num_bytes, NoProposer.num_speculative_tokens) == (0, 0)

    def test_prediction_match_of_32_tokens_drafts_64(self):
        predicted = np.arange(1000, 1200, dtype=np.int32)
        answer = np.concatenate([[7], predicted[:50]]).astype(np.int32)
        assert find_following(predicted, answer, 99) == [*range(1050, 1050 + 64)]

    def test_prediction_matches_above_32_tokens_tie_and_nearest_wins(self):
        same = [*range(100, 140)]
        predicted = [*same, 1, 7, *same[8:], 2]  # the second place matches 32 tokens, the first one 40
        answer = np.array([9, *same], dtype=np.int32)
        assert find_following(np.array(predicted, dtype=np.int32), answer, 1) == [1]
        answer = np.array([9] * 50 + same, dtype=np.int32)
        assert find_following(np.array(predicted, dtype=np.int32), answer, 1) == [2]

    def test_model_proposer_forwards_finish_and_forget_to_lookup(self):
        class First(NoProposer):
            num_bytes = 77
            heard = []  # noqa: RUF012

            def forget(self, request_ids):
                self.heard += request_ids

            def finish(self, ended):
                self.heard += ended

        first = First()
        proposer = ModelProposer(None, 4, first)
        proposer.forget(["a"])
        proposer.finish(["b"])
        assert first.heard == ["a", "b"]
        assert (proposer.num_bytes, proposer.num_passes, proposer.computes) == (77, 0, True)
        assert proposer.computed == frozenset()

    def test_draft_model_may_choose_token_zero(self):
        class Zeros:
            max_model_len = 100

            def begin(self, request_ids):
                pass

            def choose_next(self, indices):
                return np.zeros(len(indices), dtype=np.int64), np.ones(len(indices), dtype=bool)

            def end(self):
                pass

        assert ModelProposer(Zeros(), 3, NoProposer()).propose([task("a", [1])]) == [[0, 0, 0]]
