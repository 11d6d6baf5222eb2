"""The parser and the grammar agree on which text is within code."""

from __future__ import annotations

import re
from itertools import product

from octavo.server.answers.code_spans import OUTSIDE, CodeSpans


def spans_of(pieces: list[str]) -> CodeSpans:
    spans = CodeSpans()
    for piece in pieces:
        spans.feed(piece)
    return spans


def test_code_spans_detect_text_outside_code() -> None:
    for text in ("", "a", "`a`", "``a ` b``", "```py\na `b`\n```", "it`s\nso", "``a\nb", "````\na\n````\nb"):
        assert spans_of([text]).is_outside, text
    for text in ("`", "``", "```", "`a", "``a`", "```py\na\n", "```a``", "`a` and `b", "````\na\n"):
        assert not spans_of([text]).is_outside, text


def test_code_spans_match_outside_regex_for_all_short_texts() -> None:
    outside = re.compile(OUTSIDE)
    for length in range(9):
        for letters in product("`a\n", repeat=length):
            text = "".join(letters)
            spans = spans_of([text])
            # If a text ends with backticks that have not opened code yet, neither counts its end as outside.
            assert spans.is_outside == bool(outside.fullmatch(text)), text
            assert vars(spans_of([*letters, ""])) == vars(spans), text
