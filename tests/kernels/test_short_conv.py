"""Short convolutions: errors, the order of sums, and refused arguments."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch
from kernel_backends import compiled_kernels
from state_cases import state_batch

from octavo.kernels.operations.short_conv import short_conv
from octavo.kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(75, 4), (16, 2), (640, 3), (130, 7), (7, 8)]  # channels, width


def make_arguments(channels, width, dtype, generator, *, has_bias=True, num_rows=23):
    x = torch.randn(num_rows, channels, generator=generator).to(dtype)
    weight = torch.randn(width, channels, generator=generator)
    bias = torch.randn(channels if has_bias else 0, generator=generator)
    state = torch.randn(3, width - 1, channels, generator=generator).to(dtype)
    return x, weight, bias, state


def convolve(kernels, x, weight, bias, state, batch, *, has_silu=True):
    out = torch.empty(x.shape, dtype=x.dtype)
    short_conv(kernels, x, x[:0], weight, bias, state, batch, has_silu, out)
    return out


@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "width"), SHAPES)
def test_convolution_is_as_exact_as_torch(channels, width, dtype, has_bias, has_silu, compiled, generator):
    x, weight, bias, state = make_arguments(channels, width, dtype, generator, has_bias=has_bias)
    inputs = torch.cat([state[1], x]).double().t()
    exact = F.conv1d(inputs, weight.double().t().unsqueeze(1), bias.double() if has_bias else None, groups=channels).t()
    exact = F.silu(exact) if has_silu else exact
    batch = state_batch([23], [1], [2])
    plain_state = state.clone()
    plain = convolve(ReferenceKernels(), x, weight, bias, plain_state, batch, has_silu=has_silu)
    found = convolve(compiled, x, weight, bias, state, batch, has_silu=has_silu)
    assert_as_exact_as_torch(found, plain, exact)
    assert torch.equal(state, plain_state)
    assert torch.equal(state[2], torch.cat([state[1], x])[1 - width :])


def test_short_sequence_shifts_state(kernels, generator):
    x, weight, bias, state = make_arguments(20, 5, torch.float32, generator, num_rows=2)
    old = state[0].clone()
    convolve(kernels, x, weight, bias, state, state_batch([2], [0], [0]))
    assert torch.equal(state[0], torch.cat([old[2:], x]))


@pytest.mark.parametrize(
    ("inputs", "bias", "expected"),
    [
        ((2**30, 1, -(2**30)), 0, 0),
        ((2**30, -(2**30), 1), 0, 1),
        ((1, 2**30, -(2**30)), 0, 0),
        ((2**30, 1, 0), -(2**30), 0),
    ],
)
def test_taps_are_added_in_order_before_bias(inputs, bias, expected, compiled):
    """In float32, 2^30 + 1 is 2^30, so each order has another result."""
    x = torch.tensor(inputs, dtype=torch.float32).unsqueeze(1).repeat(1, 17)
    state, batch = torch.zeros(1, 2, 17), state_batch([3], [-1], [-1])
    found = convolve(compiled, x, torch.ones(3, 17), torch.full((17,), float(bias)), state, batch, has_silu=False)
    assert found[2].tolist() == [expected] * 17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.zeros(4, 21)}, "do not fit together"),
        ({1: torch.zeros(9, 20), 3: torch.zeros(3, 8, 20)}, "do not fit together"),
        ({1: torch.zeros(4, 20, dtype=torch.bfloat16)}, "weight has another dtype"),
        ({1: torch.zeros(20, 4).t()}, "weight is not contiguous"),
        ({2: torch.zeros(19)}, "do not fit together"),
        ({3: torch.zeros(3, 2, 20)}, "do not fit together"),
        ({3: torch.zeros(3, 3, 20, dtype=torch.bfloat16)}, "do not fit together"),
        ({3: torch.zeros(3, 3, 21)[..., 1:]}, "do not fit together"),
        ({0: torch.zeros(20, 23).t()}, "x has another shape or dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message, generator):
    arguments = list(make_arguments(20, 4, torch.float32, generator))
    for index, tensor in change.items():
        arguments[index] = tensor
    with pytest.raises(ValueError, match=message):
        convolve(compiled_kernels("portable"), *arguments, state_batch([23], [0], [0]))
