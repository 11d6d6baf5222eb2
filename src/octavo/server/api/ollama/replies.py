"""Answers of Ollama's API. Durations are in nanoseconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from octavo.server.answers.usage import Receipt  # noqa: TC001
from octavo.server.api.openai.replies import TokenLogprob  # noqa: TC001


def _now() -> datetime:
    return datetime.now(UTC)


class FunctionToCall(Struct):
    """A called function."""

    index: int
    name: str
    arguments: dict[str, Any]


class Call(Struct):
    """A tool call."""

    id: str
    function: FunctionToCall


class AnswerMessage(Struct):
    """The assistant's message, or its next piece in a stream."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class Answer(Struct):
    """A whole answer, or a line of a stream.

    message: Set by /api/chat.
    response, thinking: Set by /api/generate.
    cached_tokens: Prompt tokens found in the prefix cache.

    The counts are the last fields, because octavo's router searches an answer backwards for counts.
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
    """An /api/embed answer."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    cached_tokens: int = 0
    receipt: Receipt | UnsetType = UNSET


class Vector(Struct):
    """An /api/embeddings answer."""

    embedding: list[float]
