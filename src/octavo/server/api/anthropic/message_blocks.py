"""Converts Anthropic's conversations for chat templates."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from octavo.engine.template_traits import text_of
from octavo.errors import RequestError
from octavo.server.api.block_types import CACHE, LABEL, MEDIA, BlockTypes, Fields, fields, text_field
from octavo.server.api.conversation import text_part
from octavo.server.api.extra_fields import each

if TYPE_CHECKING:
    Message = dict[str, Any]
    Placed = tuple[Any, str]  # a block and its path

_ACCOUNTING = "x-anthropic-billing-header"
_ROLES = {"user", "assistant", "system"}
_CALLER = {"caller": "caller of the tool: the model, or code on Anthropic's servers"}
_QUOTES = {"citations": "quoted passages of sources: answers of this server have none"}
_CACHE = {"cache_control": CACHE}
_CALLS_ELSEWHERE = "this server has no tools of Anthropic's servers"
_ANSWERS_ONLY = "it is allowed only in an assistant's turn"
_TURNS_ONLY = "it is allowed only in a user's turn"
_SETTING = "declare tools only in the field tools"

MESSAGE = fields("role", "content", clear_at=(None, "never"), output_config=(None, {}))
TEXT = fields("text", harmless={**_CACHE, **_QUOTES})
DOCUMENT = fields("source", "title", "context", harmless={**_CACHE, **_QUOTES})
SEARCH_RESULT = fields("content", "source", "title", harmless={**_CACHE, **_QUOTES})
_TOOL_USE = fields("id", "name", "input", harmless={**_CACHE, **_CALLER}, toolset_name=(None,))
_TOOL_RESULT = fields("tool_use_id", "content", "is_error", harmless=_CACHE, toolset_name=(None,))
_THINKING = fields("thinking", harmless={"signature": LABEL})
_TEXTS: dict[str, Fields] = {"text": TEXT, "document": DOCUMENT, "search_result": SEARCH_RESULT}
_REFUSED: dict[str, str] = {
    **each(_CALLS_ELSEWHERE, "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
    **each(_CALLS_ELSEWHERE, "advisor_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result"),
    **each(_CALLS_ELSEWHERE, "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    **each(_CALLS_ELSEWHERE, "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing"),
    **each(_SETTING, "tool_addition", "tool_removal"),
    **each(MEDIA, "container_upload", "image"),
    "compaction": "it contains turns compacted by Anthropic's servers; send the turns themselves",
    "fallback": "this server has only one model",
}
SYSTEM_BLOCKS = BlockTypes({"text": TEXT}, each(_SETTING, "tool_addition", "tool_removal"))
USER_BLOCKS = BlockTypes(
    {**_TEXTS, "tool_result": _TOOL_RESULT},
    {**_REFUSED, **each(_ANSWERS_ONLY, "tool_use", "thinking", "redacted_thinking")},
)
ANSWER_BLOCKS = BlockTypes(
    {**_TEXTS, "tool_use": _TOOL_USE, "thinking": _THINKING, "redacted_thinking": fields("data")},
    {**_REFUSED, "tool_result": _TURNS_ONLY},
)
RESULT_BLOCKS = BlockTypes(
    {**_TEXTS, "tool_reference": fields("tool_name", harmless=_CACHE)}, each(MEDIA, "browser_state", "image")
)
SOURCES = BlockTypes(
    {"text": fields("data", "media_type"), "content": fields("content")}, each(MEDIA, "base64", "file", "url")
)
SOURCE_BLOCKS = BlockTypes({"text": TEXT}, {"image": MEDIA})
SEARCH_BLOCKS = BlockTypes({"text": TEXT})


def read_conversation(system: Any, messages: Any) -> list[Message]:
    """Convert a conversation for the chat template. Consecutive turns of one role are joined."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list of at least one message", parameter="messages")
    turns = [_read_blocks(message, f"messages[{index}]") for index, message in enumerate(messages)]
    result = [] if system is None else _read_system(system)
    for role, run in groupby(turns, key=lambda turn: turn[0]):
        blocks = [block for _, its_blocks in run for block in its_blocks]
        result += [_read_answer(blocks)] if role == "assistant" else _read_turn(role, blocks)
    return result


