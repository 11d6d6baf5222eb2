"""Anthropic's Messages API."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import UNSET, Struct, UnsetType

from octavo.data.request_options import RequestOptions
from octavo.engine.call_arguments import UNREADABLE_KEY, begun_arguments, parse_arguments
from octavo.errors import RequestError
from octavo.http.apis import ANTHROPIC
from octavo.http.errors import client_field_names
from octavo.server.answers.answer_form import AnswerReader
from octavo.server.answers.jobs import event
from octavo.server.answers.tools import Choice, Toolbox, check_tool_type, read_function
from octavo.server.answers.usage import Receipt  # noqa: TC001
from octavo.server.api import request_types as types
from octavo.server.api.anthropic.message_blocks import read_conversation
from octavo.server.api.block_types import LABEL, BlockTypes, fields
from octavo.server.api.conversation import (
    Conversation,
    answer_conversation,
    continuing,
    count_prompt,
    effort_options,
    template_arguments,
)
from octavo.server.api.extra_fields import ANTHROPIC_HARMLESS, UNSUPPORTED_OR_ALIAS, Off, each
from octavo.server.api.openai.requests import Body, Strings
from octavo.server.api.request_types import Shown, within
from octavo.server.api.sampling import read_response_format, sampling_params
from octavo.server.bodies import look_at
from octavo.server.endpoints import endpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.http.errors import HttpError
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams, StructuredOutputsParams
    from octavo.server.answers.answer_form import AnswerForm
    from octavo.server.answers.jobs import ChoiceUpdate, Job
    from octavo.server.answers.parts import Part
    from octavo.server.answers.tool_format import ToolFormat
    from octavo.server.answers.usage import Usage
    from octavo.server.service import Service

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CLIENT_NAMES = {"prompt": "messages", "structured_outputs": "tools", "stop": "stop_sequences"}
_FORMAT = "output_config.format"
_OUTPUT_CONFIG = {"effort", "format"}
_THOUGHTS = {
    "block_binding": LABEL,
    "budget_tokens": "limit of thinking: this server uses max_tokens only, and clients must send it",
    "display": "amount of thinking to show: this server shows all of it",
}
_THINKING = BlockTypes(
    {"enabled": fields(harmless=_THOUGHTS), "adaptive": fields(harmless=_THOUGHTS), "disabled": fields()},
    {"between_tools": "this server cannot control thinking between tools"},
)
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **each(Off(), "chat_template", "compaction", "container", "thread"),
    **each(Off(), "output_format"),  # older name of output_config.format
    **each(Off([]), "fallbacks", "mcp_servers"),
    **UNSUPPORTED_OR_ALIAS,
}


class ThreadsUnsupportedError(RequestError):
    """A request asks the server to store the conversation.

    Anthropic's SDK reads `details`, and then sends the whole conversation.
    """

    details: ClassVar[Mapping[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

    def __init__(self) -> None:
        message = "thread is not supported by this server: leave it out and send the whole conversation"
        super().__init__(message, parameter="thread")


class CountTokensRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[Any, Shown(types.Turns)]
    system: Annotated[Any, Shown(types.Content | None)] = None
    tools: Annotated[list[Any], Shown(types.Tools[types.AnthropicTool])] | None = None
    tool_choice: Annotated[dict[str, Any], Shown(types.AnthropicChoice)] | None = None
    thinking: Annotated[dict[str, Any], Shown(types.ThinkingConfig)] | None = None
    output_config: Annotated[dict[str, Any], Shown(types.OutputConfig)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: types.OutputTokens
    stream: bool | None = None
    stop_sequences: Annotated[Strings, Shown(types.StopTexts)] | None = None
    temperature: types.Temperature | None = None
    top_p: types.TopP | None = None
    top_k: types.TopK | None = None
    cache_salt: types.CacheSalt | None = None  # vLLM's
    num_speculative_tokens: Annotated[int, within("num_speculative_tokens")] | None = None  # octavo's


class MessageUsage(Struct):
    """Token counts. input_tokens excludes tokens found in the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    receipt: Receipt | UnsetType = UNSET


class Message(Struct):
    """A whole answer."""

    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"


