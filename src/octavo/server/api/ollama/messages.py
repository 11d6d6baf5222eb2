"""Messages as Ollama's API spells them, brought into the form of chat completions, which templates read."""

from __future__ import annotations

from typing import Any

from octavo.errors import RequestError
from octavo.server.api.block_types import MEDIA
from octavo.server.api.conversation import read_messages


def read_conversation(messages: list[Any]) -> list[dict[str, Any]]:
    """Check messages, and spell them as those of chat completions. Raises `RequestError` with the place.

    Calls and results need no ids in this API, and some templates want them: the same ones in every turn.
    """
    open_calls: list[str] = []
    return read_messages([_spelled(message, index, open_calls) for index, message in enumerate(messages)])


def _spelled(message: Any, index: int, open_calls: list[str]) -> Any:
    """Spell one message. open_calls: ids of the calls that have no result yet; mutated."""
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
        open_calls[:] = [call["id"] for call in result["tool_calls"] if isinstance(call, dict)]
    if role == "tool":
        result["name"] = message.get("tool_name") or message.get("name")
        result["tool_call_id"] = message.get("tool_call_id") or next(iter(open_calls), None)
        open_calls[:] = [call_id for call_id in open_calls if call_id != result["tool_call_id"]]
    return result


def _with_id(call: Any, own: str) -> Any:
    return {**call, "id": call.get("id") or own} if isinstance(call, dict) else call
