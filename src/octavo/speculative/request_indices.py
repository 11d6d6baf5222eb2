"""Token indices of running requests, and proposers that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.speculative.interface import DraftTask, EndedRequest

IndexT = TypeVar("IndexT")


class RequestIndices(Generic[IndexT]):
    """A token index per running request, with at most `max_tokens` tokens in total."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._kept: dict[str, tuple[IndexT, int]] = {}

    def get(self, request_id: str) -> IndexT | None:
        """Return a request's index, or None."""
        return self._kept[request_id][0] if request_id in self._kept else None

    def free_tokens(self, request_id: str) -> int:
        """Return the largest capacity of a request's index, in tokens."""
        current = self._kept[request_id][1] if request_id in self._kept else 0
        return self.max_tokens - self.num_tokens + current

    def keep(self, request_id: str, index: IndexT, num_tokens: int) -> None:
        """Store a request's index. num_tokens: capacity, at most `free_tokens()`."""
        self.forget((request_id,))
        self._kept[request_id] = (index, num_tokens)
        self.num_tokens += num_tokens

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests' indices."""
        for request_id in request_ids:
            if (kept := self._kept.pop(request_id, None)) is not None:
                self.num_tokens -= kept[1]


class LookupProposer(Generic[IndexT]):
    """Looks up drafts in each request's own tokens. max_tokens: limit on all indices together."""

    num_passes, computed, computes = 0, frozenset[str](), False

    def __init__(self, num_speculative_tokens: int, max_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._indices = RequestIndices[IndexT](max_tokens)

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """See `Proposer`."""
        return [self._propose(task) for task in tasks]

    def _propose(self, task: DraftTask) -> list[int]:
        raise NotImplementedError

    def forget(self, request_ids: Iterable[str]) -> None:
        """See `Proposer`."""
        self._indices.forget(request_ids)

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """See `Proposer`."""
        self.forget(request.request_id for request in ended)
