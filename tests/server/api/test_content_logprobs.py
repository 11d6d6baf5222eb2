"""The tokens that are reported as an answer's content, over vocabularies of every kind."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from content_tokens import Writer, check_answer
from fakes import FakeChatTemplate
from tokenizers import AddedToken

sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))
from test_tokenizer import CONFIG, byte_fallback, byte_level

from octavo.config import ModelInfo
from octavo.engine.input_processor import InputProcessor
from octavo.engine.tokenizer import Tokenizer

MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
NUM_ANSWERS = 120


@pytest.fixture(scope="module", params=["plain", "special", "added"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def writer(request: pytest.FixtureRequest, kind: str) -> Writer:
    """Return a writer of answers. kind: the markers are plain text, special tokens or added tokens.

    Some tokens of the vocabulary cross the borders of markers.
    """
    backend = request.param()
    across = ["nk>\n", ">I", ">é", "k.<", " <", "狐<", "\n<to", "l>\n", ">\n\n"]
    tokens = [AddedToken(each, special=kind == "special", normalized=False) for each in MARKERS]
    if kind != "plain":
        (backend.add_special_tokens if kind == "special" else backend.add_tokens)(tokens)
    backend.add_tokens([AddedToken(each, normalized=False) for each in across])
    info = ModelInfo(name="a", vocab_size=9999, max_model_len=99, eos_token_ids=frozenset({2}))
    return Writer.of(InputProcessor(Tokenizer(backend, CONFIG), info, 0, FakeChatTemplate()))


@pytest.mark.sweep(8)
def test_content_logprobs_cover_exactly_tokens_of_content(writer: Writer, kind: str) -> None:
    draw = random.Random(1)
    assert len(writer.hidden) == 4
    assert len(writer.form.shown_ids) == (4 if kind == "special" else 0)
    for _ in range(NUM_ANSWERS):
        check_answer(writer, draw.choice([[5], [1, 3], writer.write("Hello.", draw)]), draw)
