"""Answers of OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from octavo.server.answers.usage import (  # noqa: TC001
    CompletionTokensDetails,
    Receipt,
    Usage,
)


class TopLogprob(Struct):
    """A token's logprob."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """A choice's logprobs."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Struct, gc=False):
    """A prompt_logprobs entry."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class FunctionCall(Struct):
    """The called function. arguments: JSON text, or its next piece in a stream."""

    arguments: str = ""
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    """A tool call. In a stream, only the call's first piece has id, type and name."""

    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ChatMessage(Struct):
    """The answer. content is null if the answer has only tool calls.

    The server's configuration selects reasoning_content or reasoning. Fields that are always null exist for clients of
    vLLM.
    """

    content: str | None
    role: str = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One generated answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class Generated(Struct):
    """Fields of all answers."""

    id: str
    created: int
    model: str


class ChatCompletion(Generated):
    """A whole answer."""

    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: None = None
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: None = None


class ChatDelta(Struct):
    """The next piece of an answer. Only a choice's first piece has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # see `ChatMessage`
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """An update of one choice. The last update has the finish_reason and no text."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | None = None


class ChatCompletionChunk(Generated):
    """A stream's event."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: None = None
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET  # in a choice's first chunk


class Tokenized(Struct):
    """POST /tokenize. token_strs: The tokens as written in the vocabulary."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(Struct):
    """POST /detokenize. content: The same text, under llama.cpp's name."""

    prompt: str
    content: str


class TokenPiece(Struct):
    """A token and its text. If the token's bytes are not valid UTF-8, piece has the bytes."""

    id: int
    piece: str | list[int]


class TokenizedContent(Struct):
    """The answer to POST /tokenize with `content`, as in llama.cpp's server."""

    tokens: list[int | TokenPiece]


class CompletionLogprobs(Struct):
    """Parallel lists with an element for each token.

    For the first token of an echoed prompt, `token_logprobs` and `top_logprobs` have null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One choice, or an update in a stream. index: Number of the choice, counted over all prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET  # only in a whole answer
    prompt_token_ids: list[int] | None = None


class Completion(Generated):
    """A whole answer, or one event of a stream."""

    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: None = None
    usage: Usage | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    kv_transfer_params: UnsetType | None = UNSET


class InputTokensDetails(Struct):
    """Prompt token counts."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int
    receipt: Receipt | UnsetType = UNSET


class ResponseObject(Struct):
    """An answer, incomplete in most events of a stream."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    output: list[dict[str, Any]]
    status: str = "in_progress"
    usage: ResponseUsage | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    object: str = "response"
    background: bool = False
    previous_response_id: None = None
    store: bool = False
    top_logprobs: int = 0
    truncation: str = "disabled"


class InputTokens(Struct):
    """POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"
