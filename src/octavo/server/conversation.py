"""The messages of a request: checked, and brought into the form that chat templates read."""

from __future__ import annotations

from typing import Any, Protocol

import pydantic_core

from octavo.errors import RequestError

_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "documents", "chat_template", "self"}
_GENERATION = {"add_generation_prompt", "continue_final_message"}
_ROLES = {"developer": "system"}  # OpenAI's newer name; templates know the older one


class TemplateFields(Protocol):
    """The fields of a request that go to the chat template."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Check a conversation; the text parts of a message are joined. Raises `RequestError` with the place."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", parameter="messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with role and content", parameter=place)
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{place}.role must be a string", parameter=f"{place}.role")
    result = {**message, "role": _ROLES.get(role, role)}
    if message.get("tool_calls"):
        result["tool_calls"] = _read_tool_calls(message["tool_calls"], f"{place}.tool_calls")
    else:
        result.pop("tool_calls", None)
    content = message.get("content")
    is_empty = content is None and role == "assistant"
    return {**result, "content": "" if is_empty else read_text(content, f"{place}.content")}


def read_text(content: Any, place: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return a text that may come in parts. Raises `RequestError` with the place."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} must be text or a list of text parts", parameter=place)
    return "\n".join(read_text_part(part, f"{place}[{index}]", kinds) for index, part in enumerate(content))


def read_text_part(part: Any, place: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the text of a part of a message. Raises `RequestError` for what is no text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in kinds:
        shown = f", got type {kind!r}" if isinstance(kind, str) else ""
        raise RequestError(f'{place} must be {{"type": "{kinds[0]}", "text": ...}}{shown[:60]}', parameter=place)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{place}.text must be a string", parameter=f"{place}.text")
    return text


def _read_tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", parameter=place)
    return [_read_tool_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _read_tool_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        message = f'{place} must be {{"id": ..., "type": "function", "function": {{"name": ..., "arguments": ...}}}}'
        raise RequestError(message, parameter=place)
    arguments = read_arguments(function.get("arguments"), f"{place}.function.arguments")
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_arguments(text: Any, place: str) -> dict[str, Any]:
    """Return the arguments of a call, which APIs spell as JSON in a string and templates want as an object."""
    if text is not None and not isinstance(text, str | dict):
        raise RequestError(f"{place} must be a JSON object in a string", parameter=place)
    arguments = parse_arguments(text or "{}") if not isinstance(text, dict) else text
    return arguments if isinstance(arguments, dict) else {}


def parse_arguments(text: str) -> Any:
    """Parse arguments that a model wrote: what a limit cut off may lack its end; {} for what is no JSON at all.

    So a call that the server itself gave can stand in the next request, as it is.
    """
    try:
        return pydantic_core.from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}


def effort_options(effort: Any, parameter: str) -> dict[str, Any]:
    """Tell the chat template how much to think; those that know no degrees know whether to. Raises `RequestError`."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise RequestError(f"{parameter} must be a string", parameter=parameter)
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def template_options(request: TemplateFields) -> dict[str, Any]:
    """Return what a request tells the chat template. Raises `RequestError` for what only the server may tell it."""
    options = _template_arguments(request.chat_template_kwargs, _RESERVED_TEMPLATE_NAMES)
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


def extra_template_options(arguments: dict[str, Any] | None) -> dict[str, Any]:
    """Return what vLLM's chat_template_kwargs tell the template under APIs whose messages say where an answer begins.

    Raises `RequestError` for what only the server may tell it.
    """
    return _template_arguments(arguments, _RESERVED_TEMPLATE_NAMES | _GENERATION)


def _template_arguments(arguments: dict[str, Any] | None, reserved: set[str]) -> dict[str, Any]:
    arguments = arguments or {}
    if refused := arguments.keys() & reserved:
        raise RequestError(f"chat_template_kwargs must not set {min(refused)}", parameter="chat_template_kwargs")
    return dict(arguments)
