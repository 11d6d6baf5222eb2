"""The state space model of Mamba-2: errors, limits of steps, and refused arguments."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch
from kernel_backends import compiled_kernels
from state_cases import state_batch, state_columns

from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.state_batch import matrix_states

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 4, 128, 64), (2, 4, 16, 64), (3, 3, 20, 16), (2, 6, 256, 80)]  # groups, heads, state_size, head_dim


class Inputs:
    """Random inputs of one sequence. Slot 0 is read and slot 1 is written."""

    def __init__(self, shape, dtype, generator, num_rows=40):
        self.num_groups, self.num_heads, self.depth, self.columns = shape
        self.width = self.num_heads * self.columns
        self.xbc = torch.randn(num_rows, self.width + 2 * self.num_groups * self.depth, generator=generator).to(dtype)
        self.dt = torch.randn(num_rows, self.num_heads, generator=generator).to(dtype)
        self.dt_bias, self.skip, self.decay = torch.randn(3, self.num_heads, generator=generator)
        self.decay = -self.decay.abs()
        self.limits = (0.0, float("inf"))
        self.state = matrix_states(2, self.num_heads, self.depth, self.columns)
        self.state[0] = torch.randn(self.state[0].shape, generator=generator)
        self.batch = state_batch([num_rows], [0], [1])

    def run(self, kernels):
        """Return the results and the last state [heads, state_size, head_dim]."""
        state = self.state.clone()
        out = torch.empty(len(self.xbc), self.width, dtype=self.xbc.dtype)
        mamba2(
            kernels, self.xbc, self.dt, self.xbc[:0], self.dt[:0], self.dt_bias, self.decay, self.skip, *self.limits,
            state, self.batch, self.num_groups, out,
        )  # fmt: skip
        return out, state_columns(state[1])

    def exact(self):
        """Return the same in float64."""
        of_groups = self.num_groups * self.depth
        x, keys, queries = self.xbc.double().split([self.width, of_groups, of_groups], dim=1)
        x = x.view(-1, self.num_heads, self.columns)
        keys, queries = (each.view(-1, self.num_groups, self.depth) for each in (keys, queries))
        states, results = state_columns(self.state[0]).double(), []
        steps = F.softplus(self.dt.double() + self.dt_bias.double()).clamp(*self.limits)
        for row in range(len(x)):
            for head in range(self.num_heads):
                group, step, state = head // (self.num_heads // self.num_groups), steps[row, head], states[head]
                state *= (step * self.decay[head].double()).exp()
                state += torch.outer(keys[row, group], step * x[row, head])
                results.append(state.t() @ queries[row, group] + self.skip[head].double() * x[row, head])
        return torch.stack(results).view(len(x), -1), states


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.5, 1.0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_state_are_as_exact_as_torch(shape, dtype, limits, compiled, generator):
    inputs = Inputs(shape, dtype, generator)
    inputs.limits = limits
    (exact, exact_state), (plain, plain_state) = inputs.exact(), inputs.run(ReferenceKernels())
    found, state = inputs.run(compiled)
    assert_as_exact_as_torch(found, plain, exact)
    assert_as_exact_as_torch(state, plain_state, exact_state)


def test_plain_version_is_recurrence(generator):
    """float32 rounds sums of 128 products, each of which is about 10."""
    inputs = Inputs(SHAPES[0], torch.float32, generator)
    (exact, exact_state), (plain, state) = inputs.exact(), inputs.run(ReferenceKernels())
    torch.testing.assert_close(plain.double(), exact, rtol=2**-18, atol=128 * 10 * 2**-24)
    torch.testing.assert_close(state.double(), exact_state, rtol=2**-18, atol=40 * 10 * 2**-24)


def test_steps_of_any_size_give_finite_results(compiled, generator):
    inputs = Inputs(SHAPES[1], torch.float32, generator, num_rows=4)
    inputs.dt[0], inputs.dt[1], inputs.dt[2] = 1e4, -1e4, 30.0
    exact, found = inputs.exact()[0], inputs.run(compiled)[0]
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.double(), exact, rtol=2**-18, atol=2**-10)
    inputs.limits = (0.0, 0.0)
    expected = inputs.run(compiled)[1]
    assert torch.equal(expected, state_columns(inputs.state[0]))  # steps of size 0 keep the state


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("xbc", torch.zeros(40, 100), "xbc has another shape"),
        ("dt", torch.zeros(40, 2), "state is not float32"),
        ("decay", torch.zeros(2), "do not fit together"),
        ("skip", torch.zeros(4, dtype=torch.bfloat16), "another dtype"),
        ("num_groups", 3, "do not fit together"),
        ("state", torch.zeros(2, 4, 64, 16), "state is not float32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name, tensor, message, generator):
    inputs = Inputs(SHAPES[1], torch.float32, generator)
    setattr(inputs, name, tensor)
    with pytest.raises(ValueError, match=message):
        inputs.run(compiled_kernels("portable"))
