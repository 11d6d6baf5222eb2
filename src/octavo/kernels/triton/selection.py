"""The filters min_p, then top_k, then top_p, exactly and without sorting.

Each keeps a prefix of the order (value descending, id ascending). Its last token, the cut, has an id and a key, which
is an integer in the order of values. The key is found by its digits or bits, the id by counting.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.exponentials import exponential_64
from octavo.kernels.triton.loops import loop_bound

LAST_ID = tl.constexpr(2147483647)  # of a cut that keeps all its key's tokens
LEAST_KEY = tl.constexpr(-2139095041)  # of -inf
_DIGITS = tl.constexpr(256)


@triton.jit
def order_key(value):
    """Return int32 keys in the order of float32; -0.0 equals 0.0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Invert `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_kept(key, ids, cut_key, cut_id):
    """Return whether a cut keeps tokens."""
    return (key > cut_key) | ((key == cut_key) & (ids <= cut_id))


@triton.jit
def scaled_keys(logits_ptr, first, vocab, temperature, BLOCK: tl.constexpr):
    """Return keys of logits / temperature, ids, and whether they exist; NaN counts as -inf."""
    ids = first + tl.arange(0, BLOCK)
    is_there = ids < vocab
    value = tl.div_rn(tl.load(logits_ptr + ids, mask=is_there, other=float("-inf")), temperature)
    bits = tl.where(value == value, value + 0.0, float("-inf")).to(tl.int32, bitcast=True)  # noqa: PLR0124
    return bits ^ ((bits >> 31) & 0x7FFFFFFF), ids, is_there


@triton.jit
def top_k_cut(logits_ptr, vocab, temperature, k, BLOCK: tl.constexpr):
    """Return the k-th token's key, and how many of the first k have it; 0 < k <= vocab."""
    digits = tl.arange(0, _DIGITS)
    prefix = tl.full([], 0, tl.int32)
    left = k + 0
    for step in tl.static_range(4):
        counts = tl.zeros([_DIGITS], tl.int32)
        for first in range(0, loop_bound(vocab), BLOCK):
            key, _, is_there = scaled_keys(logits_ptr, first, vocab, temperature, BLOCK)
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
def tie_id(logits_ptr, vocab, temperature, cut_key, count, BLOCK: tl.constexpr):
    """Return the `count`-th id with key `cut_key`, from 1; -1 if they are fewer."""
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], -1, tl.int32)
    first = tl.full([], 0, tl.int32)
    while (first < vocab) & (found < 0):
        key, ids, is_there = scaled_keys(logits_ptr, first, vocab, temperature, BLOCK)
        is_tie = (is_there & (key == cut_key)).to(tl.int32)
        number = tl.cumsum(is_tie, 0) + seen
        found = tl.max(tl.where((is_tie > 0) & (number == count), ids, -1))
        seen += tl.sum(is_tie)
        first += BLOCK
    return found


@triton.jit
def _mass(logits_ptr, vocab, temperature, largest, cut_key, cut_id, least_key, BLOCK: tl.constexpr):
    """Return the float64 sum of e^(value - largest) of tokens that a cut keeps with a key of least_key or more.

    It is monotonic in least_key: the order of additions is fixed, and rounding is monotonic. That needs one layout of
    the kernel, so callers must not be specialized on alignment.
    """
    lanes = tl.zeros([BLOCK], tl.float64)
    for first in range(0, loop_bound(vocab), BLOCK):
        key, ids, is_there = scaled_keys(logits_ptr, first, vocab, temperature, BLOCK)
        counts = is_there & (key >= least_key) & ((key > cut_key) | ((key == cut_key) & (ids <= cut_id)))
        if tl.max(counts.to(tl.int32)) > 0:
            lanes += tl.where(counts, _weights(key, largest), 0.0)
    return tl.sum(lanes)


@triton.jit
def _weights(key, largest):
    value = key_value(key).to(tl.float64)
    return tl.where(value == largest, 1.0, exponential_64(value - largest))


@triton.jit
def top_p_cut(logits_ptr, vocab, temperature, largest_key, top_p, cut_key, cut_id, BLOCK: tl.constexpr):
    """Return the cut of the shortest prefix that reaches probability top_p < 1, among tokens that the given cut keeps.

    At least one token remains.
    """
    largest = key_value(largest_key).to(tl.float64)
    target = _mass(logits_ptr, vocab, temperature, largest, cut_key, cut_id, LEAST_KEY, BLOCK) * top_p.to(tl.float64)
    low = tl.maximum(cut_key, LEAST_KEY).to(tl.int64)  # its mass reaches the target
    high = largest_key.to(tl.int64) + 1  # mass 0
    while high - low > 1:
        middle = (low + high) >> 1
        if _mass(logits_ptr, vocab, temperature, largest, cut_key, cut_id, middle.to(tl.int32), BLOCK) >= target:
            low = middle
        else:
            high = middle
    key = low.to(tl.int32)
    above = _mass(logits_ptr, vocab, temperature, largest, cut_key, cut_id, key + 1, BLOCK)
    ties = tl.ceil((target - above) / _weights(key, largest))
    count = tl.minimum(tl.maximum(ties, 1.0), vocab.to(tl.float64)).to(tl.int32)
    last = tie_id(logits_ptr, vocab, temperature, key, count, BLOCK)
    is_short = (last < 0) | ((key == cut_key) & (last > cut_id))  # rounding may add one to the ties
    return key, tl.where(is_short, tl.where(key == cut_key, cut_id, LAST_ID), last)
