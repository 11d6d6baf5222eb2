"""The core's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.data.model_output import TokenLogprobs  # noqa: TC001  msgspec reads the types at run time


@dataclass(slots=True)
class EngineCoreOutput:
    """The new tokens of one output stream. Exactly one output, with a finish reason, ends each stream.

    num_computed_tokens: so far, including repeated ones. admitted_time: first admission, in seconds of the engine's
    clock. error: an `ErrorCode`, or a failed step's message. pooled: float32 in the machine's byte order.
    num_draft_tokens, num_accepted_tokens: of this step.
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
