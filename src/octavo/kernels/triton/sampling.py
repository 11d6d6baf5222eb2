"""Sampling of one token per row. All operations before the argmax round like the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.noise import noise_words, word_to_gumbel
from octavo.kernels.triton.selection import (
    BLOCKS_PER_LOAD,
    LAST_ID,
    LEAST_KEY,
    is_kept,
    key_of_rank,
    order_key,
    pack,
    scaled_key,
    tie_id,
    top_k_cut,
    top_p_cut,
)

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import SamplingRows

_CUT_BLOCK = 2048
_LAYERS = 8
_COUNTERS = 256  # of noise at a time; each is for four tokens
_PIECE = 8 * 4 * _COUNTERS


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See `Kernels`."""
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    pieces = cdiv(vocab, _PIECE)
    temperature, top_k, top_p, min_p, seed, sample_index, position = (
        getattr(rows, name).to(logits.device) for name in rows.__slots__
    )
    cut_keys, cut_ids = (torch.empty(num_rows, dtype=torch.int32, device=logits.device) for _ in range(2))
    layers = min(_LAYERS, cdiv(vocab, _CUT_BLOCK))
    packed = torch.empty(num_rows, layers, _CUT_BLOCK, dtype=torch.int32, device=logits.device)
    best = torch.empty(num_rows, pieces, dtype=torch.float32, device=logits.device)
    best_ids = torch.empty(num_rows, pieces, dtype=torch.int32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _find_cut[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        cut_keys,
        cut_ids,
        packed,
        vocab,
        LAYERS=_LAYERS,
        BLOCK=_CUT_BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
    _best_of_piece[num_rows, pieces](
        logits,
        temperature,
        seed,
        sample_index,
        position,
        cut_keys,
        cut_ids,
        best,
        best_ids,
        vocab,
        PIECE=_PIECE,
        COUNTERS=_COUNTERS,
        enable_fp_fusion=False,
    )
    _best_of_row[(num_rows,)](
        best, best_ids, out, pieces, BLOCK=power_of_2_from(pieces), num_warps=1, enable_fp_fusion=False
    )
    return out


@kernel(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["logits_ptr", "packed_ptr"])
def _find_cut(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    cut_keys_ptr,
    cut_ids_ptr,
    packed_ptr,
    vocab,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    cut_key = tl.full([], LEAST_KEY, tl.int32)
    cut_id = tl.full([], LAST_ID, tl.int32)
    if (temperature != 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        row_ptr = logits_ptr + row * vocab
        lanes = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, loop_bound(vocab), BLOCKS_PER_LOAD * BLOCK):
            for block in tl.static_range(BLOCKS_PER_LOAD):
                ids = first + block * BLOCK + tl.arange(0, BLOCK)
                lanes = tl.maximum(lanes, tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")))
        largest = tl.div_rn(tl.max(lanes), temperature)
        if min_p > 0.0:
            limit = largest + tl.log(min_p.to(tl.float64)).to(tl.float32)
            cut_key = tl.maximum(order_key(limit), LEAST_KEY)
        has_top_k = (top_k > 0) & (top_k < vocab)
        rank = tl.where(has_top_k, top_k, BLOCK // 2)
        num_layers, bound = tl.full([], 0, tl.int32), tl.full([], LEAST_KEY, tl.int32)
        packed_ptr += row * tl.minimum(LAYERS, tl.cdiv(vocab, BLOCK)) * BLOCK
        if (has_top_k | (top_p < 1.0)) & (rank <= BLOCK // 2):
            bound = key_of_rank(scaled_key(lanes, temperature), rank)  # `rank` or more tokens reach it
            num_layers = pack(row_ptr, vocab, temperature, bound, packed_ptr, LAYERS, BLOCK)
        if has_top_k:
            key, count = top_k_cut(row_ptr, vocab, temperature, packed_ptr, num_layers, top_k, BLOCK)
            if (num_layers == 0) & (top_p < 1.0):  # top_p reads only the tokens that top_k keeps
                bound = key
                num_layers = pack(row_ptr, vocab, temperature, bound, packed_ptr, LAYERS, BLOCK)
            if key >= cut_key:
                cut_key = key
                cut_id = tie_id(row_ptr, vocab, temperature, packed_ptr, num_layers, key, count, BLOCK)
        if top_p < 1.0:
            cut_key, cut_id = top_p_cut(
                row_ptr, vocab, temperature, packed_ptr, num_layers, bound, order_key(largest), top_p, cut_key, cut_id,
                BLOCK,
            )  # fmt: skip
    tl.store(cut_keys_ptr + row, cut_key)
    tl.store(cut_ids_ptr + row, cut_id)


@kernel
def _best_of_piece(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    sample_index_ptr,
    position_ptr,
    cut_keys_ptr,
    cut_ids_ptr,
    best_ptr,
    best_ids_ptr,
    vocab,
    PIECE: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    is_greedy = temperature == 0.0
    seed = tl.load(seed_ptr + row)
    position, sample_index = tl.load(position_ptr + row), tl.load(sample_index_ptr + row)
    cut_key, cut_id = tl.load(cut_keys_ptr + row), tl.load(cut_ids_ptr + row)
    best = tl.full([COUNTERS], float("-inf"), tl.float32)
    best_id = tl.full([COUNTERS], LAST_ID, tl.int32)
    num_nan = tl.zeros([COUNTERS], tl.int32)
    end = tl.minimum((piece + 1) * PIECE, vocab)
    for first in range(loop_bound(piece * PIECE), loop_bound(end), 4 * COUNTERS):
        counter = first // 4 + tl.arange(0, COUNTERS)
        lowest_id = counter // 16 * 64 + counter % 16
        word_0, word_1, word_2, word_3 = noise_words(counter, seed, position, sample_index)
        for number in tl.static_range(4):
            if number == 0:
                word = word_0
            elif number == 1:
                word = word_1
            elif number == 2:
                word = word_2
            else:
                word = word_3
            ids = lowest_id + 16 * number
            logit = tl.load(logits_ptr + row * vocab + ids, mask=ids < vocab, other=float("-inf"))
            num_nan += (logit != logit).to(tl.int32)  # noqa: PLR0124
            scaled = tl.div_rn(logit, tl.where(is_greedy, 1.0, temperature))
            noisy = scaled + word_to_gumbel(word)
            noisy = tl.where(is_kept(order_key(scaled), ids, cut_key, cut_id), noisy, float("-inf"))
            key = tl.where(is_greedy, logit, noisy)
            is_better = key > best  # ids ascend, so ties keep the lower id
            best = tl.where(is_better, key, best)
            best_id = tl.where(is_better, ids, best_id)
    largest = tl.max(best)
    lowest = tl.min(tl.where(best == largest, best_id, LAST_ID))
    largest = tl.where(tl.sum(num_nan) > 0, float("nan"), largest)
    place = row * tl.num_programs(1) + piece
    tl.store(best_ptr + place, largest)
    tl.store(best_ids_ptr + place, lowest)


@kernel
def _best_of_row(best_ptr, best_ids_ptr, out_ptr, pieces, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    ids = tl.load(best_ids_ptr + row * pieces + piece, mask=piece < pieces, other=LAST_ID)
    num_nan = tl.sum((best != best).to(tl.int32))  # noqa: PLR0124
    largest = tl.max(best)
    lowest = tl.min(tl.where(best == largest, ids, LAST_ID))
    names_none = (num_nan > 0) | (largest == float("-inf"))
    tl.store(out_ptr + row, tl.where(names_none, -1, lowest).to(tl.int64))
