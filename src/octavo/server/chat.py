"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import PromptTooLongError, RequestError
from octavo.server.answering import Job, News, OpenAIReply, answer, read_timeout
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.openai_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    Usage,
)
from octavo.server.sampling import sampling_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.outputs import RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.openai_requests import ChatCompletionRequest
    from octavo.server.service import Service


class TemplateFields(Protocol):
    """The fields of a request that go to the chat template."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "documents", "chat_template", "self"}


async def create_chat_completion(service: Service, http_request: Request, request: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    model = service.check_model(request.model)
    request.refuse_unsupported()
    params = _params(request, service.default_params, service.model_info.generation_defaults.get("max_tokens"))
    messages = read_messages(request.messages)
    options = template_options(request)
    timeout_s = read_timeout(http_request, service.config.request_timeout_s)
    render = service.llm.engine.input_processor.chat_prompt
    with service.enter(http_request, params.n) as place:
        try:
            prompt = await asyncio.to_thread(render, messages, **options)
        except PromptTooLongError as error:
            error.parameter = "messages"
            raise
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        job = Job.make(request_id, model, [prompt], params, request, place, timeout_s, prompt_field="messages")
        return await answer(service, http_request, job, ChatReply(job, request.top_logprobs or 0))


def _params(request: ChatCompletionRequest, defaults: SamplingParams, default_max_tokens: int | None) -> SamplingParams:
    """Without max_tokens (newer: max_completion_tokens) the checkpoint's limit holds, or else the context's."""
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", parameter="top_logprobs")
    given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    max_tokens = default_max_tokens if given is None else given
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    try:
        return sampling_params(request, defaults, max_tokens=max_tokens, logprobs=logprobs)
    except RequestError as error:
        if error.parameter == "logprobs":
            raise RequestError(f"top_{error}", parameter="top_logprobs") from None
        if error.parameter == "max_tokens" and request.max_completion_tokens is not None:
            message = str(error).replace("max_tokens", "max_completion_tokens", 1)
            raise RequestError(message, parameter="max_completion_tokens") from None
        raise


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a conversation; the text parts of a message are joined. Raises `RequestError` with the place."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", parameter="messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with role and content", parameter=place)
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{place}.role must be a string", parameter=f"{place}.role")
    if message.get("tool_calls"):
        raise RequestError(f"{place}.tool_calls is not supported by this server", parameter=f"{place}.tool_calls")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_read_part(part, f"{place}.content[{index}]") for index, part in enumerate(content))
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise RequestError(f"{place}.content must be text or a list of text parts", parameter=f"{place}.content")
    return {**message, "content": content}


def _read_part(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        shown = f", got type {kind!r}" if isinstance(kind, str) else ""
        raise RequestError(f'{place} must be {{"type": "text", "text": ...}}{shown[:60]}', parameter=place)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{place}.text must be a string", parameter=f"{place}.text")
    return text


def template_options(request: TemplateFields) -> dict[str, Any]:
    """Return what a request tells the chat template. Raises `RequestError` for what only the server may tell it."""
    options = request.chat_template_kwargs or {}
    for name in options:
        if name in _RESERVED_TEMPLATE_NAMES:
            raise RequestError(f"chat_template_kwargs must not set {name}", parameter="chat_template_kwargs")
    options = dict(options)
    if request.add_generation_prompt is not None:
        options["add_generation_prompt"] = request.add_generation_prompt
    if request.continue_final_message is not None:
        options["continue_final_message"] = request.continue_final_message
    options.setdefault("add_generation_prompt", True)
    if options.get("continue_final_message") and options["add_generation_prompt"]:
        raise RequestError(
            "continue_final_message continues the last message, so add_generation_prompt must be false",
            parameter="continue_final_message",
        )
    return options


class ChatReply(OpenAIReply):
    """Spells outputs as chat completions."""

    def __init__(self, job: Job, num_top_logprobs: int) -> None:
        self._job = job
        self._num_top = num_top_logprobs

    def chunk(self, news: News, usage: Usage | None) -> ChatCompletionChunk:
        """One event; the first one of a choice has the role, the last one the finish_reason."""
        completion = news.completion
        choice = ChatChunkChoice(
            news.choice, ChatDelta(content=completion.text), chat_logprobs(completion.logprobs, self._num_top)
        )
        if news.is_first:
            choice.delta.role = "assistant"
        if completion.finished:
            choice.finish_reason, choice.stop_reason = completion.finish_reason, completion.stop_reason
        return self._event([choice], usage)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """No choices, only counts."""
        return self._event([], usage)

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(self._job.request_id, self._job.created, self._job.model, choices)
        if self._job.include_usage:
            chunk.usage = usage  # null until the last event, unless counts are wanted all along
        return chunk

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        """All n choices of the one prompt."""
        (output,) = outputs
        choices = [
            ChatChoice(
                completion.index,
                ChatMessage(completion.text),
                chat_logprobs(completion.logprobs, self._num_top),
                completion.finish_reason,
                completion.stop_reason,
            )
            for completion in output.outputs
        ]
        result = ChatCompletion(self._job.request_id, self._job.created, self._job.model, choices, usage)
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return result
