"""The launches of operations: programs, loops, bytes and instructions that follow from the tiles of the kernels.

Used by tools/kernel_times.py. Instructions were counted in the machine code of Triton 3.6 for sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.kernels.triton import attention as tiles
from octavo.kernels.triton.launch import cdiv
from octavo.kernels.triton.matmul import (
    _GROUP,  # tiles of rows that read the same columns together, from memory; later ones find them in L2
    _RESIDENT_WARPS,
    BLOCK_M,
    BLOCK_N,
    LARGE_BLOCK_M,
    PARTITION,
    row_limits,
)
from octavo.kernels.triton.matmul_blocks import FEW_ROWS

if TYPE_CHECKING:
    from kernel_times import Device

BLOCK_K = 64  # values of K per step of all products
HEAD_DIM = 128
_CUT_LOAD, _PIECE, _PIECE_STEPS = 4 * 2048, 8192, 8  # of sampling: values that are loaded together, and pieces of rows
_CUT_REST = 64  # steps of `_find_cut` after its passes over a row
_MERGED_PARTITIONS = 4  # of which `_merge_partitions` loads the states together

# type of weight: bytes of a value of x and of the weight, then instructions with split K, with small tiles, and with
# large tiles (0 if there are none)
_TILED = {"bfloat16": (2, 2, 128, 90, 69), "int8": (1, 1, 56, 56, 48), "fp8": (2, 1, 1022, 1058, 0)}
# type of weight: its case for few rows, bits per value, then rows and columns of a tile and instructions for few rows,
# and for many rows. Q4_K has no case for few rows, so the table's row of Q5_K is used.
_PACKED = {
    "Q4_K": ("Q5_K", 4.625, (16, 16, 514), (64, 32, 733)),
    "int4": ("int4", 4.25, (16, 64, 437), (64, 64, 414)),
}
_KV = {None: (2, 860), "int8": (1, 1437), "fp8": (1, 2781)}  # bytes of a stored value, instructions
_ON_SM_80 = 0.87  # instructions of a warp for a tile of keys, relative to sm_90


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of a launch. A step is one iteration of the kernel's loop, such as a tile of K or of keys.

    case, kernel: the row of the table. programs: number of programs with work. steps: of an average program. longest:
    steps of the longest program, if it has more. memory_bytes: of the launch, each byte once.

    pipeline: steps between two drains of asynchronous copies. depth: number of steps with copies in flight, or 0 if a
    step waits for its own loads. Per step: instructions (of a warp), macs (multiply-adds), l2_bytes (copied to the
    processor), operand_bytes (that products read from shared memory), num_waits (for addresses in L2). start_waits: of
    a program before its first step.
    """

    case: str
    kernel: str
    programs: int
    steps: float
    memory_bytes: float
    instructions: float
    longest: float = 0.0
    pipeline: int = 1
    depth: int = 0
    macs: float = 0.0
    l2_bytes: float = 0.0
    operand_bytes: float = 0.0
    num_waits: int = 0
    start_waits: int = 0
    is_int8: bool = False
    is_cached: bool = False  # loads find their data in L2


