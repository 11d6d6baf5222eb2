"""Every family's calls: written, let pass by its grammar, and read, however the text is cut."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from call_grammars import Grammars

from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.tool_format import Function

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.server.answers.tool_format import ToolFormat

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "is_long": {"type": "boolean"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [Function("get_weather", WEATHER), Function("now", NOTHING)]
DEEP = {"a": ["x", {"b": None}, 1.5], "ü": '狐"\\'}
WHOLE: dict[str, Any] = {"city": 'Rö"me\n\n {[, \\n <b>', "days": -2, "deep": DEEP, "is_long": True, "unit": "F"}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", WHOLE), ("now", {}), ("get_weather", {"city": ""})]
ALONE = {"llama3_json", "pythonic"}  # whose calls are the whole answer
each_format = pytest.mark.parametrize("family", FORMATS, ids=lambda family: family.__name__)


def read(form: ToolFormat, pieces: list[str], *, is_cut: bool = False, only_one: bool = False) -> list[Part]:
    parser = form.parser(FUNCTIONS, only_one=only_one)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


def told(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content, and calls with their arguments."""
    calls = [(part.text, "".join(p.text for p in parts if p.kind == "arguments" and p.call == part.call))
             for part in parts if part.kind == "call"]  # fmt: skip
    return "".join(part.text for part in parts if part.kind == "content"), calls


def valued(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


@each_format
def test_what_a_family_writes_is_read_however_it_is_cut(family: type[ToolFormat]) -> None:
    form = family()
    for before in ("", "I look.\n"):
        if before and form.name in ALONE:
            continue
        text = before + form.write(CALLS)
        whole = read(form, [text])
        content, calls = told(whole)
        assert content.rstrip() == before.rstrip()
        assert valued(calls) == CALLS
        assert read(form, list(text)) == whole
        for cut in range(1, len(text)):
            assert read(form, [text[:cut], text[cut:]]) == whole, f"cut at {cut}"
        assert valued(told(read(form, [text], only_one=True))[1]) == CALLS[:1]


@each_format
def test_nothing_of_a_call_that_was_cut_off_is_content(family: type[ToolFormat]) -> None:
    form = family()
    before = "" if form.name in ALONE else "I look.\n"
    text = before + form.write(CALLS)
    expected = told(read(form, [text]))[1]
    seen = set()
    for cut in range(len(text) + 1):
        parts = read(form, [text[:cut]], is_cut=True)
        assert read(form, list(text[:cut]), is_cut=True) == parts, f"cut at {cut}"
        content, calls = told(parts)
        assert before.startswith(content), f"cut at {cut}"
        for (name, arguments), (whole_name, whole_arguments) in zip(calls, expected, strict=False):
            assert name == whole_name
            assert whole_arguments.startswith(arguments), f"cut at {cut}"
        seen.add(len(calls))
    assert seen == {0, 1, 2, 3}


@each_format
def test_calls_that_are_none_are_content(family: type[ToolFormat]) -> None:
    form = family()
    unknown = form.write([("rm", {"city": "Rome"})])
    begun = form.write([("get_weather", {})]).partition("get_weather")[0]
    for text in (unknown, f"{begun}get_weather?", f"{begun}!", f"a {begun}", "a < b [c] {d} (e)", ""):
        assert read(form, [text]) == ([Part("content", text)] if text else []), text
        assert read(form, list(text)) == read(form, [text])


@each_format
def test_garbage_is_read_the_same_way_however_it_is_cut(family: type[ToolFormat]) -> None:
    form, rng = family(), random.Random(7)
    text = form.write(CALLS)
    words = [
        *"\"'\\{}[]()<>=:,; \n",
        *form.markers,
        "get_weather",
        "now",
        "city",
        "x",
        '"name"',
        form.write(CALLS[1:2]),
    ]
    for _ in range(150):
        pieces = [rng.choice(words) for _ in range(rng.randrange(1, 8))]
        start, end = sorted(rng.sample(range(len(text)), 2))
        garbage = "".join([text[:start], *pieces, text[end:]] if rng.random() < 0.7 else pieces)
        for is_cut in (False, True):
            assert read(form, list(garbage), is_cut=is_cut) == read(form, [garbage], is_cut=is_cut), garbage


@pytest.fixture(scope="module", params=["plain", "special"])
def grammars_of(request: pytest.FixtureRequest) -> Callable[[type[ToolFormat]], Grammars]:
    return cache(lambda family: Grammars(request.param, [*family.markers]))


PLAIN = {"city": 'Rö"me <b>', "days": 3, "deep": {"a": [1, "x"]}, "is_long": False, "unit": "F"}


@each_format
def test_grammars_let_pass_what_a_family_writes(
    grammars_of: Callable[[type[ToolFormat]], Grammars], family: type[ToolFormat]
) -> None:
    grammars = grammars_of(family)
    form = family(grammars.spell)
    one, two = form.write([("get_weather", PLAIN)]), form.write([("get_weather", {"city": "Rome"}), ("now", {})])
    wrongs = [{"city": "Rome", "days": "two"}, {"days": 2}, {"city": "Rome", "unit": "K"}, {"city": "R", "other": "x"}]
    wrong = [form.write([("get_weather", arguments)]) for arguments in wrongs]
    for only_one in (False, True):
        forced = StructuredOutputsParams(grammar=form.forced(FUNCTIONS, only_one=only_one))
        optional = StructuredOutputsParams(grammar=form.optional(FUNCTIONS, only_one=only_one))
        for structure in (forced, optional):
            assert grammars.accepts(structure, one)
            assert grammars.accepts(structure, two) is not only_one
            for text in wrong:
                assert not grammars.accepts(structure, text), text
        assert grammars.accepts(optional, "Hello.")
        assert not grammars.accepts(forced, "Hello.")
        if form.name not in ALONE:
            assert grammars.accepts(optional, "I look.\n" + one)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    either = StructuredOutputsParams(grammar=form.or_content(FUNCTIONS, schema, only_one=False))
    assert grammars.accepts(either, one)
    assert grammars.accepts(either, '{"a": 1}')
    assert not grammars.accepts(either, '{"a": "b"}')


@each_format
def test_tools_that_are_not_strict_take_any_arguments(
    grammars_of: Callable[[type[ToolFormat]], Grammars], family: type[ToolFormat]
) -> None:
    grammars = grammars_of(family)
    form = family(grammars.spell)
    free = [Function("get_weather", {"type": "object"}), Function("now", {"type": "object"})]
    structure = StructuredOutputsParams(grammar=form.optional(free, only_one=False))
    for arguments in (PLAIN, {}, {"other": [1, 2], "x": "y"}):
        assert grammars.accepts(structure, form.write([("now", arguments)])), arguments
