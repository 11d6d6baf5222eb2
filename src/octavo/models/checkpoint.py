"""Reads weights from safetensors files."""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from octavo.errors import ModelError
from octavo.models.stored_experts import ExpertPart, find_expert_parts
from octavo.models.weight_files import decoder_names, find_weight_files, some
from octavo.models.weight_source import FloatRows
from octavo.runtime.process_memory import forget_pages, return_free_memory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from octavo.models.stored_quantization import StoredTensor

logger = logging.getLogger(__name__)
_RESIDENT_BYTES = 32 << 20  # of resident tensors, in addition to the last one
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PREDICTION = "eh_proj."  # a tensor of multi-token prediction only
_PREDICTOR = "mtp."  # Qwen3.5's layers of multi-token prediction
# Tensors that octavo computes itself.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|attn\.(masked_)?bias)$")


class CheckpointFiles:
    """The `StoredTensors` of safetensors files, named by `decoder_names`. Only recently read pages stay in memory."""

    __slots__ = ("_file_of", "_handed_out", "_part", "_stored_name", "directory")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handed_out: dict[Path, list[Tensor]] = {}
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for path in find_weight_files(directory):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118
                if name in self._file_of:
                    raise ModelError(
                        f"{path}: {name} is also in {self._file_of[name][0].name}; remove the superfluous file"
                    )
                self._file_of[name] = (path, file)
        self._part: dict[str, ExpertPart] = {}
        self._stored_name = decoder_names(self._file_of)
        self._file_of = {name: self._file_of[stored] for name, stored in self._stored_name.items()}
        self._part = self._divided()

    def _divided(self) -> dict[str, ExpertPart]:
        parts: dict[str, ExpertPart] = {}
        whole = dict(self._file_of)
        for name, part in find_expert_parts(self.directory, whole, self._shape):
            if name in self._file_of:
                path = self._file_of[name][0]
                raise ModelError(f"{path}: {part.stored} and {name} are both present; remove the superfluous file")
            self._file_of[name], self._stored_name[name] = whole[part.stored], self._stored_name[part.stored]
            parts[name] = part
        for name in {part.stored for part in parts.values()}:
            del self._file_of[name], self._stored_name[name]
        return parts

    def _shape(self, name: str) -> list[int]:
        path, file = self._file_of[name]
        try:
            shape = list(file.get_slice(self._stored_name[name]).get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: {name} cannot be read ({error}); download it again") from error
        return shape if (part := self._part.get(name)) is None else part.shape(shape)

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """See `StoredTensors`. Tied embeddings allow an equal lm_head.weight."""
        missing = [name for name, each in expected.items() if not each.is_optional and name not in self._file_of]
        if missing:
            raise ModelError(
                f"{self.directory}: the weights lack {some(missing)}, which config.json requires; the "
                "download is incomplete or config.json belongs to another model"
            )
        extra = [name for name in self._file_of if name not in expected and not _IGNORED.search(name)]
        extra = self._without_prediction_layers(extra)
        if unexpected := [name for name in extra if name != _HEAD]:
            raise ModelError(
                f"{self.directory}: the weights have {some(unexpected)}, which config.json does not require; octavo "
                "would ignore it and generate wrong tokens"
            )
        for name, (shape, dtypes, _) in expected.items():
            if name not in self._file_of:
                continue
            path, file = self._file_of[name]
            stored = file.get_slice(self._stored_name[name])
            found = self._shape(name)
            if found != list(shape) and not (math.prod(found) == math.prod(shape) == 1):  # a number may have any rank
                raise ModelError(
                    f"{path}: {name} has shape {found}, but config.json requires {list(shape)}; the two belong to "
                    "different models"
                )
            if stored.get_dtype() not in dtypes:
                raise ModelError(
                    f"{path}: {name} is stored as {stored.get_dtype()}, but {', '.join(dtypes)} is expected; quantized "
                    "weights need their quantization_config in config.json"
                )

        if _HEAD in extra and not self._is_tied():
            raise ModelError(
                f"{self._file_of[_HEAD][0]}: lm_head.weight differs from the embeddings, but config.json has "
                "tie_word_embeddings = true; set it to false"
            )

    def _without_prediction_layers(self, extra: list[str]) -> list[str]:
        """Remove multi-token prediction (DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2)."""
        layers = tuple(dict.fromkeys(name.partition(_PREDICTION)[0] for name in extra if _PREDICTION in name))
        if any(name.startswith(_PREDICTOR) for name in extra):
            layers = (*layers, _PREDICTOR)
        if layers:
            names = ", ".join(layer.removesuffix(".") for layer in layers)
            logger.info("%s: %s is not loaded: octavo does not predict several tokens", self.directory, names)
        return [name for name in extra if not name.startswith(layers)]

    def _is_tied(self) -> bool:
        head, embeddings = self.tensor(_HEAD), self.find(_EMBEDDING)
        is_tied = embeddings is not None and head.dtype == embeddings.dtype and head.equal(embeddings)
        self.release()
        return is_tied

    def find(self, name: str) -> Tensor | None:
        """See `StoredTensors`."""
        return self.tensor(name) if name in self._file_of else None

    def weight(self, name: str) -> Tensor:
        """See `StoredTensors`."""
        return self.tensor(name)

    def table(self, name: str) -> FloatRows:
        """See `StoredTensors`."""
        return FloatRows(self.tensor(name))

    def tensor(self, name: str) -> Tensor:
        """See `StoredTensors`."""
        path, file = self._file_of[name]
        try:
            tensor: Tensor = file.get_tensor(self._stored_name[name])
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: {name} cannot be read ({error}); download it again") from error
        if (part := self._part.get(name)) is not None:
            tensor = part.of(tensor)
        if sum(_extent(each) for tensors in self._handed_out.values() for each in tensors) >= _RESIDENT_BYTES:
            self.release()
        self._handed_out.setdefault(path, []).append(tensor)
        return tensor.contiguous()

    def release(self) -> None:
        """See `StoredTensors`."""
        for path, tensors in self._handed_out.items():
            forget_pages(path, [(tensor.data_ptr(), _extent(tensor)) for tensor in tensors])
        self._handed_out.clear()
        return_free_memory()


def _extent(tensor: Tensor) -> int:
    places = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (places + 1) * tensor.itemsize if tensor.numel() else 0


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is truncated or not a safetensors file ({error}; {path.stat().st_size} bytes); download it again"
        ) from error
