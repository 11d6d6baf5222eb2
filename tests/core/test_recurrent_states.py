"""The core with recurrent states: the examples of docs/hybrid.md, and conversations."""

from __future__ import annotations

import itertools

import pytest

from octavo.core import invariants
from octavo.data import events

FIRST = list(range(1000, 1150))
TWIN_AT_140 = [*FIRST[:140], *[1] * 10]
TWIN_AT_60 = [*FIRST[:60], *[2] * 90]
FOURTH = [*TWIN_AT_60[:48], *[3] * 102]


def steps_of(core, name, prompt):
    """Run a request alone until its first token; return for each step its first and last computed token, the copies of
    states and the saves.
    """
    request, steps = core.add(name, prompt, max_tokens=1), []
    while not request.is_finished:
        scheduled = core.step()
        [new] = scheduled.scheduled_new_reqs or [None]
        first = new.num_computed_tokens if new else scheduled.scheduled_cached_reqs.num_computed_tokens[0]
        copies = [(source, target) for group, source, target in scheduled.copies.block_copies if group == 1]
        assert len(copies) == len(scheduled.copies.block_copies)
        steps.append(
            ((first, first + scheduled.num_scheduled_tokens[name]), copies, scheduled.state_saves.get(name, []))
        )
    assert invariants.check(core.scheduler) == []
    return steps


@pytest.fixture
def make_hybrid(make_core):
    """Blocks of 16 tokens, steps of at most 100 tokens, and 20 slots."""

    def make(**options):
        return make_core(**{"block_size": 16, "num_state_slots": 20, "max_num_batched_tokens": 100, **options})

    return make


def test_prompts_that_differ_late_and_early_with_interval(make_hybrid):
    core = make_hybrid(state_checkpoint_interval=64)
    assert steps_of(core, "first", FIRST) == [
        ((0, 100), [], [(64, 1)]),
        ((100, 150), [], [(128, 2), (144, 3)]),
    ]
    assert steps_of(core, "twin at 140", TWIN_AT_140) == [((128, 150), [(2, 0)], [(144, 4)])]
    assert steps_of(core, "twin at 60", TWIN_AT_60) == [
        ((0, 100), [], [(48, 5), (64, 6)]),
        ((100, 150), [], [(128, 7), (144, 8)]),
    ]
    assert steps_of(core, "fourth", FOURTH) == [
        ((48, 148), [(5, 0)], [(64, 9), (128, 10), (144, 11)]),
        ((148, 150), [], []),
    ]
    queries = core.log.of_type(events.PrefixCacheQueried)
    assert [(each.num_hit_tokens, each.miss, each.position) for each in queries] == [
        (0, "never seen", None),
        (128, "different token", 140),
        (0, "no state was saved there", None),
        (48, "never seen", None),
    ]


def test_prompts_that_differ_late_and_early_with_growing_distances(make_hybrid):
    core = make_hybrid()
    assert steps_of(core, "first", FIRST) == [
        ((0, 100), [], [(80, 1)]),
        ((100, 150), [], [(144, 2)]),
    ]
    assert steps_of(core, "twin at 140", TWIN_AT_140) == [((80, 150), [(1, 0)], [(128, 3), (144, 4)])]
    assert steps_of(core, "twin at 60", TWIN_AT_60) == [
        ((0, 100), [], [(48, 5), (80, 6)]),
        ((100, 150), [], [(144, 7)]),
    ]
    assert steps_of(core, "fourth", FOURTH) == [
        ((48, 148), [(5, 0)], [(80, 8), (144, 9)]),
        ((148, 150), [], []),
    ]
    again = [*TWIN_AT_140[:140], *[4] * 10]
    assert steps_of(core, "third twin at 140", again) == [((128, 150), [(3, 0)], [(144, 10)])]


