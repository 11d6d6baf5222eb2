"""The choice of experts, their order, their products, and the sum of their outputs."""

from itertools import product

import pytest
import torch
from kernel_backends import compiled_kernels

from octavo.kernels import instruction_sets
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.operations.add_experts import add_experts, additions
from octavo.kernels.operations.choose_experts import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, choose_experts
from octavo.kernels.operations.sort_by_expert import sort_by_expert
from octavo.kernels.quantization import quantize_int4, quantize_int8
from octavo.kernels.reference import ReferenceKernels

ISAS = instruction_sets()  # of this processor
NOTHING = torch.empty(0)
PLAIN = {"num_groups": 1, "num_chosen_groups": 1, "is_group_best": False, "least_sum": -1.0, "scale": 1.0}


def choose(kernels, logits, num_chosen, scoring, bias=NOTHING, factors=NOTHING, **options):
    ids, weights = torch.empty(len(logits), num_chosen, dtype=torch.int32), torch.empty(len(logits), num_chosen)
    choose_experts(kernels, logits, bias, factors, ids, weights, scoring, *(PLAIN | options).values())
    return ids, weights


def sort(kernels, ids, num_experts):
    sources, places = torch.empty(ids.numel(), dtype=torch.int64), torch.empty_like(ids)
    starts = torch.empty(num_experts + 1, dtype=torch.int32)
    sort_by_expert(kernels, ids, sources, places, starts)
    return sources, places, starts


def add(kernels, outputs, ids, places, weights, num_experts, *, shared=NOTHING, gate=NOTHING, dtype=torch.float32):
    out = torch.empty(len(ids), outputs.shape[1], dtype=dtype)
    add_experts(kernels, outputs, ids, places, weights, shared, gate, out, num_experts)
    return out


def test_bias_changes_choice_and_not_weight(kernels):
    """DeepSeek V3: experts are chosen by sigmoid + bias, and weighted by the sigmoid alone."""
    logits, bias = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([0.9, 0.0, 0.0, 0.0])
    assert choose(kernels, logits, 2, SIGMOID)[0].tolist() == [[2, 3]]
    ids, weights = choose(kernels, logits, 2, SIGMOID, bias, least_sum=1e-20, scale=2.5)
    assert ids.tolist() == [[0, 3]]
    chosen = torch.tensor([0.5, 0.95257413])  # sigmoid of 0 and of 3
    torch.testing.assert_close(weights[0], 2.5 * chosen / chosen.sum())


def test_factor_of_expert_multiplies_only_its_weight(kernels):
    """Gemma 4: after the weights are divided by their sum."""
    logits, factors = torch.tensor([[1.0, 3.0, 2.0, 0.0]]), torch.tensor([50.0, 2.0, 3.0, 40.0])
    ids, weights = choose(kernels, logits, 2, SOFTMAX, factors=factors, least_sum=0.0, scale=0.5)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], 0.5 * logits[0, 1:3].softmax(0) * torch.tensor([2.0, 3.0]))


def test_grouped_choice_of_deepseek_v3(kernels):
    """Four groups of four: the two groups with the largest sums of two experts, though another has the best expert."""
    scores = torch.tensor([
        [0.9, 0.1, 0.1, 0.1],  # 1.0: the best expert of all
        [0.6, 0.6, 0.2, 0.1],  # 1.2
        [0.5, 0.4, 0.4, 0.4],  # 0.9
        [0.7, 0.1, 0.5, 0.3],  # 1.2
    ]).flatten()  # fmt: skip
    logits = torch.log(scores / (1 - scores))[None]
    ids, weights = choose(kernels, logits, 4, SIGMOID, num_groups=4, num_chosen_groups=2)
    assert ids.tolist() == [[4, 5, 12, 14]]
    torch.testing.assert_close(weights[0], torch.tensor([0.6, 0.6, 0.7, 0.5]))
    by_best, _ = choose(kernels, logits, 3, SIGMOID, num_groups=4, num_chosen_groups=2, is_group_best=True)
    assert by_best.tolist() == [[0, 12, 14]]  # DeepSeek V2


