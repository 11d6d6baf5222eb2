"""The messages between ranks, on any schedule and with faults."""

from __future__ import annotations

import pytest

from simulation.campaign import RunFile, run_seed
from simulation.ranks import FAULTS, draw_ranked, draw_ranked_recurrent, notices_fault


@pytest.mark.sweep(16)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_prepare_equal_inputs_on_random_schedules(seed):
    run = run_seed(f"ranks {seed}", 2500, 1, RunFile(None), draw_ranked)
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert totals.tokens > 500
    assert min(totals.preemptions, totals.hits) > 0


@pytest.mark.sweep(16)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_prepare_equal_states_on_random_schedules(seed):
    run = run_seed(f"recurrent ranks {seed}", 2500, 1, RunFile(None), draw_ranked_recurrent)
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert min(totals.preemptions, totals.state_saves, totals.state_hits) > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_rank_refuses_the_next_message_after_a_fault(fault):
    noticed = [notices_fault(f"{fault} {seed}", fault) for seed in range(12)]
    assert noticed.count(True) >= 10  # short worlds have no fault, or no later message
