"""Weights in GGUF's blocks of small integers, as in llama.cpp's ggml-common.h."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

GROUP_VALUES = 32
SUPER_GROUPS = 8
# Byte offsets of a block's float16 numbers; by default (0,).
_SCALE_PLACES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()}
_FLOAT16_EXPONENT = 0x7C  # all these bits are set in NaN and infinities
_E8M0_NAN = 255
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class BlockKind(Enum):
    """GGUF's block layouts: (values, bytes, bytes in CPU panels). Panels widen 6-bit scales and minima to 8 bits."""

    Q8_0 = "Q8_0", 32, 34, 34
    Q4_0 = "Q4_0", 32, 18, 18
    Q4_1 = "Q4_1", 32, 20, 20
    Q5_0 = "Q5_0", 32, 22, 22
    Q5_1 = "Q5_1", 32, 24, 24
    Q4_K = "Q4_K", 256, 144, 148
    Q5_K = "Q5_K", 256, 176, 180
    Q6_K = "Q6_K", 256, 210, 210
    MXFP4 = "MXFP4", 32, 17, 17

    @property
    def block_values(self) -> int:
        """Values per block."""
        return self.value[1]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return self.value[2]

    def packed_bytes(self, out_features: int, in_features: int) -> int:
        """Bytes in panels."""
        return out_features * in_features // self.block_values * self.value[3]

    def row_bytes(self, in_features: int) -> int:
        """Return a row's bytes. Raises `ValueError` if in_features is not a multiple of `block_values`."""
        if in_features % self.block_values != 0:
            raise ValueError(
                f"{self.name} has blocks of {self.block_values} values, which do not divide rows of {in_features}"
            )
        return in_features // self.block_values * self.block_bytes