def test_weights_of_softmax(kernels):
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    all_weights = logits.softmax(1)[0]
    ids, weights = choose(kernels, logits, 2, SOFTMAX)
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], all_weights[1:3])
    torch.testing.assert_close(choose(kernels, logits, 2, SOFTMAX, least_sum=0.0)[1][0], logits[0, 1:3].softmax(0))
    torch.testing.assert_close(choose(kernels, logits, 2, SOFTMAX_OF_CHOSEN)[1][0], logits[0, 1:3].softmax(0))


def test_ties_go_to_lowest_expert(kernels):
    logits = torch.zeros(3, 9)
    logits[1, 7] = 1.0
    assert choose(kernels, logits, 3, SOFTMAX)[0].tolist() == [[0, 1, 2], [0, 1, 7], [0, 1, 2]]
    assert choose(kernels, logits, 2, SIGMOID, num_groups=3, num_chosen_groups=1)[0][0].tolist() == [0, 1]


def test_logits_that_are_not_numbers_choose_different_experts():
    logits = torch.full((2, 6), torch.nan)
    logits[1, 4] = 1.0
    for isa in ISAS:
        ids, _ = choose(compiled_kernels(isa), logits, 3, SOFTMAX)
        assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 6 for row in ids.tolist())


@pytest.mark.parametrize("scoring", [SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN])
@pytest.mark.parametrize(
    ("experts", "chosen", "groups", "kept"), [(5, 3, 1, 1), (128, 8, 1, 1), (40, 6, 8, 3), (64, 1, 4, 1)]
)
def test_compiled_choice_is_that_of_plain_torch(scoring, experts, chosen, groups, kept, generator):
    logits, bias = torch.randn(70, experts, generator=generator), torch.randn(experts, generator=generator) / 10
    factors = torch.randn(experts, generator=generator) if groups > 1 else NOTHING
    options = {"num_groups": groups, "num_chosen_groups": kept, "least_sum": 0.0, "scale": 1.5}
    expected = choose(ReferenceKernels(), logits, chosen, scoring, bias, factors, **options)
    found = [choose(compiled_kernels(isa), logits, chosen, scoring, bias, factors, **options) for isa in ISAS]
    for ids, weights in found:
        assert torch.equal(ids, expected[0])
        torch.testing.assert_close(weights, expected[1])
    alone = choose(compiled_kernels(ISAS[0]), logits[41:42], chosen, scoring, bias, factors, **options)
    assert torch.equal(alone[1][0], found[0][1][41])


@pytest.mark.parametrize(("bias", "factors"), [(torch.ones(3), NOTHING), (NOTHING, torch.ones(5))])
def test_bias_or_factors_of_another_size_are_refused(bias, factors):
    with pytest.raises(ValueError, match="the bias or the factors are not"):
        choose(compiled_kernels(ISAS[0]), torch.zeros(2, 4), 2, SOFTMAX, bias, factors)


def test_rows_are_sorted_by_expert_in_order_of_step(kernels):
    ids = torch.tensor([[1, 4], [0, 1], [1, 3]], dtype=torch.int32)
    sources, places, starts = sort(kernels, ids, 5)
    assert sources.tolist() == [1, 0, 1, 2, 2, 0]
    assert places.tolist() == [[1, 5], [0, 2], [3, 4]]
    assert starts.tolist() == [0, 1, 4, 4, 5, 6]


def test_outputs_are_added_in_tree_over_experts(kernels):
    """In float32 another order gives another sum: 2^24 + 1 is 2^24."""
    big = 2.0**24
    ids = torch.tensor([[0, 1, 3], [0, 2, 3]], dtype=torch.int32)
    outputs = torch.tensor([[-big], [1.0], [big], [1.0], [-big], [big]])  # of 0, 1, 3 of the first row, in other places
    places = torch.tensor([[4, 3, 2], [0, 1, 5]], dtype=torch.int32)
    total = add(kernels, outputs, ids, places, torch.ones(2, 3), 4)
    assert total.tolist() == [[1.0], [0.0]]  # (-big + 1) + big, and -big + (1 + big)


