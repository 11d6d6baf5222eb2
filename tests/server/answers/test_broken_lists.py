"""In a list of calls a broken member stays text and the other members are calls; a cut answer loses no text."""

from __future__ import annotations

from typing import Any

import call_slips
import pytest

from octavo.server.answers.harmony import HarmonyFormat
from octavo.server.answers.list_members import member_end
from octavo.server.answers.object_calls import (
    ApertusFormat,
    CohereFormat,
    CommandRFormat,
    FunctoolsFormat,
    GraniteFormat,
    MiniMaxM1Format,
    NemotronFormat,
    Phi4MiniFormat,
    ToolCallsListFormat,
)
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.python_calls import LFM2Format, OLMo3Format, PythonicFormat
from octavo.server.answers.tool_format import Function

OBJECTS: list[Any] = [
    *(GraniteFormat, Phi4MiniFormat, FunctoolsFormat, NemotronFormat, ToolCallsListFormat),
    *(MiniMaxM1Format, CohereFormat, CommandRFormat, ApertusFormat),
]
LISTS: list[Any] = [*OBJECTS, LFM2Format, OLMo3Format]
STRING = {"type": "string"}
FUNCTIONS = [
    Function("bash", {"type": "object", "properties": {"cmd": {}}}),
    Function("read", {"type": "object", "properties": {"path": STRING}}),
]
CALLS: list[tuple[str, dict[str, Any]]] = [("bash", {"cmd": "ls"}), ("read", {"path": "a"}), ("bash", {"cmd": "pwd"})]


def read(form: Any, text: str, *, is_cut: bool = False) -> list[Part]:
    """Read a text whole and in characters, with the same result."""
    found = []
    for pieces in ([text], list(text)):
        parser = form().parser(FUNCTIONS)
        found.append(joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut)))
    assert found[0] == found[1]
    return found[0]


def content(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "content")


@pytest.mark.sweep(16)
@pytest.mark.parametrize("form", LISTS)
@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize("slip", [("bash", "nosuch"), ('"ls"', "..."), ('"ls"', "x y")])
def test_broken_list_member_keeps_other_tool_calls(form: Any, broken: int, slip: tuple[str, str]) -> None:
    calls = [CALLS[1], CALLS[2]]
    calls.insert(broken, ("bash", {"cmd": "ls"}))
    text = form().write(calls)
    start = [place for place in range(len(text)) if text.startswith("bash", place)][0 if broken < 2 else 1]
    text = text[:start] + text[start:].replace(*slip, 1)
    parts = read(form, text)
    assert [name for name, _ in call_slips.calls_of(parts)] == [name for name, _ in (CALLS[1], CALLS[2])]
    assert slip[1] in content(parts)


@pytest.mark.parametrize("form", LISTS)
def test_ambiguous_call_inside_string_is_content(form: Any) -> None:
    """The string of the first call contains quotes that are not escaped, and the text of a second call."""
    inner = form().write([CALLS[1]]).removeprefix(form().opens).removesuffix(form().closes)
    for said in (f'it is "{inner}" or', f"such as {inner}, {inner}"):
        text = form().write([("nosuch", {"cmd": "SAID"})]).replace("SAID", said)
        parts = read(form, text)
        assert call_slips.calls_of(parts) == []
        assert content(parts) == text


def test_unmarked_python_list_with_invalid_call_is_content() -> None:
    for text in ('[nosuch(path=1), read(path="a")]', '[bash(cmd=x), read(path="a")]'):
        assert content(read(PythonicFormat, text)) == text


def test_malformed_value_of_long_call_is_content_only() -> None:
    path = "x" * 1100
    text = f'<|tool_call_start|>[nosuch(cmd=1), read(path="{path}", cmd=[1, 2))'
    parts = read(LFM2Format, text, is_cut=True)
    assert call_slips.calls_of(parts) == [("read", f'{{"path": "{path}"')]
    assert content(parts).endswith("[1, 2))")


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ('{"a": {"b": ...}}, {', 17),
        ("f(a='x'), g()", 8),
        ('{"a": "b", "c": [1, (2)]}', 25),
        ('{"a": "say "hi"}}, {"b": 1}', None),
        ('{"a": "b"', None),
        ("{'a': `b`}", None),
        ('{"a": (1]}', None),
        ('[(1)"a"]', None),
        ("} {", None),
        ('"a"', None),
    ],
)
def test_list_member_ends_at_matching_bracket(text: str, end: int | None) -> None:
    assert member_end(text) == end


@pytest.mark.parametrize("form", [PythonicFormat, LFM2Format, OLMo3Format])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([1, [2, 3]], ["[1, [2", "[1, [", "[1"]),
        ({"a": "x", "b": {"c": "d"}}, ['{"a": "x", "b": {', '{"a": "x"']),
        (["it's", "[x"], ['["it\'s"', "["]),
    ],
)
def test_cut_python_value_is_emitted_up_to_complete_part(form: Any, value: Any, told: list[str]) -> None:
    text = form().write([("bash", {"cmd": value})])
    end = text.rindex(")")
    seen = set[str]()
    for cut in range(text.index("cmd=") + 5, end):
        ((name, arguments),) = call_slips.calls_of(read(form, text[:cut], is_cut=True))
        assert name == "bash"
        seen.add(arguments.removeprefix('{"cmd": '))
    assert {*told} <= seen


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<|channel|>final Hello", [("content", "Hello")]),
        ("<|channel|>final Hello <|mess", [("content", "Hello ")]),
        ("<|channel|>final Hello<|retu", [("content", "Hello")]),
        ("<|channel|>analysis I think", [("reasoning", "I think")]),
        ("<|start|>assistant<|channel|>commentary Let us", [("content", "Let us")]),
        ("<|channel|>final", []),
        ("<|channel|>final ", []),
        ("<|channel|>commentary t", []),
        ("<|channel|>commentary to=functions.ba", []),
        ("<|channel|>commentary <|const", []),
        ("<|channel|>fin", []),
    ],
)
def test_cut_answer_emits_text_after_bare_channel(text: str, told: list[tuple[str, str]]) -> None:
    assert [(part.kind, part.text) for part in read(HarmonyFormat, text, is_cut=True)] == told