def talk(core, *, has_points):
    """Have a conversation of 20 turns; return for each turn the number of computed tokens of its prompt, and the number
    of tokens after the last token that an earlier prompt also had.

    The template ends a prompt with six tokens that begin the reasoning. Later prompts have the first two of them, and
    the answer, but not the reasoning.
    """
    ids, history, previous, turns = itertools.count(100), [], [], []
    for turn in range(20):
        name, user = f"turn {turn}", list(itertools.islice(ids, 5 + 37 * turn % 90))
        reasoning, answer = (
            list(itertools.islice(ids, count)) for count in (20 + 53 * turn % 200, 10 + 29 * turn % 120)
        )
        prompt = [*history, *user, 1, 2, 3, 4, 5, 6]
        core.answers[name] = [*reasoning, *answer]
        points = (len(history) + len(user),) if has_points else ()
        request = core.add(name, prompt, max_tokens=len(reasoning) + len(answer), cache_points=points)
        core.run()
        num_shared = next((i for i, pair in enumerate(zip(prompt, previous, strict=False)) if pair[0] != pair[1]), 0)
        turns.append((len(prompt) - request.sequence.num_cached_tokens, len(prompt) - num_shared))
        history, previous = [*history, *user, 1, 2, *answer, 7], prompt
    assert invariants.check(core.scheduler) == []
    return turns


@pytest.mark.parametrize("has_points", [True, False])
def test_turn_without_earlier_reasoning_computes_at_most_an_interval_more(make_hybrid, has_points):
    turns = talk(make_hybrid(state_checkpoint_interval=64, num_state_slots=100), has_points=has_points)
    assert len(turns) == 20
    assert max(num_computed - num_new for num_computed, num_new in turns) <= 64
    assert min(num_computed - num_new for num_computed, num_new in turns) >= 0


def test_turn_without_earlier_reasoning_computes_at_most_a_block_more_with_cache_points(make_hybrid):
    turns = talk(make_hybrid(num_state_slots=100), has_points=True)
    assert max(num_computed - num_new for num_computed, num_new in turns) <= 16
    assert min(num_computed - num_new for num_computed, num_new in turns) >= 0
    without = talk(make_hybrid(num_state_slots=100), has_points=False)
    assert [new for _, new in without] == [new for _, new in turns]
    assert max(num_computed - num_new for num_computed, num_new in without) > 16


def test_turn_that_keeps_reasoning_computes_at_most_a_block_more(make_hybrid):
    """The state is also saved while the answer is decoded."""
    core, history = make_hybrid(num_state_slots=8), []
    for turn in range(20):
        prompt = [*history, *range(1000 * turn + 100, 1000 * turn + 130 + turn)]
        request = core.add(f"turn {turn}", prompt, max_tokens=50 + 7 * turn)
        core.run()
        num_computed = len(prompt) - request.sequence.num_cached_tokens
        assert num_computed <= len(prompt) - len(history) + 17  # the last token of an answer is not computed
        history = list(request.sequence.token_ids)


def test_preempted_request_resumes_at_its_newest_checkpoint(make_hybrid):
    core = make_hybrid()
    request = core.add("a", 50, max_tokens=100)
    for _ in range(40):
        core.step()
    assert request.num_computed_tokens == 89
    core.scheduler.faults.preempt(["a"])
    assert core.step().preempted_req_ids == {"a"}
    scheduled = core.step()
    assert scheduled.scheduled_new_reqs[0].num_computed_tokens == 80
    assert scheduled.num_scheduled_tokens == {"a": 10}
    [(group, source, target)] = scheduled.copies.block_copies
    assert (group, target) == (1, scheduled.scheduled_new_reqs[0].block_ids[1][0])
    assert source != target
    core.run()
    assert core.finished == {"a": "length"}


def test_save_is_skipped_without_free_slot_and_tokens_do_not_wait(make_hybrid):
    core = make_hybrid(num_state_slots=2, max_num_seqs=2)
    core.add("a", 40, max_tokens=20)
    core.add("b", 40, max_tokens=20)
    scheduled = core.step()
    assert scheduled.num_scheduled_tokens == {"a": 40, "b": 40}
    assert scheduled.state_saves == {}
    core.run()
    assert core.finished == {"a": "length", "b": "length"}
