"""Events say what ended a prefix hit, how many cached tokens are computed again, and how state slots are used."""

from __future__ import annotations

import pytest

from octavo.data import events
from octavo.data.events import HitLimit
from octavo.data.metrics import EngineMetrics
from octavo.data.state_slots import StateSlots


def limits(core):
    queries = core.log.of_type(events.PrefixCacheQueried)
    return [(each.num_hit_tokens, each.limit, each.num_unusable_tokens) for each in queries]


def counted(core):
    metrics = EngineMetrics()
    for event in core.log.events:
        metrics.emit(event)
    return metrics.stats


def ask(core, *prompts, **options):
    for index, prompt in enumerate(prompts):
        core.add(f"{len(core.log.events)}-{index}", list(prompt), max_tokens=1, **options)
        core.run()


def test_hit_ends_at_first_block_that_is_not_cached(make_core):
    core = make_core()
    ask(core, range(40), [*range(20), *range(100, 120)], range(40), range(39), range(3), [*range(40), 7])
    assert limits(core) == [
        (0, HitLimit.BLOCKS, 0),
        (20, HitLimit.BLOCKS, 0),
        (39, None, 0),
        (36, None, 0),
        (0, HitLimit.BLOCKS, 0),
        (40, None, 0),
    ]
    assert counted(core).prefix_cache_unusable == {"window": 0, "checkpoint": 0}


@pytest.mark.parametrize(
    ("interval", "expected"), [(None, (20, HitLimit.BLOCKS, 0)), (8, (16, HitLimit.CHECKPOINT, 4))]
)
def test_hit_ends_at_last_saved_state(make_core, interval, expected):
    core = make_core(num_state_slots=20, state_checkpoint_interval=interval)
    ask(core, range(40), [*range(22), *range(100, 105)])
    assert limits(core) == [(0, HitLimit.BLOCKS, 0), expected]
    assert counted(core).prefix_cache_unusable == {"window": 0, "checkpoint": expected[2]}


def test_no_saved_state_makes_all_cached_blocks_unusable(make_core):
    core = make_core(num_state_slots=20)
    ask(core, range(40), [*range(11), *range(100, 110)])
    assert limits(core)[-1] == (0, HitLimit.CHECKPOINT, 8)


def test_state_after_whole_prompt_is_no_limit(make_core):
    """The last token is computed for its logits, so the last state of use is at the end of the previous block."""
    core = make_core(num_state_slots=20)
    ask(core, range(40), range(40))
    assert limits(core)[-1] == (36, None, 0)


def test_missing_window_blocks_shorten_a_hit(make_core):
    core = make_core(window=8, num_window_blocks=12, max_num_batched_tokens=8, max_num_seqs=1)
    ask(core, range(60), range(100, 160), [*range(40), 7])
    assert limits(core)[-1] == (0, HitLimit.WINDOW, 40)
    assert counted(core).prefix_cache_unusable == {"window": 40, "checkpoint": 0}


def test_limit_of_windows_and_states_is_the_missing_state_if_the_windows_reach_farther(make_core):
    core = make_core(window=8, num_window_blocks=40, num_state_slots=20)
    ask(core, range(40), [*range(30), 7])
    assert limits(core)[-1] == (20, HitLimit.CHECKPOINT, 8)
    core = make_core(window=8, num_window_blocks=12, num_state_slots=20, max_num_batched_tokens=8, max_num_seqs=1)
    ask(core, range(60), range(100, 160), [*range(60), 7], [*range(44), 7])
    assert limits(core)[-1][1] is HitLimit.WINDOW


def test_prefix_in_host_memory_without_state_is_unusable(make_core):
    core = make_core(num_blocks=14, num_host_blocks=40, num_state_slots=2, max_num_seqs=1)
    ask(core, range(40), range(100, 150), [*range(30), 7])
    assert limits(core)[-1] == (0, HitLimit.CHECKPOINT, 28)


def test_swapped_out_request_is_queried_once(make_core):
    core = make_core(num_state_slots=4)
    core.add("a", 9, max_tokens=9)
    core.step()
    core.scheduler.faults.preempt(["a"])
    core.run()
    assert len(limits(core)) == 1


def test_slots_are_running_saved_or_free(make_core):
    core = make_core(num_state_slots=20)
    core.add("a", list(range(40)), max_tokens=3)
    core.add("b", list(range(100, 110)), max_tokens=1)
    core.step()
    group = core.scheduler.kv_cache_manager.states
    assert group.slots == StateSlots(1, 4, 15)
    core.run()
    assert [each.state_slots for each in core.log.of_type(events.StepCompleted)] == [(1, 4, 15), (1, 4, 15), (0, 4, 16)]
    stats = counted(core)
    assert (stats.state_slots, stats.num_saved_checkpoints, stats.num_evicted_checkpoints) == ((0, 4, 16), 4, 0)


def test_evicted_checkpoints_are_counted(make_core):
    core = make_core(num_state_slots=3, max_num_seqs=1)
    ask(core, range(40), range(100, 140), range(200, 240))
    stats = counted(core)
    assert stats.num_evicted_checkpoints == stats.num_saved_checkpoints - 2 > 0
    assert stats.state_slots == (0, 2, 1)


def test_quarantined_slots_are_in_no_use(make_core):
    core = make_core(num_state_slots=9)
    core.scheduler.kv_cache_manager.states.quarantine(4)
    assert core.scheduler.kv_cache_manager.states.slots == (0, 0, 8)


def test_slots_of_an_aborted_request_become_free_in_the_figures(make_core):
    core = make_core(num_state_slots=9)
    core.add("a", list(range(10)), max_tokens=9)
    core.step()
    core.scheduler.abort_request("a")
    assert counted(core).state_slots == core.scheduler.kv_cache_manager.states.slots == (0, 1, 8)


def test_models_without_recurrent_layers_have_no_slots(make_core):
    core = make_core()
    ask(core, range(10))
    assert {each.state_slots for each in core.log.of_type(events.StepCompleted)} == {None}
    assert counted(core).state_slots is None
