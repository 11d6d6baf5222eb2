"""Results and states have equal bits in whatever pieces a sequence is computed, and only named slots change."""

from dataclasses import replace

import pytest
import torch
from kernel_backends import ISAS, compiled_kernels
from state_cases import STATE_CASES, have_same_states, int32, state_batch

from octavo.kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_ROWS, NUM_SLOTS = 40, 7


@pytest.fixture(params=STATE_CASES)
def make(request):
    return STATE_CASES[request.param]


def advance_in_pieces(case, kernels, state, lengths, read_slot=2):
    """Advance slot 2 of `state` by pieces of a sequence, and return the results of all rows.

    read_slot: of the first piece.
    """
    results, first = [], 0
    for length in lengths:
        batch = state_batch([length], [2 if first else read_slot], [2])
        results.append(case.advance(kernels, slice(first, first + length), state, batch))
        first += length
    return torch.cat(results)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_two_pieces_have_bits_of_whole_sequence(make, dtype, compiled, generator):
    case = make(NUM_ROWS, dtype, generator)
    before = case.states(NUM_SLOTS)
    state = before.clone()
    whole = advance_in_pieces(case, compiled, state, [NUM_ROWS])
    assert torch.equal(state[[0, 1, 3, 4, 5, 6]], before[[0, 1, 3, 4, 5, 6]])
    assert not torch.equal(state[2], before[2])
    for lengths in [[1] * NUM_ROWS, *([first, NUM_ROWS - first] for first in range(1, NUM_ROWS))]:
        again = before.clone()
        assert torch.equal(advance_in_pieces(case, compiled, again, lengths), whole), lengths
        assert torch.equal(again, state), lengths


@pytest.mark.parametrize("isa", ISAS)
def test_pieces_of_long_sequence_have_bits_of_whole_for_any_threads(make, isa, generator):
    """Tasks prepare 64 rows at a time, and more threads divide a head's columns."""
    num_rows = 150
    case = make(num_rows, torch.float32, generator)
    before = case.states(NUM_SLOTS)
    state = before.clone()
    whole = advance_in_pieces(case, compiled_kernels(isa, 1), state, [num_rows], read_slot=0)
    for num_threads in (1, 2, 5):
        kernels = compiled_kernels(isa, num_threads)
        for lengths in ([150], [1, 149], [63, 87], [64, 86], [65, 85], [100, 50], [30, 30, 90]):
            again = before.clone()
            found = advance_in_pieces(case, kernels, again, lengths, read_slot=0)
            assert torch.equal(found, whole), (num_threads, lengths)
            assert torch.equal(again, state), (num_threads, lengths)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sequence_has_equal_bits_among_other_sequences(make, dtype, compiled, generator):
    case = make(NUM_ROWS, dtype, generator)
    before = case.states(NUM_SLOTS)
    lengths, read, write = [3, 20, 1, 0, 16], [0, 1, 0, 2, -1], [5, 1, 3, 4, 6]
    state = before.clone()
    together = case.advance(compiled, slice(None), state, state_batch(lengths, read, write))
    first = 0
    for length, source, target in zip(lengths, read, write, strict=True):
        alone = before.clone()
        result = case.advance(compiled, slice(first, first + length), alone, state_batch([length], [source], [target]))
        assert torch.equal(together[first : first + length], result)
        assert torch.equal(state[target], alone[target])
        first += length
    assert torch.equal(state[[0, 2]], before[[0, 2]])
    assert torch.equal(state[4], before[2])  # a sequence without rows writes the state that it reads


def test_saved_states_are_those_of_prefixes(make, kernels, generator):
    """The sequence of 30 rows saves states after its rows 0, 1, 6 (twice) and 29."""
    case = make(NUM_ROWS, torch.float32, generator)
    before = case.states(12)
    saved = [(4, 5), (10, 6), (11, 7), (16, 8), (16, 9), (39, 10)]
    state = before.clone()
    batch = state_batch([10, 30], [0, 1], [2, 1], saved)
    result = case.advance(kernels, slice(None), state, batch)
    unsaved = before.clone()
    assert torch.equal(case.advance(kernels, slice(None), unsaved, state_batch([10, 30], [0, 1], [2, 1])), result)
    assert torch.equal(state[[0, 1, 2, 3, 4, 11]], unsaved[[0, 1, 2, 3, 4, 11]])
    for row, slot in saved:
        first, source = (0, 0) if row < 10 else (10, 1)
        prefix = before.clone()
        case.advance(kernels, slice(first, row + 1), prefix, state_batch([row + 1 - first], [source], [3]))
        assert have_same_states(kernels, state[slot], prefix[3]), row
    assert torch.equal(state[10], state[1])


def test_saved_slot_may_be_slot_that_was_read(make, kernels, generator):
    case = make(NUM_ROWS, torch.float32, generator)
    before = case.states(3)
    state, expected = before.clone(), before.clone()
    batch = state_batch([NUM_ROWS], [0], [1], [(0, 0), (2, 2)])
    result = case.advance(kernels, slice(None), state, batch)
    apart = state_batch([NUM_ROWS], [0], [1], [(2, 2)])
    assert torch.equal(case.advance(kernels, slice(None), expected, apart), result)
    assert torch.equal(state[1:], expected[1:])
    case.advance(kernels, slice(1), expected, state_batch([1], [0], [0]))
    assert torch.equal(state, expected)


