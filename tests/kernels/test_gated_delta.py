"""The gated delta rule: errors, heads, special values, and refused arguments."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch
from kernel_backends import compiled_kernels
from state_cases import state_batch, state_columns

from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.state_batch import matrix_states

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(2, 4, 128, 48), (3, 3, 48, 64), (1, 3, 20, 16), (4, 8, 128, 128)]  # key heads, heads, key_dim, value_dim


class Inputs:
    """Random inputs of one sequence. Slot 0 is read and slot 1 is written."""

    def __init__(self, shape, dtype, generator, num_rows=40):
        self.num_key_heads, self.num_heads, self.depth, self.columns = shape
        width = 2 * self.num_key_heads * self.depth + self.num_heads * self.columns
        self.qkv = torch.randn(num_rows, width, generator=generator).to(dtype)
        self.a, self.b = torch.randn(2, num_rows, self.num_heads, generator=generator).to(dtype) * 3
        self.decay = -torch.rand(self.num_heads, generator=generator)
        self.dt_bias = torch.randn(self.num_heads, generator=generator)
        self.state = matrix_states(2, self.num_heads, self.depth, self.columns)
        self.state[0] = torch.randn(self.state[0].shape, generator=generator)
        self.batch = state_batch([num_rows], [0], [1])

    def run(self, kernels, *, is_tiled=False):
        """Return the results and the last state [heads, key_dim, value_dim]."""
        state = self.state.clone()
        out = torch.empty(len(self.qkv), self.num_heads * self.columns, dtype=self.qkv.dtype)
        gated_delta(
            kernels, self.qkv, self.a, self.b, self.qkv[:0], self.a[:0], self.b[:0], self.decay, self.dt_bias, state,
            self.batch, self.num_key_heads, is_tiled, out,
        )  # fmt: skip
        return out, state_columns(state[1])

    def exact(self, *, is_tiled=False):
        """Return the same in float64."""
        width = self.num_key_heads * self.depth
        q, k, v = self.qkv.double().split([width, width, self.num_heads * self.columns], dim=1)
        q, k = (F.normalize(x.view(-1, self.num_key_heads, self.depth), dim=2, eps=0.0) for x in (q, k))
        v = v.view(-1, self.num_heads, self.columns)
        states, results = state_columns(self.state[0]).double(), []
        step = F.softplus(self.a.double() + self.dt_bias.double())
        decay, beta = (self.decay.double() * step).exp(), self.b.double().sigmoid()
        for row in range(len(v)):
            for head in range(self.num_heads):
                ratio = self.num_heads // self.num_key_heads
                source = head % self.num_key_heads if is_tiled else head // ratio
                key, query, state = k[row, source], q[row, source] / self.depth**0.5, states[head]
                state *= decay[row, head]
                state += torch.outer(key, (v[row, head] - state.t() @ key) * beta[row, head])
                results.append(state.t() @ query)
        return torch.stack(results).view(len(v), -1), states


@pytest.mark.parametrize("is_tiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_state_are_as_exact_as_torch(shape, dtype, is_tiled, compiled, generator):
    inputs = Inputs(shape, dtype, generator)
    (exact, exact_state), (plain, plain_state) = (
        inputs.exact(is_tiled=is_tiled),
        inputs.run(ReferenceKernels(), is_tiled=is_tiled),
    )
    found, state = inputs.run(compiled, is_tiled=is_tiled)
    assert_as_exact_as_torch(found, plain, exact)
    assert_as_exact_as_torch(state, plain_state, exact_state)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_plain_version_is_recurrence(is_tiled, generator):
    """float32 rounds each of 40 steps with 2^-24 of the state's size, which is about 1."""
    inputs = Inputs(SHAPES[0], torch.float32, generator)
    exact, exact_state = inputs.exact(is_tiled=is_tiled)
    plain, state = inputs.run(ReferenceKernels(), is_tiled=is_tiled)
    torch.testing.assert_close(plain.double(), exact, rtol=0, atol=40 * 2**-24)
    torch.testing.assert_close(state.double(), exact_state, rtol=0, atol=40 * 2**-24 * 4)


def test_a_and_b_may_be_float32_slices_of_wider_rows(compiled, generator):
    inputs = Inputs(SHAPES[1], torch.bfloat16, generator)
    found, state = inputs.run(compiled)
    wide = torch.cat([inputs.a, inputs.b], dim=1).float()
    inputs.a, inputs.b = wide.split(inputs.num_heads, dim=1)
    again, other_state = inputs.run(compiled)
    assert torch.equal(again, found)
    assert torch.equal(other_state, state)


def test_gates_of_any_size_give_finite_results(compiled, generator):
    inputs = Inputs(SHAPES[0], torch.float32, generator, num_rows=6)
    inputs.a[0], inputs.a[1], inputs.a[2], inputs.b[3], inputs.b[4] = 1e4, -1e4, 30.0, 1e4, -1e4
    (exact, exact_state), (found, state) = inputs.exact(), inputs.run(compiled)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=6 * 2**-22)
    torch.testing.assert_close(state.double(), exact_state, rtol=0, atol=6 * 2**-20)


def test_query_and_key_of_zeros_give_zeros(compiled, generator):
    inputs = Inputs(SHAPES[0], torch.float32, generator, num_rows=3)
    inputs.qkv[:, : 2 * inputs.num_key_heads * inputs.depth] = 0
    assert not inputs.run(compiled)[0].any()


def test_nan_reaches_only_its_column(compiled, generator):
    inputs = Inputs(SHAPES[1], torch.float32, generator)
    column = 2 * inputs.num_key_heads * inputs.depth + 70  # head 1, column 6
    expected, expected_state = inputs.run(compiled)
    inputs.qkv[5, column] = torch.nan
    found, state = inputs.run(compiled)
    assert bool(found[5:, 70].isnan().all())
    assert bool(state[1, :, 6].isnan().all())
    found[5:, 70], state[1, :, 6] = expected[5:, 70], expected_state[1, :, 6]
    assert torch.equal(found, expected)
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("qkv", torch.zeros(40, 100), "qkv has another shape"),
        ("a", torch.zeros(40, 2), "state is not float32"),
        ("b", torch.zeros(39, 3), "b has another shape"),
        ("decay", torch.zeros(2), "do not fit together"),
        ("dt_bias", torch.zeros(3, dtype=torch.bfloat16), "dt_bias has another dtype"),
        ("num_key_heads", 2, "do not fit together"),
        ("state", torch.zeros(2, 3, 48, 64), "state is not float32"),
        ("state", torch.zeros(2, 3, 4, 48, 16, dtype=torch.bfloat16), "state is not float32"),
        ("state", torch.zeros(2, 3, 4, 16, 48).transpose(3, 4), "state is not float32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name, tensor, message, generator):
    inputs = Inputs(SHAPES[1], torch.float32, generator)
    setattr(inputs, name, tensor)
    with pytest.raises(ValueError, match=message):
        inputs.run(compiled_kernels("portable"))


def test_columns_must_be_whole_tiles():
    with pytest.raises(ValueError, match="40 columns are not a multiple of 16"):
        matrix_states(1, 2, 8, 40)
