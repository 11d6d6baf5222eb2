"""Converts Responses items to messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.errors import RequestError
from octavo.server.api.block_types import CACHE, LABEL, MEDIA, BlockTypes, fields, text_field
from octavo.server.api.conversation import read_call_arguments, read_content, text_part
from octavo.server.api.extra_fields import each

_ROLES = {"user", "assistant", "system", "developer"}
_LABELS = each(LABEL, "id", "status")
_CALL = {**_LABELS, "async": "true if the caller waits", "caller": "caller of the tool"}
_ELSEWHERE = "this server has no tools of OpenAI's servers; use functions"
_NOT_STORED = "this server stores nothing; send the conversation"
_TEXT = fields("text", harmless={"prompt_cache_breakpoint": CACHE})
_SAID = fields("text", harmless={"annotations": LABEL, "logprobs": LABEL})
_TEXTS = {"input_text": _TEXT, "output_text": _SAID, "text": _TEXT}
_MEDIA = each(MEDIA, "input_image", "input_file")

ITEMS = BlockTypes(
    {
        "message": fields("role", "content", harmless={**_LABELS, "phase": "purpose of an answer's text"}),
        "reasoning": fields(
            "content", "summary", harmless={**_LABELS, "encrypted_content": "this server cannot read it"}
        ),
        "function_call": fields("call_id", "name", "arguments", harmless=_CALL, namespace=(None,)),
        "function_call_output": fields(
            "call_id", "output", harmless={**_CALL, "name": "the call contains it"}, namespace=(None,)
        ),
    },
    {
        **each(_ELSEWHERE, "file_search_call", "computer_call", "computer_call_output", "web_search_call"),
        **each(_ELSEWHERE, "tool_search_call", "tool_search_output", "image_generation_call", "code_interpreter_call"),
        **each(_ELSEWHERE, "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        **each(_ELSEWHERE, "apply_patch_call", "apply_patch_call_output", "program", "program_output"),
        **each(_ELSEWHERE, "custom_tool_call", "custom_tool_call_output", "mcp_call", "mcp_list_tools"),
        **each(_ELSEWHERE, "mcp_approval_request", "mcp_approval_response"),
        "additional_tools": "declare tools only in the field tools",
        "configuration_update": "use only the fields reasoning and text",
        "compaction": "it contains turns compacted by OpenAI's servers; send the turns themselves",
        "compaction_trigger": "this server reads all turns",
        "item_reference": _NOT_STORED,
    },
)
MESSAGE_PARTS = BlockTypes(_TEXTS, _MEDIA)
ANSWER_PARTS = BlockTypes({**_TEXTS, "refusal": fields("refusal")}, _MEDIA)
THOUGHTS = BlockTypes({"reasoning_text": fields("text")})
SUMMARIES = BlockTypes({"summary_text": fields("text")})


def read_items(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    """Convert items to messages. Consecutive assistant items are joined, and so are system items.

    instructions: A system message, or None. given: A text or a list of items.
    """
    turns: list[_Turn] = []
    if instructions is not None:
        turns.append(_Turn("system", [instructions]))
    if isinstance(given, str):
        turns.append(_Turn("user", [given]))
    elif isinstance(given, list) and given:
        for index, item in enumerate(given):
            turn = _read_item(item, f"input[{index}]")
            if turns and turn.role == turns[-1].role and turn.role in {"assistant", "system"}:
                turns[-1].add(turn)
            else:
                turns.append(turn)
    else:
        raise RequestError("input must be a text or a list of at least one item", parameter="input")
    return [turn.message() for turn in turns if turn.texts or turn.thoughts or turn.calls]


@dataclass(slots=True)
class _Turn:
    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str | None = None

    def add(self, other: _Turn) -> None:
        self.texts += other.texts
        self.thoughts += other.thoughts
        self.calls += other.calls

    def message(self) -> dict[str, Any]:
        content: Any = None if self.calls else ""
        if self.role in {"assistant", "system"}:
            content = ("" if self.role == "assistant" else "\n\n").join(self.texts) or content
        elif self.texts:
            content = self.texts[0] if len(self.texts) == 1 else [text_part(text) for text in self.texts]
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        return message


def _read_item(item: Any, place: str) -> _Turn:
    match ITEMS.check(item, place, default="message"):
        case "message":
            return _read_message(item, place)
        case "reasoning":
            return _Turn("assistant", thoughts=_read_thoughts(item, place))
        case "function_call":
            return _Turn("assistant", calls=[_read_call(item, place)])
    texts = _texts(read_content(item.get("output"), f"{place}.output", MESSAGE_PARTS))
    return _Turn("tool", texts, call_id=str(item.get("call_id", "")))


def _read_message(item: dict[str, Any], place: str) -> _Turn:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        message = f"{place}.role must be user, assistant, system or developer"
        raise RequestError(message, parameter=f"{place}.role")
    types = ANSWER_PARTS if role == "assistant" else MESSAGE_PARTS
    texts = _texts(read_content(item.get("content"), f"{place}.content", types))
    if role in {"assistant", "user"}:
        return _Turn(role, texts)
    return _Turn("system", ["\n".join(texts)])


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content] or [""]


def _read_thoughts(item: dict[str, Any], place: str) -> list[str]:
    for name, types in (("content", THOUGHTS), ("summary", SUMMARIES)):
        parts = item.get(name)
        texts = []
        for index, part in enumerate(parts if isinstance(parts, list) else []):
            where = f"{place}.{name}[{index}]"
            types.check(part, where)
            texts.append(text_field(part, "text", where))
        if texts:
            return texts
    return []


def _read_call(item: dict[str, Any], place: str) -> dict[str, Any]:
    name = text_field(item, "name", place)
    function = {"name": name, "arguments": read_call_arguments(item.get("arguments"), f"{place}.arguments")}
    return {"id": str(item.get("call_id", "")), "type": "function", "function": function}
