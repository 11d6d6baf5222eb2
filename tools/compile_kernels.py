"""Compile the Triton kernels for GPUs that this machine need not have, and check their resources against bounds.

    TRITON_INTERPRET=0 python tools/compile_kernels.py [--target sm_90] [--case attention] [--write]

Each case calls an operation as an engine would, with tensors on the CPU. A driver without a device makes Triton compile
the kernels that would be launched, specialized for the arguments (types, alignment), for one target after the other.
The resources of each kernel (registers per thread, bytes of spilled registers, shared memory per program) are compared
with the bounds in tools/kernel_bounds, and its instructions for products with those of the table: the bits of a row
depend on them. There is a table for each minor version of Triton. --write updates that of the installed one.
The code of each kernel is also searched for what makes results depend on timing or fusion (see compiled_code.py).
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_code import faults, products, wide_offsets

if TYPE_CHECKING:
    from collections.abc import Callable

FP8 = "float8_e4m3fn"
BOUNDS = Path(__file__).with_name("kernel_bounds")
TARGETS = {  # shared memory that a program may have, in bytes
    "sm_80": ("cuda", 80, 32, 166912),
    "sm_89": ("cuda", 89, 32, 101376),
    "sm_90": ("cuda", 90, 32, 232448),  # compiled as sm_90a
    "sm_100": ("cuda", 100, 32, 232448),
    "gfx942": ("hip", "gfx942", 64, 65536),
}


@dataclass(frozen=True, slots=True)
class Taken:
    """The resources of a kernel on a target: registers and spilled bytes per thread, shared bytes per program.

    wide_offsets: number of offsets of 64 bits. products: instructions that multiply matrices, with their shapes.
    """

    case: str
    kernel: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    wide_offsets: int
    products: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Its key in the table of bounds."""
        return self.case, self.kernel, self.target


def attention(
    dtype: str, head_dim: int, *, kv: str | None = None, softcap: float | None = None, has_sinks: bool = False
) -> Callable[[], None]:
    """Return a call of attention over a batch of a prompt's chunk and of decodes, split into partitions."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.attention import paged_attention  # noqa: PLC0415

        kind = getattr(torch, dtype)
        q = torch.empty(20, 8, head_dim, dtype=kind)
        k_cache, v_cache = _caches(getattr(torch, kv or dtype), head_dim)
        sinks = torch.empty(q.shape[1]) if has_sinks else None
        paged_attention(q, k_cache, v_cache, _batch(), head_dim**-0.5, None, softcap, sinks)

    return call


def latent_attention(dtype: str, rank: int, rope_dim: int, *, kv: str | None = None) -> Callable[[], None]:
    """Return a call of attention of 16 heads to latents, the first values of keys."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.attention import paged_attention  # noqa: PLC0415

        q = torch.empty(20, 16, rank + rope_dim, dtype=getattr(torch, dtype))
        cache = _latents(getattr(torch, kv or dtype), rank, rope_dim)
        paged_attention(q, cache, cache[..., :rank], _batch(), 0.1, None)

    return call


def rope_kv(
    dtype: str, head_dim: int, rotary_dim: int, *, kv: str | None = None, has_norms: bool = False
) -> Callable[[], None]:
    """Return a call of rope_and_write_kv over views of a fused projection."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.rope_kv import rope_and_write_kv  # noqa: PLC0415

        kind = getattr(torch, dtype)
        fused = torch.empty(20, 12, head_dim, dtype=kind)
        k_cache, v_cache = _caches(getattr(torch, kv or dtype), head_dim)
        norm = torch.empty(head_dim, dtype=kind) if has_norms else None
        rope_and_write_kv(
            fused[:, :8], fused[:, 8:10], fused[:, 10:], torch.empty(64, rotary_dim), _batch(), k_cache, v_cache,
            interleaved=False, query_scale=None, q_norm=norm, k_norm=norm, eps=1e-6,
        )  # fmt: skip

    return call


def latents(dtype: str, *, kv: str | None = None) -> Callable[[], None]:
    """Return a call of rope_and_write_latents with DeepSeek's latents of 512 values."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.rope_and_write_latents import rope_and_write_latents  # noqa: PLC0415

        kind, batch = getattr(torch, dtype), _batch()
        q, latent = torch.empty(20, 16, 192, dtype=kind)[..., 128:], torch.empty(20, 2112, dtype=kind)[:, 1536:]
        rope_and_write_latents(
            q, latent, torch.empty(512, dtype=kind), 1e-6, torch.empty(64, 64), True, batch.positions,
            batch.slot_mapping, _latents(getattr(torch, kv or dtype), 512, 64), torch.empty(20, 16, 576, dtype=kind),
        )  # fmt: skip

    return call


