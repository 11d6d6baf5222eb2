"""Limits on a body's structure: counted as a parser would, and enforced before a parser runs."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.server import json_structure
from octavo.server.json_structure import check_structure


def make(source: random.Random, depth: int) -> Any:
    kind = source.randrange(4 if depth else 2)
    if kind == 0:
        return "".join(source.choice('ab"\\\\[{,:é\n') for _ in range(source.randrange(9)))
    if kind == 1:
        return source.randrange(99)
    inner = [make(source, depth - 1) for _ in range(source.randrange(6))]
    return inner if kind == 2 else {str(make(source, 0)): each for each in inner}


def structure(value: Any) -> tuple[int, int, int]:
    """Return the numbers of containers (lists and objects), names and commas."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [structure(each) for each in (value.values() if isinstance(value, dict) else value)]
    opened, named, parted = (sum(counts) for counts in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return opened + 1, named + len(value) * isinstance(value, dict), parted + max(len(value) - 1, 0)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("block", [2, 3, 7, 1 << 18])
def test_structure_is_counted_outside_strings(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(json_structure, "_BLOCK_BYTES", block)
    source = random.Random(1)
    for _ in range(200):
        value = [make(source, 4)]
        body = json.dumps(value, separators=(",", ":")).encode()
        assert tuple(json_structure._count_outside_strings(body)) == structure(value), body


LIMITS = [(b"[]", "lists and objects", 131_071), (b'"":1', "names", 262_144), (b"1", "values", 1_310_721)]


@pytest.mark.parametrize(("entry", "what", "most"), LIMITS)
def test_structure_limits_are_exact(entry: bytes, what: str, most: int) -> None:
    text = b"[" + b",".join([entry] * most) + b"]"
    check_structure(text)
    limit = most + {"lists and objects": 1, "names": 0, "values": -1}[what]
    with pytest.raises(RequestError, match=f"^the body holds {limit + 1} {what}; the limit is {limit}$"):
        check_structure(text[:-1] + b"," + entry + b"]")


def test_small_body_skips_structure_count() -> None:
    check_structure(b"[" * 262_144)
    with pytest.raises(RequestError, match=r"^the body holds 262145 lists and objects; the limit is 131072$"):
        check_structure(b"[" * 262_145)


def test_non_ascii_bytes_are_not_structure() -> None:
    check_structure(bytes(range(128, 256)) * 3000)


def test_large_strings_and_token_lists_pass_structure_limits() -> None:
    check_structure(json.dumps({"prompt": '[{,:"\\' * 200_000}).encode())
    check_structure(json.dumps({"prompt": [17] * (1 << 20)}).encode())
