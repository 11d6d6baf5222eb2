"""Outputs of requests. Names and meanings are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, overload

from octavo.data.core_output import EngineCoreOutput as EngineCoreOutput  # noqa: PLC0414 - existing imports use this

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.data.model_output import TokenLogprobs


class ErrorCode(StrEnum):
    """Failure reasons."""

    DEADLINE_PASSED = "deadline_passed"
    GRAMMAR_EXCEEDED = "grammar_exceeded"
    NOTHING_ALLOWED = "nothing_allowed"
    REQUEST_FAILED = "request_failed"
    STEP_FAILED = "step_failed"

    @classmethod
    def read(cls, error: str) -> tuple[ErrorCode, str]:
        """Split `EngineCoreOutput.error` into code and text. An error that is no code comes from a failed step."""
        try:
            code = cls(error)
        except ValueError:
            return cls.STEP_FAILED, error
        return code, code.text

    @property
    def text(self) -> str:
        """Message for users."""
        return _TEXTS[self]


_TEXTS = {
    ErrorCode.DEADLINE_PASSED: "the request's deadline has passed",
    ErrorCode.GRAMMAR_EXCEEDED: "the grammar is too complex, or allows no next token",
    ErrorCode.NOTHING_ALLOWED: "the request allows no token here (allowed_token_ids, a grammar, min_tokens)",
    ErrorCode.REQUEST_FAILED: "an internal error ended this request; see the log under its id",
    ErrorCode.STEP_FAILED: "a step of the engine failed",
}


@dataclass(slots=True)  # not frozen, for speed
class Logprob:
    """A token's log probability, from the model's raw logits (before temperature and filters)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def logprobs_by_token(entry: TokenLogprobs, texts: Mapping[int, str | None]) -> dict[int, Logprob]:
    """Return token id -> `Logprob`. The chosen token is first. The most probable tokens follow by rank."""
    ranks = [entry.rank, *range(1, len(entry.token_ids))]
    result: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
        if token_id not in result:
            result[token_id] = Logprob(logprob, rank, texts[token_id])
    return result


class PromptLogprobs(Sequence["dict[int, Logprob] | None"]):
    """Log probabilities of a prompt. The first token has None. Each other token has a token id -> Logprob dict.

    entries: The worker's results for all tokens except the first.
    """

    __slots__ = ("entries", "texts")
    __hash__ = None  # type: ignore[assignment]  # mutable

    def __init__(self, texts: Mapping[int, str | None]) -> None:
        self.entries: list[TokenLogprobs] = []
        self.texts = texts

    def __len__(self) -> int:
        return 1 + len(self.entries)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return logprobs_by_token(self.entries[position - 1], self.texts) if position else None

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | PromptLogprobs) else NotImplemented

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[dict[int, Logprob] | None]]]:
        return list, (list(self),)


@dataclass(slots=True)
class CompletionOutput:
    """One of the n outputs of a request.

    finish_reason: "stop", "length", "abort", "error", or None before the end. stop_reason: Stop string or token id that
    ended the output, or None for other reasons such as EOS. logprobs: One dict of token id -> Logprob per output token,
    if requested.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """True if the output is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds on the engine's clock, and token counts summed over all n outputs.

    first_scheduled_time: First admission. num_computed_tokens: Positions that the model computed.
    num_recomputed_tokens: Positions computed again after a preemption, and rejected drafts. num_wasted_tokens: Tokens
    generated after a stop string. num_draft_tokens: Verified drafts. num_accepted_tokens: Drafts in the answer.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_wasted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """State of one request after a step. `finished` is True in the last output.

    pooled: Bytes of the requested float32 vector (`SamplingParams.pooling`). error_code: Kind of `error`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    pooled: bytes | None = None
    error_code: ErrorCode | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A text's embedding."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt's embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
