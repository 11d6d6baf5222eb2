"""OpenAI's Responses API. The server stores nothing, so each request contains the whole conversation."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from octavo.data.request_options import RequestOptions
from octavo.http.errors import client_field_names
from octavo.runtime.ids import new_id
from octavo.server.answers.answer_form import AnswerReader
from octavo.server.answers.jobs import event
from octavo.server.answers.tools import Toolbox, check_tool_type, read_choice, read_function
from octavo.server.answers.usage import CompletionTokensDetails
from octavo.server.api import request_types as types
from octavo.server.api.block_types import CACHE, fields
from octavo.server.api.conversation import (
    Conversation,
    answer_conversation,
    count_prompt,
    effort_options,
    template_arguments,
)
from octavo.server.api.extra_fields import HARMLESS, UNSUPPORTED_OR_ALIAS, ExtraFields, Off, each
from octavo.server.api.openai.logprobs import ContentLogprobs
from octavo.server.api.openai.replies import InputTokens, InputTokensDetails, ResponseObject, ResponseUsage
from octavo.server.api.openai.requests import Priority, SamplingControls
from octavo.server.api.openai.response_items import read_items
from octavo.server.api.openai.token_places import TokenPlaces
from octavo.server.api.request_types import Shown
from octavo.server.api.sampling import read_response_format, sampling_params
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.engine.output_processor import OutputProcessor
    from octavo.http.errors import HttpError
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.answer_form import AnswerForm
    from octavo.server.answers.jobs import ChoiceUpdate, Job
    from octavo.server.answers.parts import Part
    from octavo.server.answers.tool_format import ToolFormat
    from octavo.server.answers.usage import Usage
    from octavo.server.service import Service

_LOGPROBS = "message.output_text.logprobs"
_CLIENT_NAMES = {
    "prompt": "input",
    "structured_outputs": "text.format",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **each(Off(), "access_programs", "background_options", "chat_template", "conversation", "max_completion_tokens"),
    **each(Off(), "max_tokens", "moderation", "personality", "previous_input_messages", "previous_response_id"),
    **each(Off(), "prompt", "prompt_logprobs", "structured_outputs"),
    **each(Off(False), "background", "enable_response_messages"),
    "context_management": Off([]),
    "image": Off({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
    "include_reasoning": Off(True),
    "logprobs": Off(False, 0),
    "n": Off(1),
    "response_format": Off({"type": "text"}),
    "truncation": Off("disabled"),
    **UNSUPPORTED_OR_ALIAS,
}
_NESTED = {
    "prompt_cache_options": fields(
        harmless=each(CACHE, "comparison_response_id", "mode", "ttl"),
        prewarm=(None, False),  # with true, the client wants no answer
    ),
    "reasoning": fields(
        "effort",
        harmless={
            "context": "chooses the thoughts of older turns to read: the chat template decides",
            **each("this server returns thoughts completely", "generate_summary", "summary"),
        },
        mode=(None, "standard"),
    ),
    "text": fields("format", verbosity=(None, "medium")),
}


class ResponsesRequest(SamplingControls):
    """POST /v1/responses, with vLLM's extra fields."""

    model: str | None = None
    input: Annotated[Any, Shown(types.Items)]
    include: list[Any] | None = None
    instructions: str | None = None
    max_output_tokens: types.OutputTokens | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[dict[str, Any], Shown(types.Reasoning)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None  # concerns only padding
    text: Annotated[dict[str, Any], Shown(types.TextConfig)] | None = None
    tool_choice: Annotated[Any, Shown(types.ResponsesChoice | None)] = None
    tools: Annotated[list[Any], Shown(types.Tools[types.ResponsesTool])] | None = None
    top_logprobs: types.NumLogprobs | None = None
    priority: Priority | None = None
    cache_salt: types.CacheSalt | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@endpoint(body=ResponsesRequest, answer=ResponseObject, is_streamed=True)
async def create_response(service: Service, http_request: Request, request: ResponsesRequest) -> Response:
    """Answer a conversation."""
    model = service.check_model(request.model)
    _refuse_unsupported(request, service.extra_fields)
    default_max_tokens = service.model_info.generation_defaults.get("max_tokens")
    params, conversation = await look_at(
        http_request,
        lambda: (
            _params(request, service.default_params, default_max_tokens),
            _read_conversation(request, service.answer_style.tools),
        ),
    )
    is_plain = conversation.toolbox.format is None or params.structured_outputs is not None
    reply = partial(ResponseReply, service.engine.output_processor, request)
    options: dict[str, Any] = {
        "stream": bool(request.stream),
        "options": RequestOptions(priority=request.priority or 0, cache_salt=request.cache_salt),
        "client_names": {**_CLIENT_NAMES, "structured_outputs": "text.format" if is_plain else "tools"},
    }
    return await answer_conversation(
        service, http_request, conversation, params, reply, id_prefix="resp_", model=model, **options
    )


@endpoint(body=ResponsesRequest, answer=InputTokens)
async def count_input_tokens(service: Service, http_request: Request, request: ResponsesRequest) -> Response:
    """Count prompt tokens."""
    service.check_model(request.model)
    _refuse_unsupported(request, service.extra_fields)
    tool_format = service.answer_style.tools
    return await count_prompt(service, http_request, lambda: _read_conversation(request, tool_format), InputTokens)


def _refuse_unsupported(request: ResponsesRequest, extra_fields: ExtraFields) -> None:
    extra = request.model_extra or {}
    extra_fields.check(extra, _UNSUPPORTED, HARMLESS)
    objects = {**extra, "reasoning": request.reasoning, "text": request.text}
    for name, known in _NESTED.items():
        if isinstance(objects.get(name), dict):
            known.check(objects[name], name)


def _params(request: ResponsesRequest, defaults: SamplingParams, default_max_tokens: int | None) -> SamplingParams:
    wanted = (request.text or {}).get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        wanted = {"type": "json_schema", "json_schema": wanted}
    wants_logprobs = request.top_logprobs or _LOGPROBS in (request.include or ())
    with client_field_names(_CLIENT_NAMES, in_text=True):
        return sampling_params(
            request,
            defaults,
            max_tokens=default_max_tokens if request.max_output_tokens is None else request.max_output_tokens,
            structured_outputs=read_response_format(wanted, "text.format"),
            logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
        )


def _read_conversation(request: ResponsesRequest, tool_format: ToolFormat | None) -> Conversation:
    effort = (request.reasoning or {}).get("effort")
    options = effort_options(effort, "reasoning.effort") | template_arguments(request.chat_template_kwargs)
    messages = read_items(request.instructions, request.input)
    return Conversation(messages, _read_tools(request, tool_format), options, "input")


def _read_tools(request: ResponsesRequest, tool_format: ToolFormat | None) -> Toolbox:
    described = []
    for index, tool in enumerate(request.tools or []):
        place = f"tools[{index}]"
        check_tool_type(tool, place, "function", '{"type": "function", "name": ...}')
        described.append(read_function(tool, place))
    # Clients may send back the tool_choice "auto" of an answer without tools.
    has_tools = request.tools is not None or request.tool_choice == "auto"
    choice = read_choice(request.tool_choice, lambda wanted: wanted.get("name"), has_tools=has_tools)
    return Toolbox.make(described, tool_format, choice, parallel=request.parallel_tool_calls)


_ITEM_TYPES = {"content": "message", "reasoning": "reasoning", "arguments": "function_call"}  # by `Part.kind`


class ResponseReply:
    """Formats response objects."""

    def __init__(self, outputs: OutputProcessor, request: ResponsesRequest, job: Job, form: AnswerForm) -> None:
        self._form = form
        self._reader = AnswerReader(form)
        (prompt,), params = job.prompts, job.params
        places = TokenPlaces(
            outputs.tokenizer_of(params), prompt["prompt_token_ids"], 0, skip_special_tokens=params.skip_special_tokens
        )
        hides_end = not params.include_stop_str_in_output
        self._logprobs = ContentLogprobs(places, request.top_logprobs or 0, outputs.piece, hides_end=hides_end)
        self._emits = job.stream
        self._num_events = 0
        self._events = b""
        self._is_open = False
        self._ending: CompletionOutput | None = None
        self._response = ResponseObject(
            id=job.request_id,
            created_at=job.created,
            model=job.model,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": None, "summary": None, **(request.reasoning or {})},
            temperature=job.params.temperature,
            text=request.text or {"format": {"type": "text"}},
            tool_choice="auto" if request.tool_choice is None else request.tool_choice,
            tools=request.tools or [],
            top_p=job.params.top_p,
            output=[],
            top_logprobs=request.top_logprobs or 0,
        )

    def update(self, update: ChoiceUpdate, _usage: Usage | None) -> bytes:
        """Return new events."""
        if update.is_first:
            self._emit("response.created", response=self._response)
            self._emit("response.in_progress", response=self._response)
        self._take(update.completion)
        return self._take_events()

    def end(self, usage: Usage) -> bytes:
        """Return last events."""
        self._finish(usage)
        self._emit(f"response.{self._response.status}", response=self._response)
        return self._take_events()

    def error(self, error: HttpError) -> bytes:
        """Encode an error."""
        if not self._num_events:
            self._emit("response.created", response=self._response)
        self._response.status = "failed"
        self._response.error = {"code": error.code or error.type, "message": error.message}
        self._emit("response.failed", response=self._response)
        return self._take_events()

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> ResponseObject:
        """Return the answer."""
        ((completion,),) = (output.outputs for output in outputs)
        self._take(completion)
        self._finish(usage)
        return self._response

    def _take(self, completion: CompletionOutput) -> None:
        self._logprobs.add(completion)
        for part in self._reader.read(completion):
            if not self._is_open or self._item["type"] != _ITEM_TYPES.get(part.kind):
                self._end_item("completed")
                self._begin_item(part)
            self._grow(part)
        if completion.finished:
            self._end_item("completed" if completion.finish_reason == "stop" else "incomplete")
            self._ending = completion

    def _finish(self, usage: Usage) -> None:
        response = self._response
        reason = None if self._ending is None else self._ending.finish_reason
        response.status = "completed" if reason == "stop" else "incomplete"
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            CompletionTokensDetails(self._reader.num_reasoning_tokens),
            usage.total_tokens,
            usage.receipt,
        )

    @property
    def _item(self) -> dict[str, Any]:
        return self._response.output[-1]

    def _begin_item(self, part: Part) -> None:
        item = self._new_item(part)
        self._response.output.append(item)
        self._is_open = True
        self._emit_item("response.output_item.added", item=item)
        if part.kind != "call":
            item["content"] = [_text_part(part.kind)]
            self._emit_part("response.content_part.added", part=item["content"][0])

    def _new_item(self, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "reasoning", "id": f"rs_{new_id()}", "summary": [], "content": [], "status": "in_progress"}
        if part.kind == "content":
            fields = {"type": "message", "id": f"msg_{new_id()}", "role": "assistant"}
            return {**fields, "content": [], "status": "in_progress"}
        assert self._form.toolbox.format is not None
        call_id = self._form.toolbox.format.new_call_id()
        fields = {"type": "function_call", "id": f"fc_{new_id()}", "call_id": call_id, "name": part.text}
        return {**fields, "arguments": "", "status": "in_progress"}

    def _grow(self, part: Part) -> None:
        item, logprobs = self._item, self._logprobs.take(part)
        if part.kind == "arguments":
            item["arguments"] += part.text
            self._emit_item("response.function_call_arguments.delta", item_id=item["id"], delta=part.text)
        elif part.kind != "call":
            item["content"][0]["text"] += part.text
            more = {}
            if part.kind == "content":
                item["content"][0]["logprobs"] += logprobs
                more["logprobs"] = logprobs
            self._emit_part(f"response.{_text_kind(item)}.delta", delta=part.text, **more)

    def _end_item(self, status: str) -> None:
        if not self._is_open:
            return
        item = self._item
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            self._emit_item("response.function_call_arguments.done", item_id=item["id"], **fields)
        else:
            text = item["content"][0]["text"]
            more = {"logprobs": item["content"][0]["logprobs"]} if item["type"] == "message" else {}
            self._emit_part(f"response.{_text_kind(item)}.done", text=text, **more)
            self._emit_part("response.content_part.done", part=item["content"][0])
        self._emit_item("response.output_item.done", item=item)
        self._is_open = False

    def _emit(self, kind: str, **fields: Any) -> None:
        if not self._emits:
            return
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        self._events += event(data, kind)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        self._emit(kind, output_index=len(self._response.output) - 1, **fields)

    def _emit_part(self, kind: str, **fields: Any) -> None:
        self._emit_item(kind, item_id=self._item["id"], content_index=0, **fields)

    def _take_events(self) -> bytes:
        events, self._events = self._events, b""
        return events


def _text_part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _text_kind(item: dict[str, Any]) -> str:
    return str(item["content"][0]["type"])
