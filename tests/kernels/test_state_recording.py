"""Recorded forward passes with recurrent states: later steps have other rows, slots and saved rows."""

from dataclasses import dataclass, fields, replace
from itertools import accumulate

import pytest
import torch
from state_cases import delta_case, int32, state_batch
from test_recording import MAX_TOKENS, step_of, with_outputs

from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.operations.short_conv import short_conv
from octavo.kernels.state_batch import matrix_states

HIDDEN, KEY_HEADS, HEADS, DEPTH, COLUMNS, NUM_SLOTS, NUM_KEPT = 96, 1, 2, 16, 16, 12, 6
CHANNELS = 2 * KEY_HEADS * DEPTH + HEADS * COLUMNS
# Lengths, read slots, write slots, saved state rows and slots, replayed kept rows, and numbers of rows to keep.
STEPS = [
    ([1], [0], [0], [], [[]], [0]),
    ([20, 1, 7], [1, 0, -1], [1, 2, -1], [(3, 5), (27, 6)], [[], [], []], [2, 1, 0]),
    ([40, 56], [6, 5], [3, 4], [(0, 7), (40, 8), (97, 9)], [[1], [2]], [3, 0]),
    ([1, 1, 1], [3, 4, 9], [3, 4, 0], [], [[0, 2], [], [1]], [1, 1, 1]),
    ([1], [3], [3], [], [[0]], [1]),
]


@dataclass(frozen=True)
class States:
    """The states of a layer of each kind."""

    conv: torch.Tensor
    delta: torch.Tensor
    mamba: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def random(cls, generator):
        kept = torch.randn(NUM_KEPT, 2 * CHANNELS + 2 * HEADS, generator=generator).bfloat16()
        conv = torch.randn(NUM_SLOTS, 3, CHANNELS, generator=generator).bfloat16()
        delta, mamba = (matrix_states(NUM_SLOTS, HEADS, DEPTH, COLUMNS) for _ in range(2))
        return cls(conv, delta.normal_(generator=generator), mamba.normal_(generator=generator), kept)

    def clone(self):
        return States(*(getattr(self, name).clone() for name in PARTS))


PARTS = [field.name for field in fields(States)]


def make_layers(kernels, generator):
    """Return a function (token ids, batch, states) -> hidden states that calls each kernel with states."""
    table, into = (kernels.pack_linear(torch.randn(rows, HIDDEN, generator=generator) / 8) for rows in (512, CHANNELS))
    steps = kernels.pack_linear(torch.randn(2 * HEADS, HIDDEN, generator=generator) / 8)
    taps, bias = torch.randn(4, CHANNELS, generator=generator), torch.randn(CHANNELS, generator=generator)
    decay, dt_bias, skip = -torch.rand(HEADS, generator=generator), torch.zeros(HEADS), torch.ones(HEADS)
    weight = torch.ones(COLUMNS)

    def forward(ids, batch, states):
        x = kernels.embedding(ids, table, torch.bfloat16)
        mixed, ab = kernels.linear(x, into), kernels.linear(x, steps)
        a, b = ab.split_with_sizes((HEADS, HEADS), dim=1)
        widths = (CHANNELS, CHANNELS, HEADS, HEADS)
        kept_mixed, *kept = states.kept.split_with_sizes(widths, dim=1)
        convolved = kernels.empty(*mixed.shape, like=mixed)
        short_conv(kernels, mixed, kept_mixed, taps, bias, states.conv, batch.states, True, convolved)
        delta, mamba, normed = (kernels.empty(len(x), HEADS * COLUMNS, like=x) for _ in range(3))
        gated_delta(
            kernels, convolved, a, b, *kept, decay, dt_bias, states.delta, batch.states, KEY_HEADS, False, delta
        )  # fmt: skip
        mamba2(
            kernels, convolved, a, *kept[:2], dt_bias, decay, skip, 0.0, 9.0, states.mamba, batch.states, 1, mamba
        )  # fmt: skip
        keep_rows(kernels, mixed, convolved, ab, states.kept, batch.states)
        gated_norm(kernels, delta, mamba, weight, 1e-6, COLUMNS, False, normed)
        return normed if batch.outputs is None else kernels.take_rows(normed, batch.outputs.rows)

    return forward


def make_step(lengths, read, write, saved, replayed, num_kept, generator):
    """Return token ids and batch of a step. It keeps the last num_kept[i] rows of sequence i."""
    ids, batch = step_of(lengths, generator, [0] * len(lengths))
    ends = list(accumulate(lengths))
    counts = [len(kept) + length for kept, length in zip(replayed, lengths, strict=True)]
    sources, keep_from = [], []
    for kept, length, count, end in zip(replayed, lengths, num_kept, ends, strict=True):
        sources += [*(-1 - row for row in kept), *range(end - length, end)]
        keep_from += range(end - count, end)
    states = replace(
        state_batch(counts, read, write, saved),
        sources=int32(sources),
        write_rows=int32(count - kept for count, kept in zip(counts, num_kept, strict=True)),
        keep_from=int32(keep_from),
        keep_to=int32(range(len(keep_from))),
    )
    return ids, replace(batch, states=states)


