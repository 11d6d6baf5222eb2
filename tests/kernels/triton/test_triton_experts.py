"""Triton chooses, sorts and adds experts like plain torch."""

import pytest
import torch
from test_experts import (
    NOTHING,
    add,
    choose,
    sort,
    test_bias_changes_choice_and_not_weight,
    test_factor_of_expert_multiplies_only_its_weight,
    test_grouped_choice_of_deepseek_v3,
    test_outputs_are_added_in_tree_over_experts,
    test_rows_are_sorted_by_expert_in_order_of_step,
    test_ties_go_to_lowest_expert,
    test_weights_of_softmax,
)

from octavo.kernels.operations.choose_experts import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from octavo.kernels.operations.sort_by_expert import sort_by_expert
from octavo.kernels.reference import ReferenceKernels

__all__ = [
    "test_bias_changes_choice_and_not_weight",
    "test_factor_of_expert_multiplies_only_its_weight",
    "test_grouped_choice_of_deepseek_v3",
    "test_outputs_are_added_in_tree_over_experts",
    "test_rows_are_sorted_by_expert_in_order_of_step",
    "test_ties_go_to_lowest_expert",
    "test_weights_of_softmax",
]

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

SCORINGS = [SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN]
ROUTERS = [(5, 3, 1, 1), (128, 8, 1, 1), (40, 6, 8, 3), (60, 2, 3, 2), (64, 1, 4, 1), (6, 2, 6, 4)]


def assert_chosen_as_by_torch(kernels, generator, scoring, router, *, has_bias=True, has_factors=True, **options):
    experts, chosen, groups, kept = router
    logits = torch.randn(9, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) / 10 if has_bias else NOTHING
    factors = torch.randn(experts, generator=generator) if has_factors else NOTHING
    options = {"num_groups": groups, "num_chosen_groups": kept, "least_sum": 0.0, "scale": 1.5} | options
    expected = choose(ReferenceKernels(), logits, chosen, scoring, bias, factors, **options)
    ids, weights = choose(kernels, logits, chosen, scoring, bias, factors, **options)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1])
    alone = choose(kernels, logits[4:5], chosen, scoring, bias, factors, **options)
    assert torch.equal(alone[1][0], weights[4])


@pytest.mark.sweep(16)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("is_group_best", [True, False])
def test_choice_is_that_of_plain_torch(kernels, generator, scoring, router, is_group_best):
    assert_chosen_as_by_torch(kernels, generator, scoring, router, is_group_best=is_group_best, has_factors=False)
    assert_chosen_as_by_torch(kernels, generator, scoring, router, has_bias=False, least_sum=-1.0)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("groups", [1, 3])
def test_logits_that_are_not_numbers_choose_as_plain_torch(kernels, scoring, groups):
    """Every choice is an expert, and different from the row's other choices, because it is a place in memory."""
    nan = torch.nan
    logits = torch.tensor([[nan] * 6, [0.0, nan, 1.0, -nan, 3.0, 2.0], [torch.inf, 1.0, -torch.inf, 0.0, 2.0, 3.0]])
    logits = torch.cat([logits, torch.full((1, 6), -torch.inf)])
    options = {"num_groups": groups, "num_chosen_groups": min(groups, 2), "least_sum": 0.0}
    expected = choose(ReferenceKernels(), logits, 3, scoring, **options)
    ids, weights = choose(kernels, logits, 3, scoring, **options)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], equal_nan=True)


def assert_sorted_as_by_torch(kernels, generator, num_tokens, chosen, experts):
    ids = torch.rand(num_tokens, experts, generator=generator).argsort(1)[:, :chosen].sort(1).values.int()
    wide = torch.full((ids.numel() + 2048,), -1)  # a mistake would write after the sorted rows
    sources, places, starts = wide[: ids.numel()], torch.empty_like(ids), torch.empty(experts + 1, dtype=torch.int32)
    sort_by_expert(kernels, ids, sources, places, starts)
    for one, other in zip((sources, places, starts), sort(ReferenceKernels(), ids, experts), strict=True):
        assert torch.equal(one, other)
    assert bool((wide[ids.numel() :] == -1).all())


@pytest.mark.parametrize(("num_tokens", "chosen", "experts"), [(0, 2, 5), (1, 8, 128), (300, 4, 5), (513, 2, 9)])
def test_rows_are_sorted_as_by_plain_torch(kernels, generator, num_tokens, chosen, experts):
    assert_sorted_as_by_torch(kernels, generator, num_tokens, chosen, experts)


def assert_added_as_by_torch(kernels, generator, experts, chosen, *, dtype=torch.float32, size=37, shared=None):
    """shared: None, "plain" or "gated"."""
    ids = torch.rand(9, experts, generator=generator).argsort(1)[:, :chosen].sort(1).values.int()
    _, places, _ = sort(ReferenceKernels(), ids, experts)
    outputs, weights = torch.randn(9 * chosen, size, generator=generator), torch.rand(9, chosen, generator=generator)
    added = torch.randn(9, size, generator=generator) if shared else NOTHING
    gate = torch.zeros(9, 1) if shared == "gated" else NOTHING  # a half: the sigmoid's last bits are its own
    options = {"shared": added, "gate": gate, "dtype": dtype}
    expected = add(ReferenceKernels(), outputs, ids, places, weights, experts, **options)
    found = add(kernels, outputs, ids, places, weights, experts, **options)
    assert torch.equal(found, expected)
    options |= {"shared": added[4:5], "gate": gate[4:5]}
    assert torch.equal(add(kernels, outputs, ids[4:5], places[4:5], weights[4:5], experts, **options), found[4:5])


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("experts", "chosen"), [(1, 1), (2, 2), (11, 5), (8, 8), (60, 4), (128, 8), (160, 6), (384, 20)]
)
def test_sum_of_experts_has_bits_of_plain_torch(kernels, generator, experts, chosen):
    assert_added_as_by_torch(kernels, generator, experts, chosen)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shared", [None, "plain", "gated"])
def test_sum_with_shared_expert_has_bits_of_plain_torch(kernels, generator, shared, dtype):
    assert_added_as_by_torch(kernels, generator, 16, 3, dtype=dtype, shared=shared, size=530)


def test_gate_of_shared_expert_is_as_exact_as_torch(kernels, generator):
    gate, shared = torch.randn(200, 1, generator=generator) * 5, torch.ones(200, 1)
    ids, places = torch.zeros(200, 1, dtype=torch.int32), torch.arange(200, dtype=torch.int32)[:, None]
    found = add(kernels, torch.zeros(200, 1), ids, places, torch.ones(200, 1), 4, shared=shared, gate=gate)
    torch.testing.assert_close(found, gate.sigmoid())
