"""The trainer of the model of `tests/hybrid_conversations`: its text, its template, and what the model has learned."""

import argparse
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from agent_conversations import MODEL, read_scripts

from octavo.assets import built_in_model_path
from octavo.engine.chat_template import ChatTemplate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

transformers = pytest.importorskip("transformers")
trainer = pytest.importorskip("train_hybrid_model")

pytestmark = pytest.mark.slow
TEMPLATE = ChatTemplate(trainer.hybrid_template())


@pytest.fixture(scope="module")
def tokenizer():
    return trainer.load_tokenizer(built_in_model_path() / "tokenizer.json")


def loss_of(model, batch):
    with torch.no_grad():
        logits = model(batch.inputs, use_cache=False).logits[batch.counted]
    return torch.nn.functional.cross_entropy(logits.float(), batch.targets[batch.counted]).item()


def test_stored_model_predicts_new_conversations(tokenizer):
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    losses = [loss_of(model, trainer.training_batch(tokenizer, TEMPLATE, seed=1, step=step)) for step in range(4)]
    assert max(losses) < 0.2


def test_twenty_steps_lower_the_loss(tokenizer, tmp_path):
    torch.manual_seed(0)
    model = trainer.make_model(tokenizer)
    batch = trainer.training_batch(tokenizer, TEMPLATE, seed=1, step=0)
    before = loss_of(model, batch)
    trainer.train(model, tokenizer, argparse.Namespace(steps=20, seed=0, rate=0.02))
    assert loss_of(model, batch) < before - 0.5
    trainer.export(model, tokenizer, tmp_path)
    for name in ("config.json", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (MODEL / name).read_text()


def test_template_keeps_reasoning_of_last_turn_only():
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B", "reasoning_content": "old"},
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "<tool_call>", "reasoning_content": "new"},
        {"role": "tool", "content": "C"},
    ]
    text = TEMPLATE.render(messages, add_generation_prompt=True)
    assert "old" not in text
    assert "<|im_start|>assistant\n<think>\nnew\n</think>\n\n<tool_call><|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")


def test_scripts_use_the_tools_of_the_training():
    assert read_scripts()[1] == {tool.name: tool.described for tool in trainer.TOOLS.values()}


def test_training_calls_name_offered_tools():
    rng = random.Random(0)
    for _ in range(50):
        messages, tools = trainer.conversation(rng)
        names = {tool["function"]["name"] for tool in tools}
        lines = [line for each in messages if each["role"] == "assistant" for line in each["content"].splitlines()]
        calls = [json.loads(line) for line in lines if line.startswith('{"name"')]
        assert {call["name"] for call in calls} <= names
