"""The simulation detects known faults of workers and cores with recurrent states, each injected on purpose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from octavo.core.kv.manager import KVCacheManager
from simulation.hash_model import HashWorker, next_state
from simulation.world import SimulationError, Totals, draw_recurrent, run_world

NUM_WORLDS = 40


def run_worlds() -> Totals:
    """Run worlds with few recurring texts and many states."""
    totals = Totals()
    for index in range(NUM_WORLDS):
        config = draw_recurrent(random.Random(index), 300)
        config = replace(config, num_blocks=40, block_size=2, checkpoint_interval=(None, 2, 6)[index % 3])
        config = replace(config, enable_prefix_caching=True, cache_decoded_blocks=True, hash_bits=None, window=0)
        config = replace(config, longest_prompt=12, longest_output=8, short_prompt_rate=0.0, span_rate=0.0)
        config = replace(config, max_num_waiting=None, max_num_waiting_tokens=None, mixed_step_ms=None)
        config = replace(config, num_spare_states=(2, 12)[index % 2], postpone_rate=0.1, step_failure_rate=0.015)
        config = replace(config, eviction_rate=0.0, preempt_rate=0.0, abort_rate=0.05, arrival_rate=0.8)
        config = replace(config, max_drafts=(0, 4)[index % 2], draft_rate=1.0, draft_error=0.5)
        totals.add(run_world(f"states:{index}", config))
    return totals


def of_worker(name):
    """Make a function a patch that replaces a method of the worker. The function gets the method as first argument."""

    def decorate(function):
        def patch(monkeypatch: pytest.MonkeyPatch) -> None:
            original = getattr(HashWorker, name)
            faulty = type("FaultyWorker", (HashWorker,), {name: lambda *args: function(original, *args)})
            monkeypatch.setattr("simulation.world.HashWorker", faulty)

        return patch

    return decorate


@of_worker("_copy")
def stale_state(original, self, scheduled):
    """A request starts with the old content of its slot instead of a copy of the checkpoint."""
    copies = scheduled.copies
    kept = [each for each in copies.block_copies if each[0] != len(self.memory) - 1]
    original(self, replace(scheduled, copies=replace(copies, block_copies=kept)))


@of_worker("_write_states")
def earlier_checkpoint(original, self, row, num_certain, saves):
    """A checkpoint has the state of an earlier token."""
    original(self, row, num_certain, [(num_tokens - 1, slot) for num_tokens, slot in saves])


@of_worker("_write_states")
def lost_checkpoint(original, self, row, num_certain, saves):
    """States are not saved: slots keep what they had."""
    original(self, row, num_certain, [])


def absorb(worker, row, start):
    """Make the stored state include all kept rows, as if it were the state before `start`."""
    worker.memory[-1][row.tables[-1][0]][0] = worker._states(row)[-1]
    row.kept, row.num_in_state = [], start


@of_worker("_drop_rows")
def twice_after_postponed(original, self, row, start):
    """The last known token, whose next token was postponed, is applied twice."""
    if row.kept and start == row.num_in_state:
        absorb(self, row, start)
    original(self, row, start)


@of_worker("_drop_rows")
def kept_drafts(original, self, row, start):
    """Rejected drafts stay in the state."""
    if len(row.kept) > start - row.num_in_state > 0:
        absorb(self, row, start)
    original(self, row, start)


@of_worker("_states")
def not_cleared(original, self, row):
    """A new request starts with the state of the slot's earlier owner."""
    states = original(self, row)
    if not row.num_in_state:
        states = [self.memory[-1][row.tables[-1][0]][0]]
        for position, (content, token, identity) in enumerate(row.kept):
            states.append(next_state(states[-1], content, token, position, identity))
    return states


def believed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saves of a request that ends become findable, though their steps may have failed."""
    release = KVCacheManager.release

    def hasty(self, request):
        cache, pending = self.prefix_cache, request.sequence.saves.pending
        found = cache._find_from(request, 0, None, self.pool.find) if pending else []
        for border in [border for border in pending if border <= len(found)]:
            block = found[border - 1]
            if self.states.id_of(block) is None:
                slot = pending.pop(border)
                self.states._join(block.block_id, slot)
                self.states._drop_holder(slot)
        release(self, request)

    monkeypatch.setattr(KVCacheManager, "release", hasty)


@pytest.mark.turn(12)
def test_recurrent_worlds_without_injected_fault_pass():
    totals = run_worlds()
    assert min(totals.state_hits, totals.postponed, totals.drafted - totals.accepted) > 200


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "fault",
    [
        stale_state,
        earlier_checkpoint,
        lost_checkpoint,
        twice_after_postponed,
        kept_drafts,
        not_cleared,
        believed_step,
    ],
    ids=[
        "a stale state",
        "a checkpoint of an earlier token",
        "a checkpoint that was not saved",
        "a token applied twice",
        "rejected drafts in the state",
        "the state of another request",
        "a failed step is believed",
    ],
)
def test_injected_fault_of_states_gives_wrong_token(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(SimulationError, match="wrong token"):
        run_worlds()