def test_recorded_forward_has_bits_and_states_of_model_code(compiled, generator):
    forward, recorded = make_layers(compiled, generator), States.random(generator)
    plain = recorded.clone()
    with torch.inference_mode():
        ids, batch = make_step([4, 2], [0, -1], [1, 2], [(1, 3)], [[5], [4]], [1, 0], generator)
        first, again = compiled.record_forward(lambda ids, batch: forward(ids, batch, recorded), ids, batch, MAX_TOKENS)
        assert torch.equal(first, forward(ids, batch, plain))
        assert again.calls[3:] == ("short_conv", "gated_delta", "mamba2", "keep_rows", "gated_norm", "take_rows")
        for lengths, *slots in STEPS:
            ids, batch = make_step(lengths, *slots, generator)
            outputs = with_outputs(batch, [1] * len(lengths))
            before = plain.clone()
            assert torch.equal(again(ids, batch), forward(ids, batch, plain)), lengths
            for name in PARTS:
                assert torch.equal(getattr(recorded, name), getattr(plain, name)), (name, lengths)
                getattr(recorded, name).copy_(getattr(before, name))
            assert torch.equal(again(ids, outputs), forward(ids, outputs, before)), lengths


MISSING = [
    {"write_slots": int32([0, NUM_SLOTS])},
    {"sources": int32([-1 - NUM_KEPT, 1, 2, 3, 4, 5])},
    {"write_rows": int32([5, 1])},
    {"keep_from": int32([6]), "keep_to": int32([0])},
    {"keep_from": int32([0]), "keep_to": int32([NUM_KEPT])},
]


def test_step_without_states_is_refused(compiled, generator):
    forward, states = make_layers(compiled, generator), States.random(generator)
    with torch.inference_mode():
        ids, batch = make_step([4, 2], [0, 1], [0, 1], [], [[], []], [0, 0], generator)
        _, again = compiled.record_forward(lambda ids, batch: forward(ids, batch, states), ids, batch, MAX_TOKENS)
        before = states.clone()
        missing = [replace(batch, states=replace(batch.states, **change)) for change in MISSING]
        for wrong in (replace(batch, states=None), *missing):
            with pytest.raises(IndexError, match="rows or slots that do not exist"):
                again(ids, wrong)
        assert torch.equal(states.delta, before.delta)
        assert torch.equal(states.conv, before.conv)


OTHERS = {
    "slots": lambda batch: replace(batch, read_slots=batch.read_slots.clone()),
    "sources": lambda batch: replace(batch, sources=batch.sources.clone()),
    "rows to keep": lambda batch: replace(batch, keep_from=int32([1]), keep_to=int32([2])),
    "saved rows": lambda batch: replace(batch, saved_rows=int32([1]), saved_slots=int32([2])),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_batch_that_is_not_that_of_step_is_refused(change, compiled, generator):
    case = delta_case(1, 2, 16, 16)(6, torch.float32, generator)
    state, table = case.states(3), compiled.pack_linear(torch.randn(512, 32, generator=generator))
    ids, batch = make_step([4, 2], [0, 1], [0, 1], [], [[], []], [0, 0], generator)
    other = change(batch.states)

    def forward(ids, _batch):
        out = compiled.embedding(ids, table, torch.float32)
        case.call(compiled, *case.inputs, *case.inputs, state, other, out)
        return out

    with torch.inference_mode(), pytest.raises(ValueError, match="not the batch's"):
        compiled.record_forward(forward, ids, batch, MAX_TOKENS)


def test_states_of_output_rows_are_refused(compiled, generator):
    """Output rows are a part of a sequence's rows, so its state would be wrong in a later step."""
    table = compiled.pack_linear(torch.randn(512, CHANNELS, generator=generator))
    state, taps, none = torch.zeros(2, 3, CHANNELS), torch.zeros(4, CHANNELS), torch.zeros(0)

    def forward(ids, batch):
        x = compiled.take_rows(compiled.embedding(ids, table, torch.float32), batch.outputs.rows)
        out = compiled.empty(*x.shape, like=x)
        short_conv(compiled, x, x[:0], taps, none, state, batch.states, False, out)
        return out

    ids, batch = make_step([4, 2], [0, 1], [0, 1], [], [[], []], [0, 0], generator)
    with torch.inference_mode(), pytest.raises(ValueError, match="needs all rows"):
        compiled.record_forward(forward, ids, batch, MAX_TOKENS)
