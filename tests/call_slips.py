"""Calls as models write them, with one slip each: the parsers must read what the generator meant.

A call is written with placeholders for its strings, so that a slip affects only the marks; then the strings are
inserted. A call that is read must be the intended one, or the literal one: the call that the format writes exactly so.
Run 200,000 cases: `PYTHONPATH=tests python -m call_slips 200000`.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.server.answers.gemma_calls import QUOTE, GemmaFormat
from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.nested_calls import MiniMaxM3Format
from octavo.server.answers.parts import Part, joined
from octavo.server.answers.python_calls import PythonFormat
from octavo.server.answers.tagged_calls import TaggedFormat
from octavo.server.answers.tool_format import Function, ToolFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NAME = "save_note"
PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "days": {"type": "integer"},
    "is_long": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "deep": {"type": "object"},
}
ALL = tuple(PROPERTIES)
FUNCTIONS = [
    Function(NAME, {"type": "object", "properties": PROPERTIES, "required": ["path"]}),
    Function("now", {"type": "object", "properties": {}}),
]
WORDS = ["a", "notes", "Röme", "狐", "x < y", "it is so", "e.g. 5%", "c:d", "[1]", "{}", "(b)", "#1", "and, then"]
PLACE = re.compile("\ue000(\\d+)\ue001")
BARE = (TaggedFormat, MiniMaxM3Format)
HOSTILE = [
    *(
        'x", "days": 3',
        '"}}',
        '"]',
        "]}",
        "\\",
        'C:\\"',
        "</parameter>\n",
        "\n</function>\n</tool_call>",
        '"""',
        "'''",
        '","',
    ),
    *(
        "</arg_value>",
        "<parameter=text>",
        '{"path": "x", "text": "y"}',
        '"a", "b"',
        "`",
        "``` x",
        "\x07",
        '", "path": "',
    ),
]
CODE = ['print("hi", x)', 'd = {"a": "b", "c": 1}', "re.sub(r'\\d+', '', s)", '5" pipe', "it's 'so'", '["x", "y"]']
DEEP = [{"a": True, "b": [1, None]}, {"k": {"z": "word"}}, {"n": 1.5}]


def is_json(form: ToolFormat) -> bool:
    return not isinstance(form, (*BARE, PythonFormat, GemmaFormat))