def test_additions_of_tree():
    assert additions([0, 1, 3], 0, 4) == [(0, 1), (0, 2)]
    assert additions([0, 2, 3], 0, 4) == [(1, 2), (0, 1)]
    assert additions([1, 2, 5, 6, 7], 0, 8) == [(0, 1), (3, 4), (2, 3), (0, 2)]
    assert additions([4], 0, 5) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("has_shared", "has_gate"), [(False, False), (True, False), (True, True)])
def test_compiled_sum_has_bits_of_plain_torch(has_shared, has_gate, dtype, generator):
    experts, chosen, size = 11, 5, 37
    ids = torch.rand(9, experts, generator=generator).argsort(1)[:, :chosen].sort(1).values.int()
    _, places, _ = sort(ReferenceKernels(), ids, experts)
    outputs = torch.randn(9 * chosen, size, generator=generator)
    weights = torch.rand(9, chosen, generator=generator)
    shared = torch.randn(9, size, generator=generator) if has_shared else NOTHING
    gate = torch.zeros(9, 1) if has_gate else NOTHING  # a half: the sigmoid's last bits are its own
    options = {"shared": shared, "gate": gate, "dtype": dtype}
    expected = add(ReferenceKernels(), outputs, ids, places, weights, experts, **options)
    for isa in ISAS:
        assert torch.equal(add(compiled_kernels(isa), outputs, ids, places, weights, experts, **options), expected)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4", "bias"])
def test_grouped_product_has_bits_of_product_with_one_weight(stored, generator):
    """For any number of rows of an expert, of which one has none, and any number of threads."""
    counts, width, columns = [3, 0, 300, 1], 64, 545
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
    weights = torch.randn(len(counts), columns, width, generator=generator).to(dtype)
    biases = torch.randn(len(counts), columns, generator=generator) if stored == "bias" else [None] * len(counts)
    hidden = torch.randn(40, width + 8, generator=generator).to(dtype)[:, :width]  # rows with a gap
    sources = torch.randint(40, (sum(counts),), generator=generator)
    starts, x = torch.tensor([0, *counts]).cumsum(0).int(), hidden[sources]
    quantize = {"int8": quantize_int8, "int4": lambda weight: quantize_int4(weight, 32)}.get(
        stored, lambda weight: weight
    )
    for isa, num_threads in product(ISAS, (1, 2, 5)):
        kernels = CpuKernels(isa, num_threads)
        linears = [kernels.pack_linear(quantize(each), bias) for each, bias in zip(weights, biases, strict=True)]
        packed = kernels.pack_groups(linears)
        for float32_out in (False, True):
            found = kernels.grouped_linear(hidden, packed, starts, sources=sources, float32_out=float32_out)
            assert found.dtype == (torch.float32 if float32_out else dtype)
            assert torch.equal(found, kernels.grouped_linear(x, packed, starts, float32_out=float32_out))
            for expert, linear in enumerate(linears):
                rows = slice(starts[expert], starts[expert + 1])
                assert torch.equal(found[rows], kernels.linear(x[rows], linear, float32_out=float32_out))


def test_grouped_product_refuses_tensors_that_do_not_fit(generator):
    kernels = compiled_kernels(ISAS[0])
    x = torch.randn(3, 32, generator=generator)
    packed = kernels.pack_groups([kernels.pack_linear(torch.zeros(8, 32))] * 2)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="not of these groups"):
        kernels.grouped_linear(x, packed, starts[:2])
    with pytest.raises(ValueError, match="sources"):
        kernels.grouped_linear(x, packed, starts, sources=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="without gaps"):
        kernels.grouped_linear(torch.zeros(32, 3).T, packed, starts)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: choose(k, torch.zeros(2, 4), 5, SOFTMAX), "fewer experts"),
        (lambda k: choose(k, torch.zeros(2, 4), 2, SIGMOID, num_groups=4, num_chosen_groups=1), "fewer experts"),
        (lambda k: choose(k, torch.zeros(2, 4), 2, SIGMOID, torch.zeros(3)), "bias"),
        (lambda k: sort(k, torch.zeros(2, 2, dtype=torch.int64), 4), "ids"),
        (
            lambda k: add(k, torch.zeros(3, 5), *[torch.zeros(2, 2, dtype=torch.int32)] * 2, torch.zeros(2, 2), 4),
            "do not fit",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(compiled_kernels("portable"))
