"""Checks conversations, converts them for chat templates, and answers them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.engine.call_arguments import read_arguments
from octavo.errors import PromptTooLongError, RequestError
from octavo.http.errors import client_field_names
from octavo.runtime.ids import new_id
from octavo.server.answers.answer_form import AnswerForm
from octavo.server.answers.answering import answer
from octavo.server.answers.jobs import Job, json_response
from octavo.server.api.block_types import CACHE, MEDIA, BlockTypes, fields, text_field
from octavo.server.api.extra_fields import each
from octavo.server.api.truncation import WHOLE, Truncation
from octavo.server.bodies import look_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from octavo.engine.input_processor import InputProcessor
    from octavo.http.limiter import Permit
    from octavo.sampling_params import SamplingParams
    from octavo.server.answers.jobs import Reply
    from octavo.server.answers.tools import Toolbox
    from octavo.server.api.openai.requests import ChatFields
    from octavo.server.service import Service

_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "documents", "chat_template", "self"}
_GENERATION = {"add_generation_prompt", "continue_final_message"}
MESSAGE_FIELDS = fields(
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", audio=(None,), function_call=(None,)
)
_TEXT = fields("text", harmless={"prompt_cache_breakpoint": CACHE})
_MEDIA = each(MEDIA, "image_url", "input_audio", "file")
TEXT_PARTS = BlockTypes({"text": _TEXT}, _MEDIA)
ANSWER_PARTS = BlockTypes({"text": _TEXT, "refusal": fields("refusal")}, _MEDIA)
PREDICTIONS = BlockTypes({"content": fields("content")})
CALLS = BlockTypes({"function": fields("id", "function", "index")}, {"custom": "its tools are functions"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation.

    options: Arguments of the chat template.
    field: Name of the API's field with the messages, for errors.
    prediction: The answer that the client predicts, or "".
    """

    messages: list[dict[str, Any]]
    toolbox: Toolbox
    options: dict[str, Any]
    field: str = "messages"
    truncation: Truncation = WHOLE
    prediction: str = ""


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Check messages of chat completions and convert them for the chat template."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", parameter="messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with role and content", parameter=place)
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{place}.role must be a string", parameter=f"{place}.role")
    MESSAGE_FIELDS.check({name: message[name] for name in message.keys() & MESSAGE_FIELDS.unsupported.keys()}, place)
    result = {**message}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise RequestError(f"{place}.tool_calls must be a list", parameter=f"{place}.tool_calls")
        calls = enumerate(message["tool_calls"])
        result["tool_calls"] = [_read_tool_call(call, f"{place}.tool_calls[{index}]") for index, call in calls]
    else:
        result.pop("tool_calls", None)
    is_answer = role == "assistant"
    refusal = result.pop("refusal", None) if is_answer else None
    content = message.get("content")
    if content is None and is_answer:  # chat templates accept calls without content
        result["content"] = None if "tool_calls" in result else ""
    else:
        types = ANSWER_PARTS if is_answer else TEXT_PARTS
        result["content"] = read_content(content, f"{place}.content", types)
    if refusal is not None:
        said, text = result["content"], text_field(message, "refusal", place)
        parts = [text_part(said)] if isinstance(said, str) else said
        result["content"] = [*parts, text_part(text)] if said else text
    return result


def read_content(content: Any, place: str, types: BlockTypes) -> str | list[dict[str, str]]:
    """Check and return a message's content: a string, or text parts that the chat template joins."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be text or a list of text parts", parameter=place)
    return [_read_part(part, f"{place}[{index}]", types) for index, part in enumerate(content)]


def read_prediction(prediction: Any) -> str:
    """Return the predicted answer, or "" for None."""
    if prediction is None:
        return ""
    PREDICTIONS.check(prediction, "prediction")
    content = read_content(prediction.get("content"), "prediction.content", TEXT_PARTS)
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _read_part(part: Any, place: str, types: BlockTypes) -> dict[str, str]:
    kind = types.check(part, place)
    return text_part(text_field(part, "refusal" if kind == "refusal" else "text", place))


def text_part(text: str) -> dict[str, str]:
    """Make a text part."""
    return {"type": "text", "text": text}


def _read_tool_call(call: Any, place: str) -> dict[str, Any]:
    CALLS.check(call, place, default="function")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        message = f'{place} must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        raise RequestError(message, parameter=place)
    arguments = read_call_arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_call_arguments(text: Any, place: str) -> dict[str, Any]:
    """Return a tool call's arguments. text: A JSON string, an object, or None."""
    if text is not None and not isinstance(text, str | dict):
        raise RequestError(f"{place} must be a JSON object in a string", parameter=place)
    return text if isinstance(text, dict) else read_arguments(text or "")


