"""sample and top_tokens."""

import math

import pytest
import torch

from octavo.kernels import SamplingRows
from octavo.kernels.noise import gumbel_noise
from octavo.kernels.reference import ReferenceKernels


def rows_of(n, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """Return SamplingRows from numbers or tensors [n]; row i has seed + i."""

    def column(value, dtype):
        return (torch.zeros(n) + value).to(dtype)

    return SamplingRows(
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        torch.arange(n) + seed,
        torch.arange(n, dtype=torch.int32) % 3,
        torch.arange(n, dtype=torch.int32) * 7,
    )


def one_by_one(logits, rows):
    """The definition, token by token in order of value and id."""
    chosen = []
    for i, row in enumerate(logits):
        if rows.temperature[i] == 0:
            chosen.append(int(row.argmax()))
            continue
        scaled = row / rows.temperature[i]
        left = sorted(range(len(row)), key=lambda t: (-scaled[t].item(), t))
        if rows.min_p[i] > 0:
            limit = scaled[left[0]] + torch.tensor(math.log(rows.min_p[i]), dtype=torch.float32)
            left = [t for t in left if scaled[t] >= limit]
        if rows.top_k[i] > 0:
            left = left[: int(rows.top_k[i])]
        if rows.top_p[i] < 1:
            weights = [math.exp(scaled[t].item() - scaled[left[0]].item()) for t in left]
            target, total, kept = float(rows.top_p[i]) * math.fsum(weights), 0.0, 0
            while kept < len(left) and total < target:
                total += weights[kept]
                kept += 1
            left = left[: max(kept, 1)]
        noise = gumbel_noise(rows.seed[i : i + 1], rows.position[i : i + 1], rows.sample_index[i : i + 1], len(row))[0]
        chosen.append(max(left, key=lambda t: ((scaled + noise)[t].item(), -t)))
    return torch.tensor(chosen)


@pytest.mark.sweep(48)
@pytest.mark.parametrize("vocab", [1, 15, 64, 333])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_sample_equals_scalar_definition(kernels, generator, vocab, spread):
    n = 48
    logits = (torch.randn(n, vocab, generator=generator) * spread * 4).round() / 4  # many ties
    uniform = torch.rand(4, n, generator=generator)
    rows = rows_of(
        n,
        temperature=torch.where(uniform[0] < 0.1, 0.0, uniform[0] * 2),
        top_k=torch.where(uniform[1] < 0.5, 0, (uniform[1] * 40).int()),
        top_p=torch.where(uniform[2] < 0.3, 1.0, uniform[2]),
        min_p=torch.where(uniform[3] < 0.5, 0.0, uniform[3] / 4),
    )
    assert torch.equal(kernels.sample(logits, rows), one_by_one(logits, rows))


@pytest.mark.turn(12)
@pytest.mark.parametrize("vocab", [40_001, 151_936])
def test_compiled_sample_equals_reference(fastest, single_threaded, generator, vocab):
    n = 12
    logits = torch.randn(n, vocab, generator=generator) * 4
    logits[1] = 0.5
    logits[2] = logits[2].round()
    logits[3, 5:] = -torch.inf
    rows = rows_of(
        n,
        temperature=torch.tensor([1.0, 0.7, 0.0, 1.0, 0.01, 50.0] * 2),
        top_k=torch.tensor([0, 50, 0, 0, 3, 0, 1000, 0, 0, 1, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 0.9, 0.99, 0.9, 0.3, 1.0, 1.0, 1e-6, 1.0]),
        min_p=torch.tensor([0.0] * 9 + [0.1, 0.05, 0.9]),
    )
    expected = ReferenceKernels().sample(logits, rows)
    assert torch.equal(fastest.sample(logits, rows), expected)
    assert torch.equal(single_threaded.sample(logits, rows), expected)
    alone = [fastest.sample(logits[i : i + 1], SamplingRows(*(getattr(rows, f)[i : i + 1] for f in rows.__slots__)))
             for i in range(n)]  # fmt: skip
    assert torch.equal(torch.cat(alone), expected)


def test_greedy_sampling_breaks_ties_by_lowest_id(kernels):
    logits = torch.zeros(3, 200)
    logits[1, 77] = logits[1, 150] = 1.0
    logits[2, :] = -5.0
    logits[2, 199] = -4.0
    assert kernels.sample(logits, rows_of(3, temperature=0.0)).tolist() == [0, 77, 199]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
def test_row_without_valid_logits_samples_minus_one(kernels, temperature, filters):
    logits = torch.zeros(5, 100)
    logits[0, 50] = torch.nan
    logits[1, :] = -torch.inf
    logits[2, :] = -torch.inf
    logits[2, 60] = -3.0
    logits[3, 70] = torch.inf
    logits[4, :99] = -torch.inf
    assert kernels.sample(logits, rows_of(5, temperature=temperature, **filters)).tolist() == [-1, -1, 60, 70, 99]


def test_samples_follow_filtered_distribution(fastest):
    """Chi-square with fixed seeds: top_k = 4 of 8, in the proportions of softmax."""
    logits = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.5, -1.0, 1.5, 0.5]).repeat(20_000, 1)
    drawn = fastest.sample(logits, rows_of(len(logits), temperature=0.8, top_k=4))
    counts = torch.bincount(drawn, minlength=8)
    kept = torch.tensor([1, 2, 4, 6])
    assert counts.sum() == counts[kept].sum()
    expected = (logits[0, kept] / 0.8).softmax(0) * len(logits)
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 16.3  # 0.1 % with 3 degrees of freedom


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (50, 50), (333, 7), (5000, 600)])
def test_top_tokens_equal_stable_sort(kernels, generator, vocab, k):
    values = (torch.randn(7, vocab, generator=generator) * 8).round() / 4
    values[1] = 0.0
    values[2, vocab // 2 :] = -torch.inf
    largest, ids = kernels.top_tokens(values, k)
    expected, order = values.sort(dim=1, descending=True, stable=True)
    assert torch.equal(largest, expected[:, :k])
    assert torch.equal(ids, order[:, :k])


def test_top_tokens_rank_nan_last(kernels):
    values = torch.full((1, 100), torch.nan)
    values[0, 40] = 1.0
    largest, ids = kernels.top_tokens(values, 3)
    assert (largest[0, 0], ids[0, 0]) == (1.0, 40)
    assert largest[0, 1:].tolist() == [-math.inf] * 2
