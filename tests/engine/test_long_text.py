"""Long texts encoded in pieces, and ends of long texts, are equal (`==`) to those of the whole text."""

from __future__ import annotations

import random

import pytest

from octavo.assets import built_in_model_path
from octavo.engine import long_text
from octavo.engine.long_text import PIECE_CHARS
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import RequestError
from octavo.runtime.text_work import _local, _Work

WORDS = ["fox", "Deich", "don't", "12345678", "x_y=[0];", "狐狸", "été", "🙂", "e\u0301", "\u200b", "<s>", "</s>", "a"]
BLANKS = [" ", " ", " ", " ", "\n", "\n\n", "  ", "\t", " \n ", "\r\n", "", ", ", ".\n"]


def texts(seed: int, num_chars: int) -> str:
    source, pieces, length = random.Random(seed), [], 0
    while length < num_chars:
        pieces.append(source.choice(WORDS) + source.choice(BLANKS))
        length += len(pieces[-1])
    return "".join(pieces)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(built_in_model_path())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PIECE_CHARS", 50)


@pytest.mark.turn(12)
@pytest.mark.parametrize("add", [True, False])
def test_long_text_in_pieces_has_ids_of_whole_text(tokenizer: Tokenizer, small_pieces: None, add: bool) -> None:
    for seed in range(40):
        text = texts(seed, 2000)
        whole = tokenizer._encode_at_once(text, add_special_tokens=add)
        assert tokenizer._long_texts.encode(text, add_special_tokens=add) == whole


@pytest.mark.sweep(12)
@pytest.mark.parametrize("first", range(3))
def test_encode_end_returns_last_ids_of_whole_text(tokenizer: Tokenizer, small_pieces: None, first: int) -> None:
    for seed in range(first, 40, 3):
        text = texts(seed, 2000)
        whole = tokenizer._encode_at_once(text, add_special_tokens=True)
        for num_tokens in (1, 5, 40, len(whole) - 1, len(whole), len(whole) + 9):
            assert tokenizer._long_texts.encode_end(text, num_tokens, add_special_tokens=True) == whole[-num_tokens:]


@pytest.mark.turn(12)
def test_limited_encoding_tokenizes_only_needed_pieces(tokenizer: Tokenizer) -> None:
    text = texts(0, 16 * PIECE_CHARS)
    work = _local.work = _Work()
    try:
        kept = tokenizer.encode_end(text, 100)
        assert 100 <= work.num_tokens < 3 * PIECE_CHARS
        work.num_tokens = 0
        some = tokenizer.encode(text, most=5000)
        assert 5000 < len(some) == work.num_tokens < 5000 + 2 * PIECE_CHARS
    finally:
        _local.work = None
    assert kept == tokenizer._encode_at_once(text, add_special_tokens=True)[-100:]


def test_text_without_cut_points_has_length_limit(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "1" * (PIECE_CHARS * 2)
    assert tokenizer.encode(text) == tokenizer._encode_at_once(text, add_special_tokens=True)
    monkeypatch.setattr(long_text, "MAX_UNCUT_CHARS", PIECE_CHARS)
    for take in (tokenizer.encode, lambda text: tokenizer.encode_end(text, 10)):
        with pytest.raises(RequestError, match=f"{len(text)} characters without a place to cut"):
            take(text)
