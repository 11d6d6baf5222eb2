"""Writes quantized copies of checkpoints for octavo, vLLM and transformers.

Embeddings, lm_head, norms, routers and kv_b of latent attention stay floats.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from octavo.config import DEFAULT_GROUP_SIZE
from octavo.errors import ModelError
from octavo.kernels.quantization import GROUP_MULTIPLE
from octavo.models.architecture import is_vocabulary
from octavo.models.config_file import ConfigFile
from octavo.models.experts import is_router
from octavo.models.float_weights import open_tensors
from octavo.models.gated_delta import is_rate
from octavo.models.latent_attention import is_absorbed
from octavo.models.quantized_weights import describe_stored, refuse_broken_scales, stored_tensors
from octavo.models.registry import read_architecture
from octavo.models.text_part import text_part
from octavo.models.weight_bytes import is_never_rounded, weight_bytes
from octavo.models.weight_source import FolderWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.models.architecture import Architecture
    from octavo.models.weight_source import StoredTensors

PRECISIONS = ("int8", "int4")
MAX_SHARD_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"
_ROUTERS = (r"re:.*\.mlp\.(gate|router)$", r"re:.*\.shared_expert_gate$")
_ABSORBED = (r"re:.*\.kv_b_proj$",)
_RATES = (r"re:.*\.linear_attn\.in_proj_(a|b|ba)$",)
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".md", ".tiktoken")


def quantize_checkpoint(
    source: Path,
    destination: Path,
    precision: str,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """Write a quantized copy of a checkpoint into a new or empty directory. Return the bytes of its weights.

    precision: "int8" (a scale per output feature) or "int4" (one per `group_size` input features). progress(done,
    total): in bytes of the source's weights. Raises `ModelError` if the source has integers or the destination is not
    empty.
    """
    architecture = read_architecture(source)
    if architecture.stored is not None:
        raise ModelError(f"{source} is quantized already ({architecture.stored.layout})")
    if group_size % GROUP_MULTIPLE or group_size < 1:
        raise ModelError(f"group_size must be a multiple of {GROUP_MULTIPLE}, got {group_size}")
    if precision == "int8" and group_size != DEFAULT_GROUP_SIZE:
        raise ModelError(
            f"group_size is an option of int4; int8 has one scale for each output feature, got {group_size}"
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ModelError(f"{destination} already exists; give a new directory")
    files = open_tensors(FolderWeights(source), architecture, getattr(torch, architecture.dtype))
    refuse_broken_scales(files, architecture.scale_names())
    config = text_part(ConfigFile.read(source / "config.json")).values
    config.pop("compression_config", None)  # an older name of quantization_config
    names = architecture.tensor_shapes()
    kinds = ((_ROUTERS, is_router), (_ABSORBED, is_absorbed), (_RATES, is_rate))
    ignored = [pattern for patterns, is_of in kinds if any(map(is_of, names)) for pattern in patterns]
    config["quantization_config"] = describe_stored(precision, group_size, ["lm_head", *ignored])
    try:
        # Only complete files are renamed. config.json comes last.
        folder = destination if destination.exists() else destination.parent
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=folder) as unfinished:
            written = Path(unfinished)
            num_bytes = _write_weights(architecture, files, written, precision, group_size, max_shard_bytes, progress)
            _copy_the_rest(source, written)
            destination.mkdir(exist_ok=True)
            for path in written.iterdir():
                path.rename(destination / path.name)
            (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{destination} cannot be written: {error}") from error
    return num_bytes


def _write_weights(
    architecture: Architecture,
    files: StoredTensors,
    directory: Path,
    precision: str,
    group_size: int,
    max_shard_bytes: int,
    progress: Callable[[int, int], None],
) -> int:
    writer = _ShardWriter(directory, max_shard_bytes)
    total = weight_bytes(architecture, architecture.dtype)
    done = 0
    for name, shape in architecture.tensor_shapes().items():
        tensor = files.tensor(name)
        if len(shape) == 2 and not is_vocabulary(name) and not is_never_rounded(name):
            tensors = stored_tensors(name.removesuffix(".weight"), tensor, precision, group_size)
        else:
            tensors = {name: tensor.clone()}
        if not architecture.has_head:  # names without "model." mark such a model
            tensors = {each.removeprefix("model."): stored for each, stored in tensors.items()}
        writer.add(tensors)
        done += tensor.nbytes
        progress(min(done, total), total)
    return writer.finish()


def _copy_the_rest(source: Path, directory: Path) -> None:
    for path in source.iterdir():
        is_text = path.suffix in _TEXT_SUFFIXES or path.name.startswith(("LICENSE", "NOTICE", "USE_POLICY"))
        if path.is_file() and is_text and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, directory / path.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, directory / templates.name)
    for name in _module_folders(source / "modules.json"):
        if (config := source / name / "config.json").is_file():
            (directory / name).mkdir()
            shutil.copyfile(config, directory / name / config.name)


def _module_folders(path: Path) -> set[str]:
    try:
        modules = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # serving the copy reports a broken list
        modules = []
    listed = [each.get("path") for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    plain = {name for name in listed if isinstance(name, str) and Path(name).name == name and name not in ("", "..")}
    return {"1_Pooling", *plain}


class _ShardWriter:
    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_of: dict[str, int] = {}
        self._num_shards = 0
        self._num_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._shard and size + sum(tensor.nbytes for tensor in self._shard.values()) > self._max_bytes:
            self._write()
        self._shard |= tensors
        self._num_bytes += size

    def finish(self) -> int:
        self._write()
        names = [f"model-{number + 1:05}-of-{self._num_shards:05}.safetensors" for number in range(self._num_shards)]
        if self._num_shards == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            self._path(number).rename(self._directory / name)
        if self._num_shards > 1:
            index = {
                "metadata": {"total_size": self._num_bytes},
                "weight_map": {name: names[number] for name, number in self._shard_of.items()},
            }
            (self._directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self._num_bytes

    def _write(self) -> None:
        self._shard_of |= dict.fromkeys(self._shard, self._num_shards)
        save_file(self._shard, self._path(self._num_shards), metadata={"format": "pt"})
        self._num_shards += 1
        self._shard = {}

    def _path(self, number: int) -> Path:
        return self._directory / f"part-{number}.tmp"
