"""A mistake in any kernel is detected by a comparison that the right kernels pass."""

import re
from pathlib import Path

import pytest
import test_attention_gate
import test_elementwise
import test_gated_delta
import test_gated_norm
import test_kept_rows
import test_mamba2
import test_multiply
import test_rejection
import test_relu_squared
import test_short_conv
import test_triton_experts
import test_triton_latents
import test_triton_matmul
import test_triton_sampling
import test_triton_states
import test_triton_values
import torch
from kernel_accuracy import assert_as_exact_as_torch

from octavo.kernels import triton as package
from octavo.kernels.operations.choose_experts import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton import backend

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

WIDE = (2, 1120)  # more than one block of a row


def add(kernels, generator):
    test_elementwise.test_add_rounds_once(kernels, generator, torch.bfloat16, WIDE)


def silu(kernels, generator):
    test_elementwise.test_silu_gate_is_as_exact_as_torch(kernels, generator, torch.bfloat16, WIDE)


def gelu(kernels, generator):
    test_elementwise.test_gelu_gate_is_as_exact_as_torch(kernels, generator, torch.float32, (5, 123))


def soft_cap(kernels, generator):
    test_elementwise.test_soft_cap_is_as_exact_as_torch(kernels, generator, 30.0, WIDE)


def log_softmax(kernels, generator):
    test_elementwise.test_log_softmax_is_as_exact_as_torch(kernels, generator, 1123)


def divide(kernels, generator):
    test_elementwise.test_divide_equals_torch_division(kernels, generator, WIDE)


def rms_norm(kernels, generator):
    test_elementwise.test_rms_norm_is_as_exact_as_torch(kernels, generator, torch.float32, torch.float32, WIDE)


def embedding(kernels, generator):
    test_triton_values.test_triton_embedding_has_bits_of_reference(
        kernels, generator, torch.bfloat16, torch.float32, 5.477
    )


def take_rows(kernels, generator):
    test_triton_values.test_triton_take_rows_equals_torch_indexing(kernels, generator, torch.bfloat16)


def drafts(kernels, _generator):
    test_rejection.test_requests_may_have_different_numbers_of_drafts(kernels)


def top_tokens(kernels, generator):
    test_triton_sampling.test_triton_top_tokens_equal_reference(kernels, generator, 130, 100)


def top_tokens_with_nan(kernels, _generator):
    test_triton_sampling.test_top_tokens_rank_nan_last(kernels)


def int8(kernels, generator):
    test_triton_matmul.test_integer_products_have_bits_of_reference(kernels, generator, (64, 40), torch.float32, "int8")


def int4(kernels, generator):
    test_triton_matmul.test_integer_products_have_bits_of_reference(kernels, generator, (96, 7), torch.float32, "int4")


def int4_with_minima(kernels, generator):
    stored = "int4 with minima"
    test_triton_matmul.test_integer_products_have_bits_of_reference(kernels, generator, (96, 7), torch.float32, stored)


def wide_rows(kernels, generator):
    test_triton_matmul.test_rows_wider_than_one_block_are_quantized_as_reference(kernels, generator, rotated=False)


def top_k(kernels, _generator):
    test_triton_sampling.test_filter_keeps_exact_cutoff_among_ties(kernels, "top_k")


def top_p(kernels, _generator):
    test_triton_sampling.test_filter_keeps_exact_cutoff_among_ties(kernels, "top_p")


def filtered(kernels, _generator):
    for name, layers in [("p among ties", 1), ("k among ties", 8), ("all filters", 8), ("p of most tokens", 8)]:
        test_triton_sampling.test_filters_keep_tokens_of_reference(kernels, name, layers)


def least_probability(kernels, _generator):
    logits, rows = test_triton_sampling.filtered_row("k after min_p")
    logits[0, 300] = 15.0  # the largest value, in the third block
    with test_triton_sampling.small_blocks():
        test_triton_sampling.assert_tokens_of_reference(kernels, logits, rows)


