"""Attention by FlashAttention 3 (Shah et al. 2024), on NVIDIA's Hopper: `--kernels flash-attn-3-inexact`, NOT exact.

Its calls, as they stand in hopper/flash_attn_interface.py of Dao-AILab/flash-attention (`flash_attn_with_kvcache`) and
in vLLM's copy, vllm/vllm_flash_attn (`flash_attn_varlen_func` with `fa_version=3`):

- Heads of up to 256 values, a multiple of 8, in float16 or bfloat16; blocks of any size.
- Keys and values are [num_blocks, block_size, num_kv_heads, head_dim] with free strides but for the last dimension: a
  transposed view of octavo's cache.
- The mask is aligned at the end of queries and keys; a window of (left, right) counts positions beside the row's own.
- A row that sees nothing gets zeros. Positions behind `cache_seqlens` are not read.
- Whatever is launched follows from shapes and arguments, lengths are read on the device: so it can stand in a graph.

Where sums are split, partial results take num_splits float32 copies of the result. The library's own choice has no
bound that octavo could set aside, so the number is passed: the most, of which a sequence takes what its length asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from octavo.kernels.triton.library_attention import LibraryAttention, load_library, require_nvidia, version_of

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch

_COMMAND = "pip install flash-attn-3 --index-url https://download.pytorch.org/whl/cu126 (or pip install vllm)"
_PARTIAL_BYTES = 128 << 20  # of partial results, at most
_MOST_SPLITS = 32
_TILE = 128  # rows of a KV head
_BUSY_TILES = 106  # four fifths of an H100's multiprocessors: from there on the library, too, would split nothing


class FlashAttention3Kernels(LibraryAttention):
    """The kernels in Triton, but attention is FlashAttention 3's."""

    name = "flash-attn-3-inexact"
    library = "FlashAttention 3"

    def __init__(self, device: torch.device) -> None:
        modules = ("flash_attn_interface", "vllm.vllm_flash_attn")
        found, self._module = load_library(self.name, self.library, modules, _COMMAND)
        require_nvidia(self.name, self.library, device, range(9, 10))
        self._is_of_vllm = found == modules[1]
        super().__init__(version_of(*(("vllm",) if self._is_of_vllm else ("flash-attn-3", "flash_attn_3"))))

    def covers(self, head_dim: int, dtype: Any) -> bool:
        """Whether there is a kernel for such heads."""
        return dtype in {torch.float16, torch.bfloat16} and head_dim % 8 == 0 and head_dim <= 256

    def library_bytes(self, *, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
        """Return what partial results take."""
        del num_heads, num_kv_heads, head_dim
        return _PARTIAL_BYTES

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
        num_tokens, num_seqs = q.shape[0], batch.seq_lens.shape[0]
        # Each sequence has a row, but for those that pad a graph; more than the longest has is right as well.
        most_rows = num_tokens if batch.has_rows_behind else num_tokens - num_seqs + 1
        tables, lengths = seen_blocks(batch, window)
        keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        options: dict[str, Any] = {
            "cu_seqlens_q": batch.query_start,
            "max_seqlen_q": most_rows,
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
            "num_splits": _num_splits(q, k_cache.shape[1], most_rows),
        }
        if self._is_of_vllm:
            options |= {"max_seqlen_k": tables.shape[1] * batch.block_size, "fa_version": 3}
            out = self._module.flash_attn_varlen_func(q, keys, values, seqused_k=lengths, block_table=tables, **options)
        else:
            out = self._module.flash_attn_with_kvcache(
                q, keys, values, cache_seqlens=lengths, page_table=tables, **options
            )
        result: Tensor = out.flatten(1)
        if batch.has_rows_behind:
            is_behind = torch.arange(num_tokens, device=q.device) >= batch.query_start[-1]
            result.masked_fill_(is_behind.unsqueeze(1), 0.0)
        return result


def seen_blocks(batch: AttentionBatch, window: int | None) -> tuple[Tensor, Tensor]:
    """Return block tables that begin with the first block that a row of the sequence sees, and lengths from there on.

    What stands in a table before that is no block of the sequence any more, and the library reads whole tiles.
    """
    if window is None:
        return batch.block_tables, batch.seq_lens
    first = (batch.seq_lens - batch.query_start.diff() + 1 - window).clamp(min=0) // batch.block_size
    width = batch.block_tables.shape[1]
    columns = first.unsqueeze(1) + torch.arange(width, device=first.device)
    return batch.block_tables.gather(1, columns.clamp(max=width - 1)), batch.seq_lens - first * batch.block_size


def _num_splits(q: Tensor, num_kv_heads: int, most_rows: int) -> int:
    """Return into how many parts the sum of a row may be split: one where a device is busy, or where room is scarce."""
    num_tokens, num_heads, head_dim = q.shape
    if num_kv_heads * -(-most_rows * num_heads // num_kv_heads // _TILE) >= _BUSY_TILES:
        return 1
    return max(1, min(_MOST_SPLITS, _PARTIAL_BYTES // (num_tokens * num_heads * (head_dim + 1) * 4)))
