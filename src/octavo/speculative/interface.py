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

    token_ids: int32 [num_tokens]. Prompt and output with this step's sampled tokens, valid until the next step. Later
    steps only append tokens. max_computed: Maximum number of drafts from a model. None means max_drafts. cache_salt:
    Only requests with equal salts may share drafts. predicted_token_ids: int32. Answer that the client expects.
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
    """An ended request. token_ids: int32. Prompt and output, valid only during the call."""

    request_id: str
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    cache_salt: str | None


class Proposer(Protocol):
    """A source of draft tokens, called once after each step.

    num_bytes: Maximum memory use in bytes. num_passes: Number of forward passes of a draft model in the latest call.
    computes: True if the proposer may run a model.
    """

    num_speculative_tokens: int
    num_bytes: int
    num_passes: int
    computes: bool

    @property
    def computed(self) -> AbstractSet[str]:
        """Requests for which the latest call ran a model."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return draft tokens for each task."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of requests that may resume. Ignores unknown ids."""
        ...

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """Drop the state of ended requests. The answers may become drafts for later requests with an equal salt."""
        ...