def choices(kernels, _generator):
    test_triton_sampling.test_greedy_ties_across_pieces_choose_lowest_id(kernels)


def products(kernels, generator):
    shape, dtype = (2 * test_triton_matmul.PARTITION, 40), torch.bfloat16
    test_triton_matmul.test_triton_linear_is_as_exact_as_torch(kernels, generator, shape, False, True, dtype, dtype)


def products_by_one_program(kernels, generator):
    with pytest.MonkeyPatch.context() as context:
        context.setitem(backend.matmul.__globals__, "num_processors", lambda _device: 1)
        products(kernels, generator)


def tiles(kernels, generator):
    with pytest.MonkeyPatch.context() as context:
        test_triton_matmul.test_row_has_equal_bits_in_all_tiles(kernels, generator, context, "bfloat16")


def latents(kernels, generator, stored=None):
    args = test_triton_latents.make(generator, (5, 40, 24), torch.bfloat16)
    args[1] *= 1e-3  # eps counts
    test_triton_latents.assert_same_as_torch(kernels, args, stored)


def int8_latents(kernels, generator):
    latents(kernels, generator, torch.int8)


def padding_latents(kernels, generator):
    test_triton_latents.test_padding_row_writes_no_latent(kernels, generator, torch.int8)


def chosen_experts(kernels, generator):
    test_triton_experts.assert_chosen_as_by_torch(kernels, generator, SOFTMAX, (60, 4, 1, 1))
    test_triton_experts.assert_chosen_as_by_torch(kernels, generator, SOFTMAX, (60, 4, 1, 1), least_sum=-1.0)


def chosen_in_groups(kernels, generator):
    test_triton_experts.assert_chosen_as_by_torch(kernels, generator, SIGMOID, (40, 6, 8, 3))


def softmax_of_chosen(kernels, generator):
    test_triton_experts.assert_chosen_as_by_torch(kernels, generator, SOFTMAX_OF_CHOSEN, (60, 4, 1, 1))


def tied_experts(kernels, _generator):
    test_triton_experts.test_ties_go_to_lowest_expert(kernels)


def chosen_from_nan(kernels, _generator):
    test_triton_experts.test_logits_that_are_not_numbers_choose_as_plain_torch(kernels, SIGMOID, 1)
    test_triton_experts.test_logits_that_are_not_numbers_choose_as_plain_torch(kernels, SOFTMAX, 3)


def sorted_rows(kernels, generator):
    test_triton_experts.assert_sorted_as_by_torch(kernels, generator, 300, 4, 5)


def added_experts(kernels, generator):
    test_triton_experts.assert_added_as_by_torch(kernels, generator, 60, 20)
    test_triton_experts.assert_added_as_by_torch(kernels, generator, 128, 8, shared="gated", size=530)


def delta(kernels, generator):
    for is_tiled in (False, True):
        shape, dtype = (2, 4, 20, 32), torch.float32
        test_gated_delta.test_results_and_state_are_as_exact_as_torch(shape, dtype, is_tiled, kernels, generator)


def mamba(kernels, generator):
    test_mamba2.test_results_and_state_are_as_exact_as_torch(
        (2, 4, 20, 32), torch.float32, (0.5, 1.0), kernels, generator
    )


def small_steps(kernels, generator):
    inputs = test_mamba2.Inputs((1, 2, 16, 16), torch.float32, generator, num_rows=3)
    inputs.dt -= 12.0
    inputs.state.zero_()
    inputs.skip.zero_()
    (exact, _), (plain, _), (found, _) = inputs.exact(), inputs.run(ReferenceKernels()), inputs.run(kernels)
    assert_as_exact_as_torch(found, plain, exact)


def schedules(kernels, generator, name):
    case = test_triton_states.CASES[name](17 + test_kept_rows.NUM_WRONG, torch.float32, generator)
    for seed in range(3):
        assert not test_kept_rows.find_differences(case, kernels, [8, 3, 6], 4, seed)


def delta_in_schedules(kernels, generator):
    schedules(kernels, generator, "delta")


