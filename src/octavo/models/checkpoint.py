"""Weights of a checkpoint directory: safetensors files, one or many, read tensor by tensor through a memory map."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from octavo.errors import ModelError
from octavo.models.config_file import ConfigFile
from octavo.models.process_memory import forget_pages, return_free_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from octavo.models.stored_quantization import StoredTensor

_RESIDENT_BYTES = 32 << 20  # of pages of files that are kept in memory, besides the last tensor
_PREFIX, _BARE_NAME = "model.", "embed_tokens.weight"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Tensors that some checkpoints carry and that are computed anew here.
_IGNORED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|attn\.(masked_)?bias)$")


class CheckpointFiles:
    """Every tensor of a checkpoint by name. Raises `ModelError` for files that are missing, broken or not safetensors.

    The files stay mapped while this object or a tensor from it lives. Of what was handed out, only the last pages stay
    in this process's memory; the system reads others again if they are asked for.

    Models for embeddings are often saved without their head, and their names without `model.`: they get it here.
    """

    __slots__ = ("_file_of", "_handed_out", "_left_out", "directory")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handed_out: dict[Path, list[Tensor]] = {}
        self._file_of: dict[str, tuple[Path, Any]] = {}
        for path in find_weight_files(directory):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._file_of:
                    raise ModelError(
                        f"{path}: {name} stands in {self._file_of[name][0].name}, too; remove the file that is too much"
                    )
                self._file_of[name] = (path, file)
        self._left_out = _PREFIX if _BARE_NAME in self._file_of else ""
        if self._left_out:
            self._file_of = {self._left_out + name: where for name, where in self._file_of.items()}

    def check(self, expected: Mapping[str, StoredTensor]) -> None:
        """Raise unless the files hold exactly the tensors of `expected`; known leftovers are ignored.

        A checkpoint with tied embeddings may carry an lm_head.weight as well: it is the same matrix.
        """
        missing = [name for name, each in expected.items() if not each.is_optional and name not in self._file_of]
        if missing:
            raise ModelError(
                f"{self.directory}: {_some(missing)} missing from the weights though config.json asks for it; "
                "the download is incomplete or config.json belongs to another model"
            )
        extra = [name for name in self._file_of if name not in expected and not _IGNORED.search(name)]
        if unexpected := [name for name in extra if name != "lm_head.weight"]:
            raise ModelError(
                f"{self.directory}: {_some(unexpected)} in the weights though config.json does not ask for it; "
                "octavo would ignore it and give wrong tokens"
            )
        for name, (shape, dtypes, _) in expected.items():
            if name not in self._file_of:
                continue
            path, file = self._file_of[name]
            stored = file.get_slice(name.removeprefix(self._left_out))
            if tuple(stored.get_shape()) != shape:
                found = list(stored.get_shape())
                raise ModelError(
                    f"{path}: {name} has shape {found}, but config.json asks for {list(shape)}; "
                    "the two belong to different models"
                )
            if stored.get_dtype() not in dtypes:
                raise ModelError(
                    f"{path}: {name} is stored as {stored.get_dtype()}, but {', '.join(dtypes)} is expected; quantized "
                    "weights need their quantization_config in config.json"
                )

    def find(self, name: str) -> Tensor | None:
        """Return a tensor as `tensor` does, or None where there is none of that name."""
        return self.tensor(name) if name in self._file_of else None

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that aliases the file's pages: copy it before the file may change."""
        path, file = self._file_of[name]
        try:
            tensor: Tensor = file.get_tensor(name.removeprefix(self._left_out))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: {name} cannot be read ({error}); download it again") from error
        if sum(each.nbytes for tensors in self._handed_out.values() for each in tensors) >= _RESIDENT_BYTES:
            self.release()
        self._handed_out.setdefault(path, []).append(tensor)
        return tensor

    def release(self) -> None:
        """Let go of the pages of what was handed out, and of what was freed: a tensor read again is read anew."""
        for path, tensors in self._handed_out.items():
            forget_pages(path, [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors])
        self._handed_out.clear()
        return_free_memory()


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: model.safetensors, or those of its index, or all there are."""
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        return _indexed_files(index_path)
    if found := sorted(directory.glob("*.safetensors")):
        return found
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory} holds weights as {_some(pickles)} only; octavo reads safetensors, because a pickle can run "
            "code when it is loaded. Convert it with transformers: from_pretrained(...).save_pretrained(...)"
        )
    raise ModelError(f"{directory} holds no *.safetensors weights; download the checkpoint again")


def _indexed_files(index_path: Path) -> list[Path]:
    index = ConfigFile.read(index_path)
    weight_map = index.section("weight_map")
    if weight_map is None or not all(isinstance(name, str) for name in weight_map.values.values()):
        raise index.error("weight_map", "must map tensor names to file names")
    names = sorted(set(weight_map.values.values()))
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{index_path}: {name!r} is not a plain file name")
        if not (index_path.parent / name).is_file():
            raise ModelError(f"{index_path.parent}: {name} is missing, one of {len(names)} files in {index_path.name}")
    return [index_path.parent / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is truncated or not a safetensors file ({error}; {path.stat().st_size} bytes); download it again"
        ) from error


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
