"""The filters min_p, then top_k, then top_p, exact, without sorting.

Each filter keeps a prefix of the order (value descending, id ascending). The cut is the key and id of the prefix's last
token. Keys are integers in the order of values.

`pack` drops tokens below a bound. The rest keep their lanes, so sums over packed tokens add the same numbers in the
same order. Functions read the row if `num_layers` is 0, otherwise the packed tokens.

    id      0    1    2  ...  BLOCK - 1    lane     0      1      2   ...
            .    x    .                    layer 0  B + 0  1      2B + 2
            B    .    x  ...               layer 1  2B     B + 1
           2B    .    .
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.exponentials import exponential_64
from octavo.kernels.triton.loops import loop_bound

LAST_ID = tl.constexpr(2147483647)  # id of a cut that keeps all tokens with its key
LEAST_KEY = tl.constexpr(-2139095041)  # key of -inf
BLOCKS_PER_LOAD = tl.constexpr(4)  # whose loads overlap
_DIGITS = tl.constexpr(256)


@triton.jit
def order_key(value):
    """Return int32 keys in float32's order. -0.0 equals 0.0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Invert `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_kept(key, ids, cut_key, cut_id):
    """Mark a cut's tokens."""
    return (key > cut_key) | ((key == cut_key) & (ids <= cut_id))


@triton.jit
def scaled_key(logit, temperature):
    """Return keys of logits / temperature; NaN counts as -inf."""
    value = tl.div_rn(logit, temperature)
    return order_key(tl.where(value == value, value, float("-inf")))  # noqa: PLR0124


@triton.jit
def scaled_keys(logits_ptr, vocab, temperature, packed_ptr, num_layers, first, BLOCK: tl.constexpr):
    """Return (`scaled_key`, ids, True for ids that exist)."""
    ids = first + tl.arange(0, BLOCK)
    if num_layers > 0:
        ids = tl.load(packed_ptr + ids)
    is_there = (ids >= 0) & (ids < vocab)
    logit = tl.load(logits_ptr + ids, mask=is_there, other=float("-inf"))
    return scaled_key(logit, temperature), ids, is_there


@triton.jit
def _end(vocab, num_layers, BLOCK: tl.constexpr):
    return loop_bound(tl.where(num_layers > 0, num_layers * BLOCK, vocab))


@triton.jit
def _pack_block(ids, is_packed, depth, packed_ptr, LAYERS: tl.constexpr, BLOCK: tl.constexpr):
    place = packed_ptr + depth * BLOCK + tl.arange(0, BLOCK)
    tl.store(place, ids, mask=is_packed & (depth < LAYERS))
    return depth + is_packed.to(tl.int32)


@triton.jit
def pack(logits_ptr, vocab, temperature, bound, packed_ptr, LAYERS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the ids of tokens with key >= `bound`. Return the number of layers, or 0 if it exceeds LAYERS.

    packed_ptr: [LAYERS, BLOCK], padded with -1. The program waits for BLOCKS_PER_LOAD blocks at a time.
    """
    lane = tl.arange(0, BLOCK)
    depth = tl.zeros([BLOCK], tl.int32)
    for first in range(0, loop_bound(vocab), BLOCKS_PER_LOAD * BLOCK):
        key_0, ids_0, is_there_0 = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, 0, first, BLOCK)
        key_1, ids_1, is_there_1 = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, 0, first + BLOCK, BLOCK)
        key_2, ids_2, is_there_2 = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, 0, first + 2 * BLOCK, BLOCK)
        key_3, ids_3, is_there_3 = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, 0, first + 3 * BLOCK, BLOCK)
        depth = _pack_block(ids_0, is_there_0 & (key_0 >= bound), depth, packed_ptr, LAYERS, BLOCK)
        depth = _pack_block(ids_1, is_there_1 & (key_1 >= bound), depth, packed_ptr, LAYERS, BLOCK)
        depth = _pack_block(ids_2, is_there_2 & (key_2 >= bound), depth, packed_ptr, LAYERS, BLOCK)
        depth = _pack_block(ids_3, is_there_3 & (key_3 >= bound), depth, packed_ptr, LAYERS, BLOCK)
    num_layers = tl.max(depth)
    for layer in range(loop_bound(tl.minimum(num_layers, LAYERS))):
        tl.store(packed_ptr + layer * BLOCK + lane, -1, mask=layer >= depth)
    tl.debug_barrier()  # other threads' ids are read below
    return tl.where(num_layers > LAYERS, 0, num_layers)


@triton.jit
def key_of_rank(keys, rank):
    """Return the `rank`-th largest key."""
    low, high = tl.full([], LEAST_KEY, tl.int64), tl.max(keys).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        is_reached = tl.sum((keys >= middle).to(tl.int32)) >= rank
        low, high = tl.where(is_reached, middle, low), tl.where(is_reached, high, middle)
    return low.to(tl.int32)


@triton.jit
def top_k_cut(logits_ptr, vocab, temperature, packed_ptr, num_layers, k, BLOCK: tl.constexpr):
    """Return the k-th token's key, and how many of the first k tokens have it. At least k tokens must exist."""
    digits = tl.arange(0, _DIGITS)
    prefix = tl.full([], 0, tl.int32)
    left = k + 0
    for step in tl.static_range(4):
        counts = tl.zeros([_DIGITS], tl.int32)
        for first in range(0, _end(vocab, num_layers, BLOCK), BLOCK):
            key, _, is_there = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, num_layers, first, BLOCK)
            digit = (key >> (24 - 8 * step)) & 255
            if step == 0:
                digit = digit ^ 128  # negative keys come last
            else:
                is_there = is_there & ((key >> (32 - 8 * step)) == (prefix >> (32 - 8 * step)))
            counts += tl.histogram(digit, _DIGITS, mask=is_there)
        at_least = tl.cumsum(counts, 0, reverse=True)
        chosen = tl.max(tl.where(at_least >= left, digits, 0))
        left -= tl.sum(tl.where(digits > chosen, counts, 0))
        if step == 0:
            chosen = chosen ^ 128
        prefix = prefix | (chosen << (24 - 8 * step))
    return prefix, left


