"""What the worker answers to a step: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from octavo.data.kv_tiers import EndedTransfer, TierMove


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the token itself first, then the most probable ones in order.

    rank: place of the token itself, 1 for the most probable.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one step, by request id. A request whose prompt is not computed to its end has no entry.

    sampled_token_ids: those that stand behind what was known: drafts that came true, and one token more.
    logprobs: of the same tokens.
    prompt_logprobs: of the prompt positions computed in this step, in order; position 0 has none and is left out.
    pooled: the vectors of requests for embeddings whose prompt is computed, float32 in the machine's byte order.
    errors: requests whose logits were not numbers; they fail alone.
    postponed: requests that get none of their tokens in this step, as what the choice depends on is still computed.
    kv_transfers: those that ended. host_moves: what the step's copies took to host memory and what back, if any did.
    draft_token_ids: what is guessed to follow, to be verified in the next step.
    drafting_s: what guessing took of the step. num_drafting_passes: forward passes of a model that it took; 0 for what
    is looked up. computed_drafts: the requests for which it was asked; drafts of the others were looked up.
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