def mamba_in_schedules(kernels, generator):
    schedules(kernels, generator, "mamba")


def conv_in_schedules(kernels, generator):
    schedules(kernels, generator, "conv of 8")


def convolution(kernels, generator):
    for has_bias in (False, True):
        test_short_conv.test_convolution_is_as_exact_as_torch(
            640, 3, torch.float32, has_bias, has_bias, kernels, generator
        )
    test_short_conv.test_taps_are_added_in_order_before_bias((2**30, -(2**30), 1), 0, 1, kernels)


def gated_norm(kernels, generator):
    for gate_first in (False, True):
        for shape in ((5, 75, 25), (3, 2400, 1200)):
            test_gated_norm.test_norm_is_as_exact_as_torch(
                shape, torch.bfloat16, True, gate_first, gate_first, kernels, generator
            )
        test_triton_states.test_normed_row_has_equal_bits_alone_and_as_slice_of_wider_rows(
            kernels, generator, gate_first, 600
        )


def kept_rows(kernels, generator):
    for widths in ((5, 0, 3), (700, 330, 5)):
        test_kept_rows.test_rows_are_kept_side_by_side(widths, torch.bfloat16, kernels, generator)


def multiplied(kernels, generator):
    test_multiply.test_product_is_rounded_once_and_changes_only_x(kernels, generator, (5, 2048), torch.bfloat16)


def squared(kernels, generator):
    dtype = torch.bfloat16
    test_relu_squared.test_negative_values_become_zero_and_others_are_squared(kernels, generator, WIDE, dtype)
    test_relu_squared.test_nan_stays_nan(kernels, dtype)


def sigmoid_gated(kernels, generator):
    test_attention_gate.test_gate_multiplies_by_sigmoid_and_rounds_once(kernels, generator, (5, 16, 128), torch.float32)


def copied_rows(kernels, generator):
    test_attention_gate.test_copy_changes_only_the_named_heads(kernels, generator, (5, 16, 128), torch.bfloat16)


