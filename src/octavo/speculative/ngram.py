"""Drafts the tokens that followed the latest earlier occurrence of a request's last tokens.

Source: "prompt lookup decoding" (Apoorv Saxena, 2023), here with an index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.speculative.request_indices import LookupProposer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.speculative.interface import DraftTask

_TOKEN_BITS = 32
_MOST_TOKENS = 1 << 17  # of all requests
_ENTRY_BYTES = 120  # maximum size of a dict entry, excluding the tokens of the key


@dataclass(slots=True)
class _Index:
    """The latest end position of each n-gram of a request. newest: the last tokens. Both are encoded as integers.

    An n-gram is added once its next token is known.
    """

    ends: dict[int, int] = field(default_factory=dict)
    newest: int = 0
    num_tokens: int = 0


class NgramProposer(LookupProposer[_Index]):
    """Matches as many last tokens as possible, from prompt_lookup_max down to prompt_lookup_min.

    A request that does not fit the limit of all indices gets no drafts.
    """

    def __init__(
        self, *, num_speculative_tokens: int, prompt_lookup_min: int, prompt_lookup_max: int, max_tokens: int
    ) -> None:
        super().__init__(num_speculative_tokens, min(max_tokens, _MOST_TOKENS))
        self._lengths = range(prompt_lookup_max, prompt_lookup_min - 1, -1)
        # A leading 1 bit distinguishes n-grams of different lengths, because token 0 has no bits.
        self._masks = [((1 << _TOKEN_BITS * n) - 1, 1 << _TOKEN_BITS * n) for n in self._lengths]
        self.num_bytes = self._indices.max_tokens * sum(_ENTRY_BYTES + 4 * n for n in self._lengths)

    def _propose(self, task: DraftTask) -> list[int]:
        num_tokens = len(task.token_ids)
        if num_tokens > self._indices.free_tokens(task.request_id):
            self.forget([task.request_id])
            return []
        index = self._indices.get(task.request_id) or _Index()
        self._indices.keep(task.request_id, index, num_tokens)
        end = self._extend(index, task.token_ids)
        if end is None:
            return []
        num_drafts = min(task.max_drafts, self.num_speculative_tokens)
        # If too few tokens follow the match, they are repeated.
        period = len(task.token_ids) - end
        found: list[int] = task.token_ids[end : end + num_drafts].tolist()
        return [found[i % period] for i in range(num_drafts)]

    def _extend(self, index: _Index, token_ids: NDArray[np.int32]) -> int | None:
        ends, newest, masks = index.ends, index.newest, self._masks
        whole, end = masks[0][0], index.num_tokens
        for token_id in token_ids[index.num_tokens :].tolist():
            if end >= self._lengths[-1]:
                for n, (mask, leading) in zip(self._lengths, masks, strict=True):
                    if n <= end:
                        ends[newest & mask | leading] = end
            newest = (newest << _TOKEN_BITS | token_id) & whole
            end += 1
        index.newest, index.num_tokens = newest, end
        for mask, leading in masks:
            if (found := ends.get(newest & mask | leading)) is not None:
                return found
        return None
