"""The interface of proposers, which guess draft tokens."""

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

    token_ids: int32 [num_tokens], prompt and output, including the tokens that this step sampled; append-only, valid
    until the next step.
    max_drafts: limit on drafts; the engine cannot use more.
    max_computed: limit on drafts that cost a forward pass of a model each; None: max_drafts.
    cache_salt: drafts pass only between requests of equal salt, in both directions.
    predicted_token_ids: int32, the answer that the client expects.
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
    """A request that ended, for any reason. token_ids: int32, prompt and output; valid during the call."""

    request_id: str
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    cache_salt: str | None


class Proposer(Protocol):
    """Source of draft tokens, called once after each step for all its requests.

    A rejected draft costs one row of a step and never changes the output.

    num_speculative_tokens: maximum number of drafts per request. num_bytes: maximum memory use.
    num_passes: forward passes of a model in the latest `propose` call.
    computes: True if it may run a model when lookup finds no drafts.
    """

    num_speculative_tokens: int
    num_bytes: int
    num_passes: int
    computes: bool

    @property
    def computed(self) -> AbstractSet[str]:
        """Ids of requests for which the latest `propose` call ran a model."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return the drafts of each task; an empty list if there are none."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of requests that may resume with all their tokens; unknown ids are ignored."""
        ...

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """Drop the state of ended requests. Their answers may be kept as drafts for requests of equal salt."""
        ...
