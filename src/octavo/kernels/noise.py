"""Random numbers as a function of (seed, position, sample index, stream, token id): "octavo noise v1".

Random words: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) with

    key     = (low 32 bits of the seed, high 32 bits of the seed)
    counter = (c, position, sample_index, stream)   c    = (t >> 6) * 16 + (t & 15)   for token id t
    word w of t = word number (t >> 4) & 3          (16 lanes serve 64 consecutive ids)

Gumbel noise has stream 0 and lies in (-3.14, 22.88). For a word w, x = (w + 0.5) / 2^32 and G = -ln(E), E = -ln(1 - x).
The code below defines each operation, in float32, rounded once.

A uniform number takes words 0 and 1 of c = 0: (word 0 * 2^20 + (word 1 >> 12) + 0.5) / 2^52, exact in float64.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_32 = 0xFFFFFFFF
_LANES = 16
_WORDS = 4
_SQRT_HALF_BITS = 0x3F3504F3
_LN2_HIGH = 6.9313812256e-01
_LN2_LOW = 9.0580006145e-06
_ATANH_TERMS = (13, 11, 9, 7, 5, 3)


class RandomStream(IntEnum):
    """Independent streams. CHOICE is for a row's token, the rest for rejection sampling."""

    CHOICE = 0
    DRAFT = 1
    ACCEPTANCE = 2
    RESAMPLING = 3


def gumbel_noise(seed: Tensor, position: Tensor, sample_index: Tensor, vocab_size: int) -> Tensor:
    """Return all tokens' noise: float32 [n, vocab_size]."""
    return _word_to_gumbel(philox_words(seed, position, sample_index, vocab_size))


def uniform_noise(seed: Tensor, position: Tensor, sample_index: Tensor, stream: RandomStream) -> Tensor:
    """Return one float64 in (0, 1) per seed."""
    counter = torch.zeros(1, dtype=torch.int64, device=seed.device)
    high, low, _, _ = _philox(counter, seed, position, sample_index, stream)
    return ((high << 20 | low >> 12).to(torch.float64).squeeze(1) + 0.5) * 2.0**-52


def philox_words(seed: Tensor, position: Tensor, sample_index: Tensor, vocab_size: int) -> Tensor:
    """Return all tokens' random words, int64 [n, vocab_size]."""
    num_rows, num_blocks = seed.numel(), -(-vocab_size // (_LANES * _WORDS))
    counter = torch.arange(num_blocks * _LANES, dtype=torch.int64, device=seed.device)
    words = _philox(counter, seed, position, sample_index, RandomStream.CHOICE)
    by_lane = [word.reshape(num_rows, num_blocks, _LANES) for word in words]
    return torch.stack(by_lane, dim=2).flatten(1)[:, :vocab_size]


def _philox(
    counter: Tensor, seed: Tensor, position: Tensor, sample_index: Tensor, stream: RandomStream
) -> tuple[Tensor, ...]:
    seed, position, sample_index = (column.to(torch.int64).reshape(-1, 1) for column in (seed, position, sample_index))
    keys = [seed & _LOW_32, (seed >> 32) & _LOW_32]
    words = [counter, position & _LOW_32, sample_index & _LOW_32, torch.full_like(seed, stream)]
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply_wide(words[0], _MULTIPLIERS[0])
        high_1, low_1 = _multiply_wide(words[2], _MULTIPLIERS[1])
        words = [high_1 ^ words[1] ^ keys[0], low_1, high_0 ^ words[3] ^ keys[1], low_0]
        keys = [(key + step) & _LOW_32 for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return tuple(word.expand(seed.shape[0], len(counter)) for word in words)


def _multiply_wide(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    product = word * multiplier
    return (product >> 32) & _LOW_32, product & _LOW_32


def _word_to_gumbel(word: Tensor) -> Tensor:
    upper = word >= 1 << 31
    distance = torch.where(upper, _LOW_32 - word, word)
    t = (distance.to(torch.float32) + 0.5) * 2.0**-32
    exponential = torch.where(upper, -_logarithm(t), _twice_atanh(t / (2.0 - t)))
    return -_logarithm(exponential)


def _logarithm(value: Tensor) -> Tensor:
    bits = value.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    power = exponent.to(torch.float32)
    return power * _LN2_HIGH + (_twice_atanh((mantissa - 1.0) / (mantissa + 1.0)) + power * _LN2_LOW)


def _twice_atanh(s: Tensor) -> Tensor:
    z = s * s
    q = torch.full_like(s, 1.0 / 15.0)
    for term in _ATANH_TERMS:
        q = q * z + 1.0 / term
    twice = s + s
    return twice + twice * (z * q)