@dataclass
class Case:
    """One call and its written form. strings: the string for each placeholder in the arguments."""

    rng: random.Random
    form: ToolFormat
    arguments: dict[str, Any]
    has_second: bool = False
    strings: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the intended calls."""
        return [(NAME, self.arguments), *([("now", {})] if self.has_second else [])]

    def skeleton(self) -> str:
        """Return the calls with placeholders for their strings."""
        placed = {key: self._placed(value) for key, value in self.arguments.items()}
        return self.form.write([(NAME, placed), *self.calls[1:]])

    def _placed(self, value: Any) -> Any:
        if isinstance(value, str):
            self.strings.append(value)
            return f"\ue000{len(self.strings) - 1}\ue001"
        return value

    def spelled(self, string: str) -> str:
        """Return a string as the format writes it between its quotes or tags."""
        if isinstance(self.form, (*BARE, GemmaFormat)):
            return string
        return json.dumps(string, ensure_ascii=False)[1:-1]

    def filled(self, skeleton: str, spelled: Callable[[str], str] | None = None, only: int | None = None) -> str:
        """Insert the strings, one or all of them in another spelling."""

        def put(found: re.Match[str]) -> str:
            index = int(found.group(1))
            is_other = spelled is not None and only in {None, index}
            return (
                spelled(self.strings[index]) if is_other and spelled is not None else self.spelled(self.strings[index])
            )

        return PLACE.sub(put, skeleton)

    def string(self, wanted: Callable[[str], bool]) -> int | None:
        """Return the number of a random string that meets a condition, or None."""
        found = [index for index, each in enumerate(self.strings) if wanted(each)]
        return self.rng.choice(found) if found else None


# --- slips: each returns the text, or None if the case has no place for it ---


def written(case: Case) -> str | None:
    return case.filled(case.skeleton())


def _marks(case: Case, skeleton: str) -> list[tuple[int, int]]:
    marks = sorted({*case.form.markers, "{", "}", "[", "]"} - {""}, key=len, reverse=True)
    pattern = "|".join([*map(re.escape, marks), r"</?[^<>\s]{1,40}>"])
    return [found.span() for found in re.finditer(pattern, skeleton)]


def _of_a_mark(change: Callable[[random.Random, str], str]) -> Callable[[Case], str | None]:
    def slip(case: Case) -> str | None:
        skeleton = case.skeleton()
        places = _marks(case, skeleton)
        if not places:
            return None
        start, end = case.rng.choice(places)
        return case.filled(skeleton[:start] + change(case.rng, skeleton[start:end]) + skeleton[end:])

    return slip


def _truncated(rng: random.Random, mark: str) -> str:
    start, end = sorted(rng.sample(range(len(mark) + 1), 2))
    return mark[:start] + mark[end:]


def blanks(case: Case) -> str | None:
    """Blanks are added or missing next to a mark of the structure, never within a string."""
    skeleton = case.skeleton()
    spaces = [found.span() for found in re.finditer(r"(?<=[>,:}\]])[ \n]+(?=[<\[{\"'])", skeleton)]
    if not spaces:
        return None
    start, end = case.rng.choice(spaces)
    return case.filled(skeleton[:start] + case.rng.choice(["", "\n", "  ", "\n\n", "\t"]) + skeleton[end:])


def code_span(case: Case) -> str | None:
    mark = case.rng.choice(["`", "```\n", "```json\n"])
    return f"{mark}{case.filled(case.skeleton())}\n{mark.strip('json' + chr(10))}"


def prose(case: Case) -> str | None:
    """A sentence about the format contains its marks."""
    begun = case.form.write([(NAME, {})]).partition(NAME)[0]
    marks = [mark for mark in case.form.markers if mark] or ["{}"]
    words = [begun + NAME, *marks, NAME, "is how a call begins", "and ends", "with", "or", "arguments."]
    return " ".join(["Say", *(case.rng.choice(words) for _ in range(case.rng.randrange(2, 9)))])


def stopped(case: Case) -> str | None:
    """The model ends its answer within the call."""
    text = case.filled(case.skeleton())
    return text[: case.rng.randrange(1, len(text))]


def _in_json(case: Case) -> bool:
    return is_json(case.form)


def raw_line_feed(case: Case) -> str | None:
    index = case.string(lambda each: "\n" in each) if (skeleton := case.skeleton()) and _in_json(case) else None
    return None if index is None else case.filled(skeleton, lambda each: case.spelled(each).replace("\\n", "\n"), index)


def raw_tab(case: Case) -> str | None:
    index = case.string(lambda each: "\t" in each) if (skeleton := case.skeleton()) and _in_json(case) else None
    return None if index is None else case.filled(skeleton, lambda each: case.spelled(each).replace("\\t", "\t"), index)


def _path(text: str) -> bool:
    return bool(re.search(r"\\[^\\\"/bfnrtu']", text)) and not re.search(r"\\[\\\"/bfnrtu']|[\n\t\"]|\\\Z", text)


def raw_backslash(case: Case) -> str | None:
    index = case.string(_path) if (skeleton := case.skeleton()) and _in_json(case) else None
    return None if index is None else case.filled(skeleton, lambda each: each, index)


def any_backslash(case: Case) -> str | None:
    """The same for strings that also have escapes: these are ambiguous."""
    index = case.string(lambda each: "\\" in each) if (skeleton := case.skeleton()) and _in_json(case) else None
    if index is None:
        return None
    return case.filled(skeleton, lambda each: case.spelled(each).replace("\\\\", "\\"), index)


def _paired(text: str) -> bool:
    return text.count('"') >= 2 and text.count('"') % 2 == 0 and not re.search(r'"\s*(,\s*"|[}\]:])|\\', text)


def raw_quotes(case: Case) -> str | None:
    index = case.string(_paired) if (skeleton := case.skeleton()) and _in_json(case) else None
    return None if index is None else case.filled(skeleton, lambda each: case.spelled(each).replace('\\"', '"'), index)


def any_raw_quotes(case: Case) -> str | None:
    index = case.string(lambda each: '"' in each) if (skeleton := case.skeleton()) and _in_json(case) else None
    return None if index is None else case.filled(skeleton, lambda each: case.spelled(each).replace('\\"', '"'), index)


def one_raw_quote(case: Case) -> str | None:
    index = case.string(lambda each: '"' in each) if (skeleton := case.skeleton()) and _in_json(case) else None
    if index is None:
        return None

    def spelled(string: str) -> str:
        text = case.spelled(string)
        places = [found.start() for found in re.finditer(r'\\"', text)]
        place = case.rng.choice(places)
        return text[:place] + text[place + 1 :]

    return case.filled(skeleton, spelled, index)


def trailing_comma(case: Case) -> str | None:
    if not _in_json(case):
        return None
    skeleton = case.skeleton()
    places = [found.start() for found in re.finditer(r"(?<=[\ue001\"\w\]}])[\"]?[\]}]", skeleton)]
    end = skeleton.rfind("}", 0, skeleton.rfind("}")) if '"arguments"' in skeleton or '"parameters"' in skeleton else -1
    end = end if end >= 0 else skeleton.rfind("}")
    del places
    return case.filled(skeleton[:end] + "," + skeleton[end:]) if case.arguments else None


def python_words(case: Case) -> str | None:
    skeleton = case.skeleton()
    changed = re.sub(
        r": (true|false|null)\b", lambda found: f": {found.group(1).replace('null', 'none').title()}", skeleton
    )
    return case.filled(changed) if changed != skeleton and _in_json(case) else None


def python_object(case: Case) -> str | None:
    """An object between tags is written in Python's syntax."""
    if not isinstance(case.form, TaggedFormat) or "deep" not in case.arguments:
        return None
    skeleton = case.skeleton()
    value = json.dumps(case.arguments["deep"], ensure_ascii=False)
    return case.filled(skeleton.replace(value, repr(case.arguments["deep"])))


