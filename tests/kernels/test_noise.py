"""octavo noise v1: the same bits on every backend, with a Gumbel distribution."""

import math

import pytest
import torch

from octavo.kernels.noise import _word_to_gumbel, gumbel_noise, philox_words

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, 42]


def compiled_noise(kernels, seed, position, sample_index, first, count):
    out = torch.empty(count)
    kernels.kernel_set.gumbel_noise(seed, position, sample_index, first, count, out.data_ptr())
    return out


def columns(*rows):
    return (torch.tensor(column) for column in zip(*rows, strict=True))


def test_philox_matches_published_random123_answer():
    """Known answers of Random123 (kat_vectors): counter and key are zero; c = 0, lane 0 has the ids 0, 16, 32, 48."""
    words = philox_words(*columns((0, 0, 0)), 64)[0]
    assert [int(words[i]) for i in (0, 16, 32, 48)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_philox_equals_scalar_implementation():
    def philox(counter, key):
        for _ in range(10):
            high, low = zip(*(divmod(m * c, 2**32) for m, c in ((0xD2511F53, counter[0]), (0xCD9E8D57, counter[2]))),
                            strict=True)  # fmt: skip
            counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        return counter

    seed, position, sample_index = 0xFEDCBA9876543210 - 2**64, 12345, 6
    words = philox_words(*columns((seed, position, sample_index)), 1000)[0]
    for token in (0, 15, 16, 63, 64, 777, 999):
        counter = [token // 64 * 16 + token % 16, position, sample_index, 0]
        assert words[token] == philox(counter, [0x76543210, 0xFEDCBA98])[token // 16 % 4]


@pytest.mark.parametrize("seed", SEEDS)
def test_compiled_noise_has_bits_of_reference(compiled, seed):
    for position, sample_index in ((0, 0), (1, 0), (0, 1), (131071, 7), (2**31 - 1, 2**31 - 1)):
        expected = gumbel_noise(*columns((seed, position, sample_index)), 5000)[0]
        assert torch.equal(compiled_noise(compiled, seed, position, sample_index, 0, 5000), expected)
        assert torch.equal(compiled_noise(compiled, seed, position, sample_index, 1234, 99), expected[1234:1333])


def test_noise_depends_on_seed_position_and_sample_index():
    base = (5, 6, 7)
    noise = gumbel_noise(*columns(base, (6, 6, 7), (5 + 2**32, 6, 7), (5, 7, 7), (5, 6, 8)), 4096)
    for other in noise[1:]:
        assert (noise[0] == other).float().mean() < 0.01


def test_words_map_to_gumbel_noise_with_float32_precision():
    edges = [0, 1, 2, 1000, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2**20, 2**32 - 2, 2**32 - 1]
    random = torch.randint(0, 2**32, (200_000,), generator=torch.Generator().manual_seed(1)).tolist()
    words = torch.tensor(edges + random)
    x = (words.double() + 0.5) / 2**32
    exponential = -torch.log1p(-x)
    expected = -exponential.log()
    noise = _word_to_gumbel(words)
    assert noise.isfinite().all()
    # float32 rounds the word to 24 bits and E to 24 bits: d(-ln E) = dE / E, so the error of G is absolute near G = 0.
    error = (noise.double() - expected).abs()
    assert (error <= 4 * torch.finfo(torch.float32).eps * expected.abs().clamp(min=1.0)).all()
    assert noise.max() < 22.88
    assert noise.min() > -3.14


def test_noise_has_gumbel_distribution():
    """Chi-square over 64 cells of equal probability. Seeds are fixed, so the result is always the same."""
    noise = gumbel_noise(*columns(*[(seed, 3, 0) for seed in range(8)]), 100_000).double().flatten()
    uniform = torch.exp(-torch.exp(-noise))
    counts = torch.histc(uniform, 64, 0.0, 1.0)
    expected = len(noise) / 64
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 63) < 4 * math.sqrt(2 * 63)


def test_argmax_of_noise_follows_softmax():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5])
    seeds = torch.arange(40_000)
    zeros = torch.zeros_like(seeds)
    drawn = (logits + gumbel_noise(seeds, zeros, zeros, 5)).argmax(dim=1)
    expected = logits.softmax(0) * len(seeds)
    chi_square = float(((torch.bincount(drawn, minlength=5) - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 0.1 % of Chi-square with 4 degrees of freedom
