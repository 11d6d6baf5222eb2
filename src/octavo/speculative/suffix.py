"""Suffix decoding: what followed the newest tokens before, in this request or in answers to the same tenant.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975). Whose text may be a draft is decided by the cache salt, as it is
for blocks of the prefix cache, since drafts that come true show in an answer's speed as hits do there:

- An answer is drafted only in requests of an equal salt; those without a salt share with one another. The server gives
  each tenant salts of its own, unless its key shares the prefix cache.
- A request whose salt nobody else has shares with nobody: its answer is kept and is no one's draft, and it gets drafts
  from its own tokens alone.
- Prompts are as private. The last MAX_MATCH tokens of one are kept, under the same salt: the beginning of an answer is
  recognised by them.
- While a request runs, or waits after a preemption, its text is a draft for itself alone.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from octavo.speculative.answers import Answers
from octavo.speculative.request_indices import RequestIndices
from octavo.speculative.suffix_index import BYTES_PER_TOKEN, MAX_MATCH, MIN_CAPACITY, NGRAM, SuffixIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.config import SpeculativeConfig
    from octavo.speculative.interface import DraftTask, EndedRequest

_MOST_TOKENS = 1 << 17  # of all running requests together
_LEAST_ROOM = 256  # tokens that an index has room for beside those that are there


class SuffixProposer:
    """Drafts the better of what followed in the request itself and in answers given before, by the paper's score.

    Each running request has an index of its own tokens, which grows by half. Where those of all requests have become
    too large, it keeps the newest tokens, and a request that starts then has none until others have ended.
    """

    num_passes, computed, computes = 0, frozenset[str](), False

    def __init__(self, config: SpeculativeConfig, *, max_num_seqs: int, max_model_len: int) -> None:
        self.num_speculative_tokens = config.num_speculative_tokens
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self._max_model_len = max(max_model_len, MIN_CAPACITY)
        self._indices = RequestIndices[SuffixIndex](min(max_num_seqs * self._max_model_len, _MOST_TOKENS))
        self.num_bytes = self._indices.max_tokens * BYTES_PER_TOKEN
        # Made when the first request ends: what is planned for it is not yet taken while memory is planned.
        self._answers: Answers | None = None
        self._max_bytes = config.suffix_decoding_max_cached_bytes
        self._max_answers = config.suffix_decoding_max_cached_requests
        if self._max_answers:
            self.num_bytes += Answers.bytes_of(self._max_bytes, self._max_answers)

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return the drafts of each task."""
        return [self._propose(task) for task in tasks]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the indices of requests."""
        self._indices.forget(request_ids)

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """Keep the answers, and drop the requests' own indices."""
        self.forget(request.request_id for request in ended)
        if not self._max_answers:
            return
        for request in ended:
            text = request.token_ids[max(request.num_prompt_tokens - MAX_MATCH, 0) :].tolist()
            if len(request.token_ids) == request.num_prompt_tokens or len(text) <= NGRAM:
                continue
            if self._answers is None:
                self._answers = Answers(self._max_bytes, self._max_answers)
            self._answers.add(text, request.cache_salt)

    def _propose(self, task: DraftTask) -> list[int]:
        most, factor, least = min(task.max_drafts, self.num_speculative_tokens), self._factor, self._min_probability
        suffix = array("i", task.token_ids[-MAX_MATCH:].tobytes())
        draft, score = list[int](), 0.0
        index = self._extended(task)
        if index is not None:
            draft, score = index.propose(suffix, most, factor=factor, min_probability=least)
        if self._answers is not None and score < most:
            other, other_score = self._answers.propose(
                suffix, most, task.cache_salt, factor=factor, min_probability=least
            )
            if other_score > score:
                draft = other
        return draft

    def _extended(self, task: DraftTask) -> SuffixIndex | None:
        """Return the index of a request with all of its tokens, as far as there is room for them."""
        num_tokens = len(task.token_ids)
        index = self._indices.get(task.request_id)
        if index is None or num_tokens > index.capacity:
            room = self._indices.room(task.request_id)
            capacity = min(num_tokens + max(num_tokens // 2, _LEAST_ROOM), self._max_model_len, room)
            if capacity >= (MIN_CAPACITY if index is None else num_tokens):
                index = SuffixIndex(capacity)
                self._indices.keep(task.request_id, index, capacity)
        if index is not None:
            index.extend(task.token_ids[index.num_tokens :].tolist())
        return index
