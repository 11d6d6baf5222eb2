"""Keeps packed integer weights on disk, as safetensors.

A cached file is valid until the checkpoint changes. A forged file can change tokens, but cannot run code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from octavo.config import cache_directory
from octavo.kernels.checksum import xxh64
from octavo.kernels.interface import KeptLinear
from octavo.models.weight_hashes import FileHashes, FileState, written_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import Tensor

    from octavo.kernels.interface import Kernels, PackedLinear
    from octavo.models.declared import Linear, Norm, Table, Vector
    from octavo.models.layers import Weights
    from octavo.models.weight_source import TableRows

logger = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20  # smaller models are packed fast enough
FORMAT_VERSION = 3  # increase it if the stored format changes
_READERS, _WEIGHTS_AHEAD = 2, 4
_TASK_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20  # fits the processor's cache
_LINE_BYTES = 64
_MAX_HEADER_BYTES = 64 << 20
HASHES_FILE = "hashes.json"
_SUFFIX = ".packed.safetensors"
_ABANDONED_S = 3600.0
_IN_USE_S = 86400.0


class Identity:
    """Identifies a checkpoint's files and packed format."""

    def __init__(
        self, files: Iterable[Path], formats: Iterable[object], hashes: FileHashes, on_progress: Callable[[], None]
    ) -> None:
        self._states = {path: FileState.of(path) for path in sorted(files)}
        self._formats = [str(each) for each in formats]
        self._hashes = hashes
        self._on_progress = on_progress

    def digest(self) -> str:
        """Hash formats and files, or reuse stored hashes. Raises `OSError`."""
        files = [
            (path.name, self._hashes.sha256(path, state, self._on_progress)) for path, state in self._states.items()
        ]
        return _digest_text(json.dumps([self._formats, files]))

    def is_current(self) -> bool:
        """Return False if a file changed. Raises `OSError`."""
        return all(FileState.of(path) == state for path, state in self._states.items())

    def keep(self) -> None:
        """Store file hashes."""
        self._hashes.keep()