KEPT = "return (key > cut_key) | ((key == cut_key) & (ids <= cut_id))"
MASS = "lanes_2 = tl.zeros([BLOCK], tl.float64)\n    for first in "
FIRST_TILE = "tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)"
MISTAKES = {
    add: [
        ("add", "_add[num_rows, cdiv(width, _BLOCK)]", "_add[num_rows, 1]"),
        ("add", ".to(tl.float32) + x * scale", ".to(tl.float32) + x"),
        ("add", "+ x * scale", "+ round_to(x * scale, residual_ptr.dtype.element_ty).to(tl.float32)"),
    ],
    silu: [
        ("elementwise", "_gate[num_rows, cdiv(width, _BLOCK)]", "_gate[num_rows, 1]"),
        ("elementwise", "tl.load(place + width,", "tl.load(place + width - 1,"),
    ],
    gelu: [("elementwise", "0.044715", "0.0447")],
    soft_cap: [
        ("soft_cap", "cdiv(width, _BLOCK)", "width // _BLOCK"),
    ],
    log_softmax: [
        ("log_softmax", "weights += tl.where(is_there, weight, 0.0)", "weights += weight"),
        ("log_softmax", "tl.where(total == total, logarithm(total), total)", "logarithm(total)"),
        ("log_softmax", "largest = tl.max(largest, axis=1)[:, None]", "largest = tl.zeros([1, 1], tl.float32)"),
    ],
    divide: [
        ("divide", "cdiv(width, _BLOCK)", "width // _BLOCK"),
        (
            "divide",
            "tl.div_rn(tl.load(place, mask=is_there), divisor)",
            "tl.load(place, mask=is_there) * tl.div_rn(1.0, divisor)",
        ),
    ],
    rms_norm: [
        ("norms", "squares += value * value", "squares = value * value"),
        ("norms", "mean + eps", "mean"),
    ],
    embedding: [
        ("embedding", FIRST_TILE, "tl.arange(0, BLOCK)"),
        ("embedding", "token_ids_ptr + row)", "token_ids_ptr + tl.maximum(row - 1, 0))"),
        (
            "embedding",
            "round_to(value * scale,",
            "round_to(round_to(value, out_ptr.dtype.element_ty).to(tl.float32) * scale,",
        ),
    ],
    take_rows: [
        ("rows", FIRST_TILE, "tl.arange(0, BLOCK)"),
        ("rows", "* stride + column", "* width + column"),
    ],
    drafts: [
        (
            "rejection",
            "first = tl.load(cu_num_logits_ptr + request)",
            "first = tl.load(cu_num_logits_ptr + request) + 1",
        ),
        ("rejection", "draft_ids_ptr + first + step + 1,", "draft_ids_ptr + first + step,"),
        ("rejection", "(first + step >= last) |", "(first + step > last) |"),
        ("rejection", "step < count, target", "step <= count, target"),
    ],
    top_tokens: [
        ("top_tokens", "(other_index[None, :] < index[:, None])", "(other_index[None, :] > index[:, None])"),
        ("top_tokens", "range(0, loop_bound(k), RANKED)", "range(0, RANKED, RANKED)"),
    ],
    top_tokens_with_nan: [("top_tokens", 'tl.where(value == value, value, float("-inf"))', "value")],
    int8: [
        ("quantized_rows", "tl.join(first + second, first - second)", "tl.join(first + second, second - first)"),
        ("quantized_rows", "round_to_whole(x * inverse)", "x * inverse"),
        ("quantized_rows", "is_finite & (magnitude >= _LEAST_MAGNITUDE)", "is_finite"),
        ("quantized_rows", "tl.div_rn(magnitude, 127.0)", "magnitude * 0.007874016"),
        ("matmul", "(row_scale[:, None] * column_scale[None, :])", "row_scale[:, None] * column_scale[None, :]"),
    ],
    int4: [
        ("quantized_rows", "is_there = column < width", "is_there = column < width - 1"),
        ("matmul_int4", "(first + half * HALF) // group_size", "first // group_size"),
        ("matmul_int4", "(4 * half)) & 15", "(4 - 4 * half)) & 15"),
        ("matmul_int4", "(whole + 128) >> 8", "whole >> 8"),
        ("matmul_int4", "(scale[:, None] * unit[None, :])", "scale[:, None] * unit[None, :]"),
        ("matmul_int4", "column < num_columns\n", "column < num_columns - 1\n"),
    ],
    wide_rows: [
        ("quantized_rows", "first + tl.arange(0, BLOCK), width", "tl.arange(0, BLOCK), width"),
        ("quantized_rows", "is_there = column < width", "is_there = column <= width"),
    ],
    top_k: [
        ("selection", KEPT, "return key > cut_key", "sampling"),
        ("selection", KEPT, "return key >= cut_key", "sampling"),
        ("selection", "digits > chosen, counts", "digits >= chosen, counts", "sampling"),
        ("selection", "number == count", "number == count - 1", "sampling"),
        ("selection", "seen += tl.sum(is_tie)", "seen += 0", "sampling"),
        ("selection", "counts += tl.histogram", "counts = tl.histogram", "sampling"),
        ("sampling", "(top_k < vocab)", "(top_k < 0)"),
    ],
    top_p: [
        (
            "selection",
            f"{MASS}range(0, _end(vocab, num_layers, BLOCK), BLOCK)",
            f"{MASS}range(0, BLOCK, BLOCK)",
            "sampling",
        ),
        ("selection", "tl.ceil((target - above)", "tl.floor((target - above)", "sampling"),
    ],
    filtered: [
        ("selection", "depth + is_packed.to(tl.int32)", "depth | is_packed.to(tl.int32)", "sampling"),
        ("selection", "first + 2 * BLOCK, BLOCK)", "first + BLOCK, BLOCK)", "sampling"),
        ("selection", "tl.where(num_layers > LAYERS, 0, num_layers)", "tl.minimum(num_layers, LAYERS)", "sampling"),
        ("selection", "(keys >= middle).to(tl.int32)) >= rank", "(keys >= middle).to(tl.int32)) > 0", "sampling"),
        ("selection", "found = tl.where(num_ties == count, last, -1)", "found = last", "sampling"),
        ("selection", "all_layers = tl.where(cut_key >= bound, num_layers, 0)", "all_layers = num_layers", "sampling"),
        ("selection", "packed_mass, 0 * num_layers", "packed_mass, num_layers", "sampling"),
        ("selection", "(mass_1 < target) | (key_1 == high)", "mass_0 >= target", "sampling"),
    ],
    least_probability: [
        ("sampling", "first + block * BLOCK + tl", "first + tl"),
        ("sampling", "limit = largest + ", "limit = largest - "),
    ],
    choices: [
        ("sampling", "is_better = key > best", "is_better = key >= best"),
        ("sampling", "end = tl.minimum((piece + 1) * PIECE, vocab)", "end = vocab - 1"),
        ("sampling", "tl.min(tl.where(best == largest, ids, LAST_ID))", "tl.max(tl.where(best == largest, ids, -1))"),
        ("sampling", "(num_nan > 0) |", "(num_nan > 1) |"),
    ],
    products: [
        ("matmul", "acc = dot(x, weight, acc)", "acc = dot(x, weight, 0.0 * acc)"),
        ("matmul", "for _ in range(1, NUM_PARTITIONS):", "for _ in range(2, NUM_PARTITIONS):"),
        ("matmul", "first = partition * PARTITION", "first = partition * PARTITION + 1"),
    ],
    products_by_one_program: [
        ("matmul", "for partition in range(1, tl.cdiv(WIDTH, PARTITION)):", "for partition in range(0, 0):"),
        ("matmul", "(of_group // group_rows) * BLOCK_N", "(of_group // group_rows) * BLOCK_N + 1"),
    ],
    tiles: [
        (
            "matmul",
            "first = partition * PARTITION",
            "first = (partition if BLOCK_M == 64 else tl.cdiv(WIDTH, PARTITION) - 1 - partition) * PARTITION",
        ),
        ("matmul", '"BLOCK_M": LARGE_BLOCK_M,', '"BLOCK_M": LARGE_BLOCK_M, "PARTITION": PARTITION // 2,'),
        ("matmul", "row = tl.program_id(2) * BLOCK_M + ", "row = "),
    ],
    latents: [
        ("rope_and_write_latents", "is_dim = dim < RANK", "is_dim = dim <= RANK"),
        ("rope_and_write_latents", "content * content, eps", "content * content, 0.0"),
        ("rope_and_write_latents", "weight_ptr + dim", "weight_ptr + 0 * dim"),
        ("rope_and_write_latents", "place + RANK, is_row", "place + RANK - 1, is_row"),
        ("rope_and_write_latents", "tl.store(row + RANK + first", "tl.store(row + first"),
        ("rope_and_write_latents", "queries_head_stride + RANK", "queries_head_stride"),
        ("rope_and_write_latents", "head < NUM_HEADS", "head < NUM_HEADS - 1"),
        ("rope_and_write_latents", "is_finite, y, nan)", "is_finite, y, y)"),
        ("rope_and_write_latents", "is_finite, content, 0.0)", "is_finite, content, content)"),
        ("rope_and_write_latents", "offset * row_stride", "offset * 0"),
        ("norms", "return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))", "return tl.rsqrt(mean)", "rope_and_write_latents"),
    ],
    int8_latents: [
        (
            "rope_and_write_latents",
            "tl.maximum(magnitude_of(x), magnitude_of(y)), magnitude_of(content)",
            "magnitude_of(x), magnitude_of(y)",
        ),
        ("rope_and_write_latents", "block * scales_stride + offset", "block * scales_stride"),
    ],
    padding_latents: [
        ("rope_and_write_latents", "mask=is_row & is_dim", "mask=is_dim"),
        ("rope_and_write_latents", "scale, mask=is_row", "scale"),
        ("rope_and_write_latents", "slot >= 0", "slot >= -1"),
    ],
    chosen_experts: [
        ("choose_experts", "is_there, power, 0.0)", "is_there, power, power)"),
        ("choose_experts", "& (of_group < NUM_EXPERTS // NUM_GROUPS)", ""),
        ("choose_experts", "weights *= scale", "weights *= 1.0"),
        ("choose_experts", "tl.load(factors_ptr + expert", "tl.load(factors_ptr + of_group * 0"),
        ("choose_experts", "row * NUM_CHOSEN + tl.reshape", "tl.reshape"),
        ("choose_experts", "+ least_sum)", "- least_sum + 1.0)"),
    ],
    chosen_in_groups: [
        ("choose_experts", "place, expert, mask=is_chosen", "place, of_group, mask=is_chosen"),
        ("choose_experts", "is_chosen, scores, 0.0)", "is_chosen, choice, 0.0)"),
        ("choose_experts", "if HAS_BIAS:", "if not HAS_BIAS:"),
        ("choose_experts", "if HAS_FACTORS:", "if not HAS_FACTORS:"),
        ("choose_experts", "1.0 + power)", "1.0 - power)"),
        ("choose_experts", "is_best, _NO_ORDER, order)", "is_best, order, order)"),
        ("choose_experts", "best +=", "best ="),
        (
            "choose_experts",
            "(_order(best, group, group < NUM_GROUPS), NUM_CHOSEN_GROUPS)",
            "(_order(best, group, group < NUM_GROUPS), NUM_GROUPS)",
        ),
        ("choose_experts", "expert = group * (NUM_EXPERTS // NUM_GROUPS)", "expert = group * SIZE"),
    ],
    softmax_of_chosen: [
        ("choose_experts", "_exponentials(scores, is_chosen)", "_exponentials(scores, is_there)"),
        ("choose_experts", "powers = _exponentials(scores, is_chosen)", "powers = _exponentials(choice, is_chosen)"),
    ],
    tied_experts: [
        ("choose_experts", "<< 32) - index", "<< 32) + index"),
    ],
    chosen_from_nan: [
        ("choose_experts", "order_key(value), _LARGEST_KEY)", "order_key(value), order_key(value))"),
        ("choose_experts", "1.0 + power), scores)", "1.0 + power), 0.0)"),
        ("choose_experts", "exponential(distance), distance)", "exponential(distance), 0.0)"),
    ],
    sorted_rows: [
        ("sort_by_expert", "num_lower +=", "num_lower ="),
        ("sort_by_expert", "ids < expert", "ids <= expert"),
        ("sort_by_expert", "mask=index < num_choices, other=expert", "mask=index < num_choices, other=-1"),
        ("sort_by_expert", "mask=index < num_choices, other=-1", "mask=index < num_choices - 1, other=-1"),
        ("sort_by_expert", "place += tl.max(number)", "place += 0"),
        ("sort_by_expert", "index // NUM_CHOSEN", "index"),
        ("sort_by_expert", "places_ptr + index, place + number - 1", "places_ptr + index, place + number"),
        ("sort_by_expert", "tl.cumsum(is_own.to(tl.int32), 0)", "tl.cumsum(is_own.to(tl.int32), 0, reverse=True)"),
        (
            "sort_by_expert",
            "tl.store(starts_ptr + expert + 1, num_choices)",
            "tl.store(starts_ptr + expert + 1, place - 1)",
        ),
    ],
    added_experts: [
        ("add_experts", "tl.program_id(1) * BLOCK + ", ""),
        ("add_experts", "middle = (low + high) // 2", "middle = (low + high + 1) // 2"),
        ("add_experts", "return x - (x >> 1)", "return x + 1"),
        ("add_experts", "(waiting & (height - 1)) != 0", "waiting != 0"),
        ("add_experts", "1 << HEIGHT)", "1)"),
        ("add_experts", "waiting = waiting & (waiting - 1)", "waiting = waiting - 1"),
        ("add_experts", "outputs_ptr + place * size", "outputs_ptr + (row * NUM_CHOSEN + index) * size"),
        (
            "add_experts",
            "total *= tl.load(weights_ptr + row * NUM_CHOSEN + index)",
            "total *= tl.load(weights_ptr + row * NUM_CHOSEN)",
        ),
        ("add_experts", "1.0 + exponential(-tl.load(gate_ptr + row))", "1.0"),
        ("add_experts", "total[None, :], stack)", "total[None, :], stack + total[None, :])"),
        ("add_experts", "shared_ptr + row * size", "shared_ptr"),
    ],
    delta: [
        ("gated_delta", "scale, LEVELS)\n        key", "1.0, LEVELS)\n        key"),
        ("gated_delta", "+ _LEAST_SQUARES", "+ 1.0"),
        ("gated_delta", "head % KEY_HEADS if IS_TILED", "0 if IS_TILED"),
        ("gated_delta", "(KEY_HEADS + key_head) * DEPTH", "(KEY_HEADS + 0 * key_head) * DEPTH"),
        ("gated_delta", "(value - sum", "(0.0 * value - sum"),
        ("gated_delta", "softplus(a + dt_bias)", "softplus(a)"),
        ("gated_delta", "* sigmoid(b)", "* 1.0"),
        ("states", "return tl.where(x < 0.0, 0.0, x) +", "return", "gated_delta"),
    ],
    mamba: [
        ("mamba2", "+ skip * x", "+ x"),
        ("mamba2", "key_column + GROUPS * DEPTH", "key_column"),
        ("mamba2", "size > dt_max, dt_max, size", "size > dt_max, size, size"),
        ("mamba2", "size < dt_min, dt_min", "size < dt_min, size"),
        ("mamba2", "head // (num_heads // GROUPS) * DEPTH", "head % GROUPS * DEPTH"),
    ],
    small_steps: [
        ("states", "twice_atanh(tl.div_rn(y, 2.0 + y))", "(tl.div_rn(1.0 + y, 1.0) - 1.0)", "mamba2"),
    ],
    delta_in_schedules: [
        ("gated_delta", "(read_slot >= 0)", "(read_slot > 0)"),
        ("gated_delta", "if write_rows == 0:", "if write_rows < 0:"),
        ("gated_delta", "row + 1 - first, write_rows", "row - first, write_rows"),
        ("gated_delta", "mask=(source >= 0) & is_column", "mask=(source > 0) & is_column"),
        ("states", "(-1 - source) * kept_stride", "(-1 - source) // 2 * kept_stride", "gated_delta"),
        ("states", "tl.where(is_below, middle + 1, low)", "tl.where(is_below, middle + 1, low + 1)", "gated_delta"),
        ("states", "if num_rows == write_rows:", "if num_rows >= write_rows:", "gated_delta"),
        ("states", "mask=saved < num_saved, other=-1", "mask=saved < num_saved - 1, other=-1", "gated_delta"),
    ],
    mamba_in_schedules: [
        ("mamba2", "(read_slot >= 0)", "(read_slot > 0)"),
        ("mamba2", "if write_rows == 0:", "if write_rows < 0:"),
    ],
    conv_in_schedules: [
        ("short_conv", "& (at < first) & (read_slot >= 0)", "& (at < first) & (read_slot > 0)"),
        ("short_conv", "is_row = at >= first", "is_row = at >= 0"),
        ("short_conv", "is_there & (read_slot >= 0)", "is_there & (read_slot > 0)"),
        ("short_conv", "other=first) + 1 - first", "other=first) - first"),
        ("short_conv", "while saved <= last:", "while saved < last:"),
        ("short_conv", "tl.minimum(count + tap, WIDTH - 2)", "tl.minimum(tap, WIDTH - 2)"),
        ("short_conv", "sources_ptr + first + at", "sources_ptr + at"),
    ],
    convolution: [
        ("short_conv", "at - first + WIDTH - 1", "at - first + WIDTH - 2"),
        ("short_conv", "weight_ptr + tap * channels", "weight_ptr + (WIDTH - 1 - tap) * channels"),
        ("short_conv", "if HAS_BIAS:", "if not HAS_BIAS:"),
        ("short_conv", "if HAS_SILU:", "if not HAS_SILU:"),
        ("short_conv", "in tl.static_range(WIDTH):", "in tl.static_range(WIDTH - 1, -1, -1):"),
    ],
    gated_norm: [
        ("gated_norm", "if not GATE_FIRST:", "if GATE_FIRST:"),
        ("gated_norm", "if not IS_SHARED:", "if False:"),
        ("gated_norm", "squares += value * value", "squares = value * value"),
        ("gated_norm", "token * gate_stride", "0 * token"),
        ("gated_norm", "row % num_groups * WIDTH", "0 * row"),
    ],
    kept_rows: [
        ("keep_rows", "kept_ptr + before,", "kept_ptr + x_width,"),
        ("keep_rows", "source * stride", "source * width"),
        ("keep_rows", "tl.load(keep_to_ptr + tl.program_id(0))", "tl.load(keep_to_ptr)"),
        ("keep_rows", "tl.program_id(1) * BLOCK +", ""),
    ],
    multiplied: [
        ("multiply", FIRST_TILE, "tl.arange(0, BLOCK)"),
        ("multiply", "row * factor_stride", "row * width"),
    ],
    squared: [
        ("relu_squared", FIRST_TILE, "tl.arange(0, BLOCK)"),
        ("relu_squared", "tl.where(x < 0.0, 0.0, x)", "tl.where(x > 0.0, x, 0.0)"),
        ("relu_squared", "tl.program_id(0).to(tl.int64) * width", "0 * width"),
    ],
    sigmoid_gated: [
        ("sigmoid_gate", FIRST_TILE, "tl.arange(0, BLOCK)"),
        ("sigmoid_gate", "row * gate_stride", "row * width"),
        ("exponentials", "1.0 + exponential(-x)), x)", "1.0 + exponential(x)), x)", "sigmoid_gate"),
    ],
    copied_rows: [
        ("copy_rows", FIRST_TILE, "tl.arange(0, BLOCK)"),
        ("copy_rows", "row * x_stride", "row * width"),
    ],
    int4_with_minima: [("matmul_int4", "whole -= tl.load(offset_ptr", "whole += tl.load(offset_ptr")],
}


