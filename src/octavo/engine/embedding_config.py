"""Read sentence-transformers' pooling settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.engine.generation_config import read_json
from octavo.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_MODULES, _USUAL_POOLING = "modules.json", "1_Pooling"
_KINDS = {"lasttoken": "last", "mean": "mean"}
_OWN = "sentence_transformers."  # modules without this prefix are custom code
_COMPUTED = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """How hidden states become an embedding.

    pooling: "last" or "mean".
    problem: Why octavo cannot compute the embedding. Clients see this text, so it has no absolute paths.
    """

    pooling: str = "last"
    problem: str | None = None


def read_embedding_config(directory: Path) -> EmbeddingConfig:
    """Read a checkpoint's pooling, by default "last". Raises `ModelError`."""
    folder, is_named = directory / _USUAL_POOLING, False
    for name, module in _read_modules(directory / _MODULES):
        kind = name.rpartition(".")[2]
        if not name.startswith(_OWN) or kind not in _COMPUTED:
            return EmbeddingConfig(problem=f"{_MODULES} asks for {name}, which octavo does not compute")
        if kind == "Pooling":
            folder, is_named = directory / module, True
    path = folder / "config.json"
    values, called = read_json(path), f"{folder.name}/{path.name}"
    if values is None:
        problem = f"{called}, which {_MODULES} names, is missing; download it again" if is_named else None
        return EmbeddingConfig(problem=problem)
    if not isinstance(values, dict):
        raise ModelError(f"{path} must be a JSON object, but is a JSON {type(values).__name__}")
    modes = _read_modes(path, values)
    if modes == ["mean"] and values.get("include_prompt") is False:
        modes = ["mean without the prompt"]
    if len(modes) != 1 or modes[0] not in _KINDS:
        described = " and ".join(modes) or "none"
        return EmbeddingConfig(
            problem=f"{called} asks for the pooling {described}; octavo takes the last state or the mean"
        )
    return EmbeddingConfig(_KINDS[modes[0]])


def _read_modules(path: Path) -> list[tuple[str, str]]:
    modules = read_json(path)
    if modules is None:
        return []
    if not isinstance(modules, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path", ""), str)
        for each in modules
    ):
        raise ModelError(f"{path} must list modules with a type and a path each; download it again")
    return [(each["type"], each.get("path", "")) for each in modules]


def _read_modes(path: Path, values: dict[str, Any]) -> list[str]:
    named = values.get("pooling_mode")
    if named is None:
        flags = {"pooling_mode_mean_tokens": True, **values}
        names = [name for name, value in flags.items() if name.startswith("pooling_mode_") and value is True]
        return [name.removeprefix("pooling_mode_").removesuffix("_tokens") for name in names]
    names = named if isinstance(named, list) else [named]
    if not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: pooling_mode = {named!r} must be a name or a list of them")
    return names
