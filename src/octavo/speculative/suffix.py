"""Drafts from a request's own tokens, and from earlier answers with the same cache salt.

Source: SuffixDecoding (Oliaro et al., arXiv 2411.04975). Accepted drafts make an answer faster, which a client can
observe. So drafts are isolated by cache salt, like prefix cache hits:

- An answer, with its prompt's last tokens, becomes a draft only for requests with an equal salt. Requests without a
  salt share answers.
- The tokens of an unfinished request are drafts only for that request.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from octavo.speculative.answers import Answers
from octavo.speculative.request_indices import LookupProposer
from octavo.speculative.suffix_index import BYTES_PER_TOKEN, MAX_MATCH, MIN_CAPACITY, NGRAM, SuffixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.config import SpeculativeConfig
    from octavo.speculative.interface import DraftTask, EndedRequest

_MOST_TOKENS = 1 << 17  # of all requests
_MIN_CAPACITY = 256  # least spare capacity of a new index, in tokens


class SuffixProposer(LookupProposer[SuffixIndex]):
    """Drafts from the request's own tokens or from earlier answers. The draft with the higher score wins.

    When the indices reach their size limit, an index keeps its newest tokens, and a new request gets no index.
    """

    def __init__(self, config: SpeculativeConfig, *, max_num_seqs: int, max_model_len: int) -> None:
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self._max_model_len = max(max_model_len, MIN_CAPACITY)
        super().__init__(config.num_speculative_tokens, min(max_num_seqs * self._max_model_len, _MOST_TOKENS))
        self.num_bytes = self._indices.max_tokens * BYTES_PER_TOKEN
        # Allocated when the first request ends, but always counted in `num_bytes`.
        self._answers: Answers | None = None
        self._max_bytes = config.suffix_decoding_max_cached_bytes
        self._max_answers = config.suffix_decoding_max_cached_requests
        if self._max_answers:
            self.num_bytes += Answers.bytes_of(self._max_bytes, self._max_answers)

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """See `Proposer`."""
        super().finish(ended)
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
        num_tokens = len(task.token_ids)
        index = self._indices.get(task.request_id)
        if index is None or num_tokens > index.capacity:
            limit = self._indices.free_tokens(task.request_id)
            capacity = min(num_tokens + max(num_tokens // 2, _MIN_CAPACITY), self._max_model_len, limit)
            if capacity >= (MIN_CAPACITY if index is None else num_tokens):
                index = SuffixIndex(capacity)
                self._indices.keep(task.request_id, index, capacity)
        if index is not None:
            index.extend(task.token_ids[index.num_tokens :].tolist())
        return index
