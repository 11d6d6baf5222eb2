"""Largest values and ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.selection import LAST_ID, LEAST_KEY, is_kept, scaled_keys, tie_id, top_k_cut

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 2048
_RANKED = 64


def top_tokens(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `Kernels`. NaN counts as -inf."""
    values = values.contiguous()
    num_rows, vocab = values.shape
    k = min(k, vocab)
    chosen = torch.empty(num_rows, k, dtype=torch.int32, device=values.device)
    largest = values.new_empty(num_rows, k)
    ids = torch.empty(num_rows, k, dtype=torch.int64, device=values.device)
    if largest.numel() == 0:
        return largest, ids
    _choose[(num_rows,)](values, chosen, vocab, k, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False)
    _rank[num_rows, cdiv(k, _RANKED)](values, chosen, largest, ids, vocab, k, RANKED=_RANKED, enable_fp_fusion=False)
    return largest, ids


@kernel(do_not_specialize=["vocab", "k"])
def _choose(values_ptr, chosen_ptr, vocab, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = values_ptr + row * vocab
    cut_key = tl.full([], LEAST_KEY, tl.int32)
    cut_id = tl.full([], LAST_ID, tl.int32)
    if k < vocab:
        cut_key, count = top_k_cut(row_ptr, vocab, 1.0, chosen_ptr, 0, k, BLOCK)
        cut_id = tie_id(row_ptr, vocab, 1.0, chosen_ptr, 0, cut_key, count, BLOCK)
    before = tl.full([], 0, tl.int32)
    for first in range(0, loop_bound(vocab), BLOCK):
        key, ids, is_there = scaled_keys(row_ptr, vocab, 1.0, chosen_ptr, 0, first, BLOCK)
        kept = (is_there & is_kept(key, ids, cut_key, cut_id)).to(tl.int32)
        place = before + tl.cumsum(kept, 0) - 1
        tl.store(chosen_ptr + row * k + place, ids, mask=kept > 0)
        before += tl.sum(kept)


@kernel(do_not_specialize=["vocab", "k"])
def _rank(values_ptr, chosen_ptr, largest_ptr, ids_ptr, vocab, k, RANKED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    ids, value = _chosen(values_ptr + row * vocab, chosen_ptr + row * k, index, k)
    place = tl.zeros([RANKED], tl.int32)
    for first in range(0, loop_bound(k), RANKED):
        other_index = first + tl.arange(0, RANKED)
        _, other = _chosen(values_ptr + row * vocab, chosen_ptr + row * k, other_index, k)
        # chosen ids ascend
        is_before = (other[None, :] > value[:, None]) | (
            (other[None, :] == value[:, None]) & (other_index[None, :] < index[:, None])
        )
        place += tl.sum((is_before & (other_index < k)[None, :]).to(tl.int32), axis=1)
    tl.store(largest_ptr + row * k + place, value, mask=index < k)
    tl.store(ids_ptr + row * k + place, ids.to(tl.int64), mask=index < k)


@triton.jit
def _chosen(row_ptr, chosen_ptr, index, k):
    ids = tl.load(chosen_ptr + index, mask=index < k, other=0)
    value = tl.load(row_ptr + ids, mask=index < k, other=float("-inf"))
    return ids, tl.where(value == value, value, float("-inf"))  # noqa: PLR0124