@endpoint(body=MessagesRequest, answer=Message, is_streamed=True)
async def create_message(service: Service, http_request: Request, request: MessagesRequest) -> Response:
    """Answer a conversation."""
    model = service.check_model(request.model)
    _check_fields(service, request)
    tool_format = service.answer_style.tools
    params, conversation = await look_at(
        http_request, lambda: (_params(request, service.default_params), _read_conversation(request, tool_format))
    )
    options: dict[str, Any] = {
        "stream": bool(request.stream),
        "options": RequestOptions(cache_salt=request.cache_salt),
        "client_names": _CLIENT_NAMES
        if params.structured_outputs is None
        else {**_CLIENT_NAMES, "structured_outputs": _FORMAT},
    }
    return await answer_conversation(
        service, http_request, conversation, params, MessageReply, id_prefix="msg_", model=model, **options
    )


@endpoint(body=CountTokensRequest, answer=types.TokenCount)
async def count_tokens(service: Service, http_request: Request, request: CountTokensRequest) -> Response:
    """Count prompt tokens."""
    service.check_model(request.model)
    _check_fields(service, request)
    tool_format = service.answer_style.tools
    return await count_prompt(
        service, http_request, lambda: _read_conversation(request, tool_format), lambda count: {"input_tokens": count}
    )


def _check_fields(service: Service, request: CountTokensRequest) -> None:
    extra = request.model_extra or {}
    if extra.get("thread") is not None:
        raise ThreadsUnsupportedError
    service.extra_fields.check(extra, _UNSUPPORTED, ANTHROPIC_HARMLESS)


def _params(request: MessagesRequest, defaults: SamplingParams) -> SamplingParams:
    with client_field_names(_CLIENT_NAMES):
        return sampling_params(
            request,
            defaults,
            stop=defaults.stop if request.stop_sequences is None else request.stop_sequences,
            structured_outputs=_read_format(request.output_config),
        )


def _read_format(config: dict[str, Any] | None) -> StructuredOutputsParams | None:
    config = config or {}
    if unknown := {name for name, value in config.items() if name not in _OUTPUT_CONFIG and value is not None}:
        name = f"output_config.{min(unknown)}"[:100]
        raise RequestError(f"{name} is not supported by this server", parameter=name)
    match config.get("format"):
        case None:
            return None
        case {"type": "json_schema", "schema": dict()} as wanted:
            return read_response_format({"type": "json_schema", "json_schema": wanted}, _FORMAT)
    raise RequestError(f'{_FORMAT} must be {{"type": "json_schema", "schema": ...}}', parameter=_FORMAT)


def _read_conversation(request: CountTokensRequest, tool_format: ToolFormat | None) -> Conversation:
    messages = read_conversation(request.system, request.messages)
    if messages[-1].get("tool_calls"):
        raise RequestError("the last tool_use needs a tool_result after it", parameter="messages")
    return Conversation(messages, _read_tools(request, tool_format), _template_options(request, messages))


