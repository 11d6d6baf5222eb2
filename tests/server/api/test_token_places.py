"""The places of tokens in a text, and their own texts, over vocabularies of every kind."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
from test_detokenizer import byte_tokens, some_tokens
from test_tokenizer import BACKENDS, CONFIG

from octavo.engine.tokenizer import Tokenizer
from octavo.outputs import Logprob
from octavo.server.api.openai.logprobs import chat_logprobs, completion_logprobs
from octavo.server.api.openai.token_places import TokenPlace, TokenPlaces, piece_text, places_in_prompt


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BACKENDS[request.param](), CONFIG)


def places_of(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int], *, skip: bool = True, cut: int = 1
) -> list[TokenPlace]:
    places = TokenPlaces(tokenizer, prompt, 0, skip_special_tokens=skip)
    found = [each for start in range(0, len(ids), cut) for each in places.add(ids[start : start + cut])]
    return [*found, *places.finish()]


def offsets_by_bytes(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> list[int]:
    """Return for each token the index of the character of its first byte, computed from all bytes before it."""
    offsets, before, run = [], "", b""

    def is_text(first: int) -> bool:
        whole = b""
        for token_id in ids[first:]:
            piece = tokenizer.piece(token_id, skip_special_tokens=skip)
            if isinstance(piece, str) and piece:
                break
            whole += piece or b""  # type: ignore[operator]
        try:
            return bool(whole.decode() or True)
        except UnicodeDecodeError:
            return False

    run_is_text = True
    for index, token_id in enumerate(ids):
        piece = tokenizer.piece(token_id, skip_special_tokens=skip)
        if isinstance(piece, bytes) and not run:
            run_is_text = not tokenizer.has_byte_runs or is_text(index)
        read = (lambda data: data.decode(errors="replace")) if run_is_text else (lambda data: "\ufffd" * len(data))
        if isinstance(piece, bytes):
            offsets.append(len(before) + len(read(run + piece[:1])) - 1)
            run += piece
        elif piece:
            before, run = before + read(run), b""
            offsets.append(len(before))
            before += piece
        else:
            offsets.append(-1)  # a hidden token may be anywhere
    return offsets


@pytest.mark.sweep(8)
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_text_at_token_offset_starts_with_token(kind: str, skip: bool) -> None:
    tokenizer = Tokenizer(BACKENDS[kind](), CONFIG)
    draw, word = random.Random(5), tokenizer.encode("er", add_special_tokens=False)
    for _ in range(1500):
        ids = some_tokens(tokenizer, draw)
        behind = draw.choice([[], word])
        detokenizer = tokenizer.incremental_detokenizer(behind, skip_special_tokens=skip)
        text = detokenizer.add(ids) + detokenizer.finish()
        places = places_of(tokenizer, ids, behind, skip=skip, cut=draw.choice([1, 3]))
        assert len(places) == len(ids)
        for token_id, place in zip(ids, places, strict=True):
            is_hidden = tokenizer.piece(token_id, skip_special_tokens=skip) == ""
            assert place.offset <= len(text)
            if not is_hidden and not place.text.startswith("bytes:"):
                assert text[place.offset :].startswith(place.text), (ids, text, place)
        if behind:
            wanted = offsets_by_bytes(tokenizer, ids, skip=skip)
            assert [w if w < 0 else p.offset for p, w in zip(places, wanted, strict=True)] == wanted, (ids, text)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_tokens_of_split_character_share_its_offset(kind: str) -> None:
    tokenizer = Tokenizer(BACKENDS[kind](), CONFIG)
    a, *parts, b = byte_tokens(tokenizer, "a🦜b".encode())
    places = places_of(tokenizer, [a, *parts, b], byte_tokens(tokenizer, b"b"))
    assert [place.offset for place in places] == [0, 1, 1, 1, 1, 2]
    assert [place.text for place in places[1:4]] == [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6"]
    within = places_of(tokenizer, [*parts[2:], b], [a, *parts[:2]])  # the prompt has the character's first bytes
    assert [place.offset for place in within] == [0, 0, 1]
    never = places_of(tokenizer, [b], [a, *parts[:2]])
    assert [place[:2] for place in never] == [(0, "b")]


def test_incomplete_character_at_prompt_end_has_no_offset() -> None:
    tokenizer = Tokenizer(BACKENDS["byte_level"](), CONFIG)
    begun, ids = byte_tokens(tokenizer, b"\xf0\x9f"), byte_tokens(tokenizer, "éa".encode())
    assert [place.offset for place in places_of(tokenizer, ids, begun)] == [0, 0, 1]


def test_invalid_utf8_bytes_have_separate_offsets() -> None:
    tokenizer = Tokenizer(BACKENDS["byte_fallback"](), CONFIG)
    ids = [*byte_tokens(tokenizer, b"\xf0\n"), tokenizer.token_id("h")]
    places = [place[:2] for place in places_of(tokenizer, ids, [])]
    assert places == [(0, r"bytes:\xf0"), (1, r"bytes:\n"), (2, "h")]


@pytest.mark.parametrize("prompt", ["der Deich", "<s>der 🦜</s>", "</s>  der", "naïve  中文 er", "<s>  <unk> a\n狐"])
def test_prompt_token_offsets_match_prompt_text(tokenizer: Tokenizer, prompt: str) -> None:
    places = places_in_prompt(tokenizer, prompt, tokenizer.encode(prompt))
    for place in places:
        if not place.text.startswith("bytes:") and place.text not in {"<s>", "<unk>"}:
            assert prompt[place.offset :].startswith(place.text), place
    assert [place.offset for place in places] == sorted(place.offset for place in places)
    bos = places[0]
    assert bos[:3] == (0, "<s>", tokenizer.bos_token_id)
    assert (places[1].offset == 3) == prompt.startswith("<s>")  # only a typed marker is part of the text


def test_top_logprobs_keep_alternatives_with_equal_text() -> None:
    tokenizer = Tokenizer(BACKENDS["byte_fallback"](), CONFIG)
    a, as_byte, part = tokenizer.token_id("a"), tokenizer.token_id("<0x61>"), tokenizer.token_id("<0xF0>")
    assert None not in {a, as_byte, part}
    unknown = [tokenizer.vocab_size + 1, tokenizer.vocab_size + 2]
    ids: list[Any] = [a, as_byte, part, *unknown]
    position = {token_id: Logprob(-1.0 - rank, rank + 1) for rank, token_id in enumerate(ids)}
    result = completion_logprobs([position], [TokenPlace(0, "a", a, 1)], tokenizer.piece, as_ids=False)
    assert list(result.top_logprobs[0] or ()) == [
        "a",
        f"token_id:{as_byte}",
        r"bytes:\xf0",
        "",
        f"token_id:{unknown[1]}",
    ]
    told = chat_logprobs([position], 20, tokenizer.piece)
    assert told is not None
    assert [top.bytes for top in told.content[0].top_logprobs] == [[0x61], [0x61], [0xF0], [], []]
    assert [top.token for top in told.content[0].top_logprobs] == ["a", "a", r"\xf0", "", ""]


@pytest.mark.parametrize(
    ("piece", "text"), [("a", "a"), (b"a", "a"), (b"\xf0", r"bytes:\xf0"), (b" it's\xe2\x80", r"bytes: it's\xe2\x80")]
)
def test_invalid_utf8_token_text_is_escaped(piece: str | bytes, text: str) -> None:
    assert piece_text(piece) == text
