"""Core outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.data.model_output import TokenLogprobs  # noqa: TC001  msgspec reads this type


@dataclass(slots=True)
class EngineCoreOutput:
    """New tokens of one output stream. Only a stream's last output has a finish reason."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    new_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0  # so far, including tokens that were computed again
    admitted_time: float | None = None  # first admission, in seconds on the engine's clock
    error: str | None = None  # an `ErrorCode`, or a failed step's message
    pooled: bytes | None = None  # float32 in the machine's byte order
    num_draft_tokens: int = 0  # of this step
    num_accepted_tokens: int = 0  # of this step