def operation(name: str, *shapes: tuple[int, ...], dtype: str = "bfloat16", **options: Any) -> Callable[[], None]:
    """Return a call of a method of `TritonKernels`, or of an operation, with tensors of these shapes."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.backend import TritonKernels, kernel_of  # noqa: PLC0415

        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape in shapes]
        kernel = kernel_of(name) or getattr(TritonKernels(), name)
        kernel(*tensors, **options)

    return call


def choose_experts(
    num_experts: int, num_chosen: int, *, num_groups: int = 1, scoring: int, has_factors: bool = False
) -> Callable[[], None]:
    """Return a call of choose_experts."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.choose_experts import choose_experts  # noqa: PLC0415

        ids = torch.empty(20, num_chosen, dtype=torch.int32)
        bias, factors = (torch.empty(num_experts if has else 0) for has in (num_groups > 1, has_factors))
        logits, weights = torch.empty(20, num_experts), torch.empty(20, num_chosen)
        groups = num_groups, max(1, num_groups // 2), False
        choose_experts(logits, bias, factors, ids, weights, scoring, *groups, 0.0, 1.0)

    return call


def sort_by_expert() -> None:
    """Call sort_by_expert with the choices of 20 tokens."""
    import torch  # noqa: PLC0415

    from octavo.kernels.triton.sort_by_expert import sort_by_expert  # noqa: PLC0415

    ids, sources = torch.zeros(20, 8, dtype=torch.int32), torch.empty(160, dtype=torch.int64)
    sort_by_expert(ids, sources, torch.empty_like(ids), torch.empty(129, dtype=torch.int32))


def add_experts(num_experts: int, num_chosen: int, *, is_shared: bool = False) -> Callable[[], None]:
    """Return a call of add_experts."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.add_experts import add_experts  # noqa: PLC0415

        ids, weights = torch.zeros(20, num_chosen, dtype=torch.int32), torch.empty(20, num_chosen)
        out = torch.empty(20, 2048, dtype=torch.bfloat16)
        shared, gate = torch.empty(20 if is_shared else 0, 2048), torch.empty(20 if is_shared else 0, 1)
        outputs = torch.empty(20 * num_chosen, 2048)
        add_experts(outputs, ids, torch.empty_like(ids), weights, shared, gate, out, num_experts)

    return call


def recurrent(name: str, depth: int = 128) -> Callable[[], None]:
    """Return a call of an operation with recurrent states: of Qwen3.5's shapes, or of Mamba-2 with `depth` values."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.state_batch import StateBatch, matrix_states  # noqa: PLC0415
        from octavo.kernels.triton.backend import kernel_of  # noqa: PLC0415

        numbers = torch.arange(9, dtype=torch.int32)
        batch = StateBatch(numbers, *[numbers[:8]] * 4, *[numbers[:4]] * 4)
        qkv, out, factors = torch.empty(8, 8192), torch.empty(8, 4096), torch.empty(32)
        kept, rates = torch.empty(8, 2 * 8192 + 64, dtype=torch.bfloat16), torch.empty(8, 64)
        qkv, out, rates = qkv.bfloat16(), out.bfloat16(), rates.bfloat16()
        kept_qkv, kept_mixed, kept_b, kept_a = kept.split_with_sizes((8192, 8192, 32, 32), dim=1)
        arguments: tuple[Any, ...]
        if name == "short_conv":
            state = torch.empty(8, 3, 8192, dtype=torch.bfloat16)
            arguments = qkv, kept_qkv, torch.empty(4, 8192), factors[:0], state, batch, True, torch.empty_like(qkv)
        elif name == "gated_delta":
            state = matrix_states(8, 32, depth, 128)
            b, a = rates.split_with_sizes((32, 32), dim=1)
            arguments = qkv, a, b, kept_mixed, kept_a, kept_b, factors, factors, state, batch, 16, False, out
        elif name == "mamba2":
            xbc, state = torch.empty(8, 2048 + 2 * depth, dtype=torch.bfloat16), matrix_states(8, 32, depth, 64)
            of_heads = rates[:, :32].contiguous()
            inputs = xbc, of_heads, torch.empty_like(xbc), torch.empty_like(of_heads)
            arguments = *inputs, factors, factors, factors, 0.0, 1.0, state, batch, 1, out[:, :2048]
        else:
            arguments = qkv, qkv.clone(), rates, kept, batch
        kernel = kernel_of(name)
        assert kernel is not None
        kernel(*arguments)

    return call


def gated_norm(size: int, group_size: int, *, gate_first: bool) -> Callable[[], None]:
    """Return a call of gated_norm with one weight for all groups, or with a weight for each if `gate_first`."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.gated_norm import gated_norm  # noqa: PLC0415

        x, gate, out = torch.empty(3, 8, size, dtype=torch.bfloat16)
        gated_norm(x, gate, torch.empty(size if gate_first else group_size), 1e-6, group_size, gate_first, out)

    return call


def linear(
    rows: int, dtype: str, stored: str | None = None, *, columns: int = 256, width: int = 2048
) -> Callable[[], None]:
    """Return a call of a product with a weight of `columns` columns of `width` values.

    On the CPU a device has four processors, so 64 rows and 512 columns are a product of small tiles. The tiles of 256
    rows are large if the type of weight allows it.
    """

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.block_weight import BlockKind, BlockWeight  # noqa: PLC0415
        from octavo.kernels.quantization import Fp8Weight, Int4Weight, Int8Weight  # noqa: PLC0415
        from octavo.kernels.triton.backend import TritonKernels  # noqa: PLC0415

        kernels, kind, shape = TritonKernels(), getattr(torch, dtype), (columns, width)
        weight: Any = torch.empty(shape, dtype=kind)
        if stored is not None and stored in BlockKind.__members__:
            blocks = BlockKind[stored]
            weight = [BlockWeight(blocks, torch.zeros(columns, blocks.row_bytes(width), dtype=torch.uint8), width)]
        elif stored == "int8":
            weight = Int8Weight(torch.zeros(shape, dtype=torch.int8), torch.ones(columns))
        elif stored == "fp8":
            weight = Fp8Weight(torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.ones(columns, 16), 128)
        elif stored == "int4":
            weight = Int4Weight(torch.zeros(shape, dtype=torch.uint8), torch.ones(columns, 64), None, 32)
        packed = kernels.pack_linear(weight, torch.empty(columns, dtype=kind))
        kernels.linear(torch.empty(rows, width, dtype=kind), packed)

    return call


def grouped_linear(*, is_gathered: bool) -> Callable[[], None]:
    """Return a call of products with the weights of 128 groups."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.triton.backend import TritonKernels  # noqa: PLC0415

        start, sources = torch.arange(129, dtype=torch.int32), torch.zeros(128, dtype=torch.int64)
        x, weights = torch.empty(128, 2048, dtype=torch.bfloat16), torch.empty(128, 256, 2048, dtype=torch.bfloat16)
        kernels = TritonKernels()
        packed = kernels.pack_groups([kernels.pack_linear(each) for each in weights])
        kernels.grouped_linear(x, packed, start, sources=sources if is_gathered else None)

    return call


def head_linear() -> None:
    """Call products with the weights of 16 heads."""
    import torch  # noqa: PLC0415

    from octavo.kernels.triton.backend import TritonKernels  # noqa: PLC0415

    kernels, weights = TritonKernels(), torch.empty(16, 512, 128, dtype=torch.bfloat16)
    x, queries = torch.empty(64, 16, 192, dtype=torch.bfloat16), torch.empty(64, 16, 576, dtype=torch.bfloat16)
    packed = kernels.pack_groups([kernels.pack_linear(each) for each in weights])
    kernels.head_linear(x[..., :128], packed, queries[..., :512])


def rows(name: str) -> Callable[[], None]:
    """Return a call of an operation that takes ids of rows, choices or parameters of sampling."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels import SamplingRows  # noqa: PLC0415
        from octavo.kernels.triton import embedding, rejection, rows, sampling  # noqa: PLC0415

        ids, weight = torch.arange(4), torch.empty(4, 2048, dtype=torch.bfloat16)
        if name == "embedding":
            embedding.embedding(ids, weight, torch.bfloat16, 1.0)
        elif name == "take_rows":
            rows.take_rows(weight, ids)
        elif name == "rejection_sample":
            rejection.rejection_sample(ids, ids, torch.tensor([0, 4], dtype=torch.int32), 3)
        else:
            floats, integers = torch.ones(4), torch.ones(4, dtype=torch.int32)
            parameters = SamplingRows(floats, integers, floats, floats, ids, integers, integers)
            sampling.sample(torch.empty(4, 151936), parameters)

    return call


def decode_inputs() -> Callable[[], None]:
    """Return a call that fills the inputs of a graph of decode steps."""

    def call() -> None:
        import torch  # noqa: PLC0415

        from octavo.kernels.interface import AttentionBatch, DecodePlan  # noqa: PLC0415
        from octavo.kernels.triton.decode_graphs import DecodeInputs  # noqa: PLC0415

        batch = AttentionBatch(
            query_start=torch.arange(4, dtype=torch.int32),
            seq_lens=torch.full((3,), 500, dtype=torch.int32),
            block_tables=torch.zeros(3, 32, dtype=torch.int32),
            positions=torch.zeros(3, dtype=torch.int64),
            slot_mapping=torch.zeros(3, dtype=torch.int64),
            block_size=16,
        )
        DecodeInputs(batch, DecodePlan({1: (4,)}, 64, 0)).fill((1, 4), torch.zeros(3, dtype=torch.int64), batch)

    return call


CASES: dict[str, Callable[[], None]] = {
    "attention bfloat16 64": attention("bfloat16", 64),
    "attention bfloat16 128": attention("bfloat16", 128),
    "attention bfloat16 256 capped": attention("bfloat16", 256, softcap=50.0),
    "attention bfloat16 64 sinks": attention("bfloat16", 64, has_sinks=True),
    "attention bfloat16 128 int8": attention("bfloat16", 128, kv="int8"),
    "attention bfloat16 128 fp8": attention("bfloat16", 128, kv=FP8),
    "attention bfloat16 256": attention("bfloat16", 256),
    "attention bfloat16 256 int8": attention("bfloat16", 256, kv="int8"),
    "attention bfloat16 256 fp8": attention("bfloat16", 256, kv=FP8),
    "attention bfloat16 512": attention("bfloat16", 512),
    "attention bfloat16 512 int8": attention("bfloat16", 512, kv="int8"),
    "attention bfloat16 512 fp8": attention("bfloat16", 512, kv=FP8),
    "attention float16 128": attention("float16", 128),
    "attention float32 64": attention("float32", 64),
    "attention float32 128": attention("float32", 128),
    "attention float32 128 int8": attention("float32", 128, kv="int8"),
    "attention float32 256": attention("float32", 256),
    "attention float32 512": attention("float32", 512),
    "attention latents bfloat16 512": latent_attention("bfloat16", 512, 64),
    "attention latents bfloat16 512 fp8": latent_attention("bfloat16", 512, 64, kv=FP8),
    "attention latents bfloat16 512 int8": latent_attention("bfloat16", 512, 64, kv="int8"),
    "attention latents bfloat16 128": latent_attention("bfloat16", 128, 32),
    "attention latents float32 512": latent_attention("float32", 512, 64),
    "rope_kv bfloat16 128": rope_kv("bfloat16", 128, 128),
    "rope_kv bfloat16 128 fp8": rope_kv("bfloat16", 128, 64, kv=FP8),
    "rope_kv bfloat16 128 int8": rope_kv("bfloat16", 128, 64, kv="int8"),
    "rope_kv bfloat16 128 norms": rope_kv("bfloat16", 128, 128, has_norms=True),
    "rope_kv bfloat16 128 norms fp8": rope_kv("bfloat16", 128, 64, kv=FP8, has_norms=True),
    "rope_kv bfloat16 128 norms int8": rope_kv("bfloat16", 128, 64, kv="int8", has_norms=True),
    "rope_and_write_latents bfloat16": latents("bfloat16"),
    "rope_and_write_latents bfloat16 fp8": latents("bfloat16", kv=FP8),
    "rope_and_write_latents bfloat16 int8": latents("bfloat16", kv="int8"),
    "linear bfloat16 256 rows": linear(256, "bfloat16"),
    "linear bfloat16 256 rows of odd width": linear(256, "bfloat16", width=1045),
    "linear bfloat16 64 rows": linear(64, "bfloat16", columns=512),
    "linear bfloat16 1 row": linear(1, "bfloat16"),
    "linear float16 256 rows": linear(256, "float16"),
    "linear float16 64 rows": linear(64, "float16", columns=512),
    "linear float32 256 rows": linear(256, "float32"),
    "linear float32 1 row": linear(1, "float32"),
    "linear fp8 256 rows": linear(256, "bfloat16", "fp8"),
    "linear fp8 1 row": linear(1, "bfloat16", "fp8"),
    "linear int8 256 rows": linear(256, "bfloat16", "int8"),
    "linear int8 64 rows": linear(64, "bfloat16", "int8", columns=512),
    "linear int8 1 row": linear(1, "bfloat16", "int8"),
    "linear int4 256 rows": linear(256, "bfloat16", "int4"),
    "linear int4 1 row": linear(1, "bfloat16", "int4"),
    **{
        f"linear {kind} 256 rows": linear(256, "bfloat16", kind)
        for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
    },
    **{f"linear {kind} 1 row": linear(1, "bfloat16", kind) for kind in ("Q8_0", "Q5_K", "Q6_K", "MXFP4")},
    "choose_experts 128 softmax": choose_experts(128, 8, scoring=0),
    "choose_experts 128 softmax with factors": choose_experts(128, 8, scoring=0, has_factors=True),
    "choose_experts 256 in groups": choose_experts(256, 8, num_groups=8, scoring=1),
    "choose_experts 384 sigmoid": choose_experts(384, 8, scoring=1),
    "choose_experts 32 softmax of chosen": choose_experts(32, 4, scoring=2),
    "sort_by_expert": sort_by_expert,
    "add_experts 128": add_experts(128, 8),
    "add_experts 64 shared": add_experts(64, 6, is_shared=True),
    "add_experts 512 shared": add_experts(512, 22, is_shared=True),
    "grouped_linear bfloat16": grouped_linear(is_gathered=False),
    "grouped_linear bfloat16 gathered": grouped_linear(is_gathered=True),
    "head_linear bfloat16": head_linear,
    "rms_norm bfloat16 2048": operation("rms_norm", (8, 2048), (2048,), eps=1e-6),
    "rms_norm bfloat16 heads of 128": operation("rms_norm", (8, 16, 128), (128,), eps=1e-6),
    "add_rms_norm bfloat16 4096": operation("add_rms_norm", (8, 4096), (8, 4096), (4096,), eps=1e-6),
    "add bfloat16": operation("add", (8, 2048), (8, 2048), scale=1.0),
    "gate bfloat16 silu": operation("gate", (8, 4096)),
    "gate bfloat16 gelu_tanh": operation("gate", (8, 4096), activation="gelu_tanh"),
    "gated_norm bfloat16 heads of 128": gated_norm(4096, 128, gate_first=False),
    "gated_norm bfloat16 4096 gate first": gated_norm(8192, 4096, gate_first=True),
    "gated_delta bfloat16 128": recurrent("gated_delta"),
    "mamba2 bfloat16 128": recurrent("mamba2"),
    "mamba2 bfloat16 256": recurrent("mamba2", 256),
    "short_conv bfloat16 4": recurrent("short_conv"),
    "keep_rows bfloat16": recurrent("keep_rows"),
    "multiply bfloat16": operation("multiply", (8, 2048), (8, 2048)),
    "relu_squared bfloat16": operation("relu_squared", (8, 2048)),
    "sigmoid_gate bfloat16": operation("sigmoid_gate", (8, 16, 256), (8, 16, 256)),
    "copy_rows bfloat16": operation("copy_rows", (8, 16, 256), (8, 16, 256)),
    "soft_cap": operation("soft_cap", (8, 4096), dtype="float32", cap=30.0),
    "divide": operation("divide", (8, 4096), dtype="float32", divisor=3.0),
    "log_softmax": operation("log_softmax", (8, 151937), dtype="float32"),
    "top_tokens": operation("top_tokens", (8, 151936), dtype="float32", k=20),
    "embedding": rows("embedding"),
    "take_rows": rows("take_rows"),
    "rejection_sample": rows("rejection_sample"),
    "sample": rows("sample"),
    "decode_inputs": decode_inputs(),
}
REREADING = {"add_rms_norm bfloat16 4096"}  # the sum, which other threads may have written


def _caches(dtype: Any, head_dim: int) -> list[Any]:
    import torch  # noqa: PLC0415

    from octavo.models.kv_layout import KVLayout, KVShape  # noqa: PLC0415
    from octavo.worker.kv_cache import PagedKVCache  # noqa: PLC0415

    layout, cpu = KVLayout((KVShape(2, head_dim),)), torch.device("cpu")
    return list(PagedKVCache(layout, num_blocks=[64], block_size=16, dtype=dtype, device=cpu).layer(0))


def _latents(dtype: Any, rank: int, rope_dim: int) -> Any:
    import torch  # noqa: PLC0415

    from octavo.models.kv_layout import KVLayout, LatentShape  # noqa: PLC0415
    from octavo.worker.kv_cache import PagedKVCache  # noqa: PLC0415

    layout, cpu = KVLayout((LatentShape(rank, rope_dim),)), torch.device("cpu")
    return PagedKVCache(layout, num_blocks=[64], block_size=16, dtype=dtype, device=cpu).layer(0)[0]


def _batch() -> Any:
    """Return a batch of two decodes and a chunk of 18 tokens, up to 512 positions each."""
    import torch  # noqa: PLC0415

    from octavo.kernels import AttentionBatch  # noqa: PLC0415

    return AttentionBatch(
        query_start=torch.tensor([0, 1, 2, 20], dtype=torch.int32),
        seq_lens=torch.full((3,), 500, dtype=torch.int32),
        block_tables=torch.zeros(3, 32, dtype=torch.int32),
        positions=torch.zeros(20, dtype=torch.int64),
        slot_mapping=torch.zeros(20, dtype=torch.int64),
        block_size=16,
    )


class NoDevice:
    """Triton's driver for a target without a device."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_device(self) -> str:
        """Return the key of the cache of compiled kernels."""
        return self.name

    def get_current_stream(self, device: str) -> int:
        """Return the default stream."""
        del device
        return 0

    def get_current_target(self) -> Any:
        """Return the target of the compilation."""
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415

        return GPUTarget(*TARGETS[self.name][:3])


def compiled(case: str, target: str) -> dict[str, Any]:
    """Compile the kernels of a case for a target; return each by its name."""
    from triton.runtime import driver  # noqa: PLC0415
    from triton.runtime.jit import JITFunction  # noqa: PLC0415

    kernels: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        kernels[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(NoDevice(target))
    JITFunction.run = compile_only
    try:
        CASES[case]()
    finally:
        JITFunction.run = run
    return dict(sorted(kernels.items()))


def taken(case: str, name: str, target: str, kernel: Any) -> Taken:
    """Return the resources of a compiled kernel."""
    is_amd = TARGETS[target][0] == "hip"
    measured = (_taken_on_amd if is_amd else _taken_on_nvidia)(kernel)
    code = kernel.asm["amdgcn" if is_amd else "ptx"]
    shared_bytes, num_warps = kernel.metadata.shared, kernel.metadata.num_warps
    offsets = wide_offsets(kernel.asm["ttir"])
    return Taken(case, name, target, *measured, shared_bytes, num_warps, offsets, products(code))


def _taken_on_nvidia(kernel: Any) -> tuple[int, int]:
    import triton  # noqa: PLC0415

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return registers, stack + local


def _taken_on_amd(kernel: Any) -> tuple[int, int]:
    text = kernel.asm["amdgcn"]
    count = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]
    return count["vgpr_count"], 4 * count["vgpr_spill_count"]


def bounds_file() -> Path:
    """Return the table of the installed version of Triton."""
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return BOUNDS / f"triton-{major}.{minor}.csv"


def read_bounds(path: Path | None = None) -> dict[tuple[str, str, str], Taken]:
    """Read the bounds of kernels, by default those for the installed version of Triton."""
    with (path or bounds_file()).open(encoding="utf-8", newline="") as file:
        rows = [_taken_of_row(row) for row in list(csv.reader(file))[1:]]
    return {row.key: row for row in rows}


def _taken_of_row(row: list[str]) -> Taken:
    case, kernel, target, *numbers, instructions = row
    registers, spilled_bytes, shared_bytes, num_warps, offsets = map(int, numbers)
    return Taken(case, kernel, target, registers, spilled_bytes, shared_bytes, num_warps, offsets, instructions)


def write_bounds(all_taken: list[Taken]) -> None:
    """Write the resources of kernels as their bounds; bounds of other targets and cases stay."""
    path = bounds_file()
    kept = read_bounds(path) if path.exists() else {}
    replaced = {(each.case, each.target) for each in all_taken}
    kept = {key: each for key, each in kept.items() if (each.case, each.target) not in replaced and each.case in CASES}
    kept.update({each.key: each for each in all_taken})
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Taken)])
        writer.writerows(astuple(kept[key]) for key in sorted(kept))


