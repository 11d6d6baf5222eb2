"""Anthropic's blocks become the messages that chat templates read. Each type with a text is read, in each place."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.server.api.anthropic.message_blocks import read_conversation

TEXT = {"type": "text", "text": "see below", "citations": [], "cache_control": {"type": "ephemeral"}}
PLAIN_DOCUMENT = {
    "type": "document",
    "title": "Rome",
    "context": "a guide",
    "source": {"type": "text", "media_type": "text/plain", "data": "It is warm."},
    "citations": {"enabled": True},
}
PLAIN_TEXT = "<document>\n<title>Rome</title>\n<context>a guide</context>\nIt is warm.\n</document>"
CONTENT_DOCUMENT = {"type": "document", "title": None, "source": {"type": "content", "content": [TEXT, TEXT]}}
CONTENT_TEXT = "<document>\nsee below\nsee below\n</document>"
SEARCH_RESULT = {"type": "search_result", "source": "https://a.b", "title": "Found", "content": [TEXT]}
SEARCH_TEXT = "<search_result>\n<source>https://a.b</source>\n<title>Found</title>\nsee below\n</search_result>"
REFERENCE = {"type": "tool_reference", "tool_name": "get_weather"}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def answer(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


def result(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", **({} if content is None else {"content": content}), **fields}


def read(*messages: Any, system: Any = None) -> list[dict[str, Any]]:
    return read_conversation(system, [*messages])


def test_documents_and_search_results_become_text_in_user_turn() -> None:
    (message,) = read(user(TEXT, PLAIN_DOCUMENT, CONTENT_DOCUMENT, SEARCH_RESULT))
    assert message == {"role": "user", "content": parts("see below", PLAIN_TEXT, CONTENT_TEXT, SEARCH_TEXT)}
    string_source = {"type": "document", "source": {"type": "content", "content": "It is warm."}}
    assert read(user(string_source)) == [{"role": "user", "content": "<document>\nIt is warm.\n</document>"}]


def test_documents_and_search_results_become_text_in_tool_result() -> None:
    content = [TEXT, REFERENCE, SEARCH_RESULT, PLAIN_DOCUMENT]
    (message,) = read(user(result(content)))
    texts = parts("see below", "get_weather", SEARCH_TEXT, PLAIN_TEXT)
    assert message == {"role": "tool", "tool_call_id": "c1", "content": texts}
    assert read(user(result([REFERENCE])))[0]["content"] == "get_weather"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (result("sunny"), "sunny"),
        (result(), ""),
        (result([]), ""),
        (result("no such city", is_error=True), "no such city"),
        (result(is_error=True), "error"),
        (result([], is_error=True), "error"),
        (result("", is_error=False), ""),
    ],
)
def test_failed_tool_result_without_content_reads_error(block: Any, text: str) -> None:
    assert read(user(block)) == [{"role": "tool", "tool_call_id": "c1", "content": text}]


def test_assistant_blocks_become_content_reasoning_and_tool_calls() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    (message,) = read(answer(thought, redacted, TEXT, {**TEXT, "text": "!"}, USE))
    said = {"role": "assistant", "content": "see below!", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    assert message == said
    assert read(answer(USE)) == [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert read(answer(thought)) == [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]
    assert read(answer()) == [{"role": "assistant", "content": ""}]


def test_consecutive_turns_of_one_role_are_merged() -> None:
    first, second = {"role": "user", "content": "one"}, user({**TEXT, "text": "two"})
    assert read(first, second) == [{"role": "user", "content": parts("one", "two")}]
    thinking = answer({"type": "thinking", "thinking": "Hm.", "signature": ""})
    assert read(first, thinking, {"role": "assistant", "content": "I look."}, answer(USE), user(result("sunny"))) == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    between = {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in read(first, between, between, second)] == ["user", "system", "user"]


def test_text_around_tool_results_keeps_order() -> None:
    messages = read(user(TEXT, result("a"), result("b"), TEXT), {"role": "user", "content": "more"})
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "see below"),
        ("tool", "a"),
        ("tool", "b"),
        ("user", parts("see below", "more")),
    ]


def test_system_blocks_become_text_parts() -> None:
    hello = {"role": "user", "content": "a"}
    assert read(hello, system=[TEXT, TEXT])[0] == {"role": "system", "content": parts("see below", "see below")}
    assert read(hello, system=[])[0] == {"role": "system", "content": []}


def without(block: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != name}


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        (answer(without(USE, "id")), "content[0].id"),
        (answer({**USE, "id": 7}), "content[0].id"),
        (answer(without(USE, "name")), "content[0].name"),
        (answer(without(USE, "input")), "content[0].input"),
        (answer({**USE, "toolset_name": "computer"}), "content[0].toolset_name"),
        (answer({"type": "redacted_thinking"}), "content[0].data"),
        (answer({"type": "thinking", "signature": ""}), "content[0].thinking"),
        (answer(result("a")), "content[0]"),
        (user(USE), "content[0]"),
        (user({"type": "thinking", "thinking": "", "signature": ""}), "content[0]"),
        (user(without(result("a"), "tool_use_id")), "content[0].tool_use_id"),
        (user(result("a", is_error="yes")), "content[0].is_error"),
        (user(result(7)), "content[0].content"),
        (user(result([{"type": "image", "source": {}}])), "content[0].content[0]"),
        (user(result([without(REFERENCE, "tool_name")])), "content[0].content[0].tool_name"),
        (user(REFERENCE), "content[0]"),
        (user({"type": "document"}), "content[0].source"),
        (user({**PLAIN_DOCUMENT, "source": {"type": "base64", "data": ""}}), "content[0].source"),
        (user({**PLAIN_DOCUMENT, "source": {"type": "text"}}), "content[0].source.data"),
        (user({**PLAIN_DOCUMENT, "title": 7}), "content[0].title"),
        (
            user({**PLAIN_DOCUMENT, "source": {"type": "text", "media_type": "text/html", "data": ""}}),
            "content[0].source.media_type",
        ),
        (
            user({"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}),
            "content[0].source.content[0]",
        ),
        (user(without(SEARCH_RESULT, "source")), "content[0].source"),
        (user(without(SEARCH_RESULT, "content")), "content[0].content"),
        (user({"type": "text"}), "content[0].text"),
        (user("text"), "content[0]"),
        ({"role": "system", "content": [{"type": "tool_removal", "tool": {}}]}, "content[0]"),
        ({"role": "system", "content": "a", "clear_at": "next_user_message"}, "clear_at"),
    ],
)
def test_incomplete_or_unsupported_block_is_refused_by_parameter_path(message: Any, parameter: str) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]") as caught:
        read(message)
    assert caught.value.parameter == f"messages[0].{parameter}"
