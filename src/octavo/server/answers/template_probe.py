"""How a chat template writes an answer, found by rendering a small one."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """What a chat template makes of a question, and of an answer that calls a tool; None for what it refuses.

    prompt: of the question. call: what follows it where the answer is a call.
    """

    prompt: str | None = None
    call: str | None = None

    @classmethod
    def of(cls, inputs: InputProcessor) -> TemplateProbe:
        """Render them."""
        if not inputs.has_chat_template:
            return cls()
        prompt = _rendered(inputs, [_QUESTION], add_generation_prompt=True)
        question = _rendered(inputs, [_QUESTION])
        calling = _rendered(inputs, [_QUESTION, _CALLING])
        if question is None or calling is None:
            return cls(prompt)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(question, calling, strict=False)))
        return cls(prompt, calling[num_common:])

    @property
    def shows_tools(self) -> bool:
        """Whether the model is told which tools there are."""
        return self.prompt is not None and NAME in self.prompt


def _rendered(
    inputs: InputProcessor, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False
) -> str | None:
    try:
        return inputs.chat_text(messages, tools=[_TOOL], add_generation_prompt=add_generation_prompt)
    except RequestError:
        return None
