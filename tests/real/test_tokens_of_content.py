"""The tokens that are reported as an answer's content, over real vocabularies, and the text after special tokens."""

from __future__ import annotations

import random

import pytest
from content_tokens import Writer, check_answer
from sdks import transformers

from octavo import ModelConfig
from octavo.engine.output_processor import OutputProcessor
from octavo.sampling_params import SamplingParams
from octavo.startup.launch import ServedModel, make_processors

MODELS = ["qwen3", "deepseek-r1-distill", "hermes3", "llama31", "phi35", "mistral", "smollm2"]
NUM_ANSWERS = 200
TEXTS = ["Hello there", " Hello", "  two", "a", "\nline", "狐 🦊", "<0x41>", "▁"]


def inputs_of(path):
    config = ModelConfig(model=str(path))
    return make_processors(config, ServedModel.find(config))[0]


@pytest.mark.parametrize("name", MODELS)
def test_content_tokens_are_tokens_with_content_text(name, real_model, real_scale):
    writer, draw = Writer.of(inputs_of(real_model(name))), random.Random(1)
    for _ in range(max(20, int(NUM_ANSWERS * real_scale))):
        check_answer(writer, writer.write("Hello.", draw), draw)


@pytest.mark.parametrize("name", ["phi35", "mistral"])
def test_text_after_special_tokens_equals_transformers(name, real_model):
    """With some special tokens shown (as markers are), and without. These vocabularies strip a first space."""
    tokenizer = inputs_of(real_model(name)).tokenizer
    oracle = transformers.AutoTokenizer.from_pretrained(real_model(name))
    special = sorted(each for each in tokenizer.added_ids if tokenizer.is_special(each))
    outputs = OutputProcessor(tokenizer, lambda: 0.0)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for prompt in ([], special[:2], special[:1] * 3):
            expected = oracle.decode(prompt + ids, skip_special_tokens=True)
            for params in (SamplingParams(), SamplingParams(shown_special_token_ids=special[-1:])):
                detokenizer = outputs._detokenizer(prompt, params)
                assert detokenizer.add(ids) + detokenizer.finish() == expected, (text, prompt, params)
