"""Attention over paged KV for a ragged batch, prompts and decodes in one launch: see docs/gpu.md.

A row's result depends only on its own position and KV, because tiles of rows have one padded shape, and KV tiles and
partitions (states of an online softmax; Milakov and Gimelshein 2018; Dao et al. 2022) begin at fixed positions.

A launch depends only on shapes, so captured launches serve any lengths. Rows of sequences of length 0 have position -1
and get zeros. They visit the first tile with masked loads, because divisions round towards zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from octavo.kernels.quantization import ROUNDED_KV_DTYPES, kv_scales
from octavo.kernels.triton.e4m3 import as_bytes, to_float32
from octavo.kernels.triton.exponentials import hyperbolic_tangent
from octavo.kernels.triton.launch import cdiv, kernel, power_of_2_from
from octavo.kernels.triton.loops import loop_bound
from octavo.kernels.triton.matmul import num_processors
from octavo.kernels.triton.rounding import dot, round_to
from octavo.kernels.triton.target import has_warp_groups, is_amd

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch

_MAX_ROW_BYTES = 512  # of a padded head in a tile in shared memory; wider heads are divided
_PIECE = 64  # dimensions of wide heads' q and k per product
_VALUE_BYTES = 256  # of wide heads' values that a program adds in registers
BLOCK_M = 64  # rows that a warp group of Hopper multiplies
TILE = 64
TILES = 4
PARTITION = TILE * TILES
_SPLIT_TOKENS = 8  # maximum of a split sequence; 1 if each sequence has one token
_SPLIT_PROGRAMS = 512
_SPLIT_SEQS = tl.constexpr(_SPLIT_PROGRAMS)
_SHARERS_PER_PROCESSOR = 2
_PARTIAL_BYTES = 128 << 20  # of partial sums; otherwise no sequence is split
_LOG2_E = tl.constexpr(1.4426950408889634)
_NO_WINDOW = 1 << 30
_OF_A_RUN = ["num_seqs", "num_tiles", "split_tokens", "max_partitions", "window", "table_stride"]


def paged_attention(
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
    num_seqs, num_kv_heads, value_dim = batch.seq_lens.shape[0], k_cache.shape[1], v_cache.shape[3]
    group = num_heads // num_kv_heads
    out = (q.new_zeros if batch.has_padding_rows else q.new_empty)(num_tokens, num_heads * value_dim)
    max_partitions = cdiv(batch.block_tables.shape[1] * batch.block_size, PARTITION)
    split_tokens = _split_tokens(num_tokens, num_seqs, num_heads, num_kv_heads, value_dim, max_partitions)
    partials = partial_sums(num_seqs * split_tokens, num_heads, max_partitions if split_tokens else 1, value_dim, q)
    has_scales = k_cache.dtype in ROUNDED_KV_DTYPES
    k_scales = kv_scales(k_cache) if has_scales else partials[1]
    # narrower values are the keys' first dimensions
    v_scales = kv_scales(v_cache) if has_scales and value_dim == head_dim else k_scales
    piece, block_v = _tile_dims(head_dim, value_dim, q.dtype)
    num_tiles = num_tokens * group // BLOCK_M + num_seqs  # at most
    num_sharers = min(
        num_seqs * split_tokens * max_partitions,
        cdiv(_SHARERS_PER_PROCESSOR * num_processors(batch.seq_lens.device), num_kv_heads),
    )
    sink_scores = partials[1] if sinks is None else sinks
    _attend[num_tiles + num_sharers, num_kv_heads, cdiv(value_dim, block_v)](
        out, *partials, q, as_bytes(k_cache), as_bytes(v_cache), k_scales, v_scales, sink_scores,
        batch.query_start, batch.seq_lens, batch.block_tables,
        num_seqs, num_tiles, split_tokens, max_partitions, scale if softcap is None else scale / softcap,
        0.0 if softcap is None else softcap, _NO_WINDOW if window is None else window,
        *q.stride()[:2], batch.block_tables.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
        *(k_scales.stride()[:2] if has_scales else (0, 0)), *(v_scales.stride()[:2] if has_scales else (0, 0)),
        NUM_HEADS=num_heads, GROUP=group, HEAD_DIM=head_dim, VALUE_DIM=value_dim, PIECE=piece, BLOCK_V=block_v,
        BLOCK_SIZE=batch.block_size, BLOCK_M=BLOCK_M, TILE=TILE, TILES=TILES,
        HAS_SOFTCAP=softcap is not None, HAS_SCALES=has_scales, HAS_SINKS=sinks is not None,
        **launch_options(head_dim, q.dtype),
    )  # fmt: skip
    if split_tokens:
        _merge_partitions[num_seqs * split_tokens, num_heads](
            out, *partials, batch.query_start, batch.seq_lens, sink_scores,
            split_tokens, max_partitions, _NO_WINDOW if window is None else window,
            NUM_HEADS=num_heads, VALUE_DIM=value_dim, BLOCK_V=max(16, power_of_2_from(value_dim)),
            PARTITION=PARTITION, HAS_SINKS=sinks is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _tile_dims(head_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    piece, block_v = (max(16, power_of_2_from(dim)) for dim in (head_dim, value_dim))
    if piece * dtype.itemsize <= _MAX_ROW_BYTES:
        return piece, block_v
    return _PIECE, min(block_v, _VALUE_BYTES // dtype.itemsize)


def launch_options(head_dim: int, dtype: torch.dtype) -> dict[str, int | bool]:
    """Return compile options. Only wide rows get a second warp group, because it repeats products of q and k."""
    row_bytes = head_dim * dtype.itemsize
    is_narrow = row_bytes <= (256 if dtype.itemsize < 4 and has_warp_groups() else 128)
    num_warps, num_stages = 4 if is_narrow else 8, 2 if row_bytes <= 256 and dtype.itemsize < 4 else 1
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False}
    if not is_amd():
        options["maxnreg"] = 255  # otherwise ptxas may use 32 and spill the rest
    return options


def partial_sums(num_rows: int, num_heads: int, num_partitions: int, head_dim: int, like: Tensor) -> list[Tensor]:
    """Allocate states of partitions: sums, and (maximum, sum of weights)."""
    shape = (max(num_rows, 1), num_heads, num_partitions)
    return [like.new_empty(*shape, width, dtype=torch.float32) for width in (head_dim, 2)]


def scratch_bytes(*, num_heads: int, num_kv_heads: int, head_dim: int, max_seq_len: int) -> int:
    """See `Kernels.scratch_bytes`."""
    partitions = cdiv(max_seq_len, PARTITION)
    most_seqs = max(1, _SPLIT_PROGRAMS // num_kv_heads)
    return min(_PARTIAL_BYTES, _partial_bytes(most_seqs * _SPLIT_TOKENS, num_heads, partitions, head_dim))


def _split_tokens(
    num_tokens: int, num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, max_partitions: int
) -> int:
    if max_partitions == 1 or num_seqs * num_kv_heads >= _SPLIT_PROGRAMS:
        return 0
    split_tokens = 1 if num_tokens == num_seqs else _SPLIT_TOKENS
    num_bytes = _partial_bytes(num_seqs * split_tokens, num_heads, max_partitions, head_dim)
    return split_tokens if num_bytes <= _PARTIAL_BYTES else 0


def _partial_bytes(num_rows: int, num_heads: int, num_partitions: int, head_dim: int) -> int:
    return num_rows * num_heads * num_partitions * (head_dim + 2) * 4


@triton.jit
def _merge(total_max, total_weight, totals, part_max, part_weight, part):
    maximum = tl.maximum(total_max, part_max)
    origin = tl.where(maximum == float("-inf"), 0.0, maximum)  # -inf if a row saw no position
    keep, add = tl.exp2(total_max - origin), tl.exp2(part_max - origin)
    totals = tl.fma(part, tl.broadcast_to(add[:, None], part.shape), totals * keep[:, None])
    return maximum, tl.fma(part_weight, add, total_weight * keep), totals


@triton.jit
def _nothing_seen(ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    weight = tl.zeros([ROWS], tl.float32)
    return weight + float("-inf"), weight, tl.zeros([ROWS, BLOCK_V], tl.float32)


@triton.jit
def _first_seen(position, window):
    return tl.maximum(position - window + 1, 0)


@triton.jit
def _attend_tile(
    q, q_place, is_q, maximum, weight, sums, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr,
    start, first, seq_len, position, window, scale, softcap, k_block_stride, k_row_stride, v_block_stride, v_row_stride,
    k_scales_stride, v_scales_stride,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECE: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    of_tile = start + tl.arange(0, TILE)
    is_there = (of_tile >= first) & (of_tile < seq_len)  # blocks before `first` may be released
    block = tl.load(table_ptr + of_tile // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
    offset = of_tile % BLOCK_SIZE
    k_place = k_ptr + (block * k_block_stride + offset * k_row_stride)[None, :]
    scores = dot(
        q, _keys(k_place, is_there, 0, q.dtype, HEAD_DIM, PIECE, HAS_SCALES),
        tl.zeros([q.shape[0], TILE], tl.float32),
    )  # fmt: skip
    for first_dim in range(PIECE, HEAD_DIM, PIECE):
        part = _queries(q_place, is_q, first_dim, HEAD_DIM, PIECE)
        scores = dot(part, _keys(k_place, is_there, first_dim, q.dtype, HEAD_DIM, PIECE, HAS_SCALES), scores)
    scores *= scale
    if HAS_SCALES:
        scores *= tl.load(k_scales_ptr + block * k_scales_stride + offset, mask=is_there, other=0.0)[None, :]
    if HAS_SOFTCAP:
        scores = hyperbolic_tangent(scores) * softcap
    seen = (of_tile[None, :] <= position[:, None]) & (of_tile[None, :] > position[:, None] - window)
    scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, axis=1))
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    keep, weights = tl.exp2(maximum - origin), tl.exp2(scores - origin[:, None])
    weight = weight * keep + tl.sum(weights, axis=1)
    dim, is_dim = _value_dims(VALUE_DIM, BLOCK_V)
    v = tl.load(
        v_ptr + (block * v_block_stride + offset * v_row_stride)[:, None] + dim[None, :],
        mask=is_there[:, None] & is_dim[None, :], other=0.0,
    )  # fmt: skip
    if HAS_SCALES:  # float16 could not hold scaled weights
        scales = tl.load(v_scales_ptr + block * v_scales_stride + offset, mask=is_there, other=0.0)
        if VALUE_DIM < HEAD_DIM:  # the scale is NaN if the key is
            scales = tl.where(scales == scales, scales, 0.0)  # noqa: PLR0124
        v = round_to(to_float32(v) * scales[:, None], q.dtype)
    return largest, weight, dot(round_to(weights, q.dtype), v, sums * keep[:, None])


@triton.jit
def _queries(place, is_row, first_dim, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr):
    dim = first_dim + tl.arange(0, PIECE)
    return tl.load(place + dim[None, :], mask=is_row & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _keys(
    place, is_there, first_dim, dtype: tl.constexpr, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    dim = first_dim + tl.arange(0, PIECE)
    k = tl.load(place + dim[:, None], mask=is_there[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
    return round_to(to_float32(k), dtype) if HAS_SCALES else k


@triton.jit
def _value_dims(VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr):
    dim = tl.arange(0, BLOCK_V)
    if BLOCK_V < VALUE_DIM:
        dim += tl.program_id(2) * BLOCK_V
    return dim, dim < VALUE_DIM


@triton.jit
def _sequence_of_tile(query_start_ptr, tile, num_seqs, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return a tile's sequence, and its index in the sequence, which may exceed the last tile's.

    Sequence i's tiles begin at floor(rows of earlier sequences / BLOCK_M) + i, so sequences do not overlap.
    """
    low, high = 0 * num_seqs, num_seqs  # `low` must be a tensor even if the loop does not run
    while high - low > 1:
        middle = (low + high) // 2
        is_later = tl.load(query_start_ptr + middle) * GROUP // BLOCK_M + middle > tile
        low, high = tl.where(is_later, low, middle), tl.where(is_later, middle, high)
    return low, tile - tl.load(query_start_ptr + low) * GROUP // BLOCK_M - low


