"""Each test breaks an invariant of recurrent states on purpose: the check reports its number and no other."""

from __future__ import annotations

import pytest

from octavo.core import invariants


@pytest.fixture
def core(make_core):
    """A request of 21 tokens decodes in slot 0; its states after 4 and 20 tokens are saved."""
    core = make_core(num_state_slots=6, max_num_batched_tokens=30)
    core.add("runs", 21, max_tokens=20)
    core.step()
    assert group_of(core).cached_ids() == [1, 2]
    assert breaches(core) == []
    return core


@pytest.fixture
def saving(core):
    """The same request, while a step saves its state after 24 tokens in slot 3."""
    for _ in range(2):
        core.step()
    assert core.scheduler.schedule().state_saves == {"runs": [(24, 3)]}
    assert breaches(core) == []
    return core


def breaches(core):
    return [breach.invariant for breach in invariants.check(core.scheduler)]


def group_of(core):
    return core.scheduler.kv_cache_manager.states


def sequence_of(core):
    return core.scheduler.requests["runs"].sequence


def test_missing_slot_breaks_invariant_3(core):
    group_of(core).unpin(sequence_of(core).block_tables[1])
    sequence_of(core).block_tables[1].clear()
    assert breaches(core) == [3]
    assert invariants.check(core.scheduler)[0].message == "runs: 0 slots of states, 6 blocks"


def test_second_slot_breaks_invariant_3(core):
    sequence_of(core).block_tables[1].append(group_of(core)._take())
    assert breaches(core) == [3]


def test_slot_of_waiting_request_breaks_invariant_3(core):
    request = core.add("waits", 5)
    request.sequence.block_tables[1].append(group_of(core)._take())
    assert breaches(core) == [3]
    assert invariants.check(core.scheduler)[0].message == "waits: 1 slots of states, 0 blocks"


def test_slot_in_no_list_breaks_invariant_1(core):
    group_of(core)._free.pop()
    assert breaches(core) == [1]


def test_slot_that_is_free_and_cached_breaks_invariants_1_and_5(core):
    group_of(core)._free.append(1)
    assert breaches(core) == [1, 5]


@pytest.mark.parametrize("change", [1, -1])
def test_wrong_slot_reference_count_breaks_invariant_2(core, change):
    [slot] = sequence_of(core).block_tables[1]
    group_of(core)._num_holders[slot] += change
    assert set(breaches(core)) == ({2} if change > 0 else {1, 2})


def test_pending_save_holds_its_slot(saving):
    group_of(saving)._num_holders[3] += 1
    [breach] = invariants.check(saving.scheduler)
    assert (breach.invariant, breach.block_ids, breach.group) == (2, (3,), 1)
    group_of(saving)._num_holders[3] -= 2
    assert set(breaches(saving)) == {1, 2}


def test_lost_pending_save_breaks_invariant_2(saving):
    sequence_of(saving).saves.pending.clear()
    assert breaches(saving) == [2]


@pytest.mark.parametrize(("num_tokens", "is_late"), [(24, False), (23, True)])
def test_pending_save_after_known_tokens_breaks_invariant_3(saving, num_tokens, is_late):
    request = saving.scheduler.requests["runs"]
    assert (len(request.sequence.token_ids), request.num_computed_tokens) == (24, 23)
    del request.sequence.token_ids[num_tokens:]
    request.num_computed_tokens = 22
    assert breaches(saving) == ([3] if is_late else [])


def test_unordered_pending_saves_break_invariant_3(saving):
    sequence_of(saving).saves.pending[5] = group_of(saving)._take()
    [breach] = invariants.check(saving.scheduler)
    assert (breach.invariant, breach.message) == (3, "runs: states after blocks [6, 5] are being saved")


def test_drafts_count_as_known_tokens(saving):
    sequence_of(saving).saves.pending[7] = group_of(saving)._take()
    assert breaches(saving) == [3]
    saving.scheduler.requests["runs"].spec_token_ids = [1] * 4
    assert breaches(saving) == []


def test_checkpoint_mapped_to_wrong_block_breaks_invariant_5(core):
    group = group_of(core)
    group._id_of[group.block_of(1)] = 2
    assert set(breaches(core)) == {5}


def test_cached_slot_without_block_breaks_invariant_5(core):
    group_of(core)._separate(1)
    assert breaches(core) == [5]


def test_cached_slot_of_unfindable_block_breaks_invariant_5(core):
    group, pool = group_of(core), core.scheduler.kv_cache_manager.pool
    block = pool.blocks[sequence_of(core).block_table[5]]  # not full yet
    group._separate(1)
    group._join(block.block_id, 1)
    assert breaches(core) == [5]


def test_free_slot_with_block_breaks_invariant_5(core):
    group = group_of(core)
    group._join(sequence_of(core).block_table[3], group._free[-1])
    assert breaches(core) == [5]


def test_windows_and_states_keep_invariants_together(make_core):
    core = make_core(num_state_slots=3, num_window_blocks=12, window=6, max_num_batched_tokens=8)
    core.add("runs", 21, max_tokens=20)
    while core.scheduler.has_work():
        core.step()
        assert breaches(core) == []
    assert core.finished == {"runs": "length"}


def test_host_slot_in_no_list_breaks_invariant_1(core):
    host = core.scheduler.kv_cache_manager.checkpoints.host
    host.num_slots += 1
    assert breaches(core) == [1]
    assert "host slots of states in no list or in several lists: []" in invariants.check(core.scheduler)[0].message


def test_host_slot_in_two_lists_breaks_invariant_1(core):
    host = core.scheduler.kv_cache_manager.checkpoints.host
    host.num_slots += 1
    host.release(0)
    host.release(0)
    assert breaches(core) == [1]