class PackedCache:
    """At most `max_bytes` of packed weights. The least recently used are removed first."""

    def __init__(self, max_bytes: int, directory: Path | None = None) -> None:
        self.max_bytes = max_bytes
        self.directory = directory or cache_directory() / "packed"

    def hashes(self) -> FileHashes:
        """Return stored hashes."""
        return FileHashes(self.directory / HASHES_FILE)

    def path(self, checkpoint: Path, *formats: object) -> Path:
        """Return a checkpoint's path."""
        name = json.dumps([str(checkpoint.resolve()), *(str(each) for each in formats)])
        readable = "".join(c if c.isalnum() or c in "-._" else "-" for c in checkpoint.resolve().name)[:60]
        return self.directory / f"{readable}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}{_SUFFIX}"

    def make_room(self, num_bytes: int, for_path: Path) -> bool:
        """Remove old files until `num_bytes` fit, or return False and keep all weights.

        Files used within a day are kept, so that models used in turn do not evict each other.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        ages: dict[Path, tuple[float, int]] = {}
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):
                ages[path] = (now - path.stat().st_mtime, path.stat().st_size)
        for path, (age, _) in ages.items():
            if path.suffix == ".tmp" and age > _ABANDONED_S:  # of a killed process
                path.unlink(missing_ok=True)
        kept = {path: each for path, each in ages.items() if path.name.endswith(_SUFFIX) and path != for_path}
        too_much = num_bytes + sum(size for _, size in kept.values()) - self.max_bytes
        going: list[Path] = []
        for path, (age, size) in sorted(kept.items(), key=lambda item: -item[1][0]):
            if too_much <= 0 or age < _IN_USE_S:
                break
            going.append(path)
            too_much -= size
        freed = sum(kept[path][1] for path in going)
        if too_much > 0 or shutil.disk_usage(self.directory).free + freed <= 2 * num_bytes:
            return False
        for path in going:
            path.unlink(missing_ok=True)
        return True


class KeptWeights:
    """`Weights` from a cached file, or from the checkpoint. on_progress: called after each write."""

    def __init__(
        self,
        cache: PackedCache,
        path: Path,
        identity: Identity,
        kernels: Kernels,
        source: Weights,
        on_progress: Callable[[], None],
    ) -> None:
        self._cache = cache
        self._path = path
        self._identity = identity
        self._kernels = kernels
        self._source = source
        self._on_progress = on_progress
        self._packed: dict[str, tuple[KeptLinear, ...]] = {}
        self._is_complete = True
        self._reader = _Reader.open(path, identity.digest(), kernels) if os.access(path, os.R_OK) else None

    def linear(self, declared: Linear) -> PackedLinear:
        """See `Weights`."""
        name = "+".join(declared.names)
        if self._reader is not None:
            try:
                restored = self._restore(declared, self._reader.take(name))
                self._source.skip(declared)
                return restored  # noqa: TRY300
            except Exception as error:  # noqa: BLE001
                logger.warning("%s cannot be used (%s); weights are packed again", self._path, error)
                self.close()
                self._is_complete = False  # the next start writes the file
                with suppress(OSError):
                    self._path.unlink(missing_ok=True)
        packed = self._source.linear(declared)
        self._packed[name] = self._kernels.keep_linear(packed)
        self._is_complete = self._is_complete and bool(self._packed[name])
        return packed

    def _restore(self, declared: Linear, kept: list[KeptLinear]) -> PackedLinear:
        restored = self._kernels.restore_linear(kept)
        found = restored.out_features, restored.in_features, {part.bias is not None for part in kept}
        expected = declared.out_features, declared.in_features, {declared.has_bias}
        if found != expected or len(kept) > len(declared.parts):
            raise ValueError(f"{'+'.join(declared.names)} does not have the model's shape")
        return restored

    def norm(self, declared: Norm) -> Tensor:
        """See `Weights`."""
        return self._source.norm(declared)

    def vector(self, declared: Vector) -> Tensor:
        """See `Weights`."""
        return self._source.vector(declared)

    def table(self, declared: Table) -> TableRows:
        """See `Weights`."""
        return self._source.table(declared)

    def skip(self, declared: Linear) -> None:
        """See `Weights`."""
        self._source.skip(declared)

    def finish(self) -> None:
        """Write the file if all weights come from the checkpoint and are large enough. Failures are only logged."""
        if self._reader is not None:
            with suppress(OSError):
                os.utime(self._path)
            self._identity.keep()
            return
        packed, self._packed = self._packed, {}
        num_bytes = sum(part.data.nbytes for parts in packed.values() for part in parts)
        if not packed or not self._is_complete or num_bytes < LEAST_BYTES:
            return
        try:
            if not self._cache.make_room(num_bytes, self._path):
                return
            digest = self._identity.digest()
            if not self._identity.is_current():
                logger.warning("the checkpoint was changed while it was loaded: its packed weights are not stored")
                return
            _write(self._path, digest, packed, self._on_progress)
            self._identity.keep()
            logger.info("packed weights are stored in %s (%d MB)", self._path, num_bytes // 10**6)
        except OSError as error:
            logger.warning("packed weights cannot be stored in %s: %s", self._path, error)

    def close(self) -> None:
        """Close the file."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _TensorBeingRead(NamedTuple):
    name: str
    data: Tensor
    digest: str
    tasks: list[Future[list[int]]]

    def result(self) -> Tensor:
        if _digest_sums(each for task in self.tasks for each in task.result()) != self.digest:
            raise ValueError(f"{self.name} is damaged")
        return self.data


