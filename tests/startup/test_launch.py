"""The facts about its files that an engine gets before any tensor is read."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from octavo.assets import built_in_model_path
from octavo.config import ModelConfig
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.startup.launch import ServedModel, make_processors

if TYPE_CHECKING:
    from pathlib import Path

USER = {"role": "user", "content": "hello"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint with weights and a chat template, but without a tokenizer."""
    path = write_checkpoint(tmp_path / "model", tiny_config("LlamaForCausalLM", vocab_size=512))
    (path / "chat_template.jinja").write_text("the model's")
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return a folder with another checkpoint's tokenizer only."""
    path = tmp_path / "tokenizer"
    path.mkdir()
    shutil.copy(built_in_model_path() / "tokenizer.json", path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "the tokenizer's"}))
    return path


def rendered(config: ModelConfig) -> str:
    inputs, _ = make_processors(config, ServedModel.find(config))
    prompt = inputs.chat_prompt([USER])["prompt"]
    assert isinstance(prompt, str)
    return prompt


@pytest.mark.parametrize(
    ("name", "folder"),
    [(None, "demo"), ("octavo-demo", "demo"), ("octavo-demo-draft", "demo-draft")],
)
def test_built_in_model_is_found_by_name(name: str | None, folder: str) -> None:
    assert ServedModel.find(ModelConfig(model=name)).checkpoint.path == built_in_model_path().parent / folder


def test_longrope_factors_change_architecture_identity(tmp_path: Path) -> None:
    """Engines that share a store see from the architecture whether keys were rotated by equal factors (longrope)."""
    numbers = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = tiny_config("Phi3ForCausalLM", original_max_position_embeddings=512, rope_parameters=numbers)
    (tmp_path / "config.json").write_text(json.dumps(config))

    def computed(max_model_len: int) -> str:
        model = ModelConfig(
            model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=max_model_len
        )
        return repr(ServedModel.find(model).architecture)

    assert computed(100) == computed(512)
    assert computed(513) == computed(2048)
    assert computed(512) != computed(513)


def test_separate_tokenizer_supplies_its_chat_template(model: Path, tokenizer: Path) -> None:
    assert rendered(ModelConfig(model=str(model), tokenizer=str(tokenizer))) == "the tokenizer's"
    chosen = ModelConfig(model=str(model), tokenizer=str(tokenizer), chat_template="{{ 'chosen' }}")
    assert rendered(chosen) == "chosen"


def test_tokenizer_without_template_keeps_model_chat_template(model: Path, tokenizer: Path) -> None:
    (tokenizer / "tokenizer_config.json").unlink()
    assert rendered(ModelConfig(model=str(model), tokenizer=str(tokenizer))) == "the model's"


def test_weights_are_downloaded_only_if_read(model: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer's hub id downloads no weights. Neither does a model with dummy weights."""
    hub = pytest.importorskip("huggingface_hub")
    folders = {"owner/model": model, "owner/tokenizer": tokenizer}
    asked = []

    def download(name: str, *, allow_patterns: list[str], **_options: object) -> str:
        asked.append((name, "*.safetensors" in allow_patterns))
        return str(folders[name])

    monkeypatch.setattr(hub, "snapshot_download", download)
    for load_format, has_weights in (("auto", True), ("dummy", False)):
        asked.clear()
        config = ModelConfig(model="owner/model", tokenizer="owner/tokenizer", load_format=load_format)
        assert rendered(config) == "the tokenizer's"
        assert asked == [("owner/model", has_weights), ("owner/tokenizer", False)], "once each"
