"""What the core reports of a request after a step; it crosses the process border."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.data.model_output import TokenLogprobs  # noqa: TC001  msgspec reads the types at run time


@dataclass(slots=True)
class EngineCoreOutput:
    """The new tokens of one output stream, and the reason if it ended. Each stream ends in exactly one of these.

    admitted_time: when the request first left the queue, in seconds of the engine's clock.
    error: an `ErrorCode`, or the message of a step that failed.
    num_draft_tokens, num_accepted_tokens: drafted for the step, and accepted.
    """

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    new_prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    admitted_time: float | None = None
    error: str | None = None
    pooled: bytes | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
