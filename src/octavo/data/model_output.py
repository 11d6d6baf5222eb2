"""A step's result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from octavo.data.kv_tiers import EndedTransfer, TierMove


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the chosen token, then the most probable ones. rank: of the chosen, from 1."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one step, by request id.

    sampled_token_ids: accepted drafts, then one more token; no entry before the whole prompt is computed.
    prompt_logprobs: of this step's positions; position 0 has none. errors: of requests that failed while the step
    succeeded. pooled: float32 in the machine's byte order. postponed: requests without a token, because their grammar
    is not walked yet. host_moves: to host memory and back, or empty. drafting_s: included in the step's duration.
    num_drafting_passes: of a draft model; 0 if all drafts were looked up. computed_drafts: requests with a model's
    drafts.
    """

    step: int
    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    pooled: dict[str, bytes] = field(default_factory=dict)
    postponed: set[str] = field(default_factory=set)
    kv_transfers: list[EndedTransfer] = field(default_factory=list)
    host_moves: list[TierMove] = field(default_factory=list)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    drafting_s: float = 0.0
    num_drafting_passes: int = 0
    computed_drafts: AbstractSet[str] = frozenset()
    num_compilations: int = 0