class BlockValues(NamedTuple):
    """Rows as values * scales + minima. A group has 32 input features (16 in Q6_K).

    values: whole numbers, float32 [rows, groups, size].
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None

    def dequantize(self) -> Tensor:
        """Return float32 rows. Each operation is rounded once."""
        scaled = self.values * self.scales.unsqueeze(2)
        return (scaled if self.minima is None else scaled + self.minima.unsqueeze(2)).flatten(1)


class StoredScales(NamedTuple):
    """Scales and minima [rows, groups] as blocks store them. A group has 32 input features (16 in Q6_K).

    scales: float16, 6 bits in uint8, int8, or MXFP4's exponents. minima: float16 to add, or uint8 to subtract.
    scales_of_blocks, minima_of_blocks: float16 factors of integer scales and minima.
    """

    scales: Tensor
    minima: Tensor | None
    scales_of_blocks: Tensor | None
    minima_of_blocks: Tensor | None

    def map(self, function: Callable[[Tensor], Tensor]) -> StoredScales:
        """Map each tensor."""
        return StoredScales(*(None if part is None else function(part) for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """A weight in blocks of one kind. If the uint8 rows map a file, forget(rows) drops the pages from memory."""

    kind: BlockKind
    rows: Tensor
    in_features: int
    forget: Callable[[Tensor], None] = field(default=lambda _: None, compare=False)

    def __post_init__(self) -> None:
        """Check the rows."""
        expected = self.kind.row_bytes(self.in_features)
        if self.rows.dtype != torch.uint8 or self.rows.dim() != 2 or self.rows.shape[1] != expected:
            raise ValueError(
                f"{self.in_features} values of {self.kind.name} take uint8 rows of {expected} bytes, got "
                f"{self.rows.dtype} {list(self.rows.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """(out_features, in_features)."""
        return torch.Size((self.rows.shape[0], self.in_features))

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return self.kind.packed_bytes(*self.shape)

    def numbers(self) -> BlockValues:
        """Decode the blocks."""
        blocks = self.rows.reshape(self.rows.numel() // self.kind.block_bytes, self.kind.block_bytes)
        values, scales, minima = _READERS[self.kind](blocks)
        out_features, groups = self.shape[0], self.in_features // self.kind.block_values * scales.shape[1]
        return BlockValues(
            values.float().reshape(out_features, groups, self.in_features // groups),
            scales.view(out_features, groups),
            None if minima is None else minima.view(out_features, groups),
        )

    def stored_scales(self) -> StoredScales:
        """Return stored scales."""
        blocks = self.rows.reshape(-1, self.kind.block_bytes)
        if self.kind is BlockKind.MXFP4:
            found = StoredScales(blocks[:, :1], None, None, None)
        elif self.kind is BlockKind.Q6_K:
            scales = blocks[:, 192:208].contiguous().view(torch.int8)
            found = StoredScales(scales, None, _half(blocks[:, 208:]), None)
        elif self.kind in {BlockKind.Q4_K, BlockKind.Q5_K}:
            found = StoredScales(*_six_bits(blocks), _half(blocks[:, :2]), _half(blocks[:, 2:4]))
        else:
            has_minima = self.kind in {BlockKind.Q4_1, BlockKind.Q5_1}
            found = StoredScales(_half(blocks[:, :2]), _half(blocks[:, 2:4]) if has_minima else None, None, None)
        return found.map(lambda part: part.reshape(self.rows.shape[0], -1))

    def dequantize(self) -> Tensor:
        """Return llama.cpp's exact numbers."""
        return self.numbers().dequantize()

    def has_broken_scale(self) -> bool:
        """Return True if a scale is infinite or NaN."""
        blocks = self.rows.reshape(-1, self.kind.block_bytes)
        if self.kind is BlockKind.MXFP4:
            return bool((blocks[:, 0] == _E8M0_NAN).any())
        upper_bytes = [blocks[:, place + 1] for place in _SCALE_PLACES.get(self.kind.name, (0,))]
        return any(bool(((each & _FLOAT16_EXPONENT) == _FLOAT16_EXPONENT).any()) for each in upper_bytes)

    def select_rows(self, index: slice | Tensor) -> BlockWeight:
        """Select rows."""
        return BlockWeight(self.kind, self.rows[index], self.in_features)

    def to(self, device: torch.device) -> BlockWeight:
        """Move to a device. Calls `forget` after a copy."""
        if self.rows.device == device:
            return self
        moved = BlockWeight(self.kind, self.rows.to(device), self.in_features)
        self.forget(self.rows)
        return moved


def random_blocks(generator: torch.Generator, kind: BlockKind, out_features: int, in_features: int) -> BlockWeight:
    """Return random values with typical scales."""
    num_blocks = out_features * in_features // kind.block_values
    blocks = torch.randint(0, 256, (num_blocks, kind.block_bytes), generator=generator, dtype=torch.uint8)
    for place in _SCALE_PLACES.get(kind.name, (0,)):  # random bytes may be NaN
        scales = torch.randn(num_blocks, 1, generator=generator).half() * 0.01
        blocks[:, place : place + 2] = scales.view(torch.uint8)
    if kind is BlockKind.MXFP4:
        blocks[:, 0] = torch.randint(110, 130, (num_blocks,), generator=generator, dtype=torch.uint8)
    return BlockWeight(kind, blocks.view(out_features, -1), in_features)


def exponent_scales(exponents: Tensor) -> Tensor:
    """Return float32 2^(exponent - 127) / 2, for doubled values of MXFP4."""
    whole = exponents.int()
    tiny = torch.full_like(whole, 0x00200000) << whole.clamp(max=1)  # bits of 2^-128 and 2^-127
    return torch.where(whole < 2, tiny, (whole - 1) << 23).view(torch.float32)


def mxfp4_codes(weight: BlockWeight) -> Tensor:
    """Return MXFP4's four-bit codes: uint8 [out_features, in_features]."""
    blocks = weight.rows.reshape(-1, weight.kind.block_bytes)
    return _nibbles(blocks[:, 1:].contiguous()).view(weight.shape)