def python_strings(case: Case) -> str | None:
    if not isinstance(case.form, PythonFormat):
        return None
    skeleton = case.skeleton()

    def spelled(string: str) -> str:
        kind = case.rng.randrange(4)
        if kind == 1 and not re.search(r"\\|'''|'\Z", string):
            return f"'''{string}'''"
        if kind == 2 and not re.search(r"[\\'\n\t]", string):
            half = len(string) // 2
            return f"'{string[:half]}' \"{string[half:]}\"" if '"' not in string else repr(string)
        if kind == 3 and not re.search(r"['\n\t]|\\\Z", string):
            return f"r'{string}'"
        return repr(string)

    return PLACE.sub(
        lambda found: spelled(case.strings[int(found.group(1))]), re.sub('"(\ue000\\d+\ue001)"', r"\1", skeleton)
    )


def gemma_quotes(case: Case) -> str | None:
    if not isinstance(case.form, GemmaFormat):
        return None
    skeleton = case.skeleton()
    return PLACE.sub(
        lambda found: json.dumps(case.strings[int(found.group(1))], ensure_ascii=False),
        re.sub(f"{re.escape(QUOTE)}(\ue000\\d+\ue001){re.escape(QUOTE)}", r"\1", skeleton),
    )


def _closing_tag(change: Callable[[random.Random, str], str]) -> Callable[[Case], str | None]:
    def slip(case: Case) -> str | None:
        form = case.form
        if not isinstance(form, TaggedFormat) or not form.value_closes.startswith("</"):
            return None
        skeleton = case.skeleton()
        places = [found.span() for found in re.finditer(re.escape(form.value_closes), skeleton)]
        start, end = case.rng.choice(places)
        return case.filled(skeleton[:start] + change(case.rng, form.value_closes) + skeleton[end:])

    return slip


