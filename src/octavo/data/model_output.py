"""The worker's result of a step: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from octavo.data.kv_tiers import EndedTransfer, TierMove


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: first the chosen token, then the most probable tokens in order.

    rank: rank of the chosen token, 1 for the most probable.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one step, by request id.

    sampled_token_ids: the new tokens: accepted drafts, then one more. A request whose prompt is not computed completely
    has no entry. logprobs: of the same tokens.
    prompt_logprobs: of the prompt positions computed in this step, in order; position 0 has none and is omitted.
    errors: messages of requests that failed alone, for example because their logits were not numbers.
    pooled: vectors of completely computed prompts of embedding requests, float32 in the machine's byte order.
    postponed: requests that get no token in this step although one is due, because their grammar is not walked yet.
    kv_transfers: transfers that ended. host_moves: the moves to host memory and back by the step's copies, or empty.
    draft_token_ids: drafts to verify in the next step.
    drafting_s: seconds of the step that drafting took. num_drafting_passes: number of forward passes of a draft model;
    0 if all drafts were looked up. computed_drafts: requests whose drafts a model computed.
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