def _template_options(request: CountTokensRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    options = continuing(messages)
    effort = (request.output_config or {}).get("effort")
    options |= effort_options(effort, "output_config.effort")
    if request.thinking is not None:
        kind = _THINKING.check(request.thinking, "thinking")
        if kind != "adaptive":
            options["enable_thinking"] = kind == "enabled"
    return options | template_arguments(request.chat_template_kwargs)


def _read_tools(request: CountTokensRequest, tool_format: ToolFormat | None) -> Toolbox:
    described = []
    for index, tool in enumerate(request.tools or []):
        place = f"tools[{index}]"
        if isinstance(tool, dict) and tool.get("type") is not None:
            check_tool_type(tool, place, "custom", '{"name": ..., "input_schema": ...}')
        described.append(read_function(tool, place, "input_schema"))
    wanted = request.tool_choice or {"type": "auto"}
    match wanted:
        case {"type": "tool", "name": str() as name}:
            choice = Choice("required", name)
        case {"type": "auto" | "any" | "none" as kind}:
            choice = Choice(_CHOICES[kind])
        case _:
            message = 'tool_choice.type must be auto, any, none, or tool with a "name"'
            raise RequestError(message, parameter="tool_choice")
    parallel = False if wanted.get("disable_parallel_tool_use") is True else None
    return Toolbox.make(described, tool_format, choice, parallel=parallel)


_BLOCK_TYPES = {"content": "text", "reasoning": "thinking", "arguments": "tool_use"}  # by `Part.kind`


class MessageReply:
    """Formats Anthropic's messages."""

    def __init__(self, job: Job, form: AnswerForm) -> None:
        self._job = job
        self._form = form
        self._reader = AnswerReader(form)
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        self._is_cut = False
        self._is_open = False
        self._end: dict[str, Any] = {}

    def update(self, update: ChoiceUpdate, _usage: Usage | None) -> bytes:
        """Return new events."""
        begun = b""
        if update.is_first:
            num_cached = update.output.num_cached_tokens
            usage = MessageUsage(len(update.output.prompt_token_ids) - num_cached, 0, num_cached)
            message = Message(self._job.request_id, self._job.model, [], None, None, usage)
            begun = self._emit("message_start", message=message)
        return begun + self._take(update.completion)

    def end(self, usage: Usage) -> bytes:
        """Return last events."""
        return self._emit("message_delta", delta=self._end, usage=_usage_of(usage)) + self._emit("message_stop")

    def error(self, error: HttpError) -> bytes:
        """Encode an error."""
        return ANTHROPIC.event(error)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> Message:
        """Return the answer."""
        ((completion,),) = (output.outputs for output in outputs)
        self._take(completion)
        return Message(self._job.request_id, self._job.model, self._blocks, **self._end, usage=_usage_of(usage))

    def _emit(self, kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind) if self._job.stream else b""

    def _take(self, completion: CompletionOutput) -> bytes:
        events = b""
        for part in self._reader.read(completion):
            if not self._is_open or self._blocks[-1]["type"] != _BLOCK_TYPES.get(part.kind):
                events += self._stop_block()
                self._blocks.append(self._new_block(part))
                self._arguments, self._is_open = "", True
                events += self._emit("content_block_start", index=len(self._blocks) - 1, content_block=self._blocks[-1])
            if part.kind != "call":
                events += self._grow(self._blocks[-1], part.text)
        if completion.finished:
            self._is_cut = completion.finish_reason != "stop" or isinstance(completion.stop_reason, str)
            events += self._stop_block()
            has_calls = any(block["type"] == "tool_use" for block in self._blocks)
            self._end = _ending(completion, has_calls=has_calls)
        return events

    def _new_block(self, part: Part) -> dict[str, Any]:
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        if part.kind == "content":
            return {"type": "text", "text": ""}
        assert self._form.toolbox.format is not None
        return {"type": "tool_use", "id": self._form.toolbox.format.new_call_id(), "name": part.text, "input": {}}

    def _grow(self, block: dict[str, Any], text: str) -> bytes:
        kind = block["type"]
        if kind == "tool_use":
            self._arguments += text
            return self._emit_delta("input_json_delta", partial_json=text)
        block[kind] += text
        return self._emit_delta(f"{kind}_delta", **{kind: text})

    def _emit_delta(self, kind: str, **fields: str) -> bytes:
        return self._emit("content_block_delta", index=len(self._blocks) - 1, delta={"type": kind, **fields})

    def _input(self) -> dict[str, Any]:
        if self._is_cut:
            return begun_arguments(self._arguments)
        whole = parse_arguments(self._arguments)
        return {UNREADABLE_KEY: self._arguments} if whole is None else whole

    def _stop_block(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open, block, events = False, self._blocks[-1], b""
        if block["type"] == "thinking":
            block["signature"] = _signature(block["thinking"])
            events = self._emit_delta("signature_delta", signature=block["signature"])
        elif block["type"] == "tool_use" and self._arguments:
            block["input"] = self._input()
        return events + self._emit("content_block_stop", index=len(self._blocks) - 1)


def _signature(thoughts: str) -> str:
    """Return a hash, because clients send back only thoughts with a signature."""
    return hashlib.sha256(thoughts.encode("utf-8", "surrogatepass")).hexdigest()


def _ending(completion: CompletionOutput, *, has_calls: bool) -> dict[str, Any]:
    reason, sequence = "end_turn", None
    if completion.finish_reason == "length":
        reason = "max_tokens"
    elif isinstance(completion.stop_reason, str):
        reason, sequence = "stop_sequence", completion.stop_reason
    elif has_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage_of(usage: Usage) -> MessageUsage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - num_cached, usage.completion_tokens, num_cached, receipt=usage.receipt)
