"""Attention by FlashInfer (Ye et al. 2025), on NVIDIA's GPUs: `--kernels flashinfer-inexact`, NOT exact.

Its call, as it stands in flashinfer/prefill.py of flashinfer-python 0.6.4 (`BatchPrefillWithPagedKVCacheWrapper`, which
computes prompts, decodes and drafts alike):

- `plan` takes a batch: rows and pages of each sequence as offsets, the pages, how much of each last one is there. It
  reads that on the host, so it waits for the device: once a step, as layers with the same mask share it. It cannot
  stand in a graph.
- `run` takes one layer. Layout "HND" is octavo's: [num_blocks, num_kv_heads, block_size, head_dim], the last dimension
  contiguous, and the strides of keys those of values.
- The mask is aligned at the end of queries and keys; `window_left` counts the positions before the row's own.
- Heads of 64, 128 or 256 values in float16 or bfloat16, which it compiles with nvcc when they are first asked for.

csrc/batch_prefill.cu and attention/scheduler.cuh say what it takes: sums are split onto two programs a multiprocessor
at most, each with a tile of 128 rows in float32, in memory that the caller gives.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from octavo.kernels.triton.library_attention import LibraryAttention, load_library, require_nvidia, version_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch

    Plan = tuple[AttentionBatch, Any]  # what was planned, and the wrapper that knows it

logger = logging.getLogger(__name__)
_HEAD_DIMS = (64, 128, 256)
_MOST_PLANS = 4  # of one forward pass: with a window and without, of all rows and of those that are looked at
_WRAPPER_BYTES = (8 << 20) + (128 << 10)  # that a wrapper takes by itself
_LEAST_WORKSPACE = 128 << 20  # which FlashInfer recommends
_TILE = 128
_PROGRAMS = 2  # of a multiprocessor


class FlashInferKernels(LibraryAttention):
    """The kernels in Triton, but attention is FlashInfer's. One thread at a time computes with them."""

    name = "flashinfer-inexact"
    library = "FlashInfer"

    def __init__(self, device: torch.device) -> None:
        _, self._module = load_library(self.name, self.library, ("flashinfer",), "pip install flashinfer-python")
        require_nvidia(self.name, self.library, device, range(8, 13))
        super().__init__(version_of("flashinfer-python"))
        is_gpu = device.type == "cuda"
        self._num_units = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
        self._workspace = torch.empty(0)
        self._plans: dict[tuple[Any, ...], Plan] = {}  # the one that was used last stands last

    def covers(self, head_dim: int, dtype: Any) -> bool:
        """Whether there is a kernel for such heads."""
        return dtype in {torch.float16, torch.bfloat16} and head_dim in _HEAD_DIMS

    def captures_graphs(self, head_dims: Iterable[int], dtype: Any) -> bool:
        """Whether FlashInfer computes nothing of the model: it plans each step on the host."""
        if any(self.covers(head_dim, dtype) for head_dim in head_dims):
            logger.warning("no decode graphs are captured: FlashInfer plans each step on the host")
            return False
        return super().captures_graphs(head_dims, dtype)

    def library_bytes(self, *, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Return what the wrappers and their partial results take."""
        partial = num_heads // num_kv_heads * _PROGRAMS * self._num_units * _TILE * (head_dim + 1) * 4
        return max(_LEAST_WORKSPACE, partial + (1 << 20)) + _MOST_PLANS * _WRAPPER_BYTES

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        key = (id(batch), window, scale, softcap, q.shape[1:], k_cache.shape[1], q.dtype)
        plan = self._plans.pop(key, None) or (batch, self._planned(q, k_cache, batch, scale, window, softcap))
        self._plans[key] = plan  # it keeps the batch, so that no other one has its id
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        plan[1].run(q, (k_cache, v_cache), out=out)
        return out.flatten(1)

    def _planned(
        self, q: Tensor, k_cache: Tensor, batch: AttentionBatch, scale: float, window: int | None, softcap: float | None
    ) -> Any:
        """Plan a batch for layers of one kind, with the wrapper that was used least recently; waits for the device."""
        num_heads, num_kv_heads, head_dim = q.shape[1], k_cache.shape[1], q.shape[2]
        wrapper = self._idle_wrapper(q.device, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        starts, page_starts, pages, last_page_lens = seen_pages(batch, window)
        wrapper.plan(
            starts, page_starts, pages, last_page_lens, num_heads, num_kv_heads, head_dim, batch.block_size,
            causal=True, sm_scale=scale, window_left=-1 if window is None else window - 1,
            logits_soft_cap=softcap or 0.0, q_data_type=q.dtype, kv_data_type=k_cache.dtype,
        )  # fmt: skip
        return wrapper

    def _idle_wrapper(self, device: torch.device, **heads: int) -> Any:
        """Return a new wrapper, or that of the oldest plan; all share memory of partial results: one runs at a time."""
        num_bytes = self.library_bytes(**heads) - _MOST_PLANS * _WRAPPER_BYTES
        if self._workspace.numel() < num_bytes:  # a drafting model may have other heads
            self._plans.clear()
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        if len(self._plans) == _MOST_PLANS:
            return self._plans.pop(next(iter(self._plans)))[1]
        return self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")


def seen_pages(batch: AttentionBatch, window: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return where rows and pages of each sequence begin, its pages, and what the last one holds; int32, on the host.

    The pages are those from the first on that a row of the sequence sees: what stands before that in its table is no
    page of it any more, and the library reads whole tiles. No sequence has the length 0: those are of graphs alone.
    """
    starts, lengths, tables = (each.cpu() for each in (batch.query_start, batch.seq_lens, batch.block_tables))
    first = torch.zeros_like(lengths)
    if window is not None:
        first = (lengths - starts.diff() + 1 - window).clamp(min=0) // batch.block_size
    end = (lengths - 1) // batch.block_size + 1
    number = torch.arange(tables.shape[1])
    is_seen = (number >= first.unsqueeze(1)) & (number < end.unsqueeze(1))
    page_starts = torch.zeros_like(starts)
    page_starts[1:] = (end - first).cumsum(0)
    return starts, page_starts, tables[is_seen], (lengths - 1) % batch.block_size + 1