def closing_tag_left_out(case: Case) -> str | None:
    """The tag and its line are missing, in formats with values or arguments on lines of their own."""
    return _without_closing_tag(case, has_lines=True)


def closing_tag_left_out_of_a_line(case: Case) -> str | None:
    """The same if only tags separate arguments: the next argument may be text of the value."""
    return _without_closing_tag(case, has_lines=False)


def _without_closing_tag(case: Case, *, has_lines: bool) -> str | None:
    form = case.form
    if not isinstance(form, TaggedFormat) or (form.is_padded or form.argument_closes == "\n") is not has_lines:
        return None
    skeleton = case.skeleton()
    mark = ("\n" if form.is_padded else "") + form.value_closes
    places = [found.span() for found in re.finditer(re.escape(mark), skeleton)]
    start, end = case.rng.choice(places)
    return case.filled(skeleton[:start] + skeleton[end:])


def empty_tag(case: Case) -> str | None:
    form = case.form
    if not isinstance(form, TaggedFormat) or "days" not in case.arguments or form.raw_marks:
        return None
    skeleton = case.skeleton()
    value = json.dumps(case.arguments["days"])
    pad = "\n" if form.is_padded else ""
    ends = f"{pad}{form.value_closes}"
    case_text = re.sub(
        f"(days.{{0,60}}?[>|]{pad}){re.escape(value)}(?={re.escape(ends)})", r"\1", skeleton, flags=re.DOTALL
    )
    if case_text == skeleton:
        return None
    case.arguments = {key: each for key, each in case.arguments.items() if key != "days"}
    return case.filled(case_text)


SLIPS: dict[str, Callable[[Case], str | None]] = {
    "none": written,
    "mark dropped": _of_a_mark(lambda _, __: ""),
    "mark doubled": _of_a_mark(lambda _, mark: mark + mark),
    "mark truncated": _of_a_mark(_truncated),
    "blanks": blanks,
    "code span": code_span,
    "prose": prose,
    "answer ends within": stopped,
    "raw line feed": raw_line_feed,
    "raw tab": raw_tab,
    "raw backslashes": raw_backslash,
    "raw backslashes among escapes": any_backslash,
    "raw quotes in pairs": raw_quotes,
    "raw quotes of any kind": any_raw_quotes,
    "one raw quote": one_raw_quote,
    "trailing comma": trailing_comma,
    "Python's words": python_words,
    "Python's objects in tags": python_object,
    "Python's strings": python_strings,
    "ordinary quotes": gemma_quotes,
    "closing tag with a slash": _closing_tag(lambda _, tag: tag[:-1] + "/>"),
    "closing tag without its end": _closing_tag(lambda _, tag: tag[:-1]),
    "closing tag left out": closing_tag_left_out,
    "closing tag left out of a line": closing_tag_left_out_of_a_line,
    "empty tag": empty_tag,
}
UNESCAPED = frozenset({"raw quotes of any kind", "one raw quote", "raw backslashes among escapes"})
REPAIRABLE = frozenset(
    {
        "none",
        "blanks",
        "raw line feed",
        "raw tab",
        "raw backslashes",
        "raw quotes in pairs",
        "trailing comma",
        "Python's words",
        "Python's objects in tags",
        "Python's strings",
        "ordinary quotes",
        "closing tag with a slash",
        "closing tag without its end",
        "closing tag left out",
        "empty tag",
    }
)


