"""The ends of values without quotes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from octavo.server.answers.call_parser import MalformedError
from octavo.server.answers.kimi_k3 import KimiK3Format
from octavo.server.answers.parts import joined
from octavo.server.answers.tagged_calls import (
    GLM47Format,
    GLMFormat,
    MiniCPM5Format,
    MiniMaxM2Format,
    Qwen3CoderFormat,
    SeedOSSFormat,
    TaggedFormat,
)
from octavo.server.answers.tool_format import Function, ToolFormat
from octavo.server.answers.value_ends import MarkEnd, TagEnd, ValueEnd, slips_of

if TYPE_CHECKING:
    from collections.abc import Callable

STRING = {"type": "string"}
FUNCTIONS = [Function("bash", {"type": "object", "properties": {"cmd": STRING, "why": STRING}, "required": ["cmd"]})]


def read(form: ToolFormat, text: str, *, is_cut: bool = False) -> tuple[str, str]:
    """Return the content and the arguments, which must be the same if the text arrives in characters."""
    answers = []
    for pieces in ([text], list(text)):
        parser = form.parser(FUNCTIONS)
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))
        of_kind = ["".join(each.text for each in parts if each.kind == kind) for kind in ("content", "arguments")]
        answers.append((of_kind[0], of_kind[1]))
    assert answers[0] == answers[1]
    return answers[0]


def qwen(body: str, end: str = "</function>\n</tool_call>") -> str:
    return f"<tool_call>\n<function=bash>\n{body}{end}"


def test_argument_opening_tag_inside_line_is_text() -> None:
    body = "<parameter=cmd>\nx <parameter=why>\ny\n</parameter>\n"
    assert read(Qwen3CoderFormat(), qwen(body)) == ("", '{"cmd": "x <parameter=why>\\ny"}')


def test_value_containing_call_tag_requires_closing_tag() -> None:
    text = qwen("<parameter=cmd>\nA call <function=bash> b\n")
    assert read(Qwen3CoderFormat(), text) == (text, "")
    closed = qwen("<parameter=cmd>\nA call <function=bash> b\n</parameter>\n")
    assert read(Qwen3CoderFormat(), closed) == ("", '{"cmd": "A call <function=bash> b"}')


def test_incomplete_end_tag_is_text_unless_answer_was_truncated() -> None:
    text = qwen("<parameter=cmd>\nx\n</parameter>\n", "</fun")
    assert read(Qwen3CoderFormat(), text) == (text, "")
    assert read(Qwen3CoderFormat(), text, is_cut=True) == ("", '{"cmd": "x"')


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (GLMFormat, "<tool_call>bash\n<arg_key>cmd</arg_key>\n<arg_value>ls</arg_value>\n and more"),
        (GLM47Format, "<tool_call>bash<arg_key>cmd</arg_key><arg_value>ls</arg_value> and more"),
    ],
)
def test_call_without_closing_tag_is_text(family: type[ToolFormat], text: str) -> None:
    assert read(family(), text) == (text, "")


@pytest.mark.parametrize("name", ["read", "other_tool"])
def test_parsed_arguments_are_reset_between_calls(name: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("bash", {"cmd": name}), ("bash", {"cmd": "again"})]
    _, arguments = read(Qwen3CoderFormat(), Qwen3CoderFormat().write(calls))
    assert arguments == f'{{"cmd": "{name}"}}{{"cmd": "again"}}'


def calls_in(form: ToolFormat, text: str) -> list[tuple[str, str]]:
    """Return the calls of a text, which must be the same if it arrives in characters."""
    found = []
    for pieces in ([text], list(text)):
        parser = form.parser(FUNCTIONS)
        parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        arguments = ["".join(p.text for p in parts if p.kind == "arguments" and p.call == each.call) for each in parts]
        found.append([(each.text, of) for each, of in zip(parts, arguments, strict=True) if each.kind == "call"])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "value",
    [
        "</function>\n</tool_call>\n<tool_call>\n<function=",  # the end of the call, and a head that is broken
        "</function>\n<function=",
        "x</parameter></tool_call>",
    ],
)
def test_value_may_contain_call_end_and_incomplete_call_head(value: str) -> None:
    text = qwen(f"<parameter=cmd>\n{value}\n</parameter>\n")
    assert calls_in(Qwen3CoderFormat(), text) == [("bash", json.dumps({"cmd": value}))]


@pytest.mark.parametrize("ends", ["</parameter></seed:tool_call>", "</parameter></function> and"])
def test_closing_tag_before_malformed_call_end_is_text_if_later_fits(ends: str) -> None:
    value = f"x{ends}<function="
    text = SeedOSSFormat().write([("bash", {"cmd": value})])
    assert calls_in(SeedOSSFormat(), text) == [("bash", json.dumps({"cmd": value}))]
    without = text.replace("<function=</parameter>", "<function=")
    assert calls_in(SeedOSSFormat(), without) == [("bash", '{"cmd": "x"}')]


@pytest.mark.parametrize(
    "slip",
    [
        "</parameter/><parameter=why>y</parameter>\n</function>\n</seed:tool_call>",  # no line feed
        "</parameter/></seed:tool_call>",  # no end of the call
    ],
)
def test_two_errors_after_value_make_call_text(slip: str) -> None:
    text = f"<seed:tool_call>\n<function=bash>\n<parameter=cmd>x{slip}"
    assert read(SeedOSSFormat(), text) == (text, "")


def test_empty_value_requires_closing_tag() -> None:
    text = "<tool_call>bash\n<arg_key>cmd</arg_key>\n<arg_value> \n<arg_key>why</arg_key>\n<arg_value>y</arg_value>\n"
    assert read(GLMFormat(), f"{text}</tool_call>") == (f"{text}</tool_call>", "")


def test_call_nested_in_value_of_malformed_call_is_text() -> None:
    doubled = "<tool_call>bash<arg_key>cmd</arg_key><arg_value>x</arg_value></arg_value>"
    inner, other = GLM47Format().write([("bash", {"cmd": "y"})]), GLM47Format().write([("bash", {"cmd": "z"})])
    rest = f"<arg_key>why</arg_key><arg_value>{inner}</arg_value></tool_call>"
    assert calls_in(GLM47Format(), doubled + rest) == []
    assert calls_in(GLM47Format(), doubled + rest + other) == [("bash", '{"cmd": "z"}')]


def test_kimi_k3_call_inside_value_is_text() -> None:
    inner = KimiK3Format().write([("bash", {"cmd": "y"})])
    for value in (f"a {inner} b", f"{KimiK3Format.call_closes}<|open|>call tool="):
        text = KimiK3Format().write([("bash", {"cmd": value})])
        assert calls_in(KimiK3Format(), text) == [("bash", json.dumps({"cmd": value}))]


def test_call_heads_after_value_are_scanned_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    places, begins_call = [], TagEnd._begins_call

    def noted(self: TagEnd, text: str, place: int, *, is_over: bool) -> bool | None:
        places.append(place)
        return begins_call(self, text, place, is_over=is_over)

    monkeypatch.setattr(TagEnd, "_begins_call", noted)
    value = "</parameter></seed:tool_call><function=" * 50
    text = SeedOSSFormat().write([("bash", {"cmd": value})])
    assert calls_in(SeedOSSFormat(), text)[0][0] == "bash"
    assert len(places) < 6 * 50 + 20


PARTS = [
    "<",
    ">",
    "r>",
    "</",
    "</p",
    "er>",
    "</>",
    "</param>",
    "/parameter>",
    "<parameter>",
    "</paramete>",
    "</paramete",
]
"""Closing tags of Seed OSS that lost a part."""


def ends_of(form: TaggedFormat, text: str, *, is_text: bool = True, closes: str = "") -> tuple[str, str, int]:
    """Return the value, its closing mark ("?" if it stays text), and the number of characters needed to know that."""

    def new() -> TagEnd:
        call_starts = form.argument_starts(["why"])
        return TagEnd(form, closes or form.value_closes, call_starts, is_text=is_text, is_padded=form.is_padded)

    return followed(new, text)


def followed(new: Callable[[], ValueEnd], text: str) -> tuple[str, str, int]:
    """Return the same as `ends_of`.

    It must be equal for every longer beginning of the text, and if the value's beginning is dropped while it arrives.
    """

    def found(ends: ValueEnd, text: str, *, is_over: bool) -> tuple[int, int] | None:
        try:
            return ends.find(text, is_over=is_over)
        except MalformedError:
            return ends.looked_at, -1

    answers = [found(new(), text[:cut], is_over=False) for cut in range(len(text) + 1)]
    place, end = found(new(), text, is_over=True) or (0, 0)
    num_needed = next((cut for cut, each in enumerate(answers) if each is not None), len(text) + 1)
    assert {*answers[num_needed:]} <= {(place, end)}
    ends, num_dropped = new(), 0
    for cut in range(num_needed):
        assert found(ends, text[num_dropped:cut], is_over=False) is None
        num_certain = ends.num_certain(text[num_dropped:cut])
        assert num_dropped + num_certain <= place
        ends.drop(text[num_dropped : num_dropped + num_certain])
        num_dropped += num_certain
    last = found(ends, text[num_dropped:num_needed], is_over=num_needed > len(text))
    assert last == (place - num_dropped, end - num_dropped if end >= 0 else -1)
    return text[:place], "?" if end < 0 else text[place:end], num_needed


@pytest.mark.sweep(20)
@pytest.mark.parametrize(
    ("family", "value", "mark", "rest", "num_needed"),
    [
        (Qwen3CoderFormat, "x\n", "</parameter>", "\n</function>\n</tool_call>", 39),
        (Qwen3CoderFormat, "x", "</parameter>", "\n</function>\n</tool_call>", 39),
        (Qwen3CoderFormat, "x\n", "</parameter>", "\n<parameter=why>", 30),
        (Qwen3CoderFormat, "x", "</parameter>", "\n<parameter=why>", 29),
        (Qwen3CoderFormat, "x", "</parameter>", "<parameter=why>y\n</parameter>\n</function>\n</tool_call>", 28),
        (Qwen3CoderFormat, "x\n", "</parameter", "\n</function>\n</tool_call>", 39),
        (Qwen3CoderFormat, "x\n", "</parameter/>", "\n</function>\n</tool_call>", 41),
        (Qwen3CoderFormat, "x\n", "</parameter />", "\n</function>\n</tool_call>", 42),
        (Qwen3CoderFormat, "x", "?", "</parameter\n</function>\n</tool_call>", 38),
        (
            Qwen3CoderFormat,
            "x",
            "?",
            "</parameter\n</function>\n</tool_call><tool_call>\n<function=now>\n</function>\n</tool_call>",
            75,
        ),
        (Qwen3CoderFormat, "x\n", "", "<parameter=why>\ny", 18),
        (Qwen3CoderFormat, "x <parameter=why>\ny\n", "</parameter>", "\n</function>\n</tool_call>", 57),
        (Qwen3CoderFormat, "x\n<parameter=why>y\n", "</parameter>", "\n</function>\n</tool_call>", 56),
        (Qwen3CoderFormat, "x\n\n", "?", "<parameter=why>\ny", 19),
        (Qwen3CoderFormat, "x</function>\n</tool_call>", "?", "", 26),
        (Qwen3CoderFormat, "x\n", "", "</function>\n</tool_call>", 27),
        (
            Qwen3CoderFormat,
            "x\n",
            "",
            "</function>\n</tool_call><tool_call>\n<function=now>\n</function>\n</tool_call>",
            64,
        ),
        (Qwen3CoderFormat, "x\n</function>\n</tool_call>\n", "</parameter>", "\n</function>\n</tool_call>", 64),
        (Qwen3CoderFormat, "x\n</function>\ny\n", "", "</function>\n</tool_call>", 41),
        (Qwen3CoderFormat, "x\n</tool_call>\n", "</parameter>", "\n</function>\n</tool_call>", 52),
        (Qwen3CoderFormat, "x\n</parameter> y\n", "</parameter>", "\n</function>\n</tool_call>", 54),
        (Qwen3CoderFormat, "x\n</parameter> y\n", "?", "</function>\n</tool_call>", 42),
        (Qwen3CoderFormat, "x\n", "</parameter>", "\n</parameter>\n</function>\n</tool_call>", 27),
        (Qwen3CoderFormat, "x</parameter>\n", "</parameter>", "\n</function>\n</tool_call>", 51),
        (Qwen3CoderFormat, "x\n", "</parameter>", "\n<parameter=a>", 27),
        (Qwen3CoderFormat, "x</parameter>\n<parameter=a>\n", "</parameter>", "\n</function>\n</tool_call>", 65),
        (
            Qwen3CoderFormat,
            "a<tool_call>\n<function=now>\n</function>\n</tool_call>b\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            91,
        ),
        (
            Qwen3CoderFormat,
            "a<tool_call>\n<function=now>\n</function>\nb\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            79,
        ),
        (
            Qwen3CoderFormat,
            "a<tool_call>\n<function=now>\n<parameter=why>\ny\n</parameter>\n</function>\n</tool_call>\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            121,
        ),
        (Qwen3CoderFormat, "a<function= b\n", "</parameter>", "\n</function>\n</tool_call>", 51),
        (Qwen3CoderFormat, "x\n\n", "?", "</function>\n</tool_call>", 28),
        (Qwen3CoderFormat, "x\n/parameter>\n", "?", "</function>\n</tool_call>", 39),
        (Qwen3CoderFormat, "x\n</paramet\n", "?", "</function>\n</tool_call>", 37),
        (Qwen3CoderFormat, "", "?", "", 1),
        (Qwen3CoderFormat, "x", "?", "", 2),
        (Qwen3CoderFormat, "x\n", "</parameter>", "", 15),
        (Qwen3CoderFormat, "x\n", "</parameter>", "\n", 16),
        (Qwen3CoderFormat, "x\n", "</parameter>", "\n</func", 22),
        (Qwen3CoderFormat, "x\n</param", "?", "", 10),
        (Qwen3CoderFormat, "\n\n", "?", "</function>\n</tool_call>", 27),
        (Qwen3CoderFormat, "\n", "?", "</function>\n</tool_call>", 26),
        (Qwen3CoderFormat, "a<function=n b\n", "?", "</function>\n</tool_call>", 40),
        (Qwen3CoderFormat, "", "</parameter>", "\n</function>\n</tool_call>", 37),
        (
            Qwen3CoderFormat,
            "x\n</parameter></tool_call>\n<function=\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            75,
        ),
        (
            Qwen3CoderFormat,
            "x\n",
            "</parameter>",
            "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            65,
        ),
        (SeedOSSFormat, "x", "</parameter>", "\n</function>\n</seed:tool_call>", 43),
        (SeedOSSFormat, "x", "</parameter>", "\n<parameter=why>", 29),
        (SeedOSSFormat, "x", "</parameter>", "<parameter=why>", 28),
        (SeedOSSFormat, "x", "</parameter/>", "\n<parameter=why>", 30),
        (SeedOSSFormat, "x", "?", "</parameter/><parameter=why>", 29),
        (SeedOSSFormat, "x", "</parameter", "\n</function>\n</seed:tool_call>", 43),
        (SeedOSSFormat, "x", "?", "</parameter/></seed:tool_call>", 32),
        (SeedOSSFormat, "x", "\n", "<parameter=why>", 17),
        (SeedOSSFormat, "x<parameter=why>y", "</parameter>", "\n</function>\n</seed:tool_call>", 59),
        (SeedOSSFormat, "x", "\n", "</function>\n</seed:tool_call>", 32),
        (
            SeedOSSFormat,
            "x",
            "\n",
            "</function>\n</seed:tool_call><seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
            74,
        ),
        (SeedOSSFormat, "x\n</function>\ny", "?", "", 16),
        (SeedOSSFormat, "\n", "?", "</function>\n</seed:tool_call>", 31),
        (
            SeedOSSFormat,
            "x",
            "</parameter>",
            "\n</function>\n</seed:tool_call> y</parameter>\n</function>\n</seed:tool_call>",
            43,
        ),
        (SeedOSSFormat, "x</parameter></seed:tool_call> y", "</parameter>", "\n</function>\n</seed:tool_call>", 74),
        (SeedOSSFormat, "x</parameter>\n</function>\ny", "</parameter>", "\n</function>\n</seed:tool_call>", 69),
        (
            SeedOSSFormat,
            "x",
            "</parameter>",
            "\n</function>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
            69,
        ),
        (
            SeedOSSFormat,
            "x",
            "</parameter>",
            "</seed:tool_call><function= <seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
            84,
        ),
        (
            SeedOSSFormat,
            "x<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
            "</parameter>",
            "\n</function>\n</seed:tool_call>",
            104,
        ),
        (MiniMaxM2Format, "x", "</parameter>", "</invoke>\n</minimax:tool_call>", 43),
        (MiniMaxM2Format, "x", "</parameter>", '</invoke><invoke name="now">\n</invoke>\n</minimax:tool_call>', 51),
        (MiniMaxM2Format, "x", "</parameter>", '</invoke><invoke name="', 37),
        (MiniMaxM2Format, "x", "", '</invoke><invoke name="now">\n</invoke>\n</minimax:tool_call>', 39),
        (MiniMaxM2Format, "x", "", "</invoke>\n</minimax:tool_call>", 32),
        (MiniMaxM2Format, "x</parameter>\n</minimax:tool_call>", "</parameter>", "</invoke>\n</minimax:tool_call>", 76),
        (MiniMaxM2Format, "x", "\n", '<parameter name="why">', 24),
        (GLM47Format, "x", "</arg_value>", "</tool_call>", 25),
        (GLM47Format, "x", "</arg_value>", "<arg_key>why</arg_key>", 36),
        (GLM47Format, "x", "</arg_value/>", "<arg_key>why</arg_key>", 37),
        (GLM47Format, "x", "", "</tool_call>", 14),
        (GLM47Format, "x<arg_key>why</arg_key>", "?", "", 24),
        (GLM47Format, "x</tool_call> y", "</arg_value>", "</tool_call>", 39),
        (
            GLM47Format,
            "x<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
            "</arg_value>",
            "</tool_call>",
            93,
        ),
        (KimiK3Format, "x", "<|close|>argument<|sep|>", "<|close|>call<|sep|><|close|>tools<|sep|>", 66),
        (KimiK3Format, "x", "<|close|>argument<|sep|>", "<|open|>argument", 42),
        (KimiK3Format, "x", "", '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>', 81),
        (KimiK3Format, "x", "", "<|close|>call<|sep|><|close|>tools<|sep|>", 43),
        (Qwen3CoderFormat, "x\n</p\n", "?", "</function>\n</tool_call>", 31),
        (Qwen3CoderFormat, "x\n</\n", "?", "</function>\n</tool_call>", 30),
        (Qwen3CoderFormat, "x\ner>\n", "?", "</function>\n</tool_call>", 31),
        (Qwen3CoderFormat, "x\nr>\n", "?", "</function>\n</tool_call>", 30),
        (Qwen3CoderFormat, "x\n<parameter=why>", "?", "", 18),
        (Qwen3CoderFormat, "x\n</function>\n</tool", "?", "", 21),
        (Qwen3CoderFormat, "x\n", "</parameter>", "\n</function>\n</tool", 34),
        (Qwen3CoderFormat, "x\n", "?", "</function>\n</tool_call>\n</function>\n</tool_call>", 52),
        (
            Qwen3CoderFormat,
            "x\n",
            "",
            "</function>\n</tool_call><tool_call>\n<function=now>\n</function>\n</tool_call><tool_call>\n<function=now>\n</function>\n</tool_call>",
            64,
        ),
        (
            Qwen3CoderFormat,
            "a<tool_call>\n<function=now>\n</function>\n</tool_call>b<tool_call>\n<function=now>\n</function>\n</tool_call>c\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            143,
        ),
        (
            Qwen3CoderFormat,
            "a<tool_call>\n<function=now>\n</parameter>\n</function>\nb\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            92,
        ),
        (
            Qwen3CoderFormat,
            "a<tool_call>\n<function=now>\n<parameter=why>\n<tool_call>\n<function=now>\n</function>\n</tool_call></parameter>\n</function>\n</tool_call>\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            170,
        ),
        (
            Qwen3CoderFormat,
            "a<tool_call>\n<function=now>\n<parameter=why>\n<function=now>\n</function><parameter=why>\n\n</function>\n</tool_call>\n",
            "</parameter>",
            "\n</function>\n</tool_call>",
            149,
        ),
        (Qwen3CoderFormat, "x\n</tool_call><tool_call>\n<function=now>\n</function>\n</tool_call>", "?", "", 66),
        (Qwen3CoderFormat, "x\n</tool_call>\ny\n", "", "</function>\n</tool_call>", 42),
        (SeedOSSFormat, "x\n", "\n", "<parameter=why>", 18),
        (
            SeedOSSFormat,
            "x</parameter></seed:tool_call> a</parameter> b",
            "</parameter>",
            "\n</function>\n</seed:tool_call>",
            88,
        ),
        (SeedOSSFormat, "x", "</parameter>", "\n</function>\n</seed:tool", 38),
        (
            SeedOSSFormat,
            "x</parameter></seed:tool_call><function=now>z",
            "</parameter>",
            "\n</function>\n</seed:tool_call>",
            87,
        ),
        (
            SeedOSSFormat,
            "x</parameter></seed:tool_call><function=now z",
            "</parameter>",
            "\n</function>\n</seed:tool_call>",
            87,
        ),
        (SeedOSSFormat, "x</parameter/> y", "</parameter>", "\n</function>\n</seed:tool_call>", 58),
        (SeedOSSFormat, "x</parameter /", "?", "", 15),
        (SeedOSSFormat, "x", "</parameter>", "</seed:tool_call><seed:tool_call>\n<function=now>", 62),
        (SeedOSSFormat, "x", "</parameter>", "</seed:tool_call><function=", 41),
        (SeedOSSFormat, "x</parameter></seed:tool_call></", "?", "", 33),
        (
            SeedOSSFormat,
            "x</parameter/>\n</function>\n</seed:tool_call>y",
            "</parameter>",
            "\n</function>\n</seed:tool_call>",
            87,
        ),
        (
            GLM47Format,
            "<tool_call>f<arg_key>k</arg_key><arg_value><tool_call>g</tool_call></arg_value></tool_call>",
            "</arg_value>",
            "</tool_call>",
            115,
        ),
        (GLM47Format, "<tool_call>f", "</arg_value>", "</tool_call>", 36),
        (GLM47Format, "<tool_call>f<arg_key>why</arg_key>", "</arg_value>", "</tool_call>", 59),
        (GLM47Format, "<tool_call>f</tool_call>", "?", "</tool_call>", 37),
        (KimiK3Format, "x", "<|close|>argument<|sep|>", '<|close|>tools<|sep|><|open|>call tool="now', 69),
        (GLM47Format, "x", "?", "<arg_key>why</arg_key><arg_value>", 34),
        *((SeedOSSFormat, f"x{part}\n", "?", "<parameter=why>", 17 + len(part)) for part in PARTS),
        *((SeedOSSFormat, f"x{part}\n", "?", "</function>\n</seed:tool_call>", 32 + len(part)) for part in PARTS),
        *((SeedOSSFormat, f"x{part}\n", "?", "<parameter=no>", 14 + len(part)) for part in PARTS if part not in "<>"),
        (SeedOSSFormat, "x>\n<parameter=no>", "</parameter>", "\n<parameter=why>", 45),
        (SeedOSSFormat, "x/parameter><parameter=no>", "</parameter>", "\n<parameter=why>", 54),
        (SeedOSSFormat, "<function=r>\n<parameter=no>", "</parameter>", "\n</function>\n</seed:tool_call>", 70),
        (Qwen3CoderFormat, "x\n/parameter>\n", "?", "<parameter=no>", 26),
        (Qwen3CoderFormat, "x /parameter>\n<parameter=no>\n", "</parameter>", "\n<parameter=why>", 57),
        (Qwen3CoderFormat, "x>\n", "", "<parameter=why>\n", 19),
        (Qwen3CoderFormat, "/parameter>\n", "?", "<parameter=why>\n", 28),
        *(
            (KimiK3Format, f"x{mark}", "?", f"<|open|>argument{head}", 17 + len(mark) + len(head))
            for mark in ("", "|close|>argument<|sep|>")
            for head in (' key="why"', ' type="string" key="why"', ' type="null" key="why"')
        ),
        (KimiK3Format, "x|close|>argument<|sep|>", "?", '<|open|>argument key="no"', 47),
        (KimiK3Format, 'x<|open|>argument key="no"', "<|close|>argument<|sep|>", '<|open|>argument key="why"', 76),
        (GLM47Format, "x", "</arg_value>", "<arg_key>why</arg_key><arg_value>", 46),
        (GLM47Format, "x", "</arg_value/>", "<arg_key>why</arg_key><arg_value>", 47),
    ],
)
def test_value_end_is_found_with_minimal_lookahead(
    family: type[TaggedFormat], value: str, mark: str, rest: str, num_needed: int
) -> None:
    text = value + mark.strip("?") + rest
    assert ends_of(family(), text) == (value, mark, num_needed)


@pytest.mark.parametrize(
    ("value", "mark", "rest", "num_needed"),
    [
        ("1", "</parameter>", "\n</function>\n</seed:tool_call>", 25),
        ("1", "</parameter>", "y", 14),
        ("1", "</parameter/>", "<parameter=why>", 29),
        ("1", "", "<parameter=why>", 16),
        ("1", "\n", "</function>\n</seed:tool_call>", 32),
        ("1", "?", "", 2),
    ],
)
def test_json_value_ends_at_first_closing_tag(value: str, mark: str, rest: str, num_needed: int) -> None:
    assert ends_of(SeedOSSFormat(), value + mark.strip("?") + rest, is_text=False) == (value, mark, num_needed)


@pytest.mark.parametrize(
    ("family", "value", "rest", "num_needed"),
    [
        (GLM47Format, "1", "<arg_key>why</arg_key><arg_value>", 34),
        (Qwen3CoderFormat, "1\n\n", "<parameter=why>\n", 19),
        (Qwen3CoderFormat, "1", "<parameter=why>\n", 17),
    ],
)
def test_json_value_without_closing_tag_ends_before_next_argument(
    family: type[TaggedFormat], value: str, rest: str, num_needed: int
) -> None:
    assert ends_of(family(), value + rest, is_text=False) == (value, "", num_needed)


def test_json_value_may_contain_part_of_closing_tag_before_argument() -> None:
    value = '["e><arg_key>"]'
    assert ends_of(GLM47Format(), f"{value}</arg_value></tool_call>", is_text=False)[:2] == (value, "</arg_value>")


def test_value_end_is_found_in_long_text() -> None:
    value = f"{'x' * 700}</parameter></seed:tool_call>{'y' * 700}</parameter> z{'w' * 700}"
    text = value + "</parameter>\n</function>\n</seed:tool_call>"
    assert ends_of(SeedOSSFormat(), text) == (value, "</parameter>", len(text))


def test_overlong_function_name_does_not_begin_call() -> None:
    value = f"x</parameter></seed:tool_call><function={'n' * 600}"
    text = value + "</parameter>\n</function>\n</seed:tool_call>"
    assert ends_of(SeedOSSFormat(), text) == (value, "</parameter>", len(text))


@pytest.mark.parametrize(
    ("value", "mark", "rest", "num_needed"),
    [
        ("x", "]]>", "</param></function>", 23),
        ("x]]> y", "]]>", "</param></function>", 28),
        ("x]]</param>", "?", "</function>", 23),
    ],
)
def test_cdata_end_terminates_value_before_closing_tag(value: str, mark: str, rest: str, num_needed: int) -> None:
    assert ends_of(MiniCPM5Format(), value + mark.strip("?") + rest, closes="]]>") == (value, mark, num_needed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a]b]]>c", ("a]b", "]]>", 6)),
        ("]]>", ("", "]]>", 3)),
        ("ab]]", ("ab]]", "?", 5)),
        ("a" * 9, ("a" * 9, "?", 10)),
        ("a<[b]]>", ("a", "?", 3)),
        ("a]<[b]]>", ("a]", "?", 4)),
    ],
)
def test_mark_end_terminates_value_at_first_mark(text: str, expected: tuple[str, str, int]) -> None:
    assert followed(lambda: MarkEnd("<[", "]]>"), text) == expected


def test_mark_end_does_not_rescan_text() -> None:
    end = MarkEnd("<[", "]]>")
    assert end.find("abcd]", is_over=False) is None
    assert (end.looked_at, end.num_certain("abcd]")) == (3, 4)
    end.drop("abcd")
    assert end.looked_at == 0
    assert end.find("abcdef", is_over=False) is None
    end.drop("ab")
    assert end.looked_at == 2


@pytest.mark.parametrize(
    ("family", "text", "num_certain"),
    [
        (GLM47Format, "x\n", 2),
        (SeedOSSFormat, "x\n", 1),
        (SeedOSSFormat, "x\n\n", 2),
        (SeedOSSFormat, "x<", 1),
        (SeedOSSFormat, "xy</par", 2),
        (SeedOSSFormat, "xy</seed:", 2),
        (SeedOSSFormat, "xy</parameter>", 2),
    ],
)
def test_num_certain_counts_characters_that_cannot_be_end(
    family: type[TaggedFormat], text: str, num_certain: int
) -> None:
    form = family()
    ends = TagEnd(form, form.value_closes, form.argument_starts(["why"]), is_text=True, is_padded=False)
    assert ends.find(text, is_over=False) is None
    assert ends.num_certain(text) == num_certain


@pytest.mark.parametrize(
    ("tag", "slips"), [("</a>", r"</a(?:\s*/?>)?"), ("]]>", r"\]\]>"), ("</a", "</a"), ("<a>", "<a>")]
)
def test_only_closing_tags_accept_misspellings(tag: str, slips: str) -> None:
    assert slips_of(tag) == slips
