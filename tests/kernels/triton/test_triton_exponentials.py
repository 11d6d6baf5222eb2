"""e^x and tanh with errors of at most two units of each result, however small, and sums in the promised order."""

import pytest
import torch
from broken_kernels import broken

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from octavo.kernels.triton import exponentials, reductions  # noqa: E402  once there is Triton

_COUNT = 4096
# The interpreter uses numpy, which warns of intended values: results without fraction.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@triton.jit
def _apply(x_ptr, out_ptr, function: tl.constexpr, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(out_ptr + index, function(tl.load(x_ptr + index)))


@triton.jit
def _sum(x_ptr, out_ptr, function: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 1 << LEVELS)[None, :]
    tl.store(out_ptr + tl.arange(0, ROWS), function(tl.load(x_ptr + row * (1 << LEVELS) + column), ROWS, LEVELS))


def numbers(name):
    if name == "exponential":
        return torch.linspace(-87, 88, _COUNT)
    if name == "exponential_64":
        return torch.linspace(-700, 0, _COUNT, dtype=torch.float64)
    return torch.cat([torch.linspace(-12, 12, _COUNT // 2), torch.logspace(-37, 37, _COUNT // 2)])


def units_off(module, name):
    """Return the largest error of a function, in units of the last place of its results."""
    x = numbers(name)
    out = torch.empty_like(x)
    _apply[(1,)](x, out, getattr(module, name), COUNT=_COUNT, enable_fp_fusion=False)
    exact = x.double().tanh() if name == "hyperbolic_tangent" else x.double().exp()
    return float(((out.double() - exact) / (torch.finfo(x.dtype).eps * exact)).abs().max())


@pytest.mark.parametrize("name", ["exponential", "hyperbolic_tangent", "exponential_64"])
def test_triton_exp_and_tanh_error_is_within_two_ulps(kernels, name):
    assert units_off(exponentials, name) < 2


def test_exp_and_tanh_handle_values_out_of_range(kernels):
    x = torch.tensor([89.0, torch.inf, -200.0, -87.0] * (_COUNT // 4))
    out = torch.empty_like(x)
    _apply[(1,)](x, out, exponentials.exponential, COUNT=_COUNT, enable_fp_fusion=False)
    assert out[:2].tolist() == [torch.inf, torch.inf]
    assert 0 < out[2] == out[3] < 2e-38
    x[:4] = torch.tensor([-0.0, 0.0, torch.inf, torch.nan])
    _apply[(1,)](x, out, exponentials.hyperbolic_tangent, COUNT=_COUNT, enable_fp_fusion=False)
    assert out[:2].signbit().tolist() == [True, False]
    assert out[2] == 1.0
    assert out[3].isnan()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("exponential", "r * (1.0 / 5040.0) + 1.0 / 720.0", "r * (1.0 / 5040.0) + 1.0 / 600.0"),
        ("exponential", "_LN2_LOW = tl.constexpr(1.42860682030941723212e-6)", "_LN2_LOW = tl.constexpr(0.0)"),
        ("hyperbolic_tangent", "(power - 1.0) + power * rest", "(power + power * rest) - 1.0"),
        ("exponential_64", "1.0 / 479001600.0", "0.0"),
        ("exponential_64", "(x - n * _LN2_HIGH_64) - n * _LN2_LOW_64", "x - n * (_LN2_HIGH_64 + _LN2_LOW_64)"),
    ],
)
def test_broken_exponentials_are_detected(kernels, tmp_path, name, old, new):
    assert units_off(broken(tmp_path, "exponentials", old, new), name) > 2


def sums_in_halves(module, x):
    out = torch.empty(len(x))
    _sum[(1,)](x, out, module.sum_in_halves, ROWS=len(x), LEVELS=x.shape[1].bit_length() - 1)
    return out


def test_sum_in_halves_adds_second_half_to_first(kernels, generator, tmp_path):
    x = torch.randn(4, 64, generator=generator)
    total = x
    while total.shape[1] > 1:
        first, second = total.chunk(2, dim=1)
        total = first + second
    assert torch.equal(sums_in_halves(reductions, x), total[:, 0])
    order = "[ROWS, 2, 1 << (LEVELS - 1 - level)]), axis=1)"
    neighbours = broken(tmp_path, "reductions", order, "[ROWS, 1 << (LEVELS - 1 - level), 2]), axis=2)")
    assert not torch.equal(sums_in_halves(neighbours, x), total[:, 0])