@triton.jit
def tie_id(logits_ptr, vocab, temperature, packed_ptr, num_layers, cut_key, count, BLOCK: tl.constexpr):
    """Return the `count`-th (from 1) lowest id with key `cut_key`, or -1."""
    num_ties = tl.full([], 0, tl.int32)
    last = tl.full([], -1, tl.int32)
    for first in range(0, loop_bound(num_layers * BLOCK), BLOCK):
        key, ids, is_there = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, num_layers, first, BLOCK)
        is_tie = is_there & (key == cut_key)
        num_ties += tl.sum(is_tie.to(tl.int32))
        last = tl.maximum(last, tl.max(tl.where(is_tie, ids, -1)))
    found = tl.where(num_ties == count, last, -1)
    if (num_layers == 0) | (num_ties > count):  # packed ids are in no order
        seen = tl.full([], 0, tl.int32)
        first = tl.full([], 0, tl.int32)
        while (first < vocab) & (found < 0):
            key, ids, is_there = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, 0, first, BLOCK)
            is_tie = (is_there & (key == cut_key)).to(tl.int32)
            number = tl.cumsum(is_tie, 0) + seen
            found = tl.max(tl.where((is_tie > 0) & (number == count), ids, -1))
            seen += tl.sum(is_tie)
            first += BLOCK
    return found


@triton.jit
def _masses(
    logits_ptr, vocab, temperature, packed_ptr, num_layers, largest, cut_key, cut_id, least_0, least_1, least_2,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return float64 sums of e^(value - largest) over a cut's tokens from each least key (ascending) on.

    The order of additions is fixed, so sums are monotonic in the least key. Specialization on alignment could change
    the order, so callers must turn it off.
    """
    lanes_0 = tl.zeros([BLOCK], tl.float64)
    lanes_1 = tl.zeros([BLOCK], tl.float64)
    lanes_2 = tl.zeros([BLOCK], tl.float64)
    for first in range(0, _end(vocab, num_layers, BLOCK), BLOCK):
        key, ids, is_there = scaled_keys(logits_ptr, vocab, temperature, packed_ptr, num_layers, first, BLOCK)
        counts = is_there & (key >= least_0) & is_kept(key, ids, cut_key, cut_id)
        if tl.max(counts.to(tl.int32)) > 0:
            weights = tl.where(counts, _weights(key, largest), 0.0)
            lanes_0 += weights
            lanes_1 += tl.where(key >= least_1, weights, 0.0)
            lanes_2 += tl.where(key >= least_2, weights, 0.0)
    return tl.sum(lanes_0), tl.sum(lanes_1), tl.sum(lanes_2)


@triton.jit
def _weights(key, largest):
    value = key_value(key).to(tl.float64)
    return tl.where(value == largest, 1.0, exponential_64(value - largest))


@triton.jit
def top_p_cut(
    logits_ptr, vocab, temperature, packed_ptr, num_layers, bound, largest_key, top_p, cut_key, cut_id,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the cut of the shortest prefix, of at least one token, that reaches top_p < 1 of the given cut's mass.

    bound: the least packed key.
    """
    largest = key_value(largest_key).to(tl.float64)
    all_layers = tl.where(cut_key >= bound, num_layers, 0)
    mass, packed_mass, _ = _masses(
        logits_ptr, vocab, temperature, packed_ptr, all_layers, largest, cut_key, cut_id, LEAST_KEY, bound, bound, BLOCK
    )
    target = mass * top_p.to(tl.float64)
    low = tl.maximum(cut_key, LEAST_KEY).to(tl.int64)  # its mass reaches the target
    high, above = largest_key.to(tl.int64) + 1, 0.0 * mass  # the mass of `high` is too small
    if packed_mass >= target:
        low = tl.maximum(low, bound.to(tl.int64))
    else:
        high, above, num_layers = bound.to(tl.int64), packed_mass, 0 * num_layers
    while high - low > 1:
        step = (high - low + 3) >> 2
        key_0, key_1, key_2 = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        mass_0, mass_1, mass_2 = _masses(
            logits_ptr, vocab, temperature, packed_ptr, num_layers, largest, cut_key, cut_id,
            key_0.to(tl.int32), key_1.to(tl.int32), key_2.to(tl.int32), BLOCK,
        )  # fmt: skip
        if mass_0 < target:
            high, above = key_0, mass_0
        elif (mass_1 < target) | (key_1 == high):
            low, high, above = key_0, key_1, mass_1
        elif (mass_2 < target) | (key_2 == high):
            low, high, above = key_1, key_2, mass_2
        else:
            low = key_2
    key = low.to(tl.int32)
    ties = tl.ceil((target - above) / _weights(key, largest))
    count = tl.minimum(tl.maximum(ties, 1.0), vocab.to(tl.float64)).to(tl.int32)
    last = tie_id(logits_ptr, vocab, temperature, packed_ptr, num_layers, key, count, BLOCK)
    is_short = (last < 0) | ((key == cut_key) & (last > cut_id))  # rounding may add one tie
    return key, tl.where(is_short, tl.where(key == cut_key, cut_id, LAST_ID), last)
