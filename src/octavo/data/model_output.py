"""A step's result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from octavo.data.expert_stats import ExpertLoad
    from octavo.data.kv_tiers import EndedTransfer, TierMove


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position. The chosen token is first, and the most probable tokens follow."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # rank of the chosen token, from 1


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one step. Dicts are by request id.

    postponed: Requests without a token, because their grammars have not determined the allowed tokens yet.
    """

    step: int
    sampled_token_ids: dict[str, list[int]]  # accepted drafts, then one more token; none before the prompt's end
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)  # of this step, except position 0
    errors: dict[str, str] = field(default_factory=dict)  # of requests that failed although the step succeeded
    pooled: dict[str, bytes] = field(default_factory=dict)  # float32 in the machine's byte order
    postponed: set[str] = field(default_factory=set)
    kv_transfers: list[EndedTransfer] = field(default_factory=list)
    host_moves: list[TierMove] = field(default_factory=list)  # [to host memory, from host memory], or empty
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    drafting_s: float = 0.0  # included in the step's duration
    num_drafting_passes: int = 0  # of a draft model; 0 if all drafts were looked up
    computed_drafts: AbstractSet[str] = frozenset()  # requests with drafts from a draft model
    num_compilations: int = 0
    experts: ExpertLoad | None = None  # None without experts