def effort_options(effort: Any, parameter: str) -> dict[str, Any]:
    """Return template arguments for a reasoning effort. Some templates know only `enable_thinking`."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise RequestError(f"{parameter} must be a string", parameter=parameter)
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def continuing(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return template arguments that continue the last message if its role is assistant."""
    begun = messages[-1]["role"] == "assistant"
    return {"add_generation_prompt": not begun, "continue_final_message": begun}


def template_options(request: ChatFields) -> dict[str, Any]:
    """Return the chat template's arguments."""
    options = template_arguments(request.chat_template_kwargs, _RESERVED_TEMPLATE_NAMES)
    options |= {name: wanted for name in _GENERATION if (wanted := getattr(request, name)) is not None}
    options.setdefault("add_generation_prompt", True)
    if options.get("continue_final_message") and options["add_generation_prompt"]:
        raise RequestError(
            "continue_final_message continues the last message, so add_generation_prompt must be false",
            parameter="continue_final_message",
        )
    return options


def template_arguments(
    arguments: dict[str, Any] | None, reserved: set[str] = _RESERVED_TEMPLATE_NAMES | _GENERATION
) -> dict[str, Any]:
    """Return the arguments in vLLM's field chat_template_kwargs. reserved: Names that clients must not set."""
    arguments = arguments or {}
    if refused := arguments.keys() & reserved:
        raise RequestError(f"chat_template_kwargs must not set {min(refused)}", parameter="chat_template_kwargs")
    return dict(arguments)


async def render(
    service: Service, http_request: Request, place: Permit, conversation: Conversation, *, is_prompt: bool = True
) -> dict[str, Any]:
    """Render a conversation with the chat template, and tokenize the text.

    Returns the prompt's text, token ids and cache points. If the engine uses draft tokens, also returns the token ids
    of the prediction.

    is_prompt: True to refuse a prompt that fills the whole context. If False, there are no cache points.
    """
    inputs, truncation = service.engine.input_processor, conversation.truncation

    def work() -> dict[str, Any]:
        messages, tools = conversation.toolbox.template_input(conversation.messages, service.answer_style.tools)
        text = inputs.chat_text(messages, tools=tools, **conversation.options)
        if truncation.num_tokens is None:
            token_ids = inputs.encode(text, add_special_tokens=False, is_prompt=is_prompt)
        else:
            token_ids = truncation.encode(text, inputs, add_special_tokens=False)
        prompt = {"prompt": text, "prompt_token_ids": token_ids}
        if is_prompt and truncation.num_tokens is None:
            points = inputs.cache_points(messages, text, len(token_ids), tools=tools, **conversation.options)
            prompt["cache_points"] = points
        if conversation.prediction and service.engine.client.capacity.num_speculative_tokens:
            prompt["predicted_token_ids"] = _encode_prediction(inputs, conversation.prediction)
        return prompt

    with client_field_names({"prompt": conversation.field, "messages": conversation.field}):
        return await service.read(http_request, place, work)


def _encode_prediction(inputs: InputProcessor, text: str) -> list[int]:
    try:
        return inputs.encode(text, add_special_tokens=False, is_prompt=True)
    except PromptTooLongError as error:
        raise RequestError(str(error).replace("prompt", "prediction", 1), parameter="prediction") from None


async def answer_conversation(
    service: Service,
    http_request: Request,
    conversation: Conversation,
    params: SamplingParams,
    make_reply: Callable[[Job, AnswerForm], Reply],
    *,
    id_prefix: str,
    **options: Any,
) -> Response:
    """Answer a conversation. options: Further fields of the `Job`."""
    with service.enter(http_request, params.n) as place:
        prompt = await render(service, http_request, place, conversation)
        is_whole = not options.get("stream", False)
        form = AnswerForm.of(service.answer_style, conversation.toolbox, prompt["prompt"], is_whole=is_whole)
        job = Job(
            request_id=f"{id_prefix}{new_id()}",
            prompts=[prompt],
            params=await look_at(http_request, lambda: form.applied_to(params)),
            place=place,
            deadline=http_request.state.deadline,
            **options,
        )
        return await answer(service, http_request, job, make_reply(job, form))


async def count_prompt(
    service: Service, http_request: Request, read: Callable[[], Conversation], to_response: Callable[[int], Any]
) -> Response:
    """Count a prompt's tokens."""
    conversation = await look_at(http_request, read)
    with service.enter(http_request, 1) as place:
        prompt = await render(service, http_request, place, conversation, is_prompt=False)
    return json_response(to_response(len(prompt["prompt_token_ids"])))