@dataclass(frozen=True, slots=True)
class Operation:
    """Launches in order, and the bytes and operations that an ideal kernel would need."""

    launches: tuple[Launch, ...]
    num_bytes: float
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """Shapes of a dense model with heads of 128 values."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    has_head_norms: bool


MODELS = {
    "Qwen3-0.6B": Model(28, 1024, 3072, 16, 8, 151936, has_head_norms=True),
    "Llama-8B": Model(32, 4096, 14336, 32, 8, 128256, has_head_norms=False),
}


def linear(kind: str, rows: int, width: int, columns: int, device: Device) -> Operation:
    """Return x [rows, width] @ weight.T, weight [columns, width] of type bfloat16, int8, fp8, int4 or Q4_K."""
    if kind in _PACKED:
        return _packed_linear(kind, rows, width, columns)
    x_bytes, weight_bytes, if_split, if_small, if_large = _TILED[kind]
    partitions, few = cdiv(width, PARTITION), f"linear {kind} 1 row"
    most_split_rows, least_large_rows = row_limits(partitions, columns, device.processors)
    is_split = rows <= most_split_rows
    is_large = rows >= least_large_rows and if_large > 0 and device.target != "sm_100"
    block_m, num_warps = (LARGE_BLOCK_M, 8) if is_large else (BLOCK_M, 4)
    num_tiles = cdiv(rows, block_m) * cdiv(columns, BLOCK_N)
    if is_split:
        case, instructions, programs = few, if_split, partitions * num_tiles
    else:
        case, instructions = _case_of_whole(kind, is_large=is_large), if_large if is_large else if_small
        programs = min(num_tiles, device.processors * (_RESIDENT_WARPS // num_warps))
    steps = cdiv(min(width, PARTITION) if is_split else width, BLOCK_K)
    num_bytes = rows * width * x_bytes + width * columns * weight_bytes + 2.0 * rows * columns
    product = Launch(
        case, "_multiply_partition" if is_split else "_matmul", programs,
        steps=steps if is_split else steps * num_tiles / programs,
        longest=steps if is_split else steps * cdiv(num_tiles, programs),
        memory_bytes=num_bytes, instructions=instructions, pipeline=PARTITION // BLOCK_K, depth=2,
        macs=block_m * BLOCK_N * BLOCK_K, is_int8=kind == "int8",
        l2_bytes=(min(rows, block_m) * x_bytes + BLOCK_N * weight_bytes) * BLOCK_K,
        operand_bytes=(block_m + BLOCK_N) * BLOCK_K * x_bytes, is_cached=rows > _GROUP * block_m,
    )  # fmt: skip
    launches = [_rows_in_int8(case, rows, width, 184)] if kind == "int8" else []
    launches.append(product)
    if is_split:
        programs, instructions = rows * cdiv(columns, BLOCK_N), 30 + 6 * partitions
        added = Launch(few, "_add_partitions", programs, 1, 0.0, instructions, l2_bytes=4.0 * partitions * BLOCK_N)
        launches.append(replace(added, is_cached=True))
    return Operation(tuple(launches), num_bytes, 2.0 * rows * width * columns)


def _case_of_whole(kind: str, *, is_large: bool) -> str:
    """Return the case of products whose K is not divided. Tiles for fp8 are never large."""
    return f"linear {kind} {'256' if is_large or kind == 'fp8' else '64'} rows"


def _rows_in_int8(case: str, rows: int, width: int, instructions: float) -> Launch:
    steps = 2 * cdiv(width, 1024)  # one pass finds the largest magnitude, the next one rounds
    return Launch(case, "_quantize_rows", rows, steps, 3.0 * rows * width, instructions, is_cached=True)


def _packed_linear(kind: str, rows: int, width: int, columns: int) -> Operation:
    few, bits, narrow, wide = _PACKED[kind]
    block_m, block_n, instructions = narrow if rows <= FEW_ROWS else wide
    case = f"linear {few} 1 row" if rows <= FEW_ROWS else f"linear {kind} 256 rows"
    is_int4 = kind == "int4"
    num_bytes = width * columns * bits / 8 + rows * width + 2.0 * rows * columns
    if is_int4:
        rounded = _rows_in_int8(case, rows, width, 105)
    else:
        rounded = Launch(case, "_quantize_groups", rows * cdiv(width, 1024), 1, 3.0 * rows * width, 150, is_cached=True)
    steps = cdiv(width, BLOCK_K)
    product = Launch(
        case, "_matmul_int4" if is_int4 else "_matmul_blocks", cdiv(rows, block_m) * cdiv(columns, block_n), steps,
        num_bytes, instructions, pipeline=steps, depth=2, is_int8=True,
        macs=block_m * block_n * BLOCK_K * (2 if is_int4 else 1),
        l2_bytes=(min(rows, block_m) + block_n * bits / 8) * BLOCK_K, operand_bytes=(block_m + block_n) * BLOCK_K,
    )  # fmt: skip
    return Operation((rounded, product), num_bytes, 2.0 * rows * width * columns)


def attention(model: Model, count: int, tokens: int, context: int, device: Device, kv: str | None = None) -> Operation:
    """Return attention of `count` sequences of `context` positions. The last `tokens` positions are rows of the step.

    kv: type of quantized KV (int8 or fp8), or None for bfloat16.
    """
    group, partitions = model.heads // model.kv_heads, cdiv(context, tiles.PARTITION)
    row_tiles = cdiv(tokens * group, tiles.BLOCK_M)
    ends = [context - tokens + min(cdiv((each + 1) * tiles.BLOCK_M, group), tokens) for each in range(row_tiles)]
    kv_tiles = [cdiv(end, tiles.TILE) for end in ends]  # that a tile of rows reads
    kv_bytes, instructions = _KV[kv]
    num_bytes = 2.0 * count * (context * model.kv_heads * kv_bytes + 2 * tokens * model.heads) * HEAD_DIM
    flops = 4.0 * count * model.heads * HEAD_DIM * sum(context - each for each in range(tokens))
    work = Launch(
        "attention bfloat16 128" + (f" {kv}" if kv else ""), "_attend", count * row_tiles * model.kv_heads,
        sum(kv_tiles) / row_tiles, num_bytes, instructions * (_ON_SM_80 if device.target == "sm_80" else 1.0),
        longest=max(kv_tiles), pipeline=tiles.TILES, depth=1, macs=2 * tiles.BLOCK_M * tiles.TILE * HEAD_DIM,
        l2_bytes=2 * tiles.TILE * HEAD_DIM * kv_bytes, operand_bytes=2 * (tiles.BLOCK_M + 2 * tiles.TILE) * HEAD_DIM,
        num_waits=1, start_waits=4, is_cached=row_tiles > 1,
    )  # fmt: skip
    split = tiles._split_tokens(count * tokens, count, model.heads, model.kv_heads, HEAD_DIM, partitions)  # noqa: SLF001
    if tokens > split:
        return Operation((work,), num_bytes, flops)
    sharers = cdiv(tiles._SHARERS_PER_PROCESSOR * device.processors, model.kv_heads)  # noqa: SLF001
    items, total = count * partitions * row_tiles, count * sum(kv_tiles)
    sharers = min(sharers, items)
    longest = min(cdiv(items, sharers) * tiles.TILES, total)
    work = replace(work, programs=sharers * model.kv_heads, steps=total / sharers, longest=longest)
    merged = Launch(
        work.case, "_merge_partitions", count * tokens * model.heads, cdiv(partitions, _MERGED_PARTITIONS), 0.0, 117,
        l2_bytes=4.0 * (HEAD_DIM + 2) * _MERGED_PARTITIONS, is_cached=True,
    )  # fmt: skip
    return Operation((work, merged), num_bytes, flops)


def sample(rows: int, vocab: int, *, filtered: int) -> Operation:
    """Return sampling of rows, of which `filtered` have filters."""
    num_bytes = 4.0 * rows * vocab
    loads = 2 * cdiv(vocab, _CUT_LOAD)  # one pass finds maxima, the next one packs
    steps = loads + _CUT_REST
    cut = Launch("sample", "_find_cut", 1, 1, 0.0, 180)  # of rows without filters
    if filtered:
        instructions = (694 * loads + 180 * _CUT_REST) / steps
        cut = Launch("sample", "_find_cut", filtered, steps, 4.0 * filtered * vocab, instructions)
    best = Launch("sample", "_best_of_piece", rows * cdiv(vocab, _PIECE), _PIECE_STEPS, num_bytes, 1475, l2_bytes=4096)
    return Operation((cut, best, Launch("sample", "_best_of_row", rows, 1, 0.0, 70, is_cached=True)), num_bytes)


def _rowwise(case: str, kernel: str, programs: int, num_bytes: float, instructions: float, steps: int = 1) -> Operation:
    """Return a kernel that reads rows written by the previous kernel. steps: dependent loads of a program."""
    return Operation((Launch(case, kernel, programs, steps, num_bytes, instructions, is_cached=True),), num_bytes)


def step(model: Model, count: int, tokens: int, context: int, device: Device) -> list[tuple[int, str, Operation]]:
    """Return (number, part of the step, operation) of a step in bfloat16: see `attention` for the arguments."""
    rows, hidden, inner = count * tokens, model.hidden, model.intermediate
    q_width, kv_width = model.heads * HEAD_DIM, model.kv_heads * HEAD_DIM
    case, steps = "add_rms_norm bfloat16 4096", 2 * cdiv(hidden, 1024)
    norm = _rowwise(case, "_rms_norm", rows, 8.0 * rows * hidden, 100, steps=steps)
    case = "rms_norm bfloat16 heads of 128"
    head_norms = [
        _rowwise(case, "_rms_norm", cdiv(rows * width, 1024), 4.0 * rows * width, 100, steps=2)
        for width in (q_width, kv_width)
        if model.has_head_norms
    ]
    blocks, num_bytes = cdiv(model.heads, 16) + cdiv(model.kv_heads, 16), 4.0 * rows * (q_width + 2 * kv_width)
    rope = _rowwise("rope_kv bfloat16 128", "_rope_and_write_kv", rows * blocks, num_bytes, 240, steps=3)
    gate = _rowwise("gate bfloat16 silu", "_gate", rows * cdiv(inner, 1024), 6.0 * rows * inner, 350)
    shapes = [(hidden, q_width + 2 * kv_width), (q_width, hidden), (hidden, 2 * inner), (inner, hidden)]
    products = [linear("bfloat16", rows, *shape, device) for shape in shapes]
    return [
        *((model.layers, "row-wise", each) for each in (norm, *head_norms, rope, norm, gate)),
        (model.layers, "attention", attention(model, count, tokens, context, device)),
        *((model.layers, "products", each) for each in products),
        (1, "lm_head", linear("bfloat16", count, hidden, model.vocab, device)),
        (1, "sampling", sample(count, model.vocab, filtered=0)),
    ]
