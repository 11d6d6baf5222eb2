"""Reads and checks little-endian GGUF, versions 2 and 3 (ggml's docs/gguf.md). Does not import torch."""

from __future__ import annotations

import mmap
import re
import shlex
import struct
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from octavo.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Value: TypeAlias = "bool | int | float | str | list[bool] | list[int] | list[float] | list[str]"

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_MAX_KEYS, _MAX_TENSORS, _MAX_NAME_CHARS, _MAX_DIMENSIONS = 1 << 16, 1 << 20, 1 << 16, 4
_MAX_ITEMS = 1 << 22  # of an array; vocabularies have up to 300,000 items
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SPLITS = 1 << 12
_ALL_EXPERTS = re.compile(r"(?P<layer>blk\.\d+)\.ffn_(?P<part>gate|up|down|gate_up)_exps\.(?P<kind>weight|bias)")
_ALL_HEADS = re.compile(r"blk\.\d+\.attn_[kv]_b\.weight")
_ONE_ROW = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")
_TAPS = re.compile(r"blk\.\d+\.(?:ssm_conv1d|shortconv\.conv)\.weight")
# Pieces of a file cut by bytes: NAME.gguf.part1of2, NAME.gguf-split-a, NAME.gguf.001.
_PIECE_NAME = re.compile(
    r"(?P<whole>.+\.gguf)"
    r"(?:[.-](?:part|split|chunk)(?:[-_.]?(?P<number>\d+)|[-_.](?P<letters>[a-z]{1,2}))(?:[-_.]?of[-_.]?(?P<count>\d+))?"
    r"|\.(?P<suffix>\d{1,3}|[a-y]|[ab][a-y]))"
)


class TensorType(Enum):
    """A tensor's type as (code in files, values per block, bytes per block)."""

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17

    @property
    def block_values(self) -> int:
        """Values per block."""
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return self.value[2]


_TYPES = {each.value[0]: each for each in TensorType}


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A tensor in a file. shape: rows first. offset: in bytes."""

    path: Path
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A model in GGUF files. metadata: of the first file."""

    path: Path
    paths: tuple[Path, ...]
    metadata: dict[str, Value]
    tensors: dict[str, StoredArray]

    @classmethod
    def read(cls, path: Path) -> GGUFFile:
        """Read metadata and tensor descriptions."""
        metadata, tensors = _read(path)
        paths = [path, *_other_splits(path, metadata)]
        for other in paths[1:]:
            more, others = _read(other)
            _check_split(other, more, paths.index(other), len(paths))
            for name, tensor in others.items():
                if name in tensors:
                    raise ModelError(f"{other}: tensor {name} is also in {tensors[name].path.name}")
                tensors[name] = tensor
        return cls(path, tuple(paths), metadata, dict(_divided(tensors)))


