"""What clients of Ollama get. Durations are nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from octavo.server.answers.usage import Receipt  # noqa: TC001 - msgspec reads the types of fields
from octavo.server.api.openai.replies import TokenLogprob  # noqa: TC001 - msgspec reads the types of fields


def _now() -> datetime:
    return datetime.now(UTC)


class FunctionToCall(Struct):
    """What is called."""

    index: int
    name: str
    arguments: dict[str, Any]


class Call(Struct):
    """A call of a tool, whole."""

    id: str
    function: FunctionToCall


class AnswerMessage(Struct):
    """An answer, or what it grew by."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Answer(Struct):
    """A line of a stream, or a whole answer. message: of a chat; response and thinking: of a prompt.

    cached_tokens, receipt: octavo's own; the first are those of the prompt that were found in the prefix cache. The
    counts stand last: a router reads them there, whatever a model has written before.
    """

    model: str
    created_at: datetime = field(default_factory=_now)
    message: AnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class Vectors(Struct):
    """POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    cached_tokens: int = 0
    receipt: Receipt | UnsetType = UNSET


class Vector(Struct):
    """POST /api/embeddings."""

    embedding: list[float]
