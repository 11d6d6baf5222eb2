"""Triton's kernels with recurrent states: errors as of plain torch, and equal bits in every batch and split."""

import pytest
import test_gated_delta
import test_gated_norm
import test_kept_rows
import test_mamba2
import test_short_conv
import torch
from kept_schedules import SLOTS
from state_cases import conv_case, delta_case, mamba_case
from test_attention_gate import (
    test_copy_changes_only_the_named_heads,
    test_gate_multiplies_by_sigmoid_and_rounds_once,
    test_row_of_gate_does_not_depend_on_other_rows,
)
from test_kept_rows import (
    test_rows_are_kept_side_by_side,
    test_state_without_written_rows_is_that_which_was_read,
)
from test_multiply import test_product_is_rounded_once_and_changes_only_x
from test_relu_squared import (
    test_nan_stays_nan,
    test_negative_values_become_zero_and_others_are_squared,
    test_result_is_rounded_once_like_torch,
)
from test_short_conv import test_short_sequence_shifts_state, test_taps_are_added_in_order_before_bias
from test_states_in_pieces import (
    advance_in_pieces,
    test_narrow_result_is_rounded_float32_result,
    test_rows_after_last_sequence_are_not_written,
    test_saved_slot_may_be_slot_that_was_read,
    test_saved_states_are_those_of_prefixes,
    test_sequence_has_equal_bits_among_other_sequences,
    test_slot_minus_one_reads_zeros_and_writes_nothing,
    test_slots_may_be_apart_in_memory,
)

__all__ = [
    "test_copy_changes_only_the_named_heads",
    "test_gate_multiplies_by_sigmoid_and_rounds_once",
    "test_nan_stays_nan",
    "test_narrow_result_is_rounded_float32_result",
    "test_negative_values_become_zero_and_others_are_squared",
    "test_product_is_rounded_once_and_changes_only_x",
    "test_result_is_rounded_once_like_torch",
    "test_row_of_gate_does_not_depend_on_other_rows",
    "test_rows_after_last_sequence_are_not_written",
    "test_rows_are_kept_side_by_side",
    "test_saved_slot_may_be_slot_that_was_read",
    "test_saved_states_are_those_of_prefixes",
    "test_sequence_has_equal_bits_among_other_sequences",
    "test_short_sequence_shifts_state",
    "test_slot_minus_one_reads_zeros_and_writes_nothing",
    "test_slots_may_be_apart_in_memory",
    "test_state_without_written_rows_is_that_which_was_read",
    "test_taps_are_added_in_order_before_bias",
]

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = [
    pytest.mark.turn(2),
    pytest.mark.sweep(24),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
CASES = {
    "conv of 4": conv_case(300, 4, has_bias=False, has_silu=True),
    "conv of 2": conv_case(40, 2, has_bias=True, has_silu=True),
    "conv of 8": conv_case(32, 8, has_bias=True, has_silu=False),
    "delta": delta_case(1, 2, 20, 16),
    "tiled delta": delta_case(2, 4, 16, 16, is_tiled=True),
    "mamba": mamba_case(2, 2, 20, 16),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=CASES)
def make(request):
    return CASES[request.param]


@pytest.fixture
def compiled(kernels):
    """The kernels of tests that are shared with the compiled ones of CPUs."""
    return kernels


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_pieces_have_bits_of_whole_sequence(make, dtype, kernels, generator):
    case = make(11, dtype, generator)
    before = case.states(3)
    state = before.clone()
    whole = advance_in_pieces(case, kernels, state, [11])
    assert torch.equal(state[:2], before[:2])
    for lengths in ([1] * 11, [1, 10], [2, 9], [5, 6], [9, 2], [3, 1, 7]):
        again = before.clone()
        assert torch.equal(advance_in_pieces(case, kernels, again, lengths), whole), lengths
        assert torch.equal(again, state), lengths


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_rejected_rows_leave_no_trace(make, dtype, seed, kernels, generator):
    lengths = [8, 3, 6]
    assert SLOTS * len(lengths) > max(lengths)
    case = make(sum(lengths) + test_kept_rows.NUM_WRONG, dtype, generator)
    assert not test_kept_rows.find_differences(case, kernels, lengths, 4, seed)


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 20, 16), (2, 4, 128, 32)], ids=str)
def test_triton_gated_delta_is_as_exact_as_torch(shape, dtype, is_tiled, kernels, generator):
    test_gated_delta.test_results_and_state_are_as_exact_as_torch(shape, dtype, is_tiled, kernels, generator)


def test_gates_of_any_size_give_finite_results(kernels, generator):
    test_gated_delta.test_gates_of_any_size_give_finite_results(kernels, generator)
    test_mamba2.test_steps_of_any_size_give_finite_results(kernels, generator)


@pytest.mark.turn(8)
def test_nan_reaches_only_its_column(kernels, generator):
    test_gated_delta.test_nan_reaches_only_its_column(kernels, generator)


@pytest.mark.parametrize("name", ["a", "b", "dt"])
def test_gate_that_is_not_a_number_gives_nan(name, kernels, generator):
    inputs = (test_mamba2 if name == "dt" else test_gated_delta).Inputs((1, 2, 20, 16), torch.float32, generator, 3)
    getattr(inputs, name)[1, 0] = torch.nan
    found, state = inputs.run(kernels)
    assert bool(found[1:, :16].isnan().all())
    assert bool(state[0].isnan().all())
    assert bool(found[:, 16:].isfinite().all())


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.5, 1.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 3, 20, 16), (2, 4, 256, 32)], ids=str)
def test_triton_mamba2_is_as_exact_as_torch(shape, dtype, limits, kernels, generator):
    test_mamba2.test_results_and_state_are_as_exact_as_torch(shape, dtype, limits, kernels, generator)


@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "width"), test_short_conv.SHAPES)
def test_triton_convolution_is_as_exact_as_torch(channels, width, dtype, has_bias, has_silu, kernels, generator):
    test_short_conv.test_convolution_is_as_exact_as_torch(
        channels, width, dtype, has_bias, has_silu, kernels, generator
    )


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("has_wide_weight", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", test_gated_norm.SHAPES, ids=str)
def test_triton_gated_norm_is_as_exact_as_torch(
    shape, dtype, has_wide_weight, gate_first, is_shared, kernels, generator
):
    test_gated_norm.test_norm_is_as_exact_as_torch(
        shape, dtype, has_wide_weight, gate_first, is_shared, kernels, generator
    )


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("group_size", [25, 600, 1200])
def test_normed_row_has_equal_bits_alone_and_as_slice_of_wider_rows(kernels, generator, gate_first, group_size):
    x, gate = test_gated_norm.make_arguments(9, 1200, torch.bfloat16, generator)
    weight = torch.rand(1200, generator=generator)

    def normalize(x, gate):
        return test_gated_norm.normalize(kernels, x, gate, weight, group_size, gate_first=gate_first)

    together = normalize(x, gate)
    assert torch.equal(normalize(*torch.cat([x, gate], dim=1).split(1200, dim=1)), together)
    for row in (0, 4, 8):
        assert torch.equal(normalize(x[row : row + 1], gate[row : row + 1]), together[row : row + 1])
