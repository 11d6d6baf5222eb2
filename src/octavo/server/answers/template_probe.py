"""How a chat template writes an answer, found by rendering a small one."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.engine.input_processor import InputProcessor

NAME = "lookup"
ARGUMENTS: dict[str, Any] = {"city": "Rome", "days": 2}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "The city"},
        "days": {"type": "integer", "description": "How many"},
    },
    "required": ["city", "days"],
}
_TOOL = {"type": "function", "function": {"name": NAME, "description": "Look it up", "parameters": PARAMETERS}}
_QUESTION = {"role": "user", "content": "Question"}
_CALL_ID = "call00001"  # nine letters and digits: some templates check that
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
_CALLING = {"role": "assistant", "content": None, "tool_calls": [_CALL]}


def written_call(inputs: InputProcessor) -> str | None:
    """Return how the chat template writes a call of a tool, up to the end of its turn; None where it refuses to."""
    question = _rendered(inputs, [_QUESTION])
    calling = _rendered(inputs, [_QUESTION, _CALLING])
    if question is None or calling is None:
        return None
    num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(question, calling, strict=False)))
    return calling[num_common:]


def _rendered(inputs: InputProcessor, messages: list[dict[str, Any]]) -> str | None:
    if not inputs.has_chat_template:
        return None
    try:
        return inputs.chat_text(messages, tools=[_TOOL], add_generation_prompt=False)
    except RequestError:
        return None