RUN_BY_THEMSELVES = [
    tiles,
    padding_latents,
    tied_experts,
    chosen_from_nan,
    drafts,
    top_tokens_with_nan,
    wide_rows,
    top_k,
    top_p,
    filtered,
    choices,
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("compare", [each for each in MISTAKES if each not in RUN_BY_THEMSELVES])
def test_correct_kernels_pass_comparison(kernels, generator, compare):
    compare(kernels, generator)


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("compare", "mistake"), [(name, each) for name, some in MISTAKES.items() for each in some])
def test_broken_kernel_fails_comparison(kernels, generator, make_mistake, compare, mistake):
    make_mistake(*mistake)
    with pytest.raises(AssertionError):
        compare(kernels, generator)


ELSEWHERE = {
    "attention",
    "decode_graphs",
    "e4m3",
    "exponentials",
    "grouped_matmul",
    "head_matmul",
    "matmul_blocks",
    "noise",
    "reductions",
    "rope_kv",
    "rounding",
}
NOTHING_TO_BREAK = {"loops"}  # used only by the interpreter


def test_every_kernel_has_mutants():
    """Here, or in the test files that compare the results of that kernel."""
    launched = re.compile(r"^@(triton\.jit|kernel)", re.MULTILINE)
    files = [path for path in Path(package.__path__[0]).glob("*.py") if launched.search(path.read_text("utf-8"))]
    here = {module for some in MISTAKES.values() for module, *_ in some}
    assert {path.stem for path in files} == here | ELSEWHERE | NOTHING_TO_BREAK
    sources = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f'broken(tmp_path, "{module}"' in sources for module in ELSEWHERE)
