"""What an answer says that its prompt took: in the words of all APIs, read without parsing it."""

from __future__ import annotations

import re
from typing import NamedTuple

from octavo.http.apis import APIS


def _number(*names: str) -> re.Pattern[bytes]:
    """Match a field with one of these names and its number; a quote in a model's text has a backslash before it."""
    return re.compile(rb'(?<!\\)"(?:%b)":\s*(\d+)' % "|".join(names).encode())


_PLACES = tuple({f'"{api.counted}":'.encode() for api in APIS})
_PROMPT = _number(*(name for api in APIS for name in api.prompt_counts))
_WRITTEN = _number(*(name for api in APIS for name in api.answer_counts))
_CACHED, _READ = _number("cached_tokens"), _number("cache_read_input_tokens")
COUNTS_BYTES = 2048  # that counts take


class Usage(NamedTuple):
    """num_prompt_tokens, num_cached_tokens: None where nothing was told. num_tokens: of prompt and answer."""

    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_tokens: int


def read_usage(first: bytes, last: bytes) -> Usage:
    """Read the counts of an answer: of a stream's first events, where Anthropic's tell of the prompt, and of its end.

    What stands before and behind them may be long: log probabilities, say.
    """
    counts = first[:COUNTS_BYTES] + _told_last(last)
    prompt, cached, read = _last(_PROMPT, counts), _last(_CACHED, counts), _last(_READ, counts)
    if prompt is None:
        return Usage(None, None, 0)
    if cached is None:  # Anthropic counts what was read from a cache apart
        cached = read
        prompt += read or 0
    return Usage(prompt, cached, prompt + (_last(_WRITTEN, counts) or 0))


def _told_last(text: bytes) -> bytes:
    """Return what stands at the last place where counts are told."""
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
