"""POST /v1/chat/completions."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec import UNSET

from octavo.errors import RequestError
from octavo.http.errors import client_field_names
from octavo.server.answers.answer_form import AnswerReader
from octavo.server.answers.tools import read_chat_tools
from octavo.server.answers.usage import CompletionTokensDetails
from octavo.server.api.conversation import (
    Conversation,
    answer_conversation,
    effort_options,
    read_messages,
    read_prediction,
    template_options,
)
from octavo.server.api.openai.chunks import OpenAIReply, openai_options
from octavo.server.api.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.api.openai.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from octavo.server.api.openai.requests import ChatCompletionRequest
from octavo.server.api.sampling import read_structure, sampling_params, token_limit
from octavo.server.api.truncation import Truncation
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.answer_form import AnswerForm
    from octavo.server.answers.jobs import ChoiceUpdate, Job
    from octavo.server.answers.parts import Part
    from octavo.server.answers.usage import Usage
    from octavo.server.service import Service

Told = TypeVar("Told", ChatMessage, ChatDelta)


@endpoint(body=ChatCompletionRequest, answer=ChatCompletion, is_streamed=True)
async def create_chat_completion(service: Service, http_request: Request, request: ChatCompletionRequest) -> Response:
    """Answer a conversation."""
    model = service.check_model(request.model)
    request.settle(service.extra_fields)
    info, tool_format = service.model_info, service.answer_style.tools

    def read() -> tuple[SamplingParams, Conversation]:
        with request.named_as_sent():
            params = _params(request, service.default_params, info.generation_defaults.get("max_tokens"))
        conversation = Conversation(
            read_messages(request.messages),
            read_chat_tools(request.tools, request.tool_choice, request.parallel_tool_calls, tool_format),
            effort_options(request.reasoning_effort, "reasoning_effort") | template_options(request),
            truncation=Truncation.of(request, params.max_tokens or 1, info.max_model_len),
            prediction=read_prediction(request.prediction),
        )
        return params, conversation

    params, conversation = await look_at(http_request, read)
    options = openai_options(request, "messages")
    options["client_names"]["logprobs"] = options["client_names"].get("top_logprobs", "top_logprobs")
    if conversation.toolbox.format is not None and params.structured_outputs is None:
        options["client_names"]["structured_outputs"] = "tools"
    reply = partial(ChatReply, service, request)
    return await answer_conversation(
        service, http_request, conversation, params, reply, id_prefix="chatcmpl-", model=model, **options
    )


def _params(request: ChatCompletionRequest, defaults: SamplingParams, default_max_tokens: int | None) -> SamplingParams:
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", parameter="top_logprobs")
    given, names = request.max_tokens, {"logprobs": "top_logprobs"}
    if request.max_completion_tokens is not None:
        given, names["max_tokens"] = request.max_completion_tokens, "max_completion_tokens"
    with client_field_names(names, in_text=True):
        return sampling_params(
            request,
            defaults,
            max_tokens=token_limit(given, default_max_tokens),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            structured_outputs=read_structure(request),
        )


class ChatReply(OpenAIReply[ChatChunkChoice, ChatCompletionChunk]):
    """Formats chat completions."""

    def __init__(self, service: Service, request: ChatCompletionRequest, job: Job, form: AnswerForm) -> None:
        super().__init__(job)
        self._piece = service.engine.output_processor.piece
        self._form = form
        self._request = request
        self._reasoning_field = None if request.include_reasoning is False else service.config.reasoning_field
        self._answers: dict[int, _Answer] = {}

    def _grown(self, update: ChoiceUpdate) -> ChatChunkChoice | None:
        completion = update.completion
        if update.choice not in self._answers:
            self._answers[update.choice] = _Answer(self._form, self._reasoning_field)
        answer = self._answers[update.choice]
        delta = answer.grow(completion)
        token_ids = completion.token_ids if self._request.return_token_ids else None
        # If all text is content, each step sends a chunk, even without text.
        is_step = self._form.is_plain and not completion.finished
        if delta is None and not (update.is_first or completion.logprobs or token_ids or is_step):
            return None
        choice = ChatChunkChoice(update.choice, delta or ChatDelta(content=""), self._logprobs(completion))
        choice.token_ids = token_ids
        if update.is_first:
            choice.delta.role = "assistant"
        return choice

    def _ended(self, update: ChoiceUpdate) -> ChatChunkChoice:
        choice = ChatChunkChoice(update.choice, ChatDelta(), token_ids=[] if self._request.return_token_ids else None)
        choice.logprobs = None if update.completion.logprobs is None else ChatLogprobs([])
        choice.finish_reason = self._answers[update.choice].finish_reason(update.completion)
        choice.stop_reason = update.completion.stop_reason
        return choice

    def _begin(self, event: ChatCompletionChunk, update: ChoiceUpdate) -> None:
        event.prompt_token_ids = update.output.prompt_token_ids if self._request.return_token_ids else None

    def _counted(self, usage: Usage) -> Usage:
        if self._form.has_reasoning:
            num_tokens = sum(answer.reader.num_reasoning_tokens for answer in self._answers.values())
            usage.completion_tokens_details = usage.completion_tokens_details or CompletionTokensDetails()
            usage.completion_tokens_details.reasoning_tokens = num_tokens
        return usage

    def _event(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(self._job.request_id, self._job.created, self._job.model, choices)
        if self._job.include_usage:
            chunk.usage = usage  # null before the last event, unless the client wants continuous counts
        return chunk

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        num_top, as_ids = self._request.top_logprobs or 0, bool(self._request.return_tokens_as_token_ids)
        return chat_logprobs(completion.logprobs, num_top, self._piece, as_ids=as_ids)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        """Return all choices."""
        (output,) = outputs
        choices = [self._choice(each) for each in output.outputs]
        counts = self._counted(usage)
        result = ChatCompletion(self._job.request_id, self._job.created, self._job.model, choices, counts)
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self._request.return_token_ids:
            result.prompt_token_ids = output.prompt_token_ids
        return result

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        answer = self._answers[completion.index] = _Answer(self._form, self._reasoning_field)
        return ChatChoice(
            completion.index,
            answer.message(completion),
            self._logprobs(completion),
            answer.finish_reason(completion),
            completion.stop_reason,
            completion.token_ids if self._request.return_token_ids else None,
        )


class _Answer:
    def __init__(self, form: AnswerForm, reasoning_field: str | None) -> None:
        self.reader = AnswerReader(form)
        self._reasoning_field = reasoning_field
        self._toolbox = form.toolbox
        self._has_calls = False

    def message(self, completion: CompletionOutput) -> ChatMessage:
        delta = self._delta(completion)
        message = ChatMessage(delta.content or (None if delta.tool_calls else ""))
        message.reasoning_content, message.tool_calls = delta.reasoning_content, delta.tool_calls
        for call in message.tool_calls or []:
            call.index = UNSET
        if self._reasoning_field is not None and message.reasoning_content is UNSET:
            message.reasoning_content = None
        return self._named(message)

    def grow(self, completion: CompletionOutput) -> ChatDelta | None:
        delta = self._delta(completion)
        return None if delta == ChatDelta() else self._named(delta)

    def _delta(self, completion: CompletionOutput) -> ChatDelta:
        delta = ChatDelta()
        for part in self._parts(completion):
            match part.kind:
                case "content":
                    delta.content = (delta.content or "") + part.text
                case "reasoning":
                    delta.reasoning_content = (delta.reasoning_content or "") + part.text
                case _:
                    delta.tool_calls = delta.tool_calls or []
                    if part.kind == "arguments" and delta.tool_calls:  # a chunk has one entry for each call
                        delta.tool_calls[-1].function.arguments += part.text
                        continue
                    call = ToolCall(FunctionCall(part.text)) if part.kind == "arguments" else self._call(part)
                    call.index = part.call
                    delta.tool_calls.append(call)
        return delta

    def _named(self, answer: Told) -> Told:
        if self._reasoning_field == "reasoning" and answer.reasoning_content is not UNSET:
            answer.reasoning, answer.reasoning_content = answer.reasoning_content, UNSET
        return answer

    def _parts(self, completion: CompletionOutput) -> list[Part]:
        parts = self.reader.read(completion)
        return parts if self._reasoning_field else [part for part in parts if part.kind != "reasoning"]

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """A complete answer with calls has "tool_calls", unless tool_choice names the function."""
        is_call = self._has_calls and self._toolbox.named is None
        return "tool_calls" if is_call and completion.finish_reason == "stop" else completion.finish_reason

    def _call(self, part: Part) -> ToolCall:
        self._has_calls = True
        assert self._toolbox.format is not None
        return ToolCall(FunctionCall("", part.text), self._toolbox.format.new_call_id(), "function")
