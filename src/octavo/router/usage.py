"""Reads token counts."""

from __future__ import annotations

import re
from typing import NamedTuple

from octavo.http.apis import APIS


def _number(*names: str) -> re.Pattern[bytes]:
    # A model's text never matches, because its quotes are escaped.
    return re.compile(rb'(?<!\\)"(?:%b)":\s*(\d+)' % "|".join(names).encode())


_PLACES = tuple({f'"{api.counted}":'.encode() for api in APIS})
_PROMPT = _number(*(name for api in APIS for name in api.prompt_counts))
_WRITTEN = _number(*(name for api in APIS for name in api.answer_counts))
_CACHED, _READ = _number("cached_tokens"), _number("cache_read_input_tokens")
COUNTS_BYTES = 2048


class ReportedUsage(NamedTuple):
    """Token counts, or None if not reported. num_tokens: Sum of prompt and answer."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_tokens: int = 0


def read_usage(first: bytes, last: bytes) -> ReportedUsage:
    """Read an answer's token counts.

    first: A stream's first events, in which Anthropic's API reports the prompt's tokens.
    last: The answer's end.
    """
    counts = first[:COUNTS_BYTES] + _last_counts(last)
    prompt, cached, read = _last(_PROMPT, counts), _last(_CACHED, counts), _last(_READ, counts)
    if prompt is None:
        return ReportedUsage()
    if cached is None:  # Anthropic's prompt count excludes cached tokens
        cached = read
        prompt += read or 0
    return ReportedUsage(prompt, cached, prompt + (_last(_WRITTEN, counts) or 0))


def _last_counts(text: bytes) -> bytes:
    place = max(_last_place(text, name) for name in _PLACES)
    return b"" if place < 0 else text[place : place + COUNTS_BYTES]


def _last_place(text: bytes, name: bytes) -> int:
    place = text.rfind(name)
    while place > 0 and text[place - 1] == ord("\\"):
        place = text.rfind(name, 0, place)
    return place


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
