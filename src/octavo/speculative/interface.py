"""The interface of proposers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DraftTask:
    """A request that needs draft tokens.

    token_ids            int32 [num_tokens]: prompt and output, valid until the next step; later steps only append
    max_computed         maximum number of drafts from a model; None means max_drafts
    cache_salt           only requests with equal salts share drafts
    predicted_token_ids  int32: the answer that the client expects
    """

    request_id: str
    token_ids: NDArray[np.int32]
    max_drafts: int
    cache_salt: str | None
    num_prompt_tokens: int = 0
    predicted_token_ids: NDArray[np.int32] | None = None
    max_computed: int | None = None


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """An ended request. token_ids: int32, prompt and output, valid only during the call."""

    request_id: str
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    cache_salt: str | None


class Proposer(Protocol):
    """A source of draft tokens, called once after each step.

    num_bytes   maximum memory
    num_passes  forward passes of a draft model in the latest `propose`
    computes    True if `propose` may run a model
    """

    num_speculative_tokens: int
    num_bytes: int
    num_passes: int
    computes: bool

    @property
    def computed(self) -> AbstractSet[str]:
        """Requests for which the latest `propose` ran a model."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return draft tokens for each task."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of requests that may resume. Ignores unknown ids."""
        ...

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """Drop the state of ended requests. May keep their answers as drafts for equal salts."""
        ...