def string_of(rng: random.Random, form: ToolFormat) -> str:
    """Return a string: words, paths, code, quotes, and sometimes the format's own marks."""
    if rng.random() < 0.04:
        hostile = rng.choice(HOSTILE)
        own = "" if "</" in hostile else rng.choice(["", form.write([("now", {})])])  # a closed one would begin a call
        return hostile + rng.choice(["", " "]) + own
    words = [rng.choice(WORDS) for _ in range(rng.randrange(1, 5))]
    mark = rng.choice([*form.markers, "</parameter>", "</arg_value>", "{}", "`"])
    strings = [
        "C:\\" + "\\".join(rng.choice(["Program", "work", "Data", "new", "temp", "x.py"]) for _ in range(2)),
        " ".join([*words, f'"{rng.choice(WORDS[:4])}"', rng.choice(WORDS)]),
        "\n".join(words) + rng.choice(["", "\n"]),
        "\t".join(words) + ".",
        rng.choice(CODE),
        " ".join([*words, mark, rng.choice(WORDS)]),
        *[" ".join(words)] * 3,
    ]
    return rng.choice(strings)


def arguments_of(rng: random.Random, form: ToolFormat) -> dict[str, Any]:
    values: dict[str, Any] = {
        "path": string_of(rng, form),
        "text": string_of(rng, form),
        "days": rng.randrange(-3, 400),
        "is_long": rng.random() < 0.5,
        "tags": [rng.choice(WORDS) for _ in range(rng.randrange(3))],
        "deep": rng.choice(DEEP),
    }
    return {key: values[key] for key in ALL if key == "path" or rng.random() < 0.6}


def read(form: ToolFormat, pieces: Sequence[str], *, is_cut: bool = False) -> list[Part]:
    parser = form.parser(FUNCTIONS)
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut))


def calls_of(parts: list[Part]) -> list[tuple[str, str]]:
    return [(part.text, "".join(p.text for p in parts if p.kind == "arguments" and p.call == part.call))
            for part in parts if part.kind == "call"]  # fmt: skip


def cut(rng: random.Random, text: str) -> list[str]:
    """Cut a text at random places, sometimes into its characters."""
    if rng.random() < 0.15:
        return list(text)
    places = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randrange(1, 6))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def _bare(text: str) -> str:
    return "".join(text.split())


def is_written(form: ToolFormat, calls: list[tuple[str, Any]], text: str) -> bool:
    """Return whether a text contains these calls as the format writes them, together or one by one."""
    bare = _bare(text)
    return _bare(form.write(calls)) in bare or all(_bare(form.write([each])) in bare for each in calls)


def verdict(case: Case, slip: str, text: str) -> str:
    """Return "call", "letter", "text" or a description of the error."""
    whole = read(case.form, [text])
    pieces = cut(case.rng, text)
    begun = pieces[: case.rng.randrange(1, len(pieces) + 1)]
    is_same = read(case.form, pieces) == whole
    if not is_same or read(case.form, begun, is_cut=True) != read(case.form, ["".join(begun)], is_cut=True):
        return "another answer in pieces"
    try:
        calls = [(name, json.loads(arguments)) for name, arguments in calls_of(whole)]
    except ValueError:
        return "broken JSON"
    if NAME not in dict(calls):
        return _verdict_of_text(case, text, whole, calls)
    is_meant = slip != "prose"
    if calls in (case.calls, case.calls[:1]) and is_meant:
        return "call"
    if is_meant and any(not arguments for name, arguments in calls if name == NAME):
        return "a call without arguments"
    # with unescaped quotes the text may contain another object that is valid JSON
    is_json_there = slip in UNESCAPED and all(arguments in text for _, arguments in calls_of(whole))
    return "letter" if is_json_there or is_written(case.form, calls, text) else "another call"


