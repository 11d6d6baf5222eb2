"""Check that prose stays plain: count words that usually hide a subject or a condition, per 10,000 words of a room.

    python tools/check_prose.py               # fails if a room has more of them than tools/prose_bounds.csv allows
    python tools/check_prose.py --lines core  # shows each of them in a room, with the usual replacement
    python tools/check_prose.py --lower       # writes lower bounds where there are fewer now; it never raises one

Prose is the text of docstrings, comments, messages, and Markdown outside of code blocks. A single hit is no mistake:
"where" is right for a place. Many hits make a text hard to read. CONTRIBUTING.md has sentences before and after.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import re
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = Path(__file__).with_name("prose_bounds.csv")
PER = 10_000
_STEP = 5  # bounds are multiples of it: a sentence more or less fails nothing
_FEWEST_WORDS = 3  # of a string that counts as prose
INSTEAD = {
    r"behind": "after",
    r"besides?": "next to, with, in addition to",
    r"who|whom|whose|whoever": "the request, the caller, the client that ...",
    r"told|tells?|telling": "reported, passes, says",
    r"stands?|stood": "is, is stored",
    r"(?:some|no|any|every)body": "the caller, no request, every client",
    r"(?:goes?|going|gone|went) on": "continues",
    r"what (?:is|are|was|were|has|have|had|it|they|comes?|came|follows|fell)": "the thing by its name",
    r"(?:lets?|letting) go": "releases",
    r"alike": "equal",
    r"at once": "immediately; at the same time",
    r"(?:is|are|was|were) there": "exists, is present",
    r"leaves?|left": "disconnects, exits; remains",
    r"others": "other requests, the other engines",
    r"where": "if, when; only a place is a where",
}
_WORD = re.compile(r"[A-Za-z']+")
_HIDING = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in INSTEAD), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Hit:
    """One of the counted words. line: number of the line at which its text begins."""

    path: Path
    line: int
    word: str
    text: str


def rooms() -> dict[str, list[Path]]:
    """Return the files of each room: packages, and folders beside the package."""
    source = ROOT / "src" / "octavo"
    found: dict[str, list[Path]] = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        found.setdefault(parts[0] if len(parts) > 1 else "octavo", []).append(path)
    found["csrc"] = sorted([*(ROOT / "csrc").glob("*.h"), *(ROOT / "csrc").glob("*.cpp")])
    for folder in ("tests", "tools", "benchmarks", "examples"):
        found[folder] = sorted((ROOT / folder).rglob("*.py"))
    found["docs"] = sorted((ROOT / "docs").glob("*.md"))
    found["README.md"], found["CONTRIBUTING.md"] = [ROOT / "README.md"], [ROOT / "CONTRIBUTING.md"]
    return {name: [path for path in paths if path != Path(__file__).resolve()] for name, paths in found.items()}


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file, each text with the number of its first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(re.sub(r"```.*?```", _blank, text, flags=re.DOTALL).split("\n"), 1)
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.count(" ") >= _FEWEST_WORDS
            ):
                yield node.lineno, node.value
    else:
        for found in re.finditer(r"//[^\n]*", text):
            yield text.count("\n", 0, found.start()) + 1, found[0]


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def count(paths: list[Path]) -> tuple[int, list[Hit]]:
    """Return the number of words of some files, and the hits in them."""
    num_words, hits = 0, []
    for path in paths:
        for line, text in prose_of(path):
            num_words += len(_WORD.findall(text))
            hits += [Hit(path, line, found[0], text) for found in _HIDING.finditer(text)]
    return num_words, hits


def read_bounds() -> dict[str, int]:
    """Return the bound of each room, in hits per 10,000 words."""
    with BOUNDS.open(encoding="utf-8", newline="") as file:
        return {room: int(bound) for room, bound in csv.reader(file)}


def main() -> int:
    """Count, compare, print a table. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", metavar="ROOM", help="print each hit in a room")
    parser.add_argument("--lower", action="store_true", help="write lower bounds")
    asked = parser.parse_args()
    found = rooms()
    if asked.lines is not None and asked.lines not in found:
        parser.error(f"{asked.lines} is no room: choose from {', '.join(found)}")
    if asked.lines is not None:
        _print_hits(count(found[asked.lines])[1])
        return 0
    bounds = read_bounds() if BOUNDS.exists() else {}
    rates, total = {}, 0
    for room, paths in found.items():
        num_words, hits = count(paths)
        rates[room] = PER * len(hits) / max(num_words, 1)
        total += num_words if paths and paths[0].is_relative_to(ROOT / "src") else 0
    if asked.lower:
        lowest = {room: min(_bound_of(rate), bounds.get(room, _bound_of(rate))) for room, rate in rates.items()}
        with BOUNDS.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(sorted(lowest.items()))
        bounds = lowest
    too_many = [room for room, rate in rates.items() if rate > bounds.get(room, 0)]
    for room in too_many:
        print(f"{room}: {rates[room]:.0f} hits in {PER:,} words, at most {bounds.get(room, 0)}: see --lines {room}")
    least, most = min(rates.values()), max(rates.values())
    print(f"{total:,} words of prose in src; {least:.0f} hits in the plainest room, {most:.0f} in the worst")
    return 1 if too_many else 0


def _bound_of(rate: float) -> int:
    return -(-int(rate + 1) // _STEP) * _STEP


def _print_hits(hits: list[Hit]) -> None:
    for hit in hits:
        instead = next(text for pattern, text in INSTEAD.items() if re.fullmatch(pattern, hit.word, re.IGNORECASE))
        print(f"{hit.path.relative_to(ROOT)}:{hit.line}: {hit.word} ({instead}): {' '.join(hit.text.split())[:120]}")
    counts = Counter(str(hit.path.relative_to(ROOT)) for hit in hits)
    print("\n".join(f"{number:4} {name}" for name, number in counts.most_common(10)))


if __name__ == "__main__":
    sys.exit(main())
