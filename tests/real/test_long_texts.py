"""Long texts and their ends with tokenizers of real models equal the encoding of the whole text."""

from __future__ import annotations

import random

import pytest

from octavo.engine import long_text

MODELS = ("qwen3", "qwen3-coder", "llama31", "hermes3", "deepseek-r1-distill", "smollm2", "phi35", "mistral", "gemma3")
WORDS = [
    *(
        "fox",
        "Deich",
        "don't",
        "we'LL",
        "12345678",
        "3.14",
        "x_y=[0];",
        "狐狸跳",
        "été",
        "🙂",
        "e\u0301",
        "\u200b",
        "İ",
    ),
    *("<s>", "</s>", "<|im_end|>", "<|end|>", "<think>", "<", "|", "#", "//", "a", "A", "ﬁ", "\ufeff", "한국", "नमस्ते"),
]
BLANKS = [
    " ",
    " ",
    " ",
    " ",
    " ",
    "\n",
    "\n\n",
    "  ",
    "\t",
    " \n ",
    "\r\n",
    "\r",
    "",
    "",
    ", ",
    ".\n",
    "\u00a0",
    "\u3000",
]
NUM_TEXTS = 300


def made_text(source: random.Random, num_chars: int) -> str:
    pieces: list[str] = []
    while sum(map(len, pieces)) < num_chars:
        pieces += [source.choice(WORDS), source.choice(BLANKS)]
    return "".join(pieces)


@pytest.mark.parametrize("name", MODELS)
def test_split_encoding_and_encoded_ends_equal_whole_encoding(name, real_tokenizer, real_scale, monkeypatch):
    monkeypatch.setattr(long_text, "PIECE_CHARS", 60)
    tokenizer = real_tokenizer(name)
    assert tokenizer._long_texts._cut is not None, "no text of this model would be cut"
    source = random.Random(7)
    for _ in range(max(20, int(NUM_TEXTS * real_scale))):
        text = made_text(source, source.choice([100, 400, 1500]))
        for add in (True, False):
            whole = tokenizer._encode_at_once(text, add_special_tokens=add)
            assert tokenizer._long_texts.encode(text, add_special_tokens=add) == whole, text
        whole = tokenizer._encode_at_once(text, add_special_tokens=True)
        for num_tokens in (1, 7, 50, len(whole)):
            assert tokenizer._long_texts.encode_end(text, num_tokens, add_special_tokens=True) == whole[-num_tokens:], (
                text
            )
