"""Kernels that advance states, all called alike, and the batches of their tests."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.operations.short_conv import short_conv
from octavo.kernels.state_batch import StateBatch, matrix_states


def int32(values):
    return torch.tensor(list(values), dtype=torch.int32)


def state_batch(lengths, read, write, saved=()):
    """Return a batch of sequences with these numbers of rows and slots. saved: pairs of a row and a slot."""
    rows, slots = zip(*saved, strict=True) if saved else ((), ())
    batch = StateBatch.plain(int32([0, *accumulate(lengths)]), int32(read), int32(write))
    return replace(batch, saved_rows=int32(rows), saved_slots=int32(slots))


def state_columns(state):
    """Return matrix states [..., heads, columns / 16, depth, 16] as [..., heads, depth, columns]."""
    return state.transpose(-3, -2).flatten(-2)


def have_same_states(kernels, state, other):
    """Return True if states are equal, or nearly equal in plain torch, whose roundings depend on the batch."""
    return (
        torch.equal(state, other) if kernels.name != "reference" else torch.allclose(state, other, rtol=1e-5, atol=1e-5)
    )


@dataclass(frozen=True)
class StateCase:
    """A kernel with inputs for some rows, and a shape of its state."""

    inputs: tuple[torch.Tensor, ...]
    call: Callable[..., None]
    width: int  # of the result
    empty_state: torch.Tensor  # one slot
    generator: torch.Generator

    def states(self, num_slots):
        """Return states with random content."""
        shape = (num_slots, *self.empty_state.shape[1:])
        return (torch.randn(shape, generator=self.generator) / 4).to(self.empty_state.dtype)

    def advance(self, kernels, rows, state, batch, kept=None):
        """Return the results of rows, a slice or indices. kept: from `no_kept_rows`."""
        inputs = [each[rows] for each in self.inputs]
        out = torch.full((len(inputs[0]), self.width), 7.0, dtype=inputs[0].dtype)
        widths = [each.shape[1] for each in inputs]
        kept = (self.no_kept_rows(0) if kept is None else kept).split(widths, dim=1)
        self.call(kernels, *inputs, *kept, state, batch, out)
        return out

    def no_kept_rows(self, num_kept):
        """Return memory for kept rows, full of NaN."""
        return torch.full((num_kept, sum(each.shape[1] for each in self.inputs)), torch.nan, dtype=self.inputs[0].dtype)

    def keep(self, kernels, rows, kept, batch):
        """Copy inputs of rows, a slice or indices, to `kept`."""
        inputs = [each[rows] for each in self.inputs]
        empty = inputs[0][:, :0]
        keep_rows(kernels, *(inputs + [empty] * 2)[:3], kept, batch)


def conv_case(channels, width, *, has_bias, has_silu):
    def make(num_rows, dtype, generator):
        x = torch.randn(num_rows, channels + 5, generator=generator).to(dtype)[:, 5:]
        weight = torch.randn(width, channels, generator=generator)
        bias = torch.randn(channels if has_bias else 0, generator=generator)

        def call(kernels, x, kept, state, batch, out):
            short_conv(kernels, x, kept, weight, bias, state, batch, has_silu, out)

        return StateCase((x,), call, channels, torch.zeros(1, width - 1, channels, dtype=dtype), generator)

    return make


def delta_case(num_key_heads, num_heads, depth, columns, *, is_tiled=False):
    def make(num_rows, dtype, generator):
        width = 2 * num_key_heads * depth + num_heads * columns
        qkv = torch.randn(num_rows, width, generator=generator).to(dtype)
        a, b = torch.randn(2, num_rows, num_heads, generator=generator).to(dtype)
        decay, dt_bias = -torch.rand(num_heads, generator=generator), torch.randn(num_heads, generator=generator)

        def call(kernels, *inputs_and_kept):
            *inputs, state, batch, out = inputs_and_kept
            gated_delta(kernels, *inputs, decay, dt_bias, state, batch, num_key_heads, is_tiled, out)

        empty = matrix_states(1, num_heads, depth, columns)
        return StateCase((qkv, a, b), call, num_heads * columns, empty, generator)

    return make


def mamba_case(num_groups, num_heads, depth, columns):
    def make(num_rows, dtype, generator):
        xbc = torch.randn(num_rows, num_heads * columns + 2 * num_groups * depth, generator=generator).to(dtype)
        dt = torch.randn(num_rows, num_heads, generator=generator).to(dtype)
        dt_bias, decay, skip = torch.randn(3, num_heads, generator=generator)

        def call(kernels, *inputs_and_kept):
            *inputs, state, batch, out = inputs_and_kept
            mamba2(kernels, *inputs, dt_bias, -decay.abs(), skip, 0.001, 2.0, state, batch, num_groups, out)

        return StateCase((xbc, dt), call, num_heads * columns, matrix_states(1, num_heads, depth, columns), generator)

    return make


STATE_CASES = {
    "conv of 4": conv_case(75, 4, has_bias=False, has_silu=True),
    "conv of 2": conv_case(600, 2, has_bias=True, has_silu=True),
    "conv of 8": conv_case(32, 8, has_bias=True, has_silu=False),
    "delta": delta_case(2, 4, 128, 48),
    "tiled delta": delta_case(2, 6, 48, 64, is_tiled=True),
    "mamba": mamba_case(2, 4, 16, 64),
    "wide mamba": mamba_case(1, 2, 128, 80),
}
