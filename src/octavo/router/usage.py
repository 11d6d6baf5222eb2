"""What an answer says that its prompt took: in OpenAI's, Anthropic's and TGI's words, read without parsing it."""

from __future__ import annotations

import re
from typing import NamedTuple

# A quote within a text that a model wrote has a backslash before it.
_PROMPT = re.compile(rb'(?<!\\)"(?:prompt_tokens|input_tokens|prefill_tokens|input_length)":\s*(\d+)')
_CACHED = re.compile(rb'(?<!\\)"cached_tokens":\s*(\d+)')
_READ = re.compile(rb'(?<!\\)"cache_read_input_tokens":\s*(\d+)')
_WRITTEN = re.compile(rb'(?<!\\)"(?:completion_tokens|output_tokens|generated_tokens)":\s*(\d+)')
_END_BYTES = 4096  # of a long answer, the counts stand there


class Usage(NamedTuple):
    """num_prompt_tokens, num_cached_tokens: None where nothing was told. num_tokens: of prompt and answer."""

    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_tokens: int


def read_usage(first: bytes, last: bytes) -> Usage:
    """Read the counts of an answer from its beginning, where Anthropic's streams tell them, and its end."""
    text = first[:_END_BYTES] + last[-_END_BYTES:]
    prompt, cached, read = _last(_PROMPT, text), _last(_CACHED, text), _last(_READ, text)
    if prompt is None:
        return Usage(None, None, 0)
    if cached is None:  # Anthropic counts what was read from a cache apart
        cached = read
        prompt += read or 0
    return Usage(prompt, cached, prompt + (_last(_WRITTEN, text) or 0))


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
