"""Which models may draft for another model. Errors are reported before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gguf_files import byte_vocabulary, write_gguf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from octavo.assets import BUILT_IN_DRAFT, built_in_draft_path, built_in_model_path
from octavo.config import EngineConfig, ModelConfig, SpeculativeConfig
from octavo.errors import ConfigError
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.startup import launch
from octavo.startup.draft_checkpoint import find_draft_checkpoint
from octavo.startup.launch import ServedModel, launch_engine


def find(target: dict[str, object] | None = None, /, **speculative: object):
    """Return the draft checkpoint for the built-in model. target: options for loading that model."""
    config = ModelConfig(**(target or {}))
    return find_draft_checkpoint(SpeculativeConfig.parse(speculative or None), config, ServedModel.find(config))


def changed_draft(directory: Path, **changes: object) -> Path:
    """Return a copy of the built-in draft model without its weights, because no check may read them."""
    shutil.copytree(built_in_draft_path(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def refused(directory: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        find(method="draft_model", model=str(directory))
    return str(raised.value)


def test_method_and_options_select_draft_checkpoint(tmp_path):
    assert find() is None
    assert find(method="ngram") is None
    assert find(method="suffix") is None
    draft = find({"max_model_len": 300}, method="suffix", model=BUILT_IN_DRAFT, quantization="int8")
    assert (draft.weights.path, draft.quantization, draft.shares_kv) == (built_in_draft_path(), "int8", False)
    assert (draft.name, draft.max_model_len) == (BUILT_IN_DRAFT, 300)
    draft = find({"quantization": "int8"}, method="quantized")
    assert (draft.weights.path, draft.quantization, draft.shares_kv) == (built_in_model_path(), "int4", True)
    # It is no larger, and has the same tokenizer in another layout.
    same = changed_draft(tmp_path / "same")
    (same / "tokenizer.json").write_text(json.dumps(json.loads((same / "tokenizer.json").read_text()), indent=3))
    assert find(method="draft_model", model=str(same)).weights.path == same


@pytest.mark.parametrize(("kind", "quantization"), [("Q4_0", None), ("Q4_0", "int8"), ("Q8_0", None)])
def test_int4_draft_of_4_bit_gguf_target_is_refused(kind, quantization, tmp_path):
    config = tiny_config("LlamaForCausalLM", vocab_size=288)
    path = write_gguf(write_checkpoint(tmp_path / "folder", config), tmp_path / "model.gguf", kind=kind)
    target = {"model": str(path), "quantization": quantization}
    if (kind, quantization) != ("Q4_0", None):
        assert find(target, method="quantized").shares_kv
        return
    with pytest.raises(
        ConfigError, match=r"method quantized .* in int4, but .*model.gguf is hardly larger without it: "
    ):
        find(target, method="quantized")


def test_fp8_draft_of_fp8_target_is_refused(tmp_path):
    folder = shutil.copytree(built_in_model_path(), tmp_path / "fp8")
    config = json.loads((folder / "config.json").read_text())
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    with pytest.raises(ConfigError, match=r"in fp8, but those of .*fp8 are FP8 already; use int4"):
        find({"model": str(folder)}, method="quantized", quantization="fp8")
    assert find({"model": str(folder)}, method="quantized").quantization == "int4"


def test_draft_model_with_different_vocabulary_is_refused(tmp_path):
    assert "has a vocabulary of 1,537 tokens, but the model has one of 1,536" in refused(
        changed_draft(tmp_path / "larger", vocab_size=1537)
    )
    other = changed_draft(tmp_path / "other")
    described = json.loads((other / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(described))
    Tokenizer.from_file(str(other / "tokenizer.json"))
    assert "has another vocabulary: token" in refused(other)
    skipping = {"skip_tokenizer_init": True}
    assert find(skipping, method="draft_model", model=str(other)).weights.path == other


def test_padding_rows_do_not_make_draft_vocabulary_different(tmp_path):
    """llama.cpp's conversions name each row of the embedding. tokenizer.json names only the rows that are tokens."""
    folder = write_checkpoint(tmp_path / "folder", tiny_config("LlamaForCausalLM", vocab_size=288))
    whole = write_gguf(folder, tmp_path / "whole.gguf")
    tokens = byte_vocabulary(264)["tokenizer.ggml.tokens"]
    assert byte_vocabulary(265)["tokenizer.ggml.tokens"][264:] == ["[PAD264]"]
    cut = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": byte_vocabulary(264)["tokenizer.ggml.token_type"],
    }
    draft = write_gguf(folder, tmp_path / "draft.gguf", changes=cut)
    assert find({"model": str(whole)}, method="draft_model", model=str(draft)).weights.path == draft
    tokens += ["[PAD265]", "[PAD264]"]
    cut["tokenizer.ggml.token_type"] += [5, 5]
    write_gguf(folder, draft, changes=cut)
    with pytest.raises(ConfigError, match="has another vocabulary: token"):
        find({"model": str(whole)}, method="draft_model", model=str(draft))


def test_draft_model_without_tokenizer_is_accepted_with_warning(tmp_path, caplog):
    bare = changed_draft(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert find(method="draft_model", model=str(bare)).weights.path == bare
    assert "it is assumed to use the model's tokens" in caplog.text


def test_draft_model_larger_than_target_is_refused(tmp_path):
    message = refused(changed_draft(tmp_path / "large", hidden_size=512, num_hidden_layers=9))
    assert "parameters, more than the model's" in message


def test_unsupported_or_headless_draft_model_is_refused(tmp_path):
    message = refused(changed_draft(tmp_path / "other", architectures=["MambaForCausalLM"]))
    assert message.startswith("model of speculative_config: ")
    assert "unknown architecture; octavo serves" in message
    headless = write_checkpoint(tmp_path / "headless", tiny_config("LlamaForCausalLM", vocab_size=1536))
    assert find(method="draft_model", model=str(headless)).weights.path == headless  # it has a head at this point
    weights = {name: each for name, each in load_file(headless / "model.safetensors").items() if "lm_head" not in name}
    weights = {name.removeprefix("model."): each for name, each in weights.items()}
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    assert "computes embeddings, not tokens" in refused(headless)


def test_missing_or_empty_draft_model_path_is_refused(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "is empty" in refused(tmp_path / "file")


def test_draft_model_with_shorter_context_is_accepted_with_warning(tmp_path, caplog):
    short = changed_draft(tmp_path / "short", max_position_embeddings=100)
    assert find(method="draft_model", model=str(short)).max_model_len == 100
    assert "made for 100 positions, fewer than the 2048 of the model" in caplog.text


@pytest.mark.parametrize(
    ("quantization", "of_draft"),
    [("int4", None), ("int4_all", None), ("int4", "int4_all"), ("int8", "int8"), ("int4", "int8")],
)
def test_target_with_no_more_bits_than_quantized_draft_is_refused(quantization, of_draft):
    with pytest.raises(
        ConfigError, match=f"the model itself is loaded in {quantization}, so a draft would take as long"
    ):
        find({"quantization": quantization}, method="quantized", quantization=of_draft)


def test_draft_model_error_is_raised_before_engine_process_starts(monkeypatch):
    monkeypatch.setattr(launch.sys, "executable", "/nowhere")
    config = EngineConfig(speculative=SpeculativeConfig(method="draft_model", model="/no/such/model"))
    with pytest.raises(ConfigError, match="model of speculative_config: /no/such/model does not exist"):
        launch_engine(config)
