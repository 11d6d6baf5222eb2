"""Converts Ollama's messages."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.server.api.block_types import MEDIA
from octavo.server.api.conversation import read_messages


def read_conversation(messages: list[Any]) -> list[dict[str, Any]]:
    """Convert Ollama's messages to OpenAI's messages.

    Some chat templates require an id for each tool call. A missing id is made from the call's position.
    """
    open_calls: dict[Any, Any] = {}  # maps ids of calls without results to tool names
    return read_messages([_openai_message(message, index, open_calls) for index, message in enumerate(messages)])


def _openai_message(message: Any, index: int, open_calls: dict[Any, Any]) -> Any:
    if not isinstance(message, dict):
        return message
    if message.get("images"):
        place = f"messages[{index}].images"
        raise RequestError(f"{place} is not supported: {MEDIA}", parameter=place)
    result = {name: value for name, value in message.items() if name not in {"images", "tool_name"}}
    role, calls = message.get("role"), message.get("tool_calls")
    if message.get("content") is None and role != "assistant":
        result["content"] = ""
    if isinstance(calls, list):
        result["tool_calls"] = [_with_id(call, f"call{index:03}{number:02}") for number, call in enumerate(calls)]
        open_calls.clear()
        open_calls.update(_tools_by_id(result["tool_calls"]))
    if role == "tool":
        name = message.get("tool_name") or message.get("name")
        candidates = [call_id for call_id, called in open_calls.items() if called == name]
        call_id = message.get("tool_call_id") or next(iter([*candidates, *open_calls]), None)
        result["name"], result["tool_call_id"] = name, call_id
        if isinstance(call_id, str):
            open_calls.pop(call_id, None)
    return result


def _with_id(call: Any, candidates: str) -> Any:
    return {**call, "id": call.get("id") or candidates} if isinstance(call, dict) else call


def _tools_by_id(calls: list[Any]) -> dict[str, Any]:
    named = [call for call in calls if isinstance(call, dict) and isinstance(call["id"], str)]
    functions = [call.get("function") for call in named]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    return {call["id"]: name for call, name in zip(named, names, strict=True)}
