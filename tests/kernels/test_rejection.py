"""rejection_sample: which drafts are accepted."""

from __future__ import annotations

import random

import pytest
import torch


def rows_of(cases: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return choices, inputs and bounds of requests with (choices, drafts); the input of a first row is an older
    token.
    """
    bounds = [0]
    for chosen, drafts in cases:
        assert len(chosen) == len(drafts) + 1
        bounds.append(bounds[-1] + len(chosen))
    target = [token_id for chosen, _ in cases for token_id in chosen]
    inputs = [token_id for _, drafts in cases for token_id in [4, *drafts]]
    return torch.tensor(target), torch.tensor(inputs), torch.tensor(bounds, dtype=torch.int32)


def one_by_one(chosen: list[int], drafts: list[int]) -> list[int]:
    """The definition, for one request."""
    kept = []
    for token_id, draft in zip(chosen, [*drafts, None], strict=True):
        kept.append(token_id)
        if token_id != draft:
            break
    return kept


def test_target_token_replaces_first_mismatching_draft(kernels):
    rows = rows_of([([4, 5, 9, 7, 8, 1], [4, 5, 6, 7, 8])])
    sampled, num_sampled = kernels.rejection_sample(*rows, 5)
    assert sampled.tolist() == [[4, 5, 9, -1, -1, -1]]
    assert num_sampled.tolist() == [3]
    assert (sampled.dtype, num_sampled.dtype) == (torch.int64, torch.int32)


def test_requests_may_have_different_numbers_of_drafts(kernels):
    cases = [([7], []), ([1, 2, -1], [1, 2]), ([5, 6], [4]), ([-1, 3], [3]), ([9], []), ([3, -1, 3], [3, 3])]
    sampled, num_sampled = kernels.rejection_sample(*rows_of(cases), 4)
    assert sampled.tolist() == [
        [7, -1, -1, -1, -1],
        [1, 2, -1, -1, -1],
        [5, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1],
        [9, -1, -1, -1, -1],
        [3, -1, -1, -1, -1],
    ]
    assert num_sampled.tolist() == [1, 3, 1, 1, 1, 2]


@pytest.mark.parametrize("num_steps", [0, 1, 3, 8])
@pytest.mark.parametrize("num_requests", [1, 2, 33])
def test_rejection_sample_equals_scalar_definition(kernels, num_steps, num_requests):
    rng = random.Random(num_steps)
    cases = []
    for _ in range(num_requests):
        drafts = [rng.randrange(2) for _ in range(rng.randint(0, num_steps))]
        cases.append(([rng.randrange(2) for _ in range(len(drafts) + 1)], drafts))
    sampled, num_sampled = kernels.rejection_sample(*rows_of(cases), num_steps)
    expected = [one_by_one(*case) for case in cases]
    assert sampled.tolist() == [tokens + [-1] * (num_steps + 1 - len(tokens)) for tokens in expected]
    assert num_sampled.tolist() == [len(tokens) for tokens in expected]


@pytest.mark.parametrize("bounds", [[0, 3], [0, 1, 1, 3]])
def test_rejection_sample_refuses_too_many_or_zero_rows(kernels, bounds):
    tokens = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(IndexError, match="more than 1 drafts"):
        kernels.rejection_sample(tokens, tokens, torch.tensor(bounds, dtype=torch.int32), 1)
