"""The embedding configuration of a checkpoint is read in the older and the newer form of sentence-transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from octavo import LLM, RequestError
from octavo.engine.embedding_config import EmbeddingConfig, read_embedding_config
from octavo.errors import ModelError
from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

OWN = "sentence_transformers.models."
USUAL = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


def write(directory: Path, modules: list[tuple[str, str]], pooling: dict[str, Any], folder: str = "1_Pooling") -> None:
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": kind} for index, (kind, path) in enumerate(modules)
    ]
    if listed:
        (directory / "modules.json").write_text(json.dumps(listed))
    (directory / folder).mkdir(parents=True)
    (directory / folder / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({}, "mean"),
    ],
)
@pytest.mark.parametrize("has_modules", [True, False])
def test_pooling_is_read_from_old_and_new_config_forms(
    tmp_path: Path, pooling: dict[str, Any], expected: str, has_modules: bool
) -> None:
    write(tmp_path, [(OWN + kind, path) for kind, path in USUAL] if has_modules else [], pooling)
    assert read_embedding_config(tmp_path) == EmbeddingConfig(expected)


def test_missing_config_selects_last_token_pooling(tmp_path: Path) -> None:
    assert read_embedding_config(tmp_path) == EmbeddingConfig("last")


def test_pooling_folder_is_read_from_modules_json(tmp_path: Path) -> None:
    kinds = [
        ("sentence_transformers.base.modules.transformer.Transformer", ""),
        ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "pooling"),
    ]
    write(tmp_path, kinds, {"pooling_mode": "mean"}, folder="pooling")
    assert read_embedding_config(tmp_path).pooling == "mean"


@pytest.mark.parametrize(
    ("modules", "pooling", "problem"),
    [
        ([], {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "pooling cls_token;"),
        ([], {"pooling_mode_lasttoken": True}, "mean and lasttoken"),
        ([], {"pooling_mode_mean_tokens": False}, "pooling none;"),
        ([], {"pooling_mode": "mean", "include_prompt": False}, "mean without the prompt"),
        ([], {"pooling_mode": "weightedmean"}, "weightedmean"),
        ([], {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "mean and max"),
        ([], {"pooling_mode": ["mean", "max"]}, "mean and max"),
        ([(OWN + "Transformer", ""), (OWN + "Pooling", "1_Pooling"), (OWN + "Dense", "2_Dense")], {}, "Dense"),
        ([("modeling_own.Transformer", ""), (OWN + "Pooling", "1_Pooling")], {}, "modeling_own.Transformer"),
    ],
)
def test_unsupported_pooling_or_module_is_reported_as_problem(
    tmp_path: Path, modules: list[tuple[str, str]], pooling: dict[str, Any], problem: str
) -> None:
    write(tmp_path, modules, pooling)
    found = read_embedding_config(tmp_path).problem
    assert found is not None
    assert problem in found
    assert str(tmp_path) not in found, "clients are told of it"


def test_missing_pooling_config_is_reported_as_problem(tmp_path: Path) -> None:
    write(tmp_path, [(OWN + kind, path) for kind, path in USUAL], {"pooling_mode": "mean"})
    (tmp_path / "1_Pooling" / "config.json").unlink()
    problem = read_embedding_config(tmp_path).problem
    assert problem is not None
    assert "1_Pooling/config.json" in problem
    assert "is missing" in problem
    assert str(tmp_path) not in problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("modules.json", "{}"),
        ("modules.json", '[{"path": ""}]'),
        ("modules.json", "[1]"),
        ("1_Pooling/config.json", '{"pooling_mode": 1}'),
        ("1_Pooling/config.json", '{"pooling_mode": [null]}'),
        ("1_Pooling/config.json", "[]"),
        ("1_Pooling/config.json", "{"),
    ],
)
def test_broken_config_file_raises_error_with_its_name(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, [(OWN + kind, path) for kind, path in USUAL], {})
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=name):
        read_embedding_config(tmp_path)


def test_embed_is_refused_for_unsupported_module_unless_pooling_is_given(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", tiny_config("Qwen3ForCausalLM", vocab_size=400), std=0.1)
    kinds = [*((OWN + kind, path) for kind, path in USUAL), (OWN + "Dense", "3_Dense")]
    write(checkpoint, kinds, {"pooling_mode": "mean"})
    llm = LLM(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=16)
    prompt = {"prompt_token_ids": [5, 9, 300]}
    with pytest.raises(RequestError, match="Dense"):
        llm.embed(prompt, use_tqdm=False)
    assert len(llm.embed(prompt, use_tqdm=False, pooling="mean")) == 1
    assert len(llm.generate([prompt], use_tqdm=False)) == 1, "its tokens are its own all the same"
