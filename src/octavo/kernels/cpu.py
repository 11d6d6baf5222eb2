"""Compiled CPU kernels (csrc/)."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from octavo.kernels import default_instruction_set
from octavo.kernels.block_panels import BlockPanels
from octavo.kernels.block_weight import BlockWeight
from octavo.kernels.grouped_panels import GroupedPanels
from octavo.kernels.limits import Limits
from octavo.kernels.machine import default_num_threads, usable_cores
from octavo.kernels.panels import DTYPE_NUMBERS, PANEL_COLUMNS, PanelWeight
from octavo.kernels.quantization import GROUP_MULTIPLE, Int4Weight, Int8Weight, QuantizedWeight, minima_pay
from octavo.kernels.recording import NotRecordableError, RecordedForward, Recorder, Rehearsal, with_all_rows
from octavo.kernels.reference import grouped_linear, head_linear, pack_groups
from octavo.kernels.state_batch import StateBatch, state_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from octavo.kernels.interface import (
        Activation,
        AttentionBatch,
        DecodePlan,
        KeptLinear,
        PackedGroups,
        PackedLinear,
        SamplingRows,
        WeightToPack,
    )
    from octavo.kernels.operation import Arguments, Operation

Isa = Literal["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]

ACTIVATION_NUMBERS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "clamped_silu": 2}
_TENSOR_DTYPES = {**DTYPE_NUMBERS, torch.int32: 14, torch.int64: 15}
_NO_SOURCES = (0, _TENSOR_DTYPES[torch.int64], (0,), (1,))
_NO_GROUPS = (0, _TENSOR_DTYPES[torch.int32], (0,), (1,))
_LINE_BYTES = 64
_SAME_SETS_BYTES = 2048  # lines at multiples of this distance use only two of 64 cache sets
_ATTENTION_ROWS, _LEAST_ATTENTION_ROWS = 448, 224  # a task's maximum rows; the second is for few rows
_FEW_CHUNKS, _PARTITION_POSITIONS = 4, 1024  # fewer chunks per thread are cut into partitions


class CpuKernels:
    """Compiled kernels for one instruction set, with a thread pool.

    cores: by default all usable ones. If each has a thread, all threads except the caller's are pinned.
    """

    name = "cpu"
    has_own_threads = True
    kv_cache_dtypes: tuple[str, ...] = ("int8",)
    has_fp8_weights = multiplies_fp8 = False
    warm_up_rows: tuple[int, ...] = ()

    def __init__(self, isa: Isa = "auto", num_threads: int | None = None, cores: Sequence[int] | None = None) -> None:
        from octavo import _kernels  # noqa: PLC0415

        self._module = _kernels
        self.isa = cast("Isa", default_instruction_set()) if isa == "auto" else isa
        self.kernel_set = _kernels.KernelSet(self.isa, num_threads or default_num_threads(), cores or usable_cores())
        self._calls: Any = self.kernel_set
        self._empty: Callable[..., Tensor] = torch.empty
        weakref.finalize(self, self.kernel_set.shutdown)

    @property
    def identity(self) -> str:
        """See `Kernels`."""
        return f"{self.name}:{self.isa}"

    def take_compilations(self) -> list[str]:
        """Return nothing."""
        return []

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        """See `octavo.kernels.instruction_sets`."""
        return tuple(self._module.instruction_sets())

    @property
    def num_threads(self) -> int:
        """Threads per operation, including the caller's."""
        return int(self.kernel_set.num_threads)

    def scratch_bytes(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, max_seq_len: int, max_tokens: int
    ) -> int:
        """Return the maximum bytes of attention (csrc/attention.h). Other operations need less."""
        del vocab_size
        padded_dim = -(-head_dim // PANEL_COLUMNS) * PANEL_COLUMNS
        rows = max(_ATTENTION_ROWS, num_heads)
        of_threads = self.num_threads * (128 * padded_dim + 32 * 64 + rows * (3 * padded_dim + 64))
        sums = padded_dim + 32
        begun = 2 * max_tokens * num_heads * sums
        chunks = (_FEW_CHUNKS * self.num_threads - 1) // num_kv_heads * num_kv_heads
        cut_rows = chunks * max(_LEAST_ATTENTION_ROWS, num_heads // num_kv_heads)
        partitions = cut_rows * -(-max_seq_len // _PARTITION_POSITIONS) * sums
        return 4 * (of_threads + begun + partitions)

    @property
    def layout(self) -> str:
        """The packed layout's version, and the kernels that read it.

        Raise the version if a change in csrc/arguments.h, csrc/block_formats.h, `rotate` or `whole_scales` alters
        weights.
        """
        who = {"amx": " of tiles", "avx512_bf16": " of pairs"}
        return f"panels 4{who.get(self.isa, '')}"

    def measure_limits(self, num_bytes: int = 512 << 20, rounds: int = 3) -> Limits:
        """Measure this instruction set's limits in about a second."""
        data = torch.zeros(num_bytes, dtype=torch.uint8)
        self._module.advise_huge_pages(data.data_ptr(), num_bytes)
        data.fill_(1)

        spins: dict[str, Callable[[], int]] = {
            "flops": lambda: self.kernel_set.spin_fma(1 << 19),
            "byte_ops": lambda: self.kernel_set.spin_bytes(1 << 19),
            "bfloat16_flops": lambda: self.kernel_set.spin_pairs(1 << 19),
            "bytes_read": lambda: self.kernel_set.read_memory(data.data_ptr(), num_bytes),
        }
        best = dict.fromkeys(spins, 0.0)
        for _ in range(rounds):
            for name, spin in spins.items():
                start = time.perf_counter()
                amount = spin()
                best[name] = max(best[name], amount / (time.perf_counter() - start))
        return Limits(**best)

    def set_num_threads(self, num_threads: int) -> None:
        """Change the number of threads. Results stay the same."""
        self.kernel_set.set_num_threads(num_threads)

    def compute(self, operation: Operation[*Arguments], *args: *Arguments) -> None:
        """See `Kernels`.

        Raises `ValueError` if the kernel does not accept a tensor, and `IndexError` for invalid rows or slots.
        """
        call = getattr(self._calls, operation.name, None)
        if call is None:
            operation.reference(*args)
        else:
            call(*map(_passed, args))

    def round_weight(self, weight: Tensor, bits: int, group_size: int = GROUP_MULTIPLE) -> QuantizedWeight:
        """See `Kernels`."""
        if not weight.is_floating_point():
            raise ValueError(f"a weight of {weight.dtype} cannot be quantized")
        weight = weight.detach() if weight.stride(1) == 1 else weight.detach().contiguous()
        weight = weight.float() if weight.dtype == torch.float64 else weight
        if bits == 8:
            rows, columns = weight.shape
            rounded: QuantizedWeight = Int8Weight(torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows))
            self._round(weight, 0, rounded)
            return rounded
        minima = minima_pay(weight, lambda some, tried: self.round_to_int4(some, group_size, minima=tried))
        return self.round_to_int4(weight, group_size, minima=minima)

    def round_to_int4(self, weight: Tensor, group_size: int, *, minima: bool) -> Int4Weight:
        """See `quantize_int4`."""
        rows, columns = weight.shape
        scales = torch.empty(rows, -(-columns // group_size), dtype=torch.bfloat16)
        zeros = torch.empty_like(scales, dtype=torch.float16) if minima else None
        rounded = Int4Weight(torch.empty(rows, columns, dtype=torch.uint8), scales, zeros, group_size)
        self._round(weight, group_size, rounded)
        return rounded

    def _round(self, weight: Tensor, group_size: int, rounded: QuantizedWeight) -> None:
        zeros = rounded.zeros if isinstance(rounded, Int4Weight) else None
        self.kernel_set.round_weight(
            weight.data_ptr(), DTYPE_NUMBERS[weight.dtype], *weight.shape, weight.stride(0), group_size,
            rounded.values.data_ptr(), rounded.scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(),
        )  # fmt: skip

    def pack_linear(self, weight: WeightToPack, bias: Tensor | None = None) -> PackedLinear:
        """Pack into panels."""
        if isinstance(weight, Sequence) and isinstance(weight[0], BlockWeight):
            return BlockPanels.pack(self, cast("Sequence[BlockWeight]", weight), bias).as_linear()
        return PanelWeight.pack(self, cast("Tensor | Sequence[Tensor] | QuantizedWeight", weight), bias).as_linear()

    def keep_linear(self, packed: PackedLinear) -> tuple[KeptLinear, ...]:
        """See `Kernels`."""
        storage: PanelWeight | BlockPanels = packed.storage
        return tuple(each.keep() for each in (storage.panels if isinstance(storage, BlockPanels) else (storage,)))

    def restore_linear(self, kept: Sequence[KeptLinear]) -> PackedLinear:
        """See `Kernels`."""
        panels = tuple(PanelWeight.restore(part) for part in kept)
        if panels and all(part.is_of_blocks and part.in_features == panels[0].in_features for part in panels):
            return BlockPanels(panels).as_linear()
        if len(panels) != 1:
            raise ValueError(f"{len(panels)} parts are not a packed weight")
        return panels[0].as_linear()

    def allocate(self, num_bytes: int) -> Tensor:
        """See `Kernels`. Aligned to cache lines; huge pages if possible."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        assert data.data_ptr() % 64 == 0
        self._module.advise_huge_pages(data.data_ptr(), num_bytes)
        return data

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """See `Kernels`."""
        return self._empty(*shape, dtype=like.dtype)

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """See `Kernels`."""
        out_dtype = torch.float32 if float32_out else x.dtype
        if out is None:
            out = self._empty(x.shape[0], packed.out_features, dtype=out_dtype)
        assert out.is_contiguous()
        assert (out.shape, out.dtype) == ((x.shape[0], packed.out_features), out_dtype)
        if isinstance(packed.storage, BlockPanels):
            for part, columns in packed.storage.parts():
                self._multiply(x, part, out[:, columns])
            return out
        return self._multiply(x, packed.storage, out)

    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """See `Kernels`."""
        storage = packed.storage
        if isinstance(storage, BlockPanels) or not self.kernel_set.fuses_gate(
            DTYPE_NUMBERS[x.dtype], storage.dtype_number, packed.out_features
        ):
            return self.gate(self.linear(x, packed), activation)
        out = self._factor_rows(x.shape[0], packed.out_features // 2, x.dtype)
        return self._multiply(x, storage, out, activation)

    def pack_groups(self, weights: Sequence[PackedLinear]) -> PackedGroups:
        """See `Kernels`."""
        return GroupedPanels.pack(weights) or pack_groups(weights)

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
        storage = packed.storage
        if not isinstance(storage, GroupedPanels):
            return grouped_linear(self, x, packed, group_start, sources=sources, float32_out=float32_out)
        assert x.shape[1] == packed.in_features
        num_rows = len(x) if sources is None else len(sources)
        out = self._empty(num_rows, packed.out_features, dtype=torch.float32 if float32_out else x.dtype)
        for columns, weights in storage.parts:
            part = out[:, columns]
            self._calls.grouped_linear(
                described(x), part.shape[1], part.data_ptr(), out.stride(0), DTYPE_NUMBERS[out.dtype],
                _NO_SOURCES if sources is None else described(sources), described(group_start), described(weights),
            )  # fmt: skip
        return out

    def head_linear(self, x: Tensor, packed: PackedGroups, out: Tensor | None = None) -> Tensor:
        """See `Kernels`."""
        if out is None:
            out = self._empty(*x.shape[:2], packed.out_features, dtype=x.dtype)
        storage = packed.storage
        if not isinstance(storage, GroupedPanels):
            return head_linear(self, x, packed, out)
        assert (x.shape[2], out.shape[2]) == (packed.in_features, packed.out_features)
        for columns, weights in storage.parts:
            self._calls.head_linear(described(x), described(out[:, :, columns]), described(weights))
        return out

    def _factor_rows(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Allocate rows for a product, with a longer stride if columns would use only two cache sets."""
        if columns * dtype.itemsize % _SAME_SETS_BYTES != 0:
            return self._empty(rows, columns, dtype=dtype)
        spare = _LINE_BYTES // dtype.itemsize
        return self._empty(rows, columns + spare, dtype=dtype).split_with_sizes([columns, spare], dim=1)[0]

    def _multiply(self, x: Tensor, weight: PanelWeight, out: Tensor, gated_by: Activation | None = None) -> Tensor:
        assert x.stride(1) == 1
        assert x.shape[1] == weight.in_features
        self._calls.linear(
            x.data_ptr(), DTYPE_NUMBERS[x.dtype], x.stride(0), x.shape[0], weight.data.data_ptr(),
            weight.dtype_number, weight.out_features, weight.in_features,
            0 if weight.bias is None else weight.bias.data_ptr(), out.data_ptr(), out.stride(0),
            DTYPE_NUMBERS[out.dtype], gated_by is not None, ACTIVATION_NUMBERS[gated_by or "silu"],
            weight.int4.group_size, weight.int4.has_zeros, weight.order_address if weight.int4.has_order else 0,
        )  # fmt: skip
        return out

    def captures_graphs(self, experts: Iterable[PackedGroups]) -> bool:
        """Return False."""
        del experts
        return False

    def record_forward(
        self,
        forward: Callable[[Tensor, AttentionBatch], Tensor],
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        decodes: DecodePlan | None = None,
    ) -> tuple[Tensor, RecordedForward | None]:
        """See `Kernels`. Passes with M-RoPE are not recorded."""
        del decodes
        if batch.rotary_positions is not None:
            return forward(token_ids, batch), None
        wanted, batch = batch.outputs, with_all_rows(batch)
        rehearsal = Rehearsal(token_ids.shape[0], max_tokens)
        try:
            self._empty = rehearsal.empty
            with rehearsal.views_only:
                kept = forward(token_ids, batch)
            offsets, num_bytes = rehearsal.plan()
            del kept
            recorder = Recorder(self.kernel_set, token_ids, batch, max_tokens, offsets, self.allocate(num_bytes))
            self._calls, self._empty = recorder, recorder.empty
            hidden = forward(token_ids, batch)
        except NotRecordableError:
            self._calls, self._empty = self.kernel_set, torch.empty
            return forward(token_ids, replace(batch, outputs=wanted)), None
        finally:
            self._calls, self._empty = self.kernel_set, torch.empty
        return hidden if wanted is None else hidden[wanted.rows], recorder.finish(hidden)

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """See `Kernels`."""
        return self._embedding(token_ids, packed, dtype, scale, range(packed.out_features), packed.out_features)

    def _embedding(
        self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float, ids: range, num_ids: int
    ) -> Tensor:
        """See `embedding`. ids: of the weight's rows. Rows of other ids are undefined."""
        storage: PanelWeight = (
            packed.storage.vocabulary() if isinstance(packed.storage, BlockPanels) else packed.storage
        )
        assert token_ids.is_contiguous()
        assert not storage.int4.has_order
        out = self._empty(token_ids.numel(), packed.in_features, dtype=dtype)
        self._calls.embedding(
            token_ids.data_ptr(), token_ids.numel(), storage.data.data_ptr(), storage.dtype_number, ids.start, len(ids),
            num_ids, packed.in_features, out.data_ptr(), DTYPE_NUMBERS[dtype], scale, storage.int4.group_size,
            storage.int4.has_zeros,
        )  # fmt: skip
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """See `Kernels`."""
        assert x.dim() == 2 or x.stride(1) == x.shape[2]
        assert x.stride(-1) == 1
        assert rows.is_contiguous()
        out = self._empty(rows.shape[0], *x.shape[1:], dtype=x.dtype)
        row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
        self._calls.take_rows(
            x.data_ptr(), x.stride(0) * x.dtype.itemsize, rows.data_ptr(), rows.shape[0], row_bytes, out.data_ptr()
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels`."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """See `Kernels`."""
        assert residual.is_contiguous()
        assert residual.dtype == x.dtype
        return self._norm(x, residual, weight, eps, scale)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        size, together = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
        assert x[0].is_contiguous() if x.dim() == 3 and x.shape[0] else x.is_contiguous()
        out = self._empty(*x.shape, dtype=x.dtype)
        self._calls.rms_norm(
            x.data_ptr(), 0 if residual is None else residual.data_ptr(), weight.data_ptr(),
            DTYPE_NUMBERS[weight.dtype], out.data_ptr(), DTYPE_NUMBERS[x.dtype], x.numel() // size, size, eps,
            scale, together, x.stride(0) if x.dim() > 1 else size,
        )  # fmt: skip
        return out

    def rope_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        interleaved: bool = False,
        query_scale: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """See `Kernels`."""
        q = q if q_norm is None else self.rms_norm(q, q_norm, eps)
        k = k if k_norm is None else self.rms_norm(k, k_norm, eps)
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1
        assert cos_sin.is_contiguous()
        self._calls.rope_and_write_kv(
            q.data_ptr(), q.stride()[:2], k.data_ptr(), k.stride()[:2], v.data_ptr(), v.stride()[:2],
            cos_sin.data_ptr(), 0 if query_scale is None else query_scale.data_ptr(), batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            k_cache.data_ptr(), k_cache.stride()[:2], v_cache.data_ptr(), v_cache.stride()[:2],
            DTYPE_NUMBERS[k_cache.dtype], DTYPE_NUMBERS[q.dtype], q.shape[0], q.shape[1], k.shape[1], q.shape[2],
            cos_sin.shape[1], interleaved, batch.block_size,
        )  # fmt: skip
        return q

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels`."""
        num_tokens, num_heads, head_dim = q.shape
        value_dim = v_cache.shape[3]
        assert q.stride(2) == 1
        assert k_cache.dtype == v_cache.dtype
        assert k_cache.dtype in {q.dtype, torch.int8}
        assert k_cache.stride()[2:] == v_cache.stride()[2:] == (head_dim, 1)
        out = self._factor_rows(num_tokens, num_heads * value_dim, q.dtype)
        self._calls.paged_attention(
            q.data_ptr(), q.stride()[:2], k_cache.data_ptr(), k_cache.stride()[:2], v_cache.data_ptr(),
            v_cache.stride()[:2], DTYPE_NUMBERS[k_cache.dtype], out.data_ptr(), out.stride(0), DTYPE_NUMBERS[q.dtype],
            batch.query_start.data_ptr(), batch.block_tables.data_ptr(), batch.block_tables.stride(0),
            batch.positions.data_ptr(),
            batch.seq_lens.shape[0], num_heads, k_cache.shape[1], head_dim, value_dim, batch.block_size, scale,
            window or 0, softcap or 0.0, 0 if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        return out

    def gate(self, gate_up: Tensor, activation: Activation = "silu", *, group_start: Tensor | None = None) -> Tensor:
        """See `Kernels`. Rows of no group are neither read nor written."""
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty(rows, size, dtype=gate_up.dtype)
        self._calls.gate(
            gate_up.data_ptr(), out.data_ptr(), size, DTYPE_NUMBERS[gate_up.dtype], rows, size,
            ACTIVATION_NUMBERS[activation], _NO_GROUPS if group_start is None else described(group_start),
        )  # fmt: skip
        return out

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """See `Kernels`."""
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self.kernel_set.sample(
            logits.data_ptr(), logits.shape[0], logits.shape[1], rows.temperature.data_ptr(), rows.top_k.data_ptr(),
            rows.top_p.data_ptr(), rows.min_p.data_ptr(), rows.seed.data_ptr(), rows.sample_index.data_ptr(),
            rows.position.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def rejection_sample(
        self, target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        assert target_sampled.dtype == draft_ids.dtype == torch.int64
        assert cu_num_logits.dtype == torch.int32
        num_requests = cu_num_logits.shape[0] - 1
        sampled = torch.empty(num_requests, num_speculative_steps + 1, dtype=torch.int64)
        num_sampled = torch.empty(num_requests, dtype=torch.int32)
        self._module.rejection_sample(
            target_sampled.data_ptr(), draft_ids.data_ptr(), cu_num_logits.data_ptr(), num_requests,
            num_speculative_steps, sampled.data_ptr(), num_sampled.data_ptr(),
        )  # fmt: skip
        return sampled, num_sampled

    def top_tokens(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        assert values.dtype == torch.float32
        assert values.is_contiguous()
        assert 0 < k <= values.shape[1]
        largest = torch.empty(values.shape[0], k)
        ids = torch.empty(values.shape[0], k, dtype=torch.int64)
        self.kernel_set.top_tokens(
            values.data_ptr(), values.shape[0], values.shape[1], k, largest.data_ptr(), ids.data_ptr()
        )
        return largest, ids


def _passed(argument: Any) -> Any:
    if isinstance(argument, StateBatch):
        return state_arrays(argument)
    return described(argument) if isinstance(argument, torch.Tensor) else argument


def described(tensor: Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Return a tensor as the arguments of kernels: address, number of its dtype, shape, strides."""
    return tensor.data_ptr(), _TENSOR_DTYPES[tensor.dtype], tensor.shape, tensor.stride()
