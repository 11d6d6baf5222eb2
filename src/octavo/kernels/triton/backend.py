"""The Triton backend."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton
from triton.runtime import driver

from octavo.kernels.interface import PackedGroups, PackedLinear
from octavo.kernels.quantization import Fp8Weight, Int4Weight, Int8Weight
from octavo.kernels.reference import ReferenceKernels, grouped_linear, head_linear, pack_groups
from octavo.kernels.triton import attention, elementwise, embedding, norms, rejection, rope_kv, sampling, top_tokens
from octavo.kernels.triton.compilations import Compilations
from octavo.kernels.triton.decode_graphs import DecodeGraphs
from octavo.kernels.triton.e4m3 import as_bytes
from octavo.kernels.triton.graphs import CudaGraphPool
from octavo.kernels.triton.grouped_matmul import grouped_matmul
from octavo.kernels.triton.head_matmul import head_matmul
from octavo.kernels.triton.matmul import BLOCK_M, largest_partial_sums, matmul, rows_of_tilings
from octavo.kernels.triton.matmul_blocks import FEW_ROWS, matmul_blocks
from octavo.kernels.triton.matmul_int4 import PackedInt4, matmul_int4, pack_int4
from octavo.kernels.triton.packed_blocks import BlockParts, PackedBlocks
from octavo.kernels.triton.quantized_rows import quantize_groups, quantize_rows
from octavo.kernels.triton.rows import take_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from octavo.kernels.interface import Activation, AttentionBatch, DecodePlan, SamplingRows, WeightToPack
    from octavo.kernels.operation import Arguments, Operation
    from octavo.kernels.triton.graphs import GraphPool

logger = logging.getLogger(__name__)
_OPERATIONS = (
    "add_rms_norm",
    "embedding",
    "gate",
    "gated_linear",
    "grouped_linear",
    "head_linear",
    "linear",
    "paged_attention",
    "rejection_sample",
    "rms_norm",
    "rope_and_write_kv",
    "sample",
    "take_rows",
    "top_tokens",
)
# Numbers of rows around each choice of tiles, and above an attention partition. Packed weights add more.
WARM_UP_ROWS = (1, FEW_ROWS, FEW_ROWS + 1, BLOCK_M, BLOCK_M + 1, attention.PARTITION + 1)


class TritonKernels(ReferenceKernels):
    """Triton kernels for a GPU or Triton's interpreter. Plain torch computes the rest."""

    name = "triton"
    multiplies_fp8 = True
    graph_pool: ClassVar[Callable[[torch.device], GraphPool]] = CudaGraphPool

    def __init__(self) -> None:
        in_torch = [name for name in _OPERATIONS if name not in vars(TritonKernels)]
        if in_torch:
            warnings.warn(
                f"plain torch computes {', '.join(in_torch)}, because no Triton kernel supports it; tokens may then "
                "depend on the batch",
                RuntimeWarning,
                stacklevel=3,
            )
        self.warm_up_rows: tuple[int, ...] = () if is_interpreted() else WARM_UP_ROWS
        self._compilations = Compilations()
        self._warned_of: set[str] = set()
        self._weight_shapes: set[tuple[int, int, torch.device]] = set()
        self.identity = f"{self.name} {triton.__version__}:{_target()}"

    def compute(self, operation: Operation[*Arguments], *args: *Arguments) -> None:
        """See `Kernels`."""
        kernel = kernel_of(operation.name)
        if kernel is None:
            self._leave_to_torch(operation.name)
            operation.reference(*args)
        else:
            kernel(*args)

    def take_compilations(self) -> list[str]:
        """See `Kernels`."""
        return self._compilations.take()

    def pack_linear(self, weight: WeightToPack, bias: Tensor | None = None) -> PackedLinear:
        """See `Kernels`."""
        if isinstance(weight, Int4Weight):
            packed = pack_int4(weight)
            num_bytes = packed.nbytes + (0 if bias is None else bias.nbytes)
            return PackedLinear(weight.shape[0], weight.shape[1], packed, bias, num_bytes)
        packed_as_is = super().pack_linear(weight, bias)
        if isinstance(packed_as_is.storage, list):
            parts = BlockParts.pack(packed_as_is.storage)
            return replace(packed_as_is, storage=parts, num_bytes=parts.nbytes + (0 if bias is None else bias.nbytes))
        values = weight.values if isinstance(weight, Int8Weight | Fp8Weight) else packed_as_is.storage
        shape = values.shape[0], values.shape[1], values.device
        self._weight_shapes.add(shape)
        if self.warm_up_rows:
            self.warm_up_rows = (*sorted({*self.warm_up_rows, *rows_of_tilings(*shape)}),)
        return packed_as_is

    def scratch_bytes(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, max_seq_len: int, max_tokens: int
    ) -> int:
        """See `Kernels`."""
        shape = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "max_seq_len": max_seq_len}
        of_products = (largest_partial_sums(max_tokens, *each) for each in self._weight_shapes)
        del vocab_size
        return max(attention.scratch_bytes(**shape), *of_products, 0)

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """See `Kernels`."""
        weight = packed.storage
        if out is None:
            dtype = torch.float32 if float32_out else x.dtype
            out = torch.empty(x.shape[0], packed.out_features, dtype=dtype, device=x.device)
        if isinstance(weight, Int8Weight):
            values, scales = quantize_rows(x, x.shape[1], rotated=True)
            return matmul(values, weight.values, out, packed.bias, (scales, weight.scales))
        if isinstance(weight, PackedInt4):
            values, scales = quantize_rows(x, 2 * weight.values.shape[1], rotated=False, order=weight.order)
            return matmul_int4(values, scales, weight, packed.bias, out)
        if isinstance(weight, BlockParts):
            return _linear_blocks(x, weight, packed.bias, out)
        if isinstance(weight, Fp8Weight):
            return matmul(x, as_bytes(weight.values), out, packed.bias, groups=(weight.scales, weight.group_size))
        return matmul(x, weight, out, packed.bias)

    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """See `Kernels`."""
        return self.gate(self.linear(x, packed), activation)

    def pack_groups(self, weights: Sequence[PackedLinear]) -> PackedGroups:
        """See `Kernels`."""
        storages = [each.storage for each in weights]
        if not all(isinstance(each, torch.Tensor) for each in storages) or any(
            each.bias is not None for each in weights
        ):
            return pack_groups(weights)
        kept = torch.stack(storages)
        return PackedGroups(len(weights), weights[0].out_features, weights[0].in_features, kept, kept.nbytes)

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
        if not isinstance(packed.storage, torch.Tensor):
            return grouped_linear(self, x, packed, group_start, sources=sources, float32_out=float32_out)
        dtype = torch.float32 if float32_out else x.dtype
        num_rows = len(x) if sources is None else len(sources)
        out = torch.empty(num_rows, packed.out_features, dtype=dtype, device=x.device)
        return grouped_matmul(x, packed.storage, group_start, out, sources)

    def head_linear(self, x: Tensor, packed: PackedGroups, out: Tensor | None = None) -> Tensor:
        """See `Kernels`."""
        if not isinstance(packed.storage, torch.Tensor):
            return head_linear(self, x, packed, out)
        if out is None:
            out = x.new_empty(*x.shape[:2], packed.out_features)
        return head_matmul(x, packed.storage, out)

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """See `Kernels`."""
        if isinstance(packed.storage, torch.Tensor):
            return embedding.embedding(token_ids, packed.storage, dtype, scale)
        storage = packed.storage.vocabulary() if isinstance(packed.storage, BlockParts) else packed.storage
        if isinstance(storage, PackedInt4 | PackedBlocks):
            rows = storage.rows(token_ids)
            return (rows if scale == 1.0 else rows * scale).to(dtype)
        return super().embedding(token_ids, packed, dtype, scale)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """See `Kernels`."""
        return take_rows(x, rows)

    def captures_graphs(self, experts: Iterable[PackedGroups]) -> bool:
        """See `Kernels`. Logs the reason if False. Experts multiplied one by one prevent graphs."""
        if is_interpreted() and type(self).graph_pool is CudaGraphPool:
            logger.warning("no decode graphs are captured: Triton's interpreter does not support them")
            return False
        if not all(isinstance(each.storage, torch.Tensor) for each in experts):
            logger.warning("no decode graphs are captured: experts with quantized weights or biases prevent them")
            return False
        return True

    def record_forward(
        self,
        forward: Callable[[Tensor, AttentionBatch], Tensor],
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        decodes: DecodePlan | None = None,
    ) -> tuple[Tensor, Callable[[Tensor, AttentionBatch], Tensor] | None]:
        """See `Kernels`."""
        del max_tokens
        hidden = forward(token_ids, batch)
        if decodes is None:
            return hidden, None
        return hidden, DecodeGraphs(forward, batch, decodes, type(self).graph_pool(token_ids.device))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels`."""
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """See `Kernels`."""
        return norms.add_rms_norm(x, residual, weight, eps, scale)

    def gate(self, gate_up: Tensor, activation: Activation = "silu", *, group_start: Tensor | None = None) -> Tensor:
        """See `Kernels`. Computes all rows."""
        del group_start
        return elementwise.gate(gate_up, activation)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """See `Kernels`."""
        return sampling.sample(logits, rows)

    def rejection_sample(
        self, target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        if target_sampled.device.type == "cpu" and not is_interpreted():
            return super().rejection_sample(target_sampled, draft_ids, cu_num_logits, num_speculative_steps)
        return rejection.rejection_sample(target_sampled, draft_ids, cu_num_logits, num_speculative_steps)

    def top_tokens(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        return top_tokens.top_tokens(values, k)

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
        return rope_kv.rope_and_write_kv(
            q, k, v, cos_sin, batch, k_cache, v_cache, interleaved=interleaved, query_scale=query_scale,
            q_norm=q_norm, k_norm=k_norm, eps=eps,
        )  # fmt: skip

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
        return attention.paged_attention(q, k_cache, v_cache, batch, scale, window, softcap, sinks)

    def _leave_to_torch(self, what: str) -> None:
        if what not in self._warned_of:
            self._warned_of.add(what)
            warnings.warn(
                f"plain torch computes {what}, because no Triton kernel supports it; tokens may then depend on the "
                "batch",
                RuntimeWarning,
                stacklevel=3,
            )


@functools.cache
def kernel_of(name: str) -> Callable[..., None] | None:
    """Return an operation's function."""
    path = f"octavo.kernels.triton.{name}"
    if importlib.util.find_spec(path) is None:
        return None
    kernel: Callable[..., None] = getattr(importlib.import_module(path), name)
    return kernel


def _linear_blocks(x: Tensor, weight: BlockParts, bias: Tensor | None, out: Tensor) -> Tensor:
    rows = quantize_groups(x)
    for part, columns in weight.columns():
        matmul_blocks(rows, part, None if bias is None else bias[columns], out[:, columns])
    return out


def is_interpreted() -> bool:
    """Return True if Triton was imported with TRITON_INTERPRET=1."""
    return bool(triton.knobs.runtime.interpret)


def _target() -> str:
    if is_interpreted():
        return "interpreter"
    target = driver.active.get_current_target()
    return f"{target.backend} {target.arch}"