def test_slot_minus_one_reads_zeros_and_writes_nothing(make, kernels, generator):
    case = make(NUM_ROWS, torch.float32, generator)
    before = case.states(NUM_SLOTS)
    before[3] = 0
    state = before.clone()
    dropped = case.advance(kernels, slice(None), state, state_batch([8, 32], [-1, 5], [-1, -1], [(20, 4)]))
    assert torch.equal(state[[0, 1, 2, 3, 5, 6]], before[[0, 1, 2, 3, 5, 6]])
    kept = before.clone()
    assert torch.equal(case.advance(kernels, slice(None), kept, state_batch([8, 32], [3, 5], [3, 5])), dropped)
    case.advance(kernels, slice(8, 21), before, state_batch([13], [5], [5]))
    assert have_same_states(kernels, state[4], before[5])


def test_slots_may_be_apart_in_memory(make, compiled, generator):
    case = make(NUM_ROWS, torch.float32, generator)
    state = case.states(NUM_SLOTS)
    memory = torch.full((NUM_SLOTS, state[0].numel() + 24), 9.0)
    apart = memory[:, : state[0].numel()].view(state.shape)
    apart.copy_(state)
    batch = state_batch([15, 25], [1, 2], [1, 3], [(7, 4)])
    assert torch.equal(
        case.advance(compiled, slice(None), apart, batch), case.advance(compiled, slice(None), state, batch)
    )
    assert torch.equal(apart, state)
    assert bool((memory[:, state[0].numel() :] == 9).all())


INVALID = {
    "read slot": state_batch([40], [7], [0]),
    "negative read slot": state_batch([40], [-2], [0]),
    "write slot": state_batch([40], [0], [7]),
    "saved slot": state_batch([40], [0], [0], [(3, 7)]),
    "negative saved slot": state_batch([40], [0], [0], [(3, -1)]),
    "saved row": state_batch([40], [0], [0], [(40, 1)]),
    "order of saved rows": state_batch([40], [0], [0], [(4, 1), (3, 2)]),
    "too many rows": state_batch([41], [0], [0]),
    "descending rows": replace(state_batch([20, 20], [0, 1], [0, 1]), query_start=int32([0, 50, 40])),
    "number of sources": replace(state_batch([40], [0], [0]), sources=int32(range(39))),
    "source": replace(state_batch([40], [0], [0]), sources=int32(range(1, 41))),
    "kept source": replace(state_batch([40], [0], [0]), sources=int32(range(-4, 36))),
    "too many written rows": replace(state_batch([20, 20], [0, 1], [0, 1]), write_rows=int32([21, 19])),
    "negative written rows": replace(state_batch([40], [0], [0]), write_rows=int32([-1])),
    "row to keep": replace(state_batch([40], [0], [0]), keep_from=int32([40]), keep_to=int32([0])),
    "negative row to keep": replace(state_batch([40], [0], [0]), keep_from=int32([-1]), keep_to=int32([0])),
    "kept row": replace(state_batch([40], [0], [0]), keep_from=int32([0]), keep_to=int32([3])),
    "negative kept row": replace(state_batch([40], [0], [0]), keep_from=int32([0]), keep_to=int32([-1])),
}


@pytest.mark.parametrize("batch", INVALID.values(), ids=INVALID)
def test_batch_of_missing_rows_or_slots_is_refused(make, batch, generator):
    case = make(NUM_ROWS, torch.float32, generator)
    before = case.states(NUM_SLOTS)
    state = before.clone()
    with pytest.raises(IndexError, match="rows or slots that do not exist"):
        case.advance(compiled_kernels("portable"), slice(None), state, batch, case.no_kept_rows(3))
    assert torch.equal(state, before)


def test_rows_after_last_sequence_are_not_written(make, kernels, generator):
    case = make(NUM_ROWS, torch.float32, generator)
    result = case.advance(kernels, slice(None), case.states(2), state_batch([30], [0], [0]))
    assert bool((result[30:] == 7).all())
    assert not bool((result[:30] == 7).any())


def test_instruction_sets_with_fused_operations_give_equal_bits(make, generator):
    """The order of sums is that of vec.h's lanes. On x86, the portable kernels round products before sums."""
    case = make(NUM_ROWS, torch.float32, generator)
    before, batch = case.states(2), state_batch([NUM_ROWS], [0], [1])
    results, states = [], []
    for isa in ISAS:
        if isa == "portable":
            continue
        states.append(before.clone())
        results.append(case.advance(compiled_kernels(isa), slice(None), states[-1], batch))
    assert all(torch.equal(each, results[0]) for each in results)
    assert all(torch.equal(each, states[0]) for each in states)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_narrow_result_is_rounded_float32_result(make, dtype, compiled, generator):
    case = make(NUM_ROWS, dtype, generator)
    wide = replace(case, inputs=tuple(each.float() for each in case.inputs))
    state, batch = case.states(2), state_batch([NUM_ROWS], [0], [1])
    wide_state = state.float()
    assert torch.equal(
        case.advance(compiled, slice(None), state, batch),
        wide.advance(compiled, slice(None), wide_state, batch).to(dtype),
    )
    assert torch.equal(state.float(), wide_state)


def test_plain_torch_is_the_backend_without_kernels(make, generator, monkeypatch):
    case = make(NUM_ROWS, torch.float32, generator)
    kernels, state, batch = compiled_kernels("portable"), case.states(2), state_batch([NUM_ROWS], [0], [1])
    monkeypatch.setattr(kernels, "_calls", object())
    plain = state.clone()
    result = case.advance(kernels, slice(None), state, batch)
    assert torch.equal(result, case.advance(ReferenceKernels(), slice(None), plain, batch))
    assert torch.equal(state, plain)
