"""CPU kernels of ranks: processes of one machine that share a model (see `octavo.models.share`)."""

from __future__ import annotations

import mmap
import os
from array import array
from typing import TYPE_CHECKING, Any

import torch

from octavo.kernels.cpu import CpuKernels, described
from octavo.kernels.interface import SplitLinear
from octavo.kernels.quantization import minima_pay, sampled_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from octavo.kernels.cpu import Isa
    from octavo.kernels.interface import PackedGroups, PackedLinear, SamplingRows
    from octavo.kernels.quantization import QuantizedWeight

AREA_BYTES = 16 << 20  # of each area of csrc/ranks.h; longer results are exchanged in pieces


def create_shared_memory() -> int:
    """Return an inheritable descriptor for `RankGroup`. Raises `OSError`."""
    from octavo import _kernels  # noqa: PLC0415

    memory = os.memfd_create("octavo-ranks")
    os.ftruncate(memory, _kernels.ranks_header_bytes + 2 * AREA_BYTES)
    return memory


class RankGroup:
    """The shared memory of `count` ranks.

    memory: from `create_shared_memory`. cores: for this rank's threads. Exchanges raise `RuntimeError` if another rank
    keeps them waiting for timeout_s, or after `fail`.
    """

    def __init__(self, memory: int, rank: int, count: int, timeout_s: float, cores: Sequence[int]) -> None:
        from octavo import _kernels  # noqa: PLC0415

        self.rank, self.count, self.cores = rank, count, cores
        self._mapped = mmap.mmap(memory, 0)
        self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._native = _kernels.Ranks(self._bytes.data_ptr(), len(self._mapped), rank, count, round(1000 * timeout_s))
        self.address: int = self._native.address

    @property
    def failed_rank(self) -> int | None:
        """The rank that failed first, or None."""
        failed = int(self._native.failed_rank)
        return None if failed < 0 else failed

    def fail(self, rank: int) -> None:
        """Declare a rank failed. All exchanges then fail."""
        self._native.fail(rank)


class RankedKernels(CpuKernels):
    """`CpuKernels` that exchange the inputs and results of a `SplitLinear`.

    Only rank 0 gets whole float32 results (logits). Other ranks get their own columns.
    """

    def __init__(self, group: RankGroup, isa: Isa = "auto", num_threads: int | None = None) -> None:
        super().__init__(isa, num_threads, group.cores)
        self.group = group
        self._borders: dict[tuple[tuple[int, ...], int], array[int]] = {}

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """See `Kernels`."""
        if not isinstance(packed, SplitLinear):
            return super().linear(x, packed, float32_out=float32_out, out=out)
        if packed.inputs is not None:
            x = self.join(x, packed.inputs)
        if packed.outputs is None:
            return super().linear(x, packed.own, float32_out=float32_out, out=out)
        own = super().linear(x, packed.own, float32_out=float32_out)
        if float32_out and self.group.rank != 0:
            return self._gather(own, packed.outputs, None)
        if out is None:
            out = self._empty(x.shape[0], packed.out_features, dtype=own.dtype)
        return self._gather(own, packed.outputs, out)

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """See `Kernels`."""
        if not isinstance(packed, SplitLinear):
            return super().embedding(token_ids, packed, dtype, scale)
        assert packed.outputs is not None
        ids = range(packed.outputs[self.group.rank], packed.outputs[self.group.rank + 1])
        rows = self._embedding(token_ids, packed.own, dtype, scale, ids, packed.out_features)
        self._calls.share_rows(
            self.group.address, token_ids.data_ptr(), rows.shape[0], self._address(packed.outputs, 1), rows.data_ptr(),
            rows.shape[1] * dtype.itemsize,
        )  # fmt: skip
        return rows

    def grouped_linear(
        self,
        x: Tensor,
        packed: PackedGroups,
        group_start: Tensor,
        *,
        sources: Tensor | None = None,
        float32_out: bool = False,
    ) -> Tensor:
        """See `Kernels`."""
        if packed.inputs is not None:
            x = self.join(x, packed.inputs)
        return super().grouped_linear(x, packed, group_start, sources=sources, float32_out=float32_out)

    def add_rank_experts(
        self,
        outputs: Tensor,
        ids: Tensor,
        places: Tensor,
        weights: Tensor,
        shared: Tensor,
        shared_gate: Tensor,
        experts: tuple[int, ...],
        columns: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Tensor:
        """See `RanksKernels`."""
        rank = self.group.rank
        out = self._empty(ids.shape[0], columns[rank + 1] - columns[rank], dtype=dtype)
        self._calls.add_rank_experts(
            described(outputs), described(ids), described(places), described(weights), self.group.address,
            self._address(experts, 1), self._address(columns, 1), described(shared), described(shared_gate),
            described(out),
        )  # fmt: skip
        return out

    def round_rows_to_int4(self, rows: Tensor, whole: Tensor, group_size: int) -> QuantizedWeight:
        """See `RanksKernels`."""
        sampled = sampled_rows(whole).to(rows.dtype)
        minima = minima_pay(sampled, lambda some, tried: self.round_to_int4(some, group_size, minima=tried))
        return self.round_to_int4(rows, group_size, minima=minima)

    def join(self, x: Tensor, borders: tuple[int, ...], *, out: Tensor | None = None) -> Tensor:
        """See `Kernels`. out: memory for the result, by default new memory."""
        return self._gather(x, borders, self._empty(x.shape[0], borders[-1], dtype=x.dtype) if out is None else out)

    def sample_columns(self, logits: Tensor, rows: SamplingRows, borders: tuple[int, ...]) -> Tensor:
        """See `RanksKernels`."""
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self.kernel_set.sample_columns(
            self.group.address, logits.data_ptr(), logits.shape[0], logits.shape[1], borders[self.group.rank],
            rows.temperature.data_ptr(), rows.top_k.data_ptr(), rows.top_p.data_ptr(), rows.min_p.data_ptr(),
            rows.seed.data_ptr(), rows.sample_index.data_ptr(), rows.position.data_ptr(),
            0 if self.group.rank else out.data_ptr(),
        )  # fmt: skip
        return out

    def _gather(self, own: Tensor, borders: tuple[int, ...], out: Tensor | None) -> Tensor:
        """Write all ranks' columns to `out`. Return `own` if `out` is None."""
        size = own.dtype.itemsize
        self._calls.gather(
            self.group.address, own.data_ptr(), own.stride(0) * size, own.shape[0], self._address(borders, size),
            0 if out is None else out.data_ptr(),
        )  # fmt: skip
        return own if out is None else out

    def _address(self, borders: tuple[int, ...], size: int) -> int:
        """Return the address of int64 `borders` * `size`, which stays valid for recorded calls."""
        if (borders, size) not in self._borders:
            self._borders[borders, size] = array("q", [size * border for border in borders])
        return self._borders[borders, size].buffer_info()[0]
