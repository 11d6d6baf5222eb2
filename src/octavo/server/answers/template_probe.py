"""Find how a chat template writes tools and calls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

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
_CALL_ID = "call00001"  # some templates require ids of nine letters and digits
_CALL = {"id": _CALL_ID, "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
_CALLING = {"role": "assistant", "content": None, "tool_calls": [_CALL]}


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """The text that a chat template renders for a test question and a test call.

    prompt: Prompt with the question, or None if the template refuses it.
    call: Text that the call adds to the prompt, or None if the template refuses it.
    """

    prompt: str | None = None
    call: str | None = None

    @classmethod
    def of(cls, render: Callable[..., str]) -> TemplateProbe:
        """Render the prompt and the call."""
        prompt = _rendered(render, [_QUESTION], add_generation_prompt=True)
        question = _rendered(render, [_QUESTION])
        calling = _rendered(render, [_QUESTION, _CALLING])
        if question is None or calling is None:
            return cls(prompt)
        num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(question, calling, strict=False)))
        return cls(prompt, calling[num_common:])

    @property
    def shows_tools(self) -> bool:
        """Whether the prompt names the tool."""
        return self.prompt is not None and NAME in self.prompt

    @property
    def texts(self) -> list[str]:
        """All rendered texts."""
        return [text for text in (self.prompt, self.call) if text is not None]


def _rendered(
    render: Callable[..., str], messages: list[dict[str, Any]], *, add_generation_prompt: bool = False
) -> str | None:
    try:
        return render(messages, tools=[_TOOL], add_generation_prompt=add_generation_prompt)
    except RequestError:
        return None
