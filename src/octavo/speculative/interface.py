"""The one interface behind which tokens are guessed."""

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
    """A request for which tokens are guessed.

    token_ids: int32 [num_tokens], prompt and output, what this step sampled included; valid until the next step.
    They only ever grow. max_drafts: more than that are of no use. max_computed: so many of them are worth a pass of a
    model each; None: all. cache_salt: who has another one may not be told what
    stands here, nor be guessed from. predicted_token_ids: int32, what its client expects behind its prompt.
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
    """A request that ended, whatever the reason. token_ids: int32, all that it had; valid during the call."""

    request_id: str
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    cache_salt: str | None


class Proposer(Protocol):
    """Guesses what follows in requests; called after each step, for all of its requests at once.

    It may be wrong: a wrong guess costs its row in a step, and never changes a token.

    num_speculative_tokens: drafts of a request at most. num_bytes: memory that it takes at most.
    num_passes: forward passes of a model that the newest call of `propose` took. computes: whether it ever
    has one computed, where nothing can be looked up.
    """

    num_speculative_tokens: int
    num_bytes: int
    num_passes: int
    computes: bool

    @property
    def computed(self) -> AbstractSet[str]:
        """Requests whose drafts the newest call of `propose` had computed."""
        ...

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return the drafts of each task, none where nothing can be guessed."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept of requests that come back with all of their tokens; unknown ids are passed over."""
        ...

    def finish(self, ended: Sequence[EndedRequest]) -> None:
        """Drop what is kept of requests that ended; what they wrote may be of use for others of their salt."""
        ...
