"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET

from octavo.errors import PromptTooLongError, RequestError
from octavo.server.answer_form import AnswerForm, AnswerReader
from octavo.server.answering import Job, News, OpenAIReply, answer, event, openai_options, read_timeout
from octavo.server.body import look_at
from octavo.server.conversation import effort_options, read_messages, template_options
from octavo.server.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.openai_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    CompletionTokensDetails,
    FunctionCall,
    ToolCall,
    Usage,
)
from octavo.server.sampling import sampling_params
from octavo.server.tools import read_chat_tools

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.logprobs import Piece
    from octavo.server.openai_requests import ChatCompletionRequest
    from octavo.server.parts import Part
    from octavo.server.service import Service
    from octavo.server.tools import Toolbox

Told = TypeVar("Told", ChatMessage, ChatDelta)


async def create_chat_completion(service: Service, http_request: Request, request: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    model = service.check_model(request.model)
    request.refuse_unsupported()
    params = _params(request, service.default_params, service.model_info.generation_defaults.get("max_tokens"))
    messages = await look_at(http_request, lambda: read_messages(request.messages))
    style = service.answer_style
    toolbox = read_chat_tools(request.tools, request.tool_choice, request.parallel_tool_calls, style.tools)
    options = effort_options(request.reasoning_effort, "reasoning_effort") | template_options(request)
    timeout_s = read_timeout(http_request, service.config.request_timeout_s)
    with service.enter(http_request, params.n) as place:
        prompt = await render(service, messages, toolbox, options)
        form = AnswerForm.of(style, toolbox, prompt["prompt"])
        params = form.applied_to(params)
        job = Job(
            request_id=f"chatcmpl-{uuid.uuid4().hex}",
            model=model,
            prompts=[prompt],
            params=params,
            place=place,
            timeout_s=timeout_s,
            **openai_options(request, "messages"),
        )
        job.spelled["logprobs"] = "top_logprobs"
        if toolbox.format is not None and request.response_format is None:
            job.spelled["structured_outputs"] = "tools"
        field = None if request.include_reasoning is False else service.config.reasoning_field
        piece = service.llm.engine.output_processor.piece
        reply = ChatReply(job, form, request.top_logprobs or 0, piece, reasoning_field=field)
        return await answer(service, http_request, job, reply)


async def render(
    service: Service, messages: list[dict[str, Any]], toolbox: Toolbox, options: dict[str, Any]
) -> dict[str, Any]:
    """Spell a conversation as the chat template does, beside the event loop."""
    tools = list(toolbox.given) or None
    try:
        return await asyncio.to_thread(service.llm.engine.input_processor.chat_prompt, messages, tools=tools, **options)
    except PromptTooLongError as error:
        error.parameter = "messages"
        raise


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


class ChatReply(OpenAIReply):
    """Spells outputs as chat completions. reasoning_field: what has the reasoning; None where it is left out."""

    def __init__(
        self, job: Job, form: AnswerForm, num_top_logprobs: int, piece: Piece, *, reasoning_field: str | None
    ) -> None:
        super().__init__(job)
        self._piece = piece
        self._form = form
        self._num_top = num_top_logprobs
        self._reasoning_field = reasoning_field
        self._answers: dict[int, _Answer] = {}

    def news(self, news: News, usage: Usage | None) -> bytes:
        """Return a chunk; the first one of a choice has the role, the last one the finish_reason.

        Plain content has a chunk for each step, empty where its text is held back.
        """
        completion = news.completion
        answer = self._answers.setdefault(news.choice, _Answer(self._form, self._reasoning_field))
        delta = answer.grow(completion)
        if delta is None and not (news.is_first or completion.logprobs or completion.finished or self._form.is_plain):
            return b""  # a parser waits for more
        choice = ChatChunkChoice(
            news.choice, delta or ChatDelta(content=""), chat_logprobs(completion.logprobs, self._num_top, self._piece)
        )
        if news.is_first:
            choice.delta.role = "assistant"
        if completion.finished:
            choice.finish_reason, choice.stop_reason = answer.finish_reason(completion), completion.stop_reason
        return event(self._event([choice], usage))

    def _usage_chunk(self, usage: Usage) -> ChatCompletionChunk:
        """No choices, only counts."""
        return self._event([], self._counted(usage, self._answers.values()))

    def _counted(self, usage: Usage, answers: Iterable[_Answer]) -> Usage:
        """Add how many of the tokens were reasoning."""
        if self._form.has_reasoning:
            num_tokens = sum(answer.reader.num_reasoning_tokens for answer in answers)
            usage.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return usage

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(self._job.request_id, self._job.created, self._job.model, choices)
        if self._job.include_usage:
            chunk.usage = usage  # null until the last event, unless counts are wanted all along
        return chunk

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        """All n choices of the one prompt."""
        (output,) = outputs
        answers = [_Answer(self._form, self._reasoning_field) for _ in output.outputs]
        choices = [self._choice(each, answer) for each, answer in zip(output.outputs, answers, strict=True)]
        counts = self._counted(usage, answers)
        result = ChatCompletion(self._job.request_id, self._job.created, self._job.model, choices, counts)
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        return result

    def _choice(self, completion: CompletionOutput, answer: _Answer) -> ChatChoice:
        return ChatChoice(
            completion.index,
            answer.message(completion),
            chat_logprobs(completion.logprobs, self._num_top, self._piece),
            answer.finish_reason(completion),
            completion.stop_reason,
        )


class _Answer:
    """One choice while it grows."""

    def __init__(self, form: AnswerForm, reasoning_field: str | None) -> None:
        self.reader = AnswerReader(form)
        self._reasoning_field = reasoning_field
        self._toolbox = form.toolbox
        self._has_calls = False

    def message(self, completion: CompletionOutput) -> ChatMessage:
        """Return a whole answer."""
        message = ChatMessage(None)
        for part in self._parts(completion):
            match part.kind:
                case "content":
                    message.content = (message.content or "") + part.text
                case "reasoning":
                    message.reasoning_content = (message.reasoning_content or "") + part.text
                case "call":
                    message.tool_calls = message.tool_calls or []
                    message.tool_calls.append(self._call(part))
                case "arguments":
                    assert message.tool_calls
                    message.tool_calls[part.call].function.arguments += part.text
        if message.content is None and not message.tool_calls:
            message.content = ""
        return self._named(message)

    def grow(self, completion: CompletionOutput) -> ChatDelta | None:
        """Return what an answer grew by."""
        delta = ChatDelta()
        for part in self._parts(completion):
            match part.kind:
                case "content":
                    delta.content = (delta.content or "") + part.text
                case "reasoning":
                    delta.reasoning_content = (delta.reasoning_content or "") + part.text
                case _:
                    delta.tool_calls = delta.tool_calls or []
                    if part.kind == "arguments" and delta.tool_calls:  # a chunk tells of each call once
                        delta.tool_calls[-1].function.arguments += part.text
                        continue
                    call = ToolCall(FunctionCall(part.text)) if part.kind == "arguments" else self._call(part)
                    call.index = part.call
                    delta.tool_calls.append(call)
        return None if delta == ChatDelta() else self._named(delta)

    def _named(self, answer: Told) -> Told:
        """Give the reasoning the name that the server has for it."""
        if self._reasoning_field == "reasoning" and answer.reasoning_content is not UNSET:
            answer.reasoning, answer.reasoning_content = answer.reasoning_content, UNSET
        return answer

    def _parts(self, completion: CompletionOutput) -> list[Part]:
        parts = self.reader.read(completion)
        return parts if self._reasoning_field else [part for part in parts if part.kind != "reasoning"]

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Tell why it ended, in the API's words: a call that the client forced by name is an ordinary end."""
        is_call = self._has_calls and self._toolbox.named is None
        return "tool_calls" if is_call and completion.finish_reason == "stop" else completion.finish_reason

    def _call(self, part: Part) -> ToolCall:
        self._has_calls = True
        assert self._toolbox.format is not None
        return ToolCall(FunctionCall("", part.text), self._toolbox.format.new_call_id(), "function")
