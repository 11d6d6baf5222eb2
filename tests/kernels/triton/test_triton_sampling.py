"""Tokens, the largest of rows and drafts that came true: those of the other backends, bit for bit."""

from dataclasses import fields

import pytest
import torch
from broken_kernels import broken
from test_rejection import (
    test_it_is_what_the_definition_says,
    test_requests_have_drafts_of_their_own,
    test_the_target_stands_where_it_differs_first,
)
from test_sampling import (
    one_by_one,
    rows_of,
    test_greedy_takes_the_lowest_of_equals,
    test_top_tokens_of_a_row_with_nan_still_ends,
)
from test_sampling import test_rows_that_name_no_token as of_rows_that_name_no_token

from octavo.kernels import SamplingRows
from octavo.kernels.noise import gumbel_noise
from octavo.kernels.reference import ReferenceKernels

__all__ = [
    "test_greedy_takes_the_lowest_of_equals",
    "test_it_is_what_the_definition_says",
    "test_requests_have_drafts_of_their_own",
    "test_the_target_stands_where_it_differs_first",
    "test_top_tokens_of_a_row_with_nan_still_ends",
]


# The interpreter computes with numpy, which warns of what is meant: infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def on_the_cpu(sample, logits, rows):
    """Return what a definition in plain torch says, on the CPU, whose bits are to be those of every device."""
    with torch.device("cpu"):
        return sample(logits.cpu(), SamplingRows(*(getattr(rows, each.name).cpu() for each in fields(rows))))


@pytest.mark.sweep(4)  # the interpreter takes a second each
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
def test_rows_that_name_no_token(kernels, temperature, filters):
    of_rows_that_name_no_token(kernels, temperature, filters)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("vocab", [1, 15, 64, 333])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_sample_is_its_definition(kernels, generator, vocab, spread):
    n = 6
    logits = (torch.randn(n, vocab, generator=generator) * spread * 4).round() / 4  # ties abound
    uniform = torch.rand(4, n, generator=generator)
    rows = rows_of(
        n,
        temperature=torch.where(uniform[0] < 0.1, 0.0, uniform[0] * 2),
        top_k=torch.where(uniform[1] < 0.5, 0, (uniform[1] * 40).int()),
        top_p=torch.where(uniform[2] < 0.3, 1.0, uniform[2]),
        min_p=torch.where(uniform[3] < 0.5, 0.0, uniform[3] / 4),
    )
    expected = on_the_cpu(one_by_one, logits, rows)
    assert torch.equal(kernels.sample(logits, rows).cpu(), expected)
    assert torch.equal(kernels.sample(logits[3:4], rows.take(slice(3, 4))).cpu(), expected[3:4])


@pytest.mark.slow
def test_sample_is_that_of_the_reference(kernels, generator):
    """Over rows of several pieces, with all filters."""
    n = 12
    logits = torch.randn(n, 20_011, generator=generator) * 4
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
    expected = on_the_cpu(ReferenceKernels().sample, logits, rows)
    assert torch.equal(kernels.sample(logits, rows).cpu(), expected)


@pytest.mark.parametrize("vocab", [63, 1030])
def test_noise_has_the_bits_of_the_definition(kernels, vocab):
    """Seen through logits of zero, where the noise alone decides: remove the winner, and the next one is seen."""
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
    rows = rows_of(5)
    rows.seed.copy_(seeds)
    rows.position.copy_(torch.tensor([0, 1, 131071, 2**31 - 1, 5]))
    noise = gumbel_noise(rows.seed, rows.position, rows.sample_index, vocab)
    logits = torch.zeros(5, vocab)
    for chosen in noise.sort(dim=1, descending=True, stable=True).indices[:, :2].T:
        assert torch.equal(kernels.sample(logits, rows), chosen)
        logits.scatter_(1, chosen[:, None], -torch.inf)


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (50, 50), (333, 7), (3000, 100)])
def test_top_tokens(kernels, generator, vocab, k):
    values = (torch.randn(5, vocab, generator=generator) * 8).round() / 4
    values[1] = 0.0
    values[1, ::3] = -0.0  # equal to 0.0
    values[2, vocab // 2 :] = -torch.inf
    values[3, 0] = torch.inf
    values[4, vocab // 2] = torch.nan
    largest, ids = kernels.top_tokens(values, k)
    expected, order = ReferenceKernels().top_tokens(values, k)
    assert torch.equal(largest, expected)
    assert torch.equal(ids, order)
    alone, alone_ids = kernels.top_tokens(values[1:2], k)
    assert torch.equal(alone, expected[1:2])
    assert torch.equal(alone_ids, order[1:2])


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("sampling", "is_better = key > best", "is_better = key >= best"),  # not the lowest of equals
        ("sampling", "end = tl.minimum((piece + 1) * PIECE, vocab)", "end = vocab - 1"),  # a tail is lost
        ("sampling", "(top_k < vocab)", "(top_k < 0)"),  # a filter does nothing
    ],
)
def test_mistakes_are_caught(kernels, generator, tmp_path, module, old, new):
    logits = torch.zeros(4, 1025)
    logits[0, 1024] = 9.0  # alone in the last part
    logits[1, [3, 19]] = 9.0  # of one lane
    logits[2] = torch.randn(1025, generator=generator)
    rows = rows_of(4, temperature=torch.tensor([0.0, 0.0, 5.0, 5.0]), top_k=torch.tensor([0, 0, 1, 1]))
    expected = on_the_cpu(ReferenceKernels().sample, logits, rows)
    assert torch.equal(kernels.sample(logits, rows).cpu(), expected)
    assert not torch.equal(broken(tmp_path, module, old, new).sample(logits, rows).cpu(), expected)


def test_drafts_of_a_request_without_a_row(kernels):
    with pytest.raises(IndexError, match="no row of logits, or more than 2 drafts"):
        kernels.rejection_sample(torch.tensor([1]), torch.tensor([1]), torch.tensor([0, 0, 1], dtype=torch.int32), 2)