def _divided(tensors: dict[str, StoredArray]) -> Iterator[tuple[str, StoredArray]]:
    for name, stored in ((name, _with_sizes_of_one(name, each)) for name, each in tensors.items()):
        if _ALL_HEADS.fullmatch(name) is not None and len(stored.shape) == 3:
            yield from _heads(name.removesuffix(".weight"), stored)
            continue
        match = _ALL_EXPERTS.fullmatch(name)
        if match is None or len(stored.shape) != (3 if match["kind"] == "weight" else 2):
            yield name, stored
            continue
        num_experts, rows, *columns = stored.shape
        parts = ["gate", "up"] if match["part"] == "gate_up" else [match["part"]]
        if rows % len(parts) or stored.num_bytes % (num_experts * len(parts)):
            raise ModelError(f"{stored.path}: {name} of shape {list(stored.shape)} cannot be divided among experts")
        size = stored.num_bytes // (num_experts * len(parts))
        for index in range(num_experts * len(parts)):
            part, shape = parts[index % len(parts)], (rows // len(parts), *columns)
            yield (
                f"{match['layer']}.ffn_{part}_exps.{index // len(parts)}.{match['kind']}",
                StoredArray(stored.path, stored.type, shape, stored.offset + index * size, size),
            )


def _with_sizes_of_one(name: str, stored: StoredArray) -> StoredArray:
    """Restore sizes of 1, which llama.cpp drops."""
    if len(stored.shape) == 1 and _ONE_ROW.fullmatch(name) is not None:
        return replace(stored, shape=(1, *stored.shape))
    if len(stored.shape) == 2 and _TAPS.fullmatch(name) is not None:
        return replace(stored, shape=(stored.shape[0], 1, stored.shape[1]))
    return stored


def _heads(name: str, stored: StoredArray) -> Iterator[tuple[str, StoredArray]]:
    num_heads, *shape = stored.shape
    size = stored.num_bytes // num_heads
    for head in range(num_heads):
        part = StoredArray(stored.path, stored.type, tuple(shape), stored.offset + head * size, size)
        yield f"{name}.{head}.weight", part


def _read(path: Path) -> tuple[dict[str, Value], dict[str, StoredArray]]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise ModelError(f"{path} is empty; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                reader = _Reader(path, data, size)
                metadata, num_tensors = reader.read_metadata()
                return metadata, reader.read_tensors(metadata, num_tensors)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.position = len(MAGIC)

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.path}: {problem}")

    def read_metadata(self) -> tuple[dict[str, Value], int]:
        if self.data[:4] != MAGIC:
            self.fail(f"this is not a GGUF file (it begins with {self.data[:4]!r}); give a .gguf file or a directory")
        version = self.number("I", "the version")
        if version & 0xFFFF == 0:
            self.fail("this GGUF file is in big-endian order; convert it with gguf-convert-endian of the package gguf")
        if version not in _VERSIONS:
            self.fail(f"GGUF version {version}; octavo reads versions 2 and 3: convert the model again")
        num_tensors = self.limited("tensors", _MAX_TENSORS)
        num_keys = self.limited("keys", _MAX_KEYS)
        metadata: dict[str, Value] = {}
        for index in range(num_keys):
            key = self.text(f"key {index}", most=_MAX_NAME_CHARS)
            if key in metadata:
                self.fail(f"the key {key} occurs twice")
            metadata[key] = self.value(key)
        return metadata, num_tensors

    def read_tensors(self, metadata: dict[str, Value], num_tensors: int) -> dict[str, StoredArray]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self.fail(f"general.alignment = {alignment!r} must be a power of two up to {_MAX_ALIGNMENT}")
        found = [self.describe(index) for index in range(num_tensors)]
        begin = -(-self.position // alignment) * alignment
        tensors: dict[str, StoredArray] = {}
        for name, kind, shape, offset in found:
            if name in tensors:
                self.fail(f"there are two tensors named {name}")
            num_bytes = kind.block_bytes
            for each in shape:
                num_bytes *= each
            num_bytes //= kind.block_values
            if offset % alignment or begin + offset + num_bytes > self.size:
                self.fail(
                    f"tensor {name}, of {num_bytes} bytes from {begin + offset} on, is not within the file's "
                    f"{self.size} bytes; the download is incomplete or the file is damaged"
                )
            tensors[name] = StoredArray(self.path, kind, shape, begin + offset, num_bytes)
        in_order = sorted(tensors.items(), key=lambda item: item[1].offset)
        for (name, tensor), (following, after) in pairwise(in_order):
            if tensor.offset + tensor.num_bytes > after.offset:
                self.fail(f"the tensors {name} and {following} overlap")
        return tensors

    def describe(self, index: int) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self.text(f"the name of tensor {index}", most=_MAX_NAME_CHARS)
        num_dimensions = self.number("I", name)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self.fail(f"tensor {name} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are allowed")
        shape = tuple(self.number("Q", name) for _ in range(num_dimensions))[::-1]
        if not all(0 < each < 1 << 40 for each in shape):
            self.fail(f"tensor {name} has the shape {list(shape)}")
        code = self.number("I", name)
        if code not in _TYPES:
            self.fail(f"tensor {name} is of type {code}, which is none of {', '.join(TensorType.__members__)}")
        kind = _TYPES[code]
        if shape[-1] % kind.block_values:
            self.fail(
                f"tensor {name} has rows of {shape[-1]} values, which is no multiple of the block size of {kind.name}"
            )
        return name, kind, shape, self.number("Q", name)

    def value(self, key: str) -> Value:
        code = self.number("I", key)
        if code == _STRING:
            return self.text(key)
        if code != _ARRAY:
            return self.numbers(code, 1, key)[0]
        code, count = self.number("I", key), self.limited(f"items in {key}", _MAX_ITEMS)
        if code != _STRING:
            return self.numbers(code, count, key)
        return self.texts(key, count)

    def numbers(self, code: int, count: int, key: str) -> list[int] | list[float] | list[bool]:
        """Check the size before the allocation."""
        if code not in _FORMATS:
            self.fail(f"{key} is {'an array in an array' if code == _ARRAY else f'of the unknown type {code}'}")
        kind = _FORMATS[code]
        begin = self.position
        self.position += count * struct.calcsize(f"<{kind}")
        if self.position > self.size:
            self.fail(f"the file ends within {key}; the download is incomplete")
        return list(struct.unpack_from(f"<{count}{kind}", self.data, begin))

    def number(self, kind: str, what: str) -> int:
        begin = self.position
        self.position += struct.calcsize(f"<{kind}")
        if self.position > self.size:
            self.fail(f"the file ends within {what}; the download is incomplete")
        value: int = struct.unpack_from(f"<{kind}", self.data, begin)[0]
        return value

    def limited(self, what: str, most: int) -> int:
        count = self.number("Q", f"the number of {what}")
        if count > most:
            self.fail(f"the file has {count} {what}; the limit is {most}")
        return count

    def text(self, key: str, most: int | None = None) -> str:
        text = self.texts(key, 1)[0]
        if most is not None and len(text) > most:
            self.fail(f"{key} has {len(text)} characters; the limit is {most}")
        return text

    def texts(self, key: str, count: int) -> list[str]:
        """Replace invalid UTF-8 in keys that only describe the file."""
        if count > (self.size - self.position) // _LENGTH.size:
            self.fail(f"{key} has {count} strings, more than the file can hold")
        data, size, unpack = self.data, self.size, _LENGTH.unpack_from
        errors = "replace" if key.startswith(("general.", "quantize.")) else "strict"
        texts: list[str] = []
        begin = self.position
        for _ in range(count):
            end = begin + _LENGTH.size
            if end > size or (following := end + unpack(data, begin)[0]) > size:
                self.fail(f"the file ends within a string of {key}; the download is incomplete")
            try:
                texts.append(data[end:following].decode(errors=errors))
            except UnicodeDecodeError:
                self.fail(f"a string of {key} is not UTF-8")
            begin = following
        self.position = begin
        return texts


def check_piece(path: Path) -> None:
    """Raise `ModelError` for a piece of a GGUF file, a folder of pieces, or a missing file that exists in pieces.

    The message says how to join the pieces.
    """
    found = _PIECE_NAME.fullmatch(path.name)
    if path.is_dir():
        is_model = (path / "config.json").exists() or any(path.glob("*.gguf"))
        names = [] if is_model else [each.name for each in path.glob("*.gguf?*")]
        wholes = sorted({match["whole"] for name in names if (match := _PIECE_NAME.fullmatch(name))})
    else:
        wholes = [found["whole"]] if found and path.is_file() else [] if path.exists() else [path.name]
    folder = path if path.is_dir() else path.parent
    if not wholes or not folder.is_dir():
        return
    whole = folder / wholes[0]
    pieces = [match for each in folder.glob("*.gguf?*") if (match := _PIECE_NAME.fullmatch(each.name))]
    pieces = sorted((match for match in pieces if match["whole"] == whole.name), key=_piece_order)
    if not pieces:
        return
    if whole.is_file():
        raise ModelError(f"{path} is a piece of a GGUF file; give the whole file: {whole}")
    count = int(pieces[0]["count"] or len(pieces))
    joined = " ".join(shlex.quote(str(folder / match.string)) for match in pieces)
    what = (
        f"only {len(pieces)} of {count} pieces of {whole} are here"
        if len(pieces) < count
        else f"{whole} is split into pieces"
    )
    how = "download the other pieces, then join them in order" if len(pieces) < count else "join them in order"
    raise ModelError(f"{what}; {how}, and give the whole file: cat {joined} > {shlex.quote(str(whole))}")


def _piece_order(piece: re.Match[str]) -> tuple[int, int, str]:
    number = piece["number"] or piece["letters"] or piece["suffix"]
    return (0, int(number), "") if number.isdecimal() else (1, len(number), number)


def _other_splits(path: Path, metadata: dict[str, Value]) -> list[Path]:
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= _MAX_SPLITS:
        raise ModelError(f"{path}: split.count = {count!r} must be a whole number of files up to {_MAX_SPLITS}")
    if count <= 1:
        return []
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(f"{path} is one of {count} files, so its name must be NAME-00001-of-{count:05}.gguf")
    first = path.with_name(f"{match['stem']}-00001-of-{count:05}.gguf")
    if int(match["number"]) != 1:
        raise ModelError(f"{path} is one of {count} files; give the first one, {first.name}")
    _check_split(path, metadata, 0, count)
    others = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(2, count + 1)]
    if missing := [each.name for each in others if not each.is_file()]:
        raise ModelError(f"{path.parent}: {missing[0]} is missing, one of {count} files of the model")
    return others


def _check_split(path: Path, metadata: dict[str, Value], number: int, count: int) -> None:
    found = metadata.get("split.no"), metadata.get("split.count")
    if found != (number, count):
        raise ModelError(
            f"{path}: split.no = {found[0]!r} and split.count = {found[1]!r}, but {number} and {count} are expected; "
            "the file belongs to another model"
        )
