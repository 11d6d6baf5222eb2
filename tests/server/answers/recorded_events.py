"""What the parsers tell of many answers, and when: each event with its kind, text, call and start.

Other tests check what an answer means. These checksums show that a change of the code changed what a client gets in a
stream, or the moment at which the client gets it. After such a change on purpose, compare the events before and after
it, run the other tests of this folder, and record anew:

    cd tests; python -m server.answers.recorded_events HermesFormat calls
    cd tests; python -m server.answers.recorded_events > server/answers/events.txt
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from typing import TYPE_CHECKING, Any

from call_slips import PROPERTIES, SLIPS, Case, arguments_of, string_of

from octavo.server.answers.generic_calls import GenericFormat
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.object_calls import ApertusFormat
from octavo.server.answers.parts import ReasoningParser
from octavo.server.answers.reasoning_forms import REASONING_FORMS
from octavo.server.answers.tagged_calls import TaggedFormat
from octavo.server.answers.tool_format import Function, ToolFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from octavo.server.answers.parts import AnswerParser, Part

FORMS = {each.__name__: each for each in (*FORMATS, GenericFormat)}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "größe": {"type": ["number", "null"]},
        "unit": {"enum": ["°C", "F", 3]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "inside": {"$ref": "#"},
        "list": {"type": "array", "items": {"$ref": "#"}},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "string"}}},
        "free": {},
    },
    "required": ["größe"],
}
FUNCTIONS = [
    Function("save_note", {"type": "object", "properties": PROPERTIES, "required": ["path"]}),
    Function("now", {"type": "object", "properties": {}}),
    Function("find", NODE),
    Function("any", {"type": "object", "additionalProperties": True, "properties": {"path": {"type": "string"}}}),
    Function("either", {"anyOf": [NODE, {"type": "object", "properties": {"path": {"type": "string"}}}]}),
]
BLANKS = ["", " ", "\n", "\n\n", "\t", "  \r\n ", " " * 9, " " * 255, " " * 257]
HALF = "\ufffd"
WHOLE = re.compile(r'\{[^{}]*"save_note"[^{}]*\{"path": "p"\}\s*\}')  # a call that is an object


# --- answers


def node(rng: random.Random, form: ToolFormat, depth: int = 0) -> dict[str, Any]:
    """Return arguments of `find`."""
    values: dict[str, Any] = {
        "größe": rng.choice([1.5, None, -2]),
        "unit": rng.choice(["°C", "F", 3]),
        "either": rng.choice([string_of(rng, form), 7]),
        "rows": [["a", "b c"], [], [string_of(rng, form)]],
        "free": rng.choice([string_of(rng, form), [True, {"k": None}], {}, "", "12"]),
    }
    if depth < 2:
        values["inside"] = node(rng, form, depth + 1)
        values["list"] = [node(rng, form, depth + 2) for _ in range(rng.randrange(3))]
    return {key: value for key, value in values.items() if rng.random() < 0.5}


def call(rng: random.Random, form: ToolFormat) -> tuple[str, dict[str, Any]]:
    """Return a random call of one of the functions."""
    name = rng.choice(["save_note", "save_note", "now", "find", "any", "either"])
    if name == "now":
        return name, {}
    if name in {"save_note", "any"}:
        return name, {**arguments_of(rng, form), **({"Öl": [1]} if name == "any" and rng.random() < 0.5 else {})}
    return name, node(rng, form)


def calls(rng: random.Random, form: ToolFormat) -> str:
    """Return one to three calls, with text and blanks around them."""
    written = form.write([call(rng, form) for _ in range(rng.randrange(1, 4))])
    before, behind = rng.choice(["", "", "I look.", "a < b [c] {d} `e` to"]), rng.choice(["", "", "Done.", "{"])
    return f"{before}{rng.choice(BLANKS)}{written}{rng.choice(BLANKS)}{behind}"


def slips(rng: random.Random, form: ToolFormat) -> str:
    """Return a call with a slip, sometimes with another call or with text behind it."""
    while True:
        case = Case(rng, form, arguments_of(rng, form), has_second=rng.random() < 0.4)
        text = SLIPS[rng.choice([*SLIPS])](case)
        if text is not None:
            return text + rng.choice(["", "", " and so on", form.write([("now", {})])])


def long(rng: random.Random, form: ToolFormat) -> str:
    """Return a call with arguments about as long as those that are held back, whole or broken near its end."""
    text = rng.choice(["x", "狐 ", 'a "b" ', "\n"]) * 2000
    written = form.write([("save_note", {"path": text[: rng.randrange(940, 1100)], "text": "behind", "days": 3})])
    place = len(written) - rng.randrange(1, 90)
    return {
        0: written,
        1: written + form.write([("now", {})]),
        2: written[:place] + rng.choice(["}", '"', "\n", "<", "x"]) + written[place:],
        3: written[:place] + written[place + 1 :],
    }[rng.randrange(4)]


def pieces_of(form: ToolFormat) -> list[str]:
    """Return the marks of a format, whole and broken, and texts between them."""
    marks = [each for each in (*form.markers, getattr(form, "opens", ""), getattr(form, "closes", "")) if each]
    named = form.write([("save_note", {"path": "p"})])
    before, _, behind = named.partition("save_note")
    more = list[str]()
    if isinstance(form, TaggedFormat):
        closes = form.value_closes.strip()
        more = [closes, closes[:-1], closes[1:], closes[:-1] + "/>", *form.argument_starts(["text", "days", "no"])]
        more += [form.call_opens, form.call_closes, form.argument_opens, form.value_closes + form.argument_closes]
    return [
        *marks, *(each[:-1] for each in marks), *(each.strip() for each in marks), *more, named, before, behind,
        before + "save_note", before + "rm", form.write([("now", {})]), "now", "save_note", "path", *BLANKS[:6],
        *"\"'\\{}[]()<>=:,;`", "\\ud83d", "\\u00e9", "true", "None", "-1.5e3", "Text.", HALF, "ü狐", '"name": "now"',
        '{"name": "now", "arguments": {}}', "[now()]", "now(", "path='x'", "```",
    ]  # fmt: skip


def marks(rng: random.Random, form: ToolFormat) -> str:
    """Return marks of the format and other pieces in any order, sometimes within a call."""
    found = pieces_of(form)
    text = "".join(rng.choice(found) for _ in range(rng.randrange(1, 9)))
    if rng.random() < 0.5:
        return text
    whole = form.write([call(rng, form)])
    start, end = sorted(rng.randrange(len(whole) + 1) for _ in range(2))
    return whole[:start] + text + whole[end if rng.random() < 0.5 else start :]


def values(rng: random.Random, form: ToolFormat) -> str:
    """Return a call with values made of marks of the format."""
    found = pieces_of(form)
    texts = ["".join(rng.choice(found) for _ in range(rng.randrange(1, 5))) for _ in range(2)]
    return form.write([("save_note", {"path": texts[0], "text": texts[1], "days": 3})]) + rng.choice(["", "x"])


def members(rng: random.Random, form: ToolFormat) -> str:
    """Return a call that is an object with its members in another order or form; of other formats, marks."""
    written = form.write([("save_note", {"path": "p"}), ("now", {})])
    found = WHOLE.search(written)
    if found is None or isinstance(form, ApertusFormat):  # its only key is the name
        return response(rng) if isinstance(form, GenericFormat) else marks(rng, form)
    name_key, arguments_key, *_ = (each for each in json.loads(found[0]) if each != "tool_call_id")
    named = [f'"{name_key}": "save_note"'] * 3 + [f'"{name_key}": 5', f'"{name_key}": "rm"', f'"{name_key}": "\\ud800"']
    given = [
        *['{"path": "p"}', '"{\\"path\\": \\"p\\"}"', '{"path": "a "b" c", "days": 3}', '{"path": "p", "no": "x"}'] * 2,
        *(
            "null",
            '""',
            "[1]",
            "12",
            '"x"',
            '{"path": "p"',
            '{"path": "p"}}',
            '{"path": "p",}',
            '{"path": "p", "path": "q"}',
        ),
        *(
            '{"path": "p"} "x"',
            '{"path": "a"} and "b"}',
            '{"path": "p", "deep": {"a": [1, {"b": None}]}}',
            "{'path': 'p'}",
        ),
    ]
    others = [
        '"id": [1, {"x": "}"}]',
        '"other": -1.5e3',
        '"s": "a\\"b"',
        '"parameters": {}',
        '"arguments": {"text": "t"}',
        '"meta": {"path": "m"}',
    ]
    chosen = [rng.choice(named), f'"{arguments_key}": {rng.choice(given)}']
    chosen += [rng.choice(others) for _ in range(rng.choice([0, 0, 1, 2]))]
    if rng.random() < 0.5:
        rng.shuffle(chosen)
    blank = rng.choice(["", "", " ", "\n  "])
    text = f"{blank},{blank}".join(chosen[: rng.choice([1, 2, 2, 9, 9, 9])]).replace(
        ": ", rng.choice([": ", ":", " : "])
    )
    return written[: found.start()] + f"{{{blank}{text}{blank}}}" + written[found.end() :]


def response(rng: random.Random) -> str:
    """Return the object of a model with a template without tools, with a text or with JSON for the user."""
    pieces = ["Hello ", "\\n", '\\"', "\\u00e9", "\\ud83d\\ude42", "\\ud83d", "狐", "\n", "\\x", "{[", "\\u12"]
    text = "".join(rng.choice(pieces) for _ in range(rng.randrange(6)))
    value = rng.choice([f'"{text}"', f'"{text}"', f'{{"a": [1, "{text}", null], "b": {{}}}}', "12", "[[], true]", "}"])
    blanks = [rng.choice(["", "", " ", "\n"]) for _ in range(6)]
    key = rng.choice(['"response"'] * 4 + ['"tool_calls"', '"tool_call"', '"other"', "response"])
    return "".join(f"{blank}{part}" for blank, part in zip(blanks, ["{", key, ":", value, "}", ""], strict=True))


def inner(rng: random.Random, form: ToolFormat) -> str:
    """Return a call with a value that holds whole calls, beginnings and ends of calls."""
    whole = form.write([("save_note", {"path": "p", "days": 3})])
    half = rng.randrange(len(whole) + 1)
    pieces = [whole, form.write([("now", {})]), form.write([("now", {}), ("now", {})]), whole[:half], whole[half:]]
    pieces += [whole.strip(), "\n", " so ", "\n\n", "Say: "]
    text = "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 6)))
    written = form.write([("save_note", {"path": text, **({"text": text[:9]} if rng.random() < 0.3 else {})})])
    place = rng.randrange(max(len(written) - 60, 0), len(written))
    return written if rng.random() < 0.6 else written[:place] + written[place + rng.randrange(1, 9) :]


KINDS: dict[str, tuple[int, Callable[[random.Random, ToolFormat], str]]] = {
    "calls": (14, calls),
    "slips": (40, slips),
    "long": (8, long),
    "marks": (40, marks),
    "values": (14, values),
    "members": (30, members),
    "inner": (16, inner),
}
"""The number of answers of each kind, and the function that makes one."""


# --- readings


def cut_anywhere(rng: random.Random, text: str) -> list[str]:
    """Cut a text into its characters, into lines and words, or at up to four places."""
    if rng.random() < 0.4 and len(text) < 600:
        return list(text)
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(5)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def events(parser: AnswerParser, pieces: Sequence[str], *, is_cut: bool) -> Iterator[list[Any]]:
    """Yield the parts of an answer, each after the number of the piece with which it was told."""
    for index, piece in enumerate(pieces):
        yield from ([index, *_told(part)] for part in parser.feed(piece))
    yield from (["end", *_told(part)] for part in parser.finish(is_cut=is_cut))


def _told(part: Part) -> list[Any]:
    return [part.kind, part.text, part.call, part.start]


def readings(name: str, kind: str) -> Iterator[tuple[list[str], bool, list[list[Any]]]]:
    """Yield the pieces of each answer of one kind, whether it was cut off, and its events."""
    form = FORMS[name]()
    count, make = KINDS[kind]
    for number in range(count):
        rng = random.Random(f"{name} {kind} {number}")
        text = make(rng, form)
        reasoning = rng.choice(REASONING_FORMS) if rng.random() < 0.2 else None
        is_open = rng.random() < 0.5
        if reasoning is not None:
            opens, closes = rng.choice([reasoning.opens, ""]), rng.choice([reasoning.closes, reasoning.closes, ""])
            thought = rng.choice(["Hm.", "", f"Hm {reasoning.opens[:-1]} {reasoning.closes[:-1]}", "\n so\n"])
            text = f"{rng.choice(BLANKS)}{opens}{rng.choice(BLANKS)}{thought}{closes}{rng.choice(BLANKS)}{text}"
        only_one, is_whole = rng.random() < 0.15, rng.random() < 0.1
        for is_cut in (False, True):
            read = text[: rng.randrange(len(text) + 1)] + rng.choice(["", "", HALF]) if is_cut else text
            parser: Any = form.parser(FUNCTIONS, only_one=only_one)
            if is_whole:
                parser.num_held_chars = None
            if reasoning is not None:
                interrupts = form.reasoning_ends(FUNCTIONS)
                parser = ReasoningParser(parser, is_open=is_open, form=reasoning, interrupts=interrupts)
            pieces = cut_anywhere(rng, read)
            yield pieces, is_cut, list(events(parser, pieces, is_cut=is_cut))


def checksum(name: str, kind: str) -> str:
    """Return the checksum of the events of a format's answers of one kind."""
    told = json.dumps([each for *_, each in readings(name, kind)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


if __name__ == "__main__":
    if sys.argv[1:]:
        for pieces, is_cut, told in readings(*sys.argv[1:]):
            sys.stdout.writelines(f"{line!r}\n" for line in (pieces, "cut" if is_cut else "ended", *told))
    else:
        sys.stdout.writelines(f"{name} {kind}: {checksum(name, kind)}\n" for name in FORMS for kind in KINDS)