def _read_system(system: Any) -> list[Message]:
    """Omit the block that Claude Code adds for Anthropic's billing.

    The block differs in every request, so it would prevent hits in the prefix cache.
    """
    blocks = system
    if isinstance(system, list):
        texts = [block.get("text") if isinstance(block, dict) else None for block in system]
        blocks = [block for block, text in zip(system, texts, strict=True) if not str(text).startswith(_ACCOUNTING)]
        if system and not blocks:
            return []
    return [{"role": "system", "content": _read_texts(blocks, "system", SYSTEM_BLOCKS)}]


def _read_blocks(message: Any, place: str) -> tuple[str, list[Placed]]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{place}.role must be user or assistant", parameter=f"{place}.role")
    MESSAGE.check(message, place)
    return role, _placed(message.get("content"), f"{place}.content")


def _placed(content: Any, place: str) -> list[Placed]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, place)]
    if not isinstance(content, list):
        raise RequestError(f"{place} must be text or a list of blocks", parameter=place)
    return [(block, f"{place}[{index}]") for index, block in enumerate(content)]


def _read_answer(blocks: list[Placed]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, place in blocks:
        match ANSWER_BLOCKS.check(block, place):
            case "tool_use":
                calls.append(_read_tool_use(block, place))
            case "thinking":
                thoughts.append(text_field(block, "thinking", place))
            case "redacted_thinking":
                text_field(block, "data", place)  # only checked, because the data is encrypted
            case kind:
                texts.append(_read_text(kind, block, place))
    message: Message = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _read_turn(role: str, blocks: list[Placed]) -> list[Message]:
    types = USER_BLOCKS if role == "user" else SYSTEM_BLOCKS
    kinds = [(types.check(block, place), block, place) for block, place in blocks]
    messages: list[Message] = []
    for is_result, run in groupby(kinds, key=lambda each: each[0] == "tool_result"):
        if is_result:
            messages += [_read_result(block, place) for _, block, place in run]
        else:
            messages.append({"role": role, "content": _content([_read_text(*each) for each in run])})
    return messages or [{"role": role, "content": ""}]


def _content(texts: list[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [text_part(text) for text in texts]


def _read_texts(content: Any, place: str, types: BlockTypes) -> str | list[dict[str, str]]:
    blocks = _placed(content, place)
    return _content([_read_text(types.check(block, where), block, where) for block, where in blocks])


def _read_text(kind: str, block: dict[str, Any], place: str) -> str:
    match kind:
        case "document":
            ignored = [name for name in ("title", "context") if block.get(name) is not None]
            about = [_tagged(name, text_field(block, name, place)) for name in ignored]
            return _tagged("document", "\n".join([*about, _read_source(block.get("source"), f"{place}.source")]))
        case "search_result":
            about = [_tagged(name, text_field(block, name, place)) for name in ("source", "title")]
            text = text_of(_read_texts(block.get("content"), f"{place}.content", SEARCH_BLOCKS))
            return _tagged("search_result", "\n".join([*about, text]))
        case "tool_reference":
            return text_field(block, "tool_name", place)  # the name is enough, because the template gets all tools
    return text_field(block, "text", place)


def _read_source(source: Any, place: str) -> str:
    if SOURCES.check(source, place) == "content":
        return text_of(_read_texts(source.get("content"), f"{place}.content", SOURCE_BLOCKS))
    if source.get("media_type", "text/plain") != "text/plain":
        raise RequestError(f"{place}.media_type must be text/plain", parameter=f"{place}.media_type")
    return text_field(source, "data", place)


def _tagged(name: str, text: str) -> str:
    lines = "\n" if name in {"document", "search_result"} else ""
    return f"<{name}>{lines}{text}{lines}</{name}>"


def _read_result(block: dict[str, Any], place: str) -> Message:
    call_id, content, is_error = text_field(block, "tool_use_id", place), block.get("content"), block.get("is_error")
    if is_error is not None and not isinstance(is_error, bool):
        raise RequestError(f"{place}.is_error must be true or false", parameter=f"{place}.is_error")
    text = "" if content is None else _read_texts(content, f"{place}.content", RESULT_BLOCKS)
    if is_error and not text:
        text = "error"  # chat templates have no field for errors
    return {"role": "tool", "tool_call_id": call_id, "content": text or ""}


def _read_tool_use(block: dict[str, Any], place: str) -> dict[str, Any]:
    call_id, name, arguments = text_field(block, "id", place), text_field(block, "name", place), block.get("input")
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}.input must be an object", parameter=f"{place}.input")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