def _verdict_of_text(case: Case, text: str, parts: list[Part], calls: list[tuple[str, Any]]) -> str:
    """Judge an answer whose first call is text."""
    if calls not in ([], case.calls[1:]):
        return "letter" if is_written(case.form, calls, text) else "a call of a text"
    told = "".join(part.text for part in parts if part.kind in {"content", "reasoning"})
    if not calls and not case.form.frames_content:
        return "text" if told == text else "lost text"
    strings = [each for each in case.strings if "\n" not in each and len(each) > 5 and each in text]
    lost = [each for each in strings if each not in told and not any(mark in each for mark in case.form.markers)]
    if calls and lost and all(case.form.write([("now", {})]) in each for each in lost):
        return "letter"
    return "lost text" if lost else "text"


def made(rng: random.Random, slip: str) -> tuple[Case, str]:
    """Return a case that has a place for a slip, and its text."""
    while True:
        form = rng.choice(FORMATS)()
        case = Case(rng, form, arguments_of(rng, form), has_second=rng.random() < 0.2)
        text = SLIPS[slip](case)
        if text is not None:
            return case, ("I look.\n" if rng.random() < 0.3 and not case.form.frames_content else "") + text


def run(count: int, seed: int = 1, first: int = 0) -> tuple[dict[str, Counter[str]], list[tuple[str, str, str, str]]]:
    """Return the verdicts of each slip, and the wrong cases: slip, format, verdict, text."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong = []
    kinds = [*SLIPS]
    for number in range(first, first + count):
        rng = random.Random(f"{seed} {number}")
        slip = kinds[number % len(kinds)]
        case, text = made(rng, slip)
        form = case.form
        found = verdict(case, slip, text)
        counts[slip][found] += 1
        counts[f"{slip} | {type(form).__name__}"][found] += 1
        if found not in {"call", "letter", "text"}:
            wrong.append((slip, type(form).__name__, found, text))
    return counts, wrong


def told_of_a_cut(form: ToolFormat, text: str) -> str:
    """Return what is reported of an answer that a limit cut off.

    j, b, e: a call with arguments that are JSON, broken JSON, or empty. w: the whole text. s: a shorter one.
    """
    parts = read(form, [text], is_cut=True)
    if calls := calls_of(parts):
        _, arguments = calls[-1]
        try:
            return "j" if json.loads(arguments) is not None else "b"
        except ValueError:
            return "b" if arguments else "e"
    return "w" if "".join(part.text for part in parts) == text else "s"


def outcomes(slip: str, count: int = 64) -> str:
    """Return the outcomes of the first cases of a slip.

    Two letters for each: c for call, l for letter, t for text, of the whole answer; then `told_of_a_cut` of a part.
    """
    found = []
    for number in range(count):
        case, text = made(random.Random(f"outcomes {slip} {number}"), slip)
        begun = text[: case.rng.randrange(1, len(text) + 1)]
        found.append(verdict(case, slip, text)[0] + told_of_a_cut(case.form, begun))
    return " ".join(found)


def table(counts: dict[str, Counter[str]]) -> str:
    """Return the verdicts as a table."""
    lines = [f"{'slip':32}{'cases':>8}{'call':>8}{'letter':>8}{'text':>8}{'wrong':>8}"]
    for slip, found in counts.items():
        if "|" in slip:
            continue
        total = sum(found.values())
        wrong = total - found["call"] - found["letter"] - found["text"]
        lines.append(f"{slip:32}{total:>8}{found['call']:>8}{found['letter']:>8}{found['text']:>8}{wrong:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["outcomes"]:
        sys.stdout.writelines(f"{slip}: {outcomes(slip)}\n" for slip in SLIPS)
        sys.exit()
    counts, wrong = run(int(sys.argv[1]), *(int(each) for each in sys.argv[2:3]))
    sys.stdout.write(table(counts) + "\n")
    for each in wrong[:40]:
        sys.stdout.write(f"{each[:3]}\n{each[3]}\n\n")
