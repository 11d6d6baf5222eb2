"""What one blank, one lost character or one level more changes of a call, in every format that it concerns."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from octavo.server.answers.gemma_calls import GemmaFormat
from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.harmony import HarmonyFormat
from octavo.server.answers.kimi_k3 import KimiK3Format
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.muse_glimmer import MuseGlimmerFormat
from octavo.server.answers.named_calls import FunctionaryFormat, NamedFormat
from octavo.server.answers.nested_calls import MARK, MiniMaxM3Format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.python_calls import LFM2Format, PythonFormat, PythonicFormat
from octavo.server.answers.recipients import RecipientsFormat
from octavo.server.answers.tagged_calls import MiniCPM5Format, Qwen3CoderFormat, TaggedFormat
from octavo.server.answers.tool_format import Function, ToolFormat
from octavo.server.answers.tool_formats import HermesFormat, NamedMistralFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

HELD_CHARS, HELD_SPACE, HEAD_CHARS = 1024, 256, 256
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "days": {"type": "integer"},
    "free": {},
    "any": {"type": ["array", "object"]},
}
FUNCTIONS = [
    Function("save", {"type": "object", "properties": PROPERTIES, "required": ["path"]}),
    Function("now", {"type": "object", "properties": {}}),
]
CALLS: list[tuple[str, dict[str, Any]]] = [("save", {"path": 'a "b"', "days": 3, "free": [2, 1]}), ("now", {})]
TAGGED = [each for each in FORMATS if issubclass(each, TaggedFormat)]
IN_JSON = [
    each for each in (*FORMATS, GenericFormat)
    if not issubclass(each, (TaggedFormat, MiniMaxM3Format, PythonFormat, GemmaFormat))
]  # fmt: skip


def by_name(family: type[ToolFormat]) -> str:
    return family.__name__


def read(form: ToolFormat, pieces: Sequence[str], *, is_cut: bool = False) -> list[Part]:
    parser = form.parser(FUNCTIONS)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    """Return the names of the calls, and their arguments as they were told."""
    return [(part.text, "".join(p.text for p in parts if p.kind == "arguments" and p.call == part.call))
            for part in parts if part.kind == "call"]  # fmt: skip


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "content")


def valued(parts: list[Part]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls_of(parts)]


def objects_in(text: str) -> list[tuple[int, int]]:
    """Return the places of the outermost JSON objects in a text."""
    found, place = list[tuple[int, int]](), 0
    while (place := text.find("{", place)) >= 0:
        _, end = json.JSONDecoder().raw_decode(text, place)
        found.append((place, end))
        place = end
    return found


# --- blanks -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(16)
@pytest.mark.parametrize("blank", [" ", "\r\n\t "])
@pytest.mark.parametrize("family", IN_JSON, ids=by_name)
def test_blanks_within_json_do_not_change_calls(family: type[ToolFormat], blank: str) -> None:
    form = family()
    text = form.write(CALLS)
    places = [
        start + found.end()
        for start, end in objects_in(text)
        for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+', text[start : end - 1])
    ]
    everywhere = text
    for place in reversed(places):
        one = text[:place] + blank + text[place:]
        assert valued(read(form, [one])) == CALLS, one
        everywhere = everywhere[:place] + blank + everywhere[place:]
    assert valued(read(form, [everywhere])) == CALLS
    assert valued(read(form, list(everywhere))) == CALLS
    assert content_of(read(form, list(everywhere))) == ""


@pytest.mark.parametrize("family", FORMATS, ids=by_name)
def test_blanks_before_call_are_dropped_up_to_held_limit(family: type[ToolFormat]) -> None:
    form = family()
    written = form.write(CALLS)
    for num_blanks in (1, HELD_SPACE - 1, HELD_SPACE, HELD_SPACE + 1, HELD_SPACE + 7):
        parts = read(form, ["a" + " " * num_blanks, written])
        if valued(parts) != CALLS:
            assert form.reads_reasoning  # whose calls are whole messages
            continue
        assert content_of(parts) == "a" + " " * max(0, num_blanks - HELD_SPACE)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", [each for each in FORMATS if not each.reads_reasoning], ids=by_name)
@pytest.mark.parametrize("blank", ["", " ", "\n", "\n\n", " \t\r\n" * 9])
def test_blanks_after_call_are_dropped(family: type[ToolFormat], blank: str) -> None:
    form = family()
    for pieces in ([form.write(CALLS) + blank], [form.write(CALLS), *blank], list(form.write(CALLS) + blank)):
        parts = read(form, pieces)
        assert valued(parts) == CALLS
        assert content_of(parts) == ""


# --- arguments that are held back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", IN_JSON, ids=by_name)
def test_long_call_is_emitted_before_its_end(
    family: type[ToolFormat],
) -> None:
    form = family()
    head, _, rest = form.write([("save", {"path": "@" * 9})]).partition("@" * 9)
    arguments_head = '{"path": "'
    most = HELD_CHARS - len(arguments_head)
    for num_chars, is_told in ((most, False), (most + 1, True)):
        parser = form.parser(FUNCTIONS)
        told = joined([*parser.feed(head), *parser.feed("x" * num_chars)])
        expected = [Part("call", "save"), Part("arguments", arguments_head + "x" * num_chars)]
        assert told == (expected if is_told else [])
        more = joined(parser.feed("y"))
        assert more == (
            [Part("arguments", "y")] if is_told else [expected[0], Part("arguments", f"{expected[1].text}y")]
        )
        parts = joined([*told, *more, *parser.feed(rest), *parser.finish()])
        assert valued(parts) == [("save", {"path": "x" * num_chars + "y"})]
    whole = form.parser(FUNCTIONS)
    whole.num_held_chars = None
    assert whole.feed(head + "x" * 5000) == []
    assert valued(whole.feed(rest) + whole.finish()) == [("save", {"path": "x" * 5000})]


@pytest.mark.parametrize("family", IN_JSON, ids=by_name)
def test_second_call_is_held_back_like_first(family: type[ToolFormat]) -> None:
    form = family()
    text = form.write([("save", {"path": "x" * 600}), ("save", {"path": "z" * 600})])
    parser = form.parser(FUNCTIONS)
    start = text.index("z" * 600)
    before = joined(parser.feed(text[:start]))
    assert [part.call for part in before] == [0, 0]
    assert parser.feed("z" * 600) == []


# --- tags -------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(16)
@pytest.mark.parametrize("family", TAGGED, ids=by_name)
def test_value_never_ends_with_rest_of_closing_tag(family: type[TaggedFormat]) -> None:
    """A tag that lost its beginning or its end is no text of the value; a rest of one or two characters may be."""
    form = family()
    closes = form.value_closes
    text = form.write([("save", {"path": "a word@", "days": 3})])
    pad = "\n" if form.is_padded else ""
    assert f"@{pad}{closes}" in text
    for num_chars in range(1, len(closes)):
        for rest in (closes[-num_chars:], closes[:num_chars]):
            broken = text.replace(f"@{pad}{closes}", f"{pad}{rest}")
            for pieces in ([broken], list(broken)):
                parts = read(form, pieces)
                if not (calls := valued(parts)):
                    assert form.reads_reasoning or content_of(parts) == broken
                    continue
                [(_, arguments)] = calls
                if num_chars > 2:
                    assert not arguments["path"].endswith(rest), broken


@pytest.mark.parametrize("family", [each for each in TAGGED if each.raw_marks], ids=by_name)
def test_mark_around_value_is_never_text_of_truncated_value(family: type[TaggedFormat]) -> None:
    form = family()
    assert form.raw_marks is not None
    opens, closes = form.raw_marks
    value = f"a {form.value_closes} b"
    text = form.write([("save", {"path": "@"})]).replace("@", f"{opens}{value}{closes}")
    assert valued(read(form, [text])) == [("save", {"path": value})]
    for cut in range(text.index(opens), text.index(closes) + len(closes)):
        for pieces in ([text[:cut]], list(text[:cut])):
            parts = read(form, pieces, is_cut=True)
            [(name, arguments)] = calls_of(parts)
            begun = arguments.removeprefix('{"path": "')
            assert name == "save"
            assert value.startswith(begun), text[:cut]
            assert content_of(parts) == ""


def test_formats_with_marks_around_values_are_listed() -> None:
    assert [each for each in TAGGED if each.raw_marks] == [MiniCPM5Format]


@pytest.mark.parametrize("tags", ["<>a</>", "</path>", "<path>a</days>", "<path>a</path></save>", "<any></item></any>"])
def test_malformed_nested_tag_breaks_call(tags: str) -> None:
    form = MiniMaxM3Format()
    text = form.write([("save", {"path": "@"})])
    start = text.index(f"{MARK}<path>")
    end = text.index(f"{MARK}</invoke>")
    text = text[:start] + tags.replace("<", f"{MARK}<") + text[end:]
    expected = [Part("content", text)]
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


@pytest.mark.parametrize("tag", ["</function", "</function/>", "</function/"])
def test_misspelled_end_of_call_is_dropped(tag: str) -> None:
    text = Qwen3CoderFormat().write([("save", {"path": "a", "days": 3})]).replace("</function>", tag)
    for pieces in ([text], list(text)):
        parts = read(Qwen3CoderFormat(), pieces)
        assert (valued(parts), content_of(parts)) == ([("save", {"path": "a", "days": 3})], "")


@pytest.mark.parametrize("family", FORMATS, ids=by_name)
def test_line_feed_at_end_of_string_is_kept(family: type[ToolFormat]) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("save", {"path": "a\n", "free": "b\n"})]
    text = family().write(calls)
    for pieces in ([text], list(text)):
        assert valued(read(family(), pieces)) == calls


@pytest.mark.parametrize(
    "family", [each for each in TAGGED if each not in {KimiK3Format, MuseGlimmerFormat}], ids=by_name
)
def test_truncated_name_of_tagged_call_is_dropped(family: type[TaggedFormat]) -> None:
    """In the other two formats, a quote or the head of a message shows that the name is whole."""
    begun, name, rest = family().write([("save", {"path": "a"})]).partition("save")
    assert calls_of(read(family(), [begun + name], is_cut=True)) == []
    assert calls_of(read(family(), [begun + name + rest[:1]], is_cut=True)) == [("save", "")]


@pytest.mark.parametrize("family", [LFM2Format, PythonicFormat], ids=by_name)
def test_python_argument_needs_name(family: type[ToolFormat]) -> None:
    text = family().write([("save", {"path": "a"})]).replace("path", "")
    for pieces in ([text], list(text)):
        assert read(family(), pieces) == [Part("content", text)]


@pytest.mark.parametrize("attributes", ['type="string"', "", 'name="path" type="string"'])
def test_kimi_k3_argument_needs_key(attributes: str) -> None:
    text = KimiK3Format().write([("save", {"path": "a"})])
    assert ' key="path" type="string"' in text
    text = text.replace(' key="path" type="string"', f" {attributes}".rstrip())
    assert calls_of(read(KimiK3Format(), [text])) == []
    assert calls_of(read(KimiK3Format(), list(text))) == []


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [GemmaFormat, MiniMaxM3Format], ids=by_name)
@pytest.mark.parametrize("is_list", [False, True])
def test_call_with_values_nested_above_limit_is_text(family: type[ToolFormat], is_list: bool) -> None:
    """The arguments are at depth 0, and values down to depth 64 are read."""

    def nested(depth: int) -> Any:
        value: Any = "x"
        for _ in range(depth):
            value = [value] if is_list else {"a": value}
        return value

    form = family()
    most = 64 if family is GemmaFormat else 65
    for depth in (1, most - 1, most):
        assert valued(read(form, [form.write([("save", {"free": nested(depth)})])])) == [
            ("save", {"free": nested(depth)})
        ]
    for depth in (most + 1, most + 2):
        text = form.write([("save", {"free": nested(depth)})])
        assert read(form, [text]) == [Part("content", text)]


@pytest.mark.parametrize("family", [LFM2Format, GemmaFormat], ids=by_name)
def test_call_with_argument_name_above_limit_is_text(family: type[ToolFormat]) -> None:
    form = family()
    for length, is_read in ((511, True), (512, True), (513, False), (2000, False)):
        text = form.write([("save", {"k" * length: 1})])
        for pieces in ([text], list(text)):
            assert valued(read(form, pieces)) == ([("save", {"k" * length: 1})] if is_read else [])


@pytest.mark.parametrize("family", [each for each in FORMATS if issubclass(each, NamedFormat)], ids=by_name)
def test_head_longer_than_limit_is_text(family: type[NamedFormat]) -> None:
    form = family()
    before, _, behind = form.write([("save", {"path": "a"})]).partition("save")
    head = before[len(form.opens) + len(form.call_opens) :] + "save"
    rest = behind.partition(form.arguments_open.strip())[0].rstrip()
    for num_chars, is_read in ((0, True), (1, True), (HEAD_CHARS, True), (HEAD_CHARS + 1, False)):
        num_blanks = max(0, num_chars - len(head) - len(rest))
        text = before + "save" + rest + " " * num_blanks + behind.removeprefix(rest).lstrip()
        for pieces in ([text], list(text)):
            assert bool(calls_of(read(form, pieces))) is is_read, num_chars
        begun = text[: text.rindex("{")].rstrip()
        cut = read(form, [begun], is_cut=True)
        assert (content_of(cut) == "") is is_read, num_chars
        assert is_read or cut == [Part("content", begun)]


def test_text_is_emitted_once_it_cannot_be_head() -> None:
    parser = FunctionaryFormat().parser(FUNCTIONS)
    text = "<function=" + "x" * HEAD_CHARS
    assert parser.feed(text) == []
    assert parser.feed("y") == [Part("content", f"{text}y")]


@pytest.mark.parametrize("family", [HarmonyFormat, MuseGlimmerFormat], ids=by_name)
def test_blanks_may_end_message_head(family: type[ToolFormat]) -> None:
    form = family()
    text = form.write([("save", {"path": "a"})])
    for blank in (" ", "\n", "\r\n  "):
        spread = text.replace("<|message|>", f"{blank}<|message|>")
        assert valued(read(form, [spread])) == [("save", {"path": "a"})], spread
        assert valued(read(form, list(spread))) == [("save", {"path": "a"})]


@pytest.mark.parametrize(("num_chars", "is_read"), [(HEAD_CHARS, True), (HEAD_CHARS + 1, False)])
def test_message_head_longer_than_limit_is_text(num_chars: int, is_read: bool) -> None:
    head = "<|channel|>commentary to=functions.save".ljust(num_chars)
    for pieces in ([f"{head}<|message|>{{}}<|call|>"], [*head, "<|message|>{}<|call|>"]):
        assert valued(read(HarmonyFormat(), pieces)) == ([("save", {})] if is_read else [])


@pytest.mark.parametrize(("num_chars", "is_read"), [(HEAD_CHARS + 11, True), (HEAD_CHARS + 12, False)])
def test_head_longer_than_limit_is_text_in_truncated_answer(num_chars: int, is_read: bool) -> None:
    """The mark behind a head, which may have been cut off, has 11 characters."""
    text = "<|channel|>commentary to=functions.save".ljust(num_chars)
    for pieces in ([text], list(text)):
        assert content_of(read(HarmonyFormat(), pieces, is_cut=True)).strip() == ("" if is_read else text.strip())


@pytest.mark.parametrize(("num_chars", "is_read"), [(HEAD_CHARS - 1, True), (HEAD_CHARS, False)])
def test_name_longer_than_limit_is_text(num_chars: int, is_read: bool) -> None:
    text = f'[TOOL_CALLS]{"save".ljust(num_chars)}{{"path": "a"}}'
    for pieces in ([text], list(text)):
        parts = read(NamedMistralFormat(), pieces)
        assert valued(parts) == ([("save", {"path": "a"})] if is_read else [])
        assert content_of(parts) == ("" if is_read else text)


@pytest.mark.parametrize("num_brackets", [1, 7, 8, 20])
def test_surplus_brackets_before_closing_mark_are_dropped_if_they_are_few(num_brackets: int) -> None:
    text = f'<tool_call>{{"name": "now", "arguments": {{}}}}{"}" * num_brackets}</tool_call>'
    for pieces in ([text], list(text)):
        parts = read(HermesFormat(), pieces)
        assert valued(parts) == [("now", {})]
        assert content_of(parts) == ("" if num_brackets < 8 else "}" * num_brackets + "</tool_call>")


# --- the ends of calls ------------------------------------------------------------------------------------------------


def test_first_message_end_mark_ends_arguments() -> None:
    call = HarmonyFormat().write([("save", {"path": "a"})])
    later = '<|start|>assistant<|channel|>final<|message|>x "} y<|end|>'
    text = call.replace("<|call|>", " and so<|call|>") + later
    for pieces in ([text], list(text)):
        assert valued(read(HarmonyFormat(), pieces)) == [("save", {"path": "a"})]
    two = call.replace("<|call|>", ' and "} so<|call|>') + later
    for pieces in ([two], list(two)):
        assert calls_of(read(HarmonyFormat(), pieces)) == []


@pytest.mark.parametrize("blank", [" ", "\n", " \r\n\t"])
@pytest.mark.parametrize("family", [HarmonyFormat, MuseGlimmerFormat], ids=by_name)
def test_blanks_before_message_end_are_dropped(family: type[ToolFormat], blank: str) -> None:
    text = family().write([("save", {"path": "a"})])
    end = text.rindex("<|")
    for pieces in ([text[:end] + blank + text[end:]], [*text[:end], *blank, text[end:]]):
        assert valued(read(family(), pieces)) == [("save", {"path": "a"})]
        assert content_of(read(family(), pieces)) == ""


@pytest.mark.parametrize(
    ("rest", "is_call"),
    [("sa", True), ("save", True), ("save[AR", True), ("save[ARGS]", True), ("sa[ve{", False), ("sa ve", False),
     ('sa[ve{"path"', False), ("save so it", False)],
)  # fmt: skip
def test_truncated_name_is_dropped_only_if_it_may_be_function(rest: str, is_call: bool) -> None:
    text = f"[TOOL_CALLS]{rest}"
    for before in ("", '[TOOL_CALLS]save[ARGS]{"path": "a"}so'):
        for pieces in ([before + text], list(before + text)):
            told = content_of(read(NamedMistralFormat(), pieces, is_cut=True))
            assert told.removeprefix("so" if before else "") == ("" if is_call else text)


@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
def test_blanks_around_last_list_mark_are_dropped(blank: str) -> None:
    text = blank.join(["<|python_start|>", "[", "now", "(", ")", "]", "<|python_end|>", ""])
    for pieces in ([text], list(text)):
        assert read(PythonicFormat(), pieces) == [Part("call", "now"), Part("arguments", "{}")]
    untagged = f"[now()]{blank}"
    assert read(PythonicFormat(), [untagged]) == [Part("call", "now"), Part("arguments", "{}")]


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ("[", True), ("[sa", True), ("[save", True), ("[save(", True), ("[save(pa", True), ("[ now ( )", True),
        ("[save(1", True), ("[save(1, ", False), ("[save(pa, x", False), ("[save(pa x)", False), ("[save()(", False),
        ("[other(", False), ("[1, 2", False), ("[save.x(", False), ("[now(), sa", True),
    ],
)  # fmt: skip
def test_truncated_list_is_dropped_only_if_it_may_become_calls(text: str, is_call: bool) -> None:
    for pieces in ([text], list(text)):
        assert content_of(read(PythonicFormat(), pieces, is_cut=True)) == ("" if is_call else text)


# --- grammars ---------------------------------------------------------------------------------------------------------


def test_longest_mark_is_matched() -> None:
    class Marked(ToolFormat):
        markers = ("<a", "<a>", "<a>b", "c")

    assert Marked()._pieces("x<a>by<a><ac") == ["x", "<a>b", "y", "<a>", "<a", "c"]
    assert Marked()._literal("c<a>") == '"c" "<a>"'
    assert Marked(lambda mark: f"<[{len(mark)}]>")._literal("cd<a>") == '<[1]> "d" <[3]>'
    assert Marked()._literal("") == ""


# --- repairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["", " ", " x", "}", ' {"days": 3}', ", 1"])
@pytest.mark.parametrize("is_first", [False, True])
def test_arguments_in_string_or_before_name_become_one_object(rest: str, is_first: bool) -> None:
    """Anything behind the object in the string is a slip, and what is told is JSON in any case."""
    members = ['"name": "save"', '"arguments": ' + json.dumps('{"path": 1}' + rest)]
    text = f"<tool_call>{{{', '.join(members[::-1] if is_first else members)}}}</tool_call>"
    for pieces in ([text], list(text)):
        parts = read(HermesFormat(), pieces)
        assert valued(parts) == ([] if rest.strip() else [("save", {"path": 1})])
        assert content_of(parts) == (text if rest.strip() else "")


@pytest.mark.parametrize("family", [NamedMistralFormat, RecipientsFormat], ids=by_name)
@pytest.mark.parametrize("value", ["a", 'a "b" c'])
def test_blanks_after_repaired_call_are_dropped(family: type[ToolFormat], value: str) -> None:
    text = family().write([("save", {"path": "@"})]).replace("@", value) + " \n"
    for pieces in ([text], list(text)):
        parts = read(family(), pieces)
        assert (valued(parts), content_of(parts)) == ([("save", {"path": value})], "")


def test_argument_names_decide_which_quote_ends_value() -> None:
    """A quote that is not escaped ends a string only before the name of an argument."""
    text = '<tool_call>{"name": "save", "arguments": {"path": "a "b" c", "other": "d"}}</tool_call>'
    free = Function("save", {"type": "object", "additionalProperties": True, "properties": PROPERTIES})
    told = []
    for functions in (FUNCTIONS, [free]):
        parser = HermesFormat().parser(functions)
        told.append(calls_of(joined(parser.feed(text) + parser.finish())))
    assert told[1] == [("save", '{"path": "a \\"b\\" c", "other": "d"}')]
    assert told[0] == told[1]  # an unknown name is likelier than a string that holds it
    inside = '<tool_call>{"name": "save", "arguments": {"path": "a", "b": "c" "}}</tool_call>'
    told = []
    for functions in (FUNCTIONS, [free]):
        parser = HermesFormat().parser(functions)
        told.append(calls_of(joined(parser.feed(inside) + parser.finish())))
    assert told[0] != told[1]
