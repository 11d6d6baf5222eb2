"""Embeddings are those of transformers, and of checkpoints that were saved for nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModel

from octavo import LLM, RequestError, SamplingParams
from octavo.launch import read_pooling
from octavo.models.random_weights import tiny_config, write_checkpoint

PROMPTS = [[5, 9, 300, 7], [11] * 40, list(range(2, 120)), [3]]


@pytest.fixture(scope="module", params=["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def checkpoint(request, tmp_path_factory):
    config = tiny_config(request.param, vocab_size=400, tie_word_embeddings=True)
    return write_checkpoint(tmp_path_factory.mktemp(request.param) / "tiny", config, std=0.1)


def make(checkpoint) -> LLM:
    return LLM(
        model=str(checkpoint), dtype="float32", skip_tokenizer_init=True, max_model_len=256, num_gpu_blocks_override=64
    )


def embed(llm: LLM, **options) -> list[np.ndarray]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [np.array(output.outputs.embedding) for output in llm.embed(prompts, use_tqdm=False, **options)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_transformers(checkpoint, pooling):
    theirs = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    llm = make(checkpoint)
    for prompt, ours, unit in zip(
        PROMPTS, embed(llm, pooling=pooling, normalize=False), embed(llm, pooling=pooling), strict=True
    ):
        with torch.inference_mode():
            states = theirs(torch.tensor([prompt])).last_hidden_state[0]
        expected = (states[-1] if pooling == "last" else states.mean(dim=0)).numpy()
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(unit, expected / np.linalg.norm(expected), rtol=2e-4, atol=2e-5)
        assert abs(np.linalg.norm(unit) - 1) < 1e-6


def test_a_checkpoint_that_was_saved_without_its_head(checkpoint, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
    named = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(named, bare / "model.safetensors")
    (bare / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    for one, other in zip(embed(make(checkpoint)), embed(make(bare)), strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ({}, "last"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "last"),
    ],
)
def test_what_sentence_transformers_writes(tmp_path, modes, expected):
    if modes:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    assert read_pooling(tmp_path) == expected


def test_what_is_refused():
    with pytest.raises(RequestError, match="pooling must be"):
        SamplingParams(max_tokens=1, pooling="cls")
    with pytest.raises(RequestError, match="max_tokens = 1"):
        SamplingParams(max_tokens=2, pooling="mean")
    with pytest.raises(RequestError, match="n = 1"):
        SamplingParams(max_tokens=1, n=2, pooling="mean")
