"""Embeddings equal those of transformers, also for checkpoints that were saved only for embeddings."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
from sdks import transformers

from octavo import LLM, ModelError, RequestError, SamplingParams
from octavo.models.quantize_checkpoint import quantize_checkpoint
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


@pytest.mark.sweep(8)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_equal_transformers(checkpoint, pooling):
    theirs = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
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


def test_checkpoint_without_head_gives_equal_embeddings(checkpoint, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
    named = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(named, bare / "model.safetensors")
    (bare / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    for one, other in zip(embed(make(checkpoint)), embed(make(bare)), strict=True):
        assert one.tolist() == other.tolist()


def without_head(checkpoint, directory, *, prefix):
    """Write a copy of a checkpoint like embedding models, with untied weights in config.json and no head."""
    shutil.copytree(checkpoint, directory)
    config = json.loads((checkpoint / "config.json").read_text()) | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
    named = {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}
    safetensors.torch.save_file(named, directory / "model.safetensors")
    return directory


def test_untied_checkpoint_without_head_embeds_and_refuses_generation(checkpoint, tmp_path):
    """As in Qwen3-Embedding-8B; its smaller variants are tied."""
    llm = make(without_head(checkpoint, tmp_path / "bare", prefix=""))
    for one, other in zip(embed(make(checkpoint)), embed(llm), strict=True):
        assert one.tolist() == other.tolist()
    with pytest.raises(RequestError, match="no lm_head"):
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)
    assert embed(llm), "it goes on"


def test_missing_head_is_refused_unless_checkpoint_is_for_embeddings(checkpoint, tmp_path):
    named = without_head(checkpoint, tmp_path / "named", prefix="model.")
    with pytest.raises(ModelError, match=r"lm_head\.weight, which config.json requires"):
        make(named)
    (named / "modules.json").write_text("[]")
    assert embed(make(named))[0].tolist() == embed(make(checkpoint))[0].tolist()


@pytest.mark.sweep(12)
@pytest.mark.parametrize("folder", [None, "1_Pooling", "own"])
def test_quantized_copy_keeps_pooling_of_source(checkpoint, tmp_path, folder):
    """folder: the one named by modules.json; None for no such file."""
    source = without_head(checkpoint, tmp_path / "bare", prefix="")
    if folder is not None:
        modules = [{"type": "sentence_transformers.models.Pooling", "path": folder}]
        (source / "modules.json").write_text(json.dumps(modules))
    pooling = source / (folder or "1_Pooling")
    pooling.mkdir()
    (pooling / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    (pooling / "pytorch_model.bin").write_bytes(b"x")
    quantize_checkpoint(source, tmp_path / "rounded", "int8")
    assert not list((tmp_path / "rounded").rglob("*.bin"))
    copy = make(tmp_path / "rounded")
    chosen, mean, last = embed(copy), embed(copy, pooling="mean"), embed(copy, pooling="last")
    assert chosen[0].tolist() == mean[0].tolist()
    assert chosen[0].tolist() != last[0].tolist()
    with pytest.raises(RequestError, match="no lm_head"):
        copy.generate([{"prompt_token_ids": PROMPTS[0]}], use_tqdm=False)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"path": path} for path in ("..", ".", "", "/", "a/b", "../a", None, ["1_Pooling"])]),
        "[" * 100_000,
        "{",
        "7",
        '[[], null, {"type": "x"}]',
    ],
)
def test_quantize_copies_only_folders_of_checkpoint(checkpoint, tmp_path, text):
    """A config.json in another folder is not copied, whatever modules.json says."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (tmp_path / "config.json").write_text("{}")
    (source / "modules.json").write_text(text)
    quantize_checkpoint(source, tmp_path / "rounded", "int8")
    assert not [path for path in (tmp_path / "rounded").iterdir() if path.is_dir()]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_invalid_pooling_params_are_refused():
    with pytest.raises(RequestError, match="pooling must be"):
        SamplingParams(max_tokens=1, pooling="cls")
    with pytest.raises(RequestError, match="max_tokens = 1"):
        SamplingParams(max_tokens=2, pooling="mean")
    with pytest.raises(RequestError, match="n = 1"):
        SamplingParams(max_tokens=1, n=2, pooling="mean")
