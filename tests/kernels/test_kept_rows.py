"""Steps with rows that are rejected later give the bits of a pass over the right rows alone."""

import random

import pytest
import torch
from kept_schedules import KEPT, SLOTS, Schedule, step_of_pieces
from kernel_backends import ISAS, compiled_kernels
from state_cases import STATE_CASES, int32, state_batch

from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.state_batch import StateBatch

DTYPES = [torch.float32, torch.bfloat16]
NUM_WRONG = 10


@pytest.fixture(params=STATE_CASES)
def make(request):
    return STATE_CASES[request.param]


def plain_pass(case, kernels, state, first, num_rows, read_slot):
    """Return the results of rows, and the states after 0 .. num_rows of them."""
    memory = torch.cat([state.new_zeros(1, *state.shape[1:]), state, state.new_zeros(num_rows, *state.shape[1:])])
    before = len(state) + 1
    batch = state_batch([num_rows], [read_slot + 1], [-1], [(row, before + row) for row in range(num_rows)])
    results = case.advance(kernels, slice(first, first + num_rows), memory, batch)
    return results, torch.cat([memory[read_slot + 1 :][:1], memory[before:]])


def are_same(kernels, found, expected):
    """Return True if tensors are equal, or differ by a rounding in plain torch, whose roundings depend on the batch."""
    tolerance = 0.0 if kernels.name != "reference" else max(1e-5, torch.finfo(found.dtype).eps)
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def apart(states):
    """Return a copy of states with gaps between the slots."""
    memory = torch.full((len(states), states[0].numel() + 16), 9.0, dtype=states.dtype)
    return memory[:, :-16].view(states.shape).copy_(states)


def find_differences(case, kernels, lengths, most_rows, seed):
    """Advance sequences of these lengths by a random schedule. Return what differs from passes over each alone."""
    draw, wrong = random.Random(seed), range(sum(lengths), sum(lengths) + NUM_WRONG)
    before = case.states(SLOTS * len(lengths))
    state, kept = apart(before), case.no_kept_rows(KEPT * len(lengths))
    firsts = [sum(lengths[:index]) for index in range(len(lengths))]
    schedules, expected, differences = [], [], []
    for index, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        schedules.append(Schedule(index, first, length, wrong, draw, begins_at_zero=index % 2 == 1))
        read_slot = -1 if index % 2 else index * SLOTS
        expected.append(plain_pass(case, kernels, before, first, length, read_slot))
    for step in range(1000):
        active = [each for each in schedules if not each.is_done]
        if not active:
            return differences
        pieces = [each.next_piece(most_rows) for each in active]
        rows, batch, of_step = step_of_pieces(pieces, draw)
        found = case.advance(kernels, rows, state, batch, kept)
        case.keep(kernels, rows, kept, batch)
        for schedule, piece, places in zip(active, pieces, of_step, strict=True):
            results, states = expected[schedule.index]
            for row, place in enumerate(places[: piece.num_right]):
                if place is not None and not are_same(kernels, found[place], results[piece.first + row]):
                    differences.append((step, schedule.index, "row", row))
            for count, slot in [*piece.saved, (piece.write_rows, piece.write)]:
                if not are_same(kernels, state[slot], states[piece.first + count]):
                    differences.append((step, schedule.index, "slot", slot))
    raise TimeoutError


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rejected_rows_leave_no_trace_in_one_sequence(make, dtype, kernels, generator):
    case = make(30 + NUM_WRONG, dtype, generator)
    for seed in range(4):
        assert not find_differences(case, kernels, [30], 5, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rejected_rows_leave_no_trace_in_batches(make, dtype, kernels, generator):
    case = make(45 + NUM_WRONG, dtype, generator)
    for seed in range(2):
        assert not find_differences(case, kernels, [20, 5, 13, 7], 4, seed)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("isa", ISAS)
def test_rejected_rows_leave_no_trace_in_long_pieces(make, isa, num_threads, generator):
    """Tasks prepare 64 rows at a time."""
    case = make(250 + NUM_WRONG, torch.float32, generator)
    for seed in range(2):
        assert not find_differences(case, compiled_kernels(isa, num_threads), [150, 100], 90, seed)


@pytest.mark.parametrize("read", [-1, 0, 1])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_state_without_written_rows_is_that_which_was_read(make, num_rows, read, kernels, generator):
    case = make(3, torch.float32, generator)
    before = case.states(3)
    state = before.clone()
    batch = StateBatch(*map(int32, ([0, num_rows], range(num_rows), [read], [1], [0], [], [], [], [])))
    case.advance(kernels, slice(num_rows), state, batch)
    assert torch.equal(state[1], before[read] if read >= 0 else torch.zeros_like(before[0]))
    assert torch.equal(state[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("widths", [(5, 0, 3), (0, 0, 1), (70, 33, 0), (0, 0, 0)], ids=str)
def test_rows_are_kept_side_by_side(widths, dtype, kernels, generator):
    parts = [torch.randn(6, width + 2, generator=generator).to(dtype)[:, 2:] for width in widths]
    memory = torch.randn(5, sum(widths) + 3, generator=generator).to(dtype)
    expected, kept = memory.clone(), memory[:, 1:-2]
    expected[[3, 0], 1:-2] = torch.cat([part[[5, 2]] for part in parts], dim=1)
    batch = StateBatch(*map(int32, ([0], [], [], [], [], [], [], [5, 2], [3, 0])))
    keep_rows(kernels, *parts, kept, batch)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize(("row", "place"), [(4, 0), (-1, 0), (0, 3), (0, -1)])
def test_missing_rows_are_not_kept(row, place):
    batch = StateBatch(*map(int32, ([0], [], [], [], [], [], [], [0, row], [2, place])))
    kept = torch.zeros(3, 6)
    with pytest.raises(IndexError, match="rows or slots that do not exist"):
        keep_rows(compiled_kernels("portable"), torch.ones(4, 1), torch.ones(4, 2), torch.ones(4, 3), kept, batch)
    assert not kept.any()


@pytest.mark.parametrize(
    ("index", "tensor"),
    [
        (0, torch.zeros(4, 2)),
        (1, torch.zeros(3, 2)),
        (2, torch.zeros(4, 3, dtype=torch.bfloat16)),
        (3, torch.zeros(3, 5)),
        (3, torch.zeros(6, 3).t()),
    ],
)
def test_tensors_that_do_not_fit_are_not_kept(index, tensor):
    tensors = [torch.zeros(4, 1), torch.zeros(4, 2), torch.zeros(4, 3), torch.zeros(3, 6)]
    tensors[index] = tensor
    with pytest.raises(ValueError, match=r"another (shape|dtype)"):
        keep_rows(compiled_kernels("portable"), *tensors, state_batch([4], [-1], [-1]))