def exceeded(taken: Taken, bounds: dict[tuple[str, str, str], Taken]) -> list[str]:
    """Return what exceeds a kernel's row in the table: an eighth more registers, any more memory, other products."""
    bound, where = bounds.get(taken.key), f"{taken.kernel} of {taken.case} for {taken.target}"
    if bound is None:
        return [f"{where} has no bound: tools/compile_kernels.py --write"]
    limits = {
        "registers": bound.registers + bound.registers // 8,
        "spilled_bytes": bound.spilled_bytes,
        "shared_bytes": min(bound.shared_bytes, TARGETS[taken.target][3]),
    }
    problems = [
        f"{where} takes {getattr(taken, name)} {name.replace('_', ' ')}, at most {limit} are allowed"
        for name, limit in limits.items()
        if getattr(taken, name) > limit
    ]
    if (taken.num_warps, taken.products) != (bound.num_warps, bound.products):
        problems.append(
            f"{where} multiplies by {taken.products!r} in {taken.num_warps} warps; the table has {bound.products!r} in "
            f"{bound.num_warps}"
        )
    if taken.wide_offsets != bound.wide_offsets:
        problems.append(f"{where} has {taken.wide_offsets} offsets of 64 bits; the table has {bound.wide_offsets}")
    return problems


def main() -> int:
    """Compile, print a table, return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="default: all")
    parser.add_argument("--case", action="append", help="those whose names begin so; default: all")
    parser.add_argument("--write", action="store_true", help="put down what kernels take as what they may")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        parser.error("with TRITON_INTERPRET nothing is compiled: set it to 0")
    all_taken: list[Taken] = []
    problems: list[str] = []
    for target in arguments.target or TARGETS:
        for case in CASES:
            if not case.startswith(tuple(arguments.case or [""])):
                continue
            for name, kernel in compiled(case, target).items():
                all_taken.append(taken(case, name, target, kernel))
                print(*astuple(all_taken[-1]), sep="\t", flush=True)
                problems += [
                    f"{name} of {case} for {target}: {fault}" for fault in faults(kernel, rereads=case in REREADING)
                ]
    if arguments.write:
        write_bounds(all_taken)
    bounds = read_bounds() if bounds_file().exists() else {}
    problems += [problem for each in all_taken for problem in exceeded(each, bounds)]
    print(*problems, sep="\n", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