@triton.jit
def _tiles_of_rows(
    tile, first_position, num_tokens, window, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr
):
    """Return the first position that a tile of rows sees, and its KV tiles' first and end index."""
    first = _first_seen(first_position + tile * BLOCK_M // GROUP, window)
    last = first_position + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, num_tokens - 1)
    return first, first // TILE, last // TILE + 1


@triton.jit
def _ends_of_sequences(
    query_start_ptr, seq_lens_ptr, num_seqs, split_tokens, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    """Return cumulative numbers of split sequences' items, which are pairs of a partition and a tile of rows."""
    sequence = tl.arange(0, _SPLIT_SEQS)
    is_there = sequence < num_seqs
    first_token = tl.load(query_start_ptr + sequence, mask=is_there, other=0)
    num_tokens = tl.load(query_start_ptr + sequence + 1, mask=is_there, other=0) - first_token
    seq_len = tl.load(seq_lens_ptr + sequence, mask=is_there, other=0)
    first_partition = _first_seen(seq_len - num_tokens, window) // PARTITION
    num_items = ((seq_len - 1) // PARTITION + 1 - first_partition) * tl.cdiv(num_tokens * GROUP, BLOCK_M)
    return tl.cumsum(tl.where((num_tokens > 0) & (num_tokens <= split_tokens), num_items, 0), 0)


@triton.jit
def _items_of_program(
    query_start_ptr, seq_lens_ptr, num_seqs, num_tiles, split_tokens, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    is_sharer = tl.program_id(0) >= num_tiles
    ends = tl.zeros([_SPLIT_SEQS], tl.int32)
    if is_sharer:
        ends = _ends_of_sequences(
            query_start_ptr, seq_lens_ptr, num_seqs, split_tokens, window, GROUP, BLOCK_M, PARTITION
        )
    first, step = tl.maximum(tl.program_id(0) - num_tiles, 0), tl.maximum(tl.num_programs(0) - num_tiles, 1)
    return ends, first, tl.where(is_sharer, tl.max(ends), 1), step


@triton.jit
def _sequence_of_item(ends, item):
    is_before = ends <= item
    return tl.sum(is_before.to(tl.int32)), item - tl.max(tl.where(is_before, ends, 0))


@kernel(do_not_specialize=_OF_A_RUN)
def _attend(
    out_ptr, partials_ptr, partial_weights_ptr, q_ptr, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, sinks_ptr,
    query_start_ptr, seq_lens_ptr, tables_ptr,
    num_seqs, num_tiles, split_tokens, max_partitions, scale, softcap, window,
    q_stride, q_head_stride, table_stride, k_block_stride, k_head_stride, k_row_stride,
    v_block_stride, v_head_stride, v_row_stride,
    k_scales_stride, k_scales_head_stride, v_scales_stride, v_scales_head_stride,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """For one KV head, compute a tile of queries over all partitions, or several items of split sequences."""
    is_sharer = tl.program_id(0) >= num_tiles
    ends, first_item, end_item, step = _items_of_program(
        query_start_ptr, seq_lens_ptr, num_seqs, num_tiles, split_tokens, window, GROUP, BLOCK_M, TILE * TILES
    )
    k_ptr += tl.program_id(1) * k_head_stride
    v_ptr += tl.program_id(1) * v_head_stride
    k_scales_ptr += tl.program_id(1) * k_scales_head_stride
    v_scales_ptr += tl.program_id(1) * v_scales_head_stride
    for item in range(loop_bound(first_item), loop_bound(end_item), loop_bound(step)):
        if is_sharer:
            sequence, number = _sequence_of_item(ends, item)
        else:
            sequence, number = _sequence_of_tile(query_start_ptr, tl.program_id(0), num_seqs, GROUP, BLOCK_M)
        first_token = tl.load(query_start_ptr + sequence)
        num_tokens = tl.load(query_start_ptr + sequence + 1) - first_token
        sequence_tiles = tl.maximum(tl.cdiv(num_tokens * GROUP, BLOCK_M), 1)
        tile = tl.where(is_sharer, number % sequence_tiles, number)
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token, head = row // GROUP, tl.program_id(1) * GROUP + row % GROUP
        is_there = token < num_tokens
        seq_len = tl.load(seq_lens_ptr + sequence)
        first_position = seq_len - num_tokens
        position = tl.where(is_there, first_position + token, -1)
        first, first_tile, end_tile = _tiles_of_rows(tile, first_position, num_tokens, window, GROUP, BLOCK_M, TILE)
        partition, end_partition = first_tile // TILES, (end_tile - 1) // TILES + 1
        if is_sharer:
            own = _first_seen(first_position, window) // (TILE * TILES) + number // sequence_tiles
            partition, end_partition = tl.maximum(partition, own), tl.minimum(end_partition, own + 1)
        elif (num_tokens <= split_tokens) | (tile >= sequence_tiles):
            end_partition = partition
        if partition < end_partition:
            q_place = q_ptr + ((first_token + token).to(tl.int64) * q_stride + head * q_head_stride)[:, None]
            q = _queries(q_place, is_there[:, None], 0, HEAD_DIM, PIECE)
            total_max, total_weight, totals = _nothing_seen(BLOCK_M, BLOCK_V)
            table_ptr = tables_ptr + sequence.to(tl.int64) * table_stride
            for index in range(loop_bound(partition), loop_bound(end_partition)):
                maximum, weight, sums = _nothing_seen(BLOCK_M, BLOCK_V)
                of_partition = tl.maximum(index * TILES, first_tile)
                end_of_partition = tl.minimum(index * TILES + TILES, end_tile)
                for of_tile in range(loop_bound(of_partition), loop_bound(end_of_partition)):
                    maximum, weight, sums = _attend_tile(
                        q, q_place, is_there[:, None], maximum, weight, sums, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr,
                        table_ptr, of_tile * TILE, first, seq_len, position, window, scale, softcap,
                        k_block_stride, k_row_stride, v_block_stride, v_row_stride, k_scales_stride, v_scales_stride,
                        HEAD_DIM, VALUE_DIM, PIECE, BLOCK_V, BLOCK_SIZE, TILE, HAS_SOFTCAP, HAS_SCALES,
                    )  # fmt: skip
                total_max, total_weight, totals = _merge(total_max, total_weight, totals, maximum, weight, sums)
            dim, is_dim = _value_dims(VALUE_DIM, BLOCK_V)
            is_value = is_there[:, None] & is_dim[None, :]
            if is_sharer:
                place = ((sequence * split_tokens + token).to(tl.int64) * NUM_HEADS + head) * max_partitions + partition
                tl.store(partials_ptr + place[:, None] * VALUE_DIM + dim[None, :], totals, mask=is_value)
                tl.store(partial_weights_ptr + place * 2, total_max, mask=is_there)
                tl.store(partial_weights_ptr + place * 2 + 1, total_weight, mask=is_there)
            else:
                place = ((first_token + token).to(tl.int64) * NUM_HEADS + head) * VALUE_DIM
                _write(
                    out_ptr + place[:, None] + dim[None, :], total_max, total_weight, totals, sinks_ptr + head,
                    is_value, HAS_SINKS,
                )  # fmt: skip


@triton.jit
def _write(place, total_max, total_weight, totals, sink_place, mask, HAS_SINKS: tl.constexpr):
    """Merge the sinks, and store totals / total_weight. -0.0 becomes 0.0, because weights of zero may set the sign."""
    if HAS_SINKS:
        one, nothing = tl.full(total_weight.shape, 1.0, tl.float32), tl.zeros(totals.shape, tl.float32)
        sink = tl.load(sink_place) * _LOG2_E
        total_max, total_weight, totals = _merge(total_max, total_weight, totals, sink, one, nothing)
    total_weight = tl.where(total_weight == 0.0, 1.0, total_weight)
    result = tl.div_rn(totals, tl.broadcast_to(total_weight[:, None], totals.shape)) + 0.0
    tl.store(place, round_to(result, place.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=["split_tokens", "max_partitions", "window"])
def _merge_partitions(
    out_ptr, partials_ptr, partial_weights_ptr, query_start_ptr, seq_lens_ptr, sinks_ptr,
    split_tokens, max_partitions, window,
    NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PARTITION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    sequence, token = tl.program_id(0) // split_tokens, tl.program_id(0) % split_tokens
    first_token = tl.load(query_start_ptr + sequence)
    num_tokens = tl.load(query_start_ptr + sequence + 1) - first_token
    if (num_tokens <= split_tokens) & (token < num_tokens):
        position = tl.load(seq_lens_ptr + sequence) - num_tokens + token
        row, dim = tl.arange(0, 1), tl.arange(0, BLOCK_V)
        is_dim = (row == 0)[:, None] & (dim < VALUE_DIM)[None, :]
        total_max, total_weight, totals = _nothing_seen(1, BLOCK_V)
        first = (tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)) * max_partitions + row
        partition, end_partition = _first_seen(position, window) // PARTITION, position // PARTITION + 1
        for index in range(loop_bound(partition), loop_bound(end_partition)):
            place = first + index
            total_max, total_weight, totals = _merge(
                total_max, total_weight, totals,
                tl.load(partial_weights_ptr + place * 2), tl.load(partial_weights_ptr + place * 2 + 1),
                tl.load(partials_ptr + place[:, None] * VALUE_DIM + dim[None, :], mask=is_dim, other=0.0),
            )  # fmt: skip
        place = ((first_token + token).to(tl.int64) * NUM_HEADS + tl.program_id(1) + row) * VALUE_DIM
        place = out_ptr + place[:, None] + dim[None, :]
        _write(place, total_max, total_weight, totals, sinks_ptr + tl.program_id(1) + row, is_dim, HAS_SINKS)