class _Reader:
    """Reads weights ahead and checks them. One allocation holds all weights, so most pages are huge."""

    @classmethod
    def open(cls, path: Path, identity: str, kernels: Kernels) -> _Reader | None:
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            header, start = _read_header(file)
            metadata = header.pop("__metadata__")
            if metadata["identity"] != identity:
                os.close(file)
                return None
            if _digest_text(metadata["linears"]) != metadata["digest"]:
                raise ValueError("its header is damaged")  # noqa: TRY301
            return cls(file, start, header, json.loads(metadata["linears"]), kernels)
        except Exception as error:  # noqa: BLE001
            logger.warning("%s cannot be read (%s); weights are packed again", path, error)
            os.close(file)
            return None

    def __init__(
        self, file: int, start: int, tensors: dict[str, Any], linears: dict[str, list[dict[str, Any]]], kernels: Kernels
    ) -> None:
        self._file = file
        self._start = start
        self._places = _places(tensors, os.fstat(file).st_size - start)
        self._memory = kernels.allocate(sum(_whole_lines(last - first) for first, last in self._places.values()))
        self._taken = 0
        self._linears = linears
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="octavo-read")
        self._names = list(linears)
        self._begun: dict[str, list[tuple[_TensorBeingRead, _TensorBeingRead | None, dict[str, int | str]]]] = {}
        self._num_begun = 0

    def take(self, name: str) -> list[KeptLinear]:
        index = self._names.index(name)
        for ahead in self._names[self._num_begun : index + 1 + _WEIGHTS_AHEAD]:
            self._begun[ahead] = [self._begin_part(ahead, *each) for each in enumerate(self._linears[ahead])]
            self._num_begun += 1
        kept = []
        for data, bias, numbers in self._begun.pop(name):
            values = None if bias is None else bias.result().view(torch.float32)
            kept.append(KeptLinear(data.result(), values, numbers))
        return kept

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._begun.clear()
        os.close(self._file)

    def _begin_part(
        self, name: str, index: int, part: dict[str, Any]
    ) -> tuple[_TensorBeingRead, _TensorBeingRead | None, dict[str, int | str]]:
        bias = None if part["bias"] is None else self._begin(_tensor_name(name, index, "bias"), part["bias"])
        return self._begin(_tensor_name(name, index, "data"), part["data"]), bias, part["numbers"]

    def _begin(self, name: str, digest: str) -> _TensorBeingRead:
        first, last = self._places.pop(name)
        data = self._memory[self._taken : self._taken + last - first]
        self._taken += _whole_lines(last - first)
        offsets = range(self._start + first, self._start + last, _TASK_BYTES)
        tasks = [self._pool.submit(self._read, *each) for each in zip(_cut(data, _TASK_BYTES), offsets, strict=True)]
        return _TensorBeingRead(name, data, digest, tasks)

    def _read(self, data: Tensor, offset: int) -> list[int]:
        sums = []
        for piece in _cut(data, _PIECE_BYTES):
            view, done = _bytes_of(piece), 0
            while done < len(view):
                count = os.preadv(self._file, [view[done:]], offset + done)
                if count == 0:
                    raise ValueError("it was truncated while it was read")
                done += count
            sums.append(xxh64(piece))
            offset += done
        return sums


def _places(tensors: dict[str, Any], num_bytes: int) -> dict[str, tuple[int, int]]:
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, tensor in tensors.items():
        first, last = tensor["data_offsets"]
        if not (type(first) is type(last) is int and end <= first < last <= num_bytes):
            raise ValueError(f"{name} is cut off")
        places[name], end = (first, last), last
    return places


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // _LINE_BYTES) * _LINE_BYTES


def _read_header(file: int) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 0 < size <= min(os.fstat(file).st_size - 8, _MAX_HEADER_BYTES):
        raise ValueError("it is cut off")
    header = json.loads(os.pread(file, size, 8))
    if not isinstance(header, dict):
        raise TypeError("its header is not an object")
    return header, 8 + size


def _write(
    path: Path, identity: str, packed: dict[str, tuple[KeptLinear, ...]], on_progress: Callable[[], None]
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, parts in packed.items():
        for index, part in enumerate(parts):
            tensors[_tensor_name(name, index, "data")] = part.data
            if part.bias is not None:
                tensors[_tensor_name(name, index, "bias")] = part.bias.view(torch.uint8)
    with ThreadPoolExecutor(_READERS) as pool:
        digests = dict(zip(tensors, pool.map(_digest, tensors.values()), strict=True))
    linears = {
        name: [
            {
                "numbers": part.numbers,
                "data": digests[_tensor_name(name, index, "data")],
                "bias": digests.get(_tensor_name(name, index, "bias")),
            }
            for index, part in enumerate(parts)
        ]
        for name, parts in packed.items()
    }
    text = json.dumps(linears)
    metadata = {"identity": identity, "linears": text, "digest": _digest_text(text)}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "U8", "shape": [tensor.nbytes], "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 64)
    with written_whole(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            file.write(_bytes_of(tensor))
            on_progress()


def _tensor_name(linear: str, part: int, what: str) -> str:
    return f"{linear}.{what}" if part == 0 else f"{linear}.{part}.{what}"


def _cut(data: Tensor, num_bytes: int) -> list[Tensor]:
    return [data[first : first + num_bytes] for first in range(0, len(data), num_bytes)]


def _digest(tensor: Tensor) -> str:
    return _digest_sums(map(xxh64, _cut(tensor, _PIECE_BYTES)))


def _digest_sums(sums: Iterable[int]) -> str:
    return hashlib.blake2b(b"".join(each.to_bytes(8, "little") for each in sums), digest_size=16).hexdigest()


def _digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)
