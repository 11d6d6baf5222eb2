"""The scheduler's half of KV transfer: what is stored outside, and which transfers are under way.

Names and division follow vLLM's KVConnector: this half decides, in the worker's half bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from octavo.data.request import Request


class KVConnector(Protocol):
    """A store of KV outside of this engine."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Return how many tokens beyond `num_computed_tokens` could be fetched for a request now."""
        ...

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Take note that blocks were found for them: the transfer is ordered with this step."""
        ...

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Take note that a request ended, with the blocks it held until now."""
        ...


class NullConnector:
    """Nothing is stored anywhere else."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Find nothing."""
        del request, num_computed_tokens
        return 0

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Do nothing."""

    def request_finished(self, request: Request, block_ids: list[int]) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A transfer under way: with it the first `num_tokens` of `request` are computed."""

    transfer_id: int
    request: Request
    num_tokens: int
    deadline: float


class PendingLoads:
    """Transfers under way, by id and by request. Ids are never used twice, so a late or double result finds nothing."""

    def __init__(self) -> None:
        self._loads: dict[int, PendingLoad] = {}
        self._by_request: dict[str, int] = {}
        self._next_id = 0

    def start(self, request: Request, num_tokens: int, deadline: float) -> PendingLoad:
        """Begin a transfer."""
        load = PendingLoad(self._next_id, request, num_tokens, deadline)
        self._next_id += 1
        self._loads[load.transfer_id] = load
        self._by_request[request.request_id] = load.transfer_id
        return load

    def end(self, transfer_id: int) -> PendingLoad | None:
        """End a transfer; None for one that is unknown or over."""
        load = self._loads.pop(transfer_id, None)
        if load is not None:
            del self._by_request[load.request.request_id]
        return load

    def of_request(self, request_id: str) -> int | None:
        """Return the id of a request's transfer, or None."""
        return self._by_request.get(request_id)

    def expired(self, now: float) -> list[PendingLoad]:
        """Return those whose deadline has passed: deadlines grow with ids."""
        found = []
        for load in self._loads.values():
            if load.deadline > now:
                break
            found.append(load)
        return found

    def __len__(self) -> int:
        return len(self._loads)

    def requests(self) -> list[Request]:
        """Return the requests that wait for their KV."""
        return [load.request for load in self._loads.values()]