def group_by_kind(weights: Sequence[BlockWeight]) -> list[list[BlockWeight]]:
    """Group neighbouring weights of one kind, which can be fused along out_features."""
    groups: list[list[BlockWeight]] = []
    for weight in weights:
        if groups and groups[-1][0].kind is weight.kind:
            groups[-1].append(weight)
        else:
            groups.append([weight])
    return groups


_Numbers = tuple["Tensor", "Tensor", "Tensor | None"]


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


def _float16(data: Tensor) -> Tensor:
    return _half(data).float()


def _nibbles(data: Tensor, together: int = 16) -> Tensor:
    """For each `together` bytes, return low halves, then high halves."""
    parts = data.view(len(data), data.shape[1] // together, 1, together)
    return torch.cat([parts & 15, parts >> 4], dim=2).flatten(1)


def _fifth_bits(data: Tensor) -> Tensor:
    """Return 16 or 0 per value. Bit i of the four bytes is for value i."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (((data.unsqueeze(2) >> shifts) & 1) << 4).flatten(1)


def _read_q8_0(blocks: Tensor) -> _Numbers:
    return blocks[:, 2:].contiguous().view(torch.int8), _float16(blocks[:, :2]), None


def _read_q4_0(blocks: Tensor) -> _Numbers:
    return _nibbles(blocks[:, 2:].contiguous()).float() - 8, _float16(blocks[:, :2]), None


def _read_q4_1(blocks: Tensor) -> _Numbers:
    return _nibbles(blocks[:, 4:].contiguous()), _float16(blocks[:, :2]), _float16(blocks[:, 2:4])


def _read_q5_0(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[:, 6:].contiguous()) | _fifth_bits(blocks[:, 2:6])
    return values.float() - 16, _float16(blocks[:, :2]), None


def _read_q5_1(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[:, 8:].contiguous()) | _fifth_bits(blocks[:, 4:8])
    return values, _float16(blocks[:, :2]), _float16(blocks[:, 2:4])


def _six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    whole_scales = torch.cat([scales & 63, (rest & 15) | ((scales >> 2) & 48)], dim=1)
    return whole_scales, torch.cat([minima & 63, (rest >> 4) | ((minima >> 2) & 48)], dim=1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, minima = _six_bits(blocks)
    return _float16(blocks[:, :2]) * scales.float(), _float16(blocks[:, 2:4]) * (-minima.to(torch.int8)).float()


def _read_q4_k(blocks: Tensor) -> _Numbers:
    return _nibbles(blocks[:, 16:].contiguous(), GROUP_VALUES), *_scales_and_minima(blocks)


def _read_q5_k(blocks: Tensor) -> _Numbers:
    shifts = torch.arange(SUPER_GROUPS, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    return _nibbles(blocks[:, 48:].contiguous(), GROUP_VALUES) | fifth.flatten(1), *_scales_and_minima(blocks)


def _read_q6_k(blocks: Tensor) -> _Numbers:
    lower = _nibbles(blocks[:, :128].contiguous(), 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device).unsqueeze(1)
    upper = ((blocks[:, 128:192].view(len(blocks), 2, 1, GROUP_VALUES) >> shifts) & 3) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (lower | upper.flatten(1)).float() - 32, _float16(blocks[:, 208:]) * scales, None


def _read_mxfp4(blocks: Tensor) -> _Numbers:
    table = torch.tensor(_MXFP4_VALUES, dtype=torch.float32, device=blocks.device)
    return table[_nibbles(blocks[:, 1:].contiguous()).long()], exponent_scales(blocks[:, :1]), None


_READERS: dict[BlockKind, Callable[[Tensor], _Numbers]] = {
    BlockKind.Q8_0: _read_q8_0,
    BlockKind.Q4_0: _read_q4_0,
    BlockKind.Q4_1: _read_q4_1,
    BlockKind.Q5_0: _read_q5_0,
    BlockKind.Q5_1: _read_q5_1,
    BlockKind.Q4_K: _read_q4_k,
    BlockKind.Q5_K: _read_q5_k,
    BlockKind.Q6_K: _read_q6_k,
    BlockKind.MXFP4: _read_mxfp4,
}
