"""How many drafts are verified: where they come true and rows are cheap, and nowhere else."""

from __future__ import annotations

import random

import pytest

from octavo.core.draft_policy import DraftPolicy, StepCost
from octavo.data.draft_stats import AcceptanceRates
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def make_request(name="r"):
    return Request(name, [1], SamplingParams(max_tokens=9))


def measured(*steps):
    """What steps cost after (rows, seconds) were measured."""
    cost = StepCost()
    for rows, seconds in steps:
        cost.learn(rows, seconds)
    return cost


def policy_with(*steps):
    """A policy that knows nothing but what these steps took."""
    policy = DraftPolicy()
    policy.step_cost = measured(*steps)
    return policy


# --- how often drafts come true ---------------------------------------------------------------------------------------


def test_what_nobody_verified_is_as_likely_as_elsewhere():
    assert AcceptanceRates().rates([0.5, 0.25]) == [0.5, 0.25]
    assert AcceptanceRates().rates([]) == []


def test_a_draft_behind_the_first_wrong_one_tells_nothing():
    rates = AcceptanceRates()
    rates.note(4, 2)
    assert rates.rates([0.5] * 4) == [2 / 3, 2 / 3, 1 / 3, 0.5]
    rates.note(1, 1)  # there was no second one
    first = (1 + 0.9 + 1) / (2 + 0.9 + 1)
    assert rates.rates([0.5] * 4) == [pytest.approx(first), 2 / 3, 1 / 3, 0.5]
    assert rates.rates([0.5]) == [pytest.approx(first)]


def test_what_is_older_counts_less():
    rates = AcceptanceRates(decay=0.5)
    for _ in range(50):
        rates.note(1, 0)
    assert rates.rates([0.5]) == [pytest.approx(1 / 4)]  # as if it had been two
    rates.note(1, 1)
    assert rates.rates([0.5]) == [pytest.approx(2 / 4)]


def test_what_is_not_verified_any_more_fades():
    rates = AcceptanceRates()
    rates.note(1, 0)
    assert rates.rates([0.5]) == [1 / 3]
    rates.fade()
    assert rates.rates([0.5]) == [1 / 2.98]
    for _ in range(500):
        rates.fade()
    assert rates.rates([0.5]) == [pytest.approx(0.5, abs=0.001)]


# --- what a row costs -------------------------------------------------------------------------------------------------


def test_nothing_is_known_before_a_step_was_measured():
    assert StepCost().seconds(5) == 0.0


def test_between_measured_steps_lies_a_line_and_beyond_them_what_is_worth_a_trial():
    cost = measured((8, 3.0), (4, 2.0))
    assert [cost.seconds(rows) for rows in (1, 2, 4, 5, 6, 8, 9, 100)] == [0.5, 1.0, 2.0, 2.25, 2.5, 3.0, 3.0, 3.0]


def test_more_rows_never_take_less():
    cost = measured((4, 2.0), (8, 1.0), (16, 3.0))
    assert [cost.seconds(rows) for rows in (4, 6, 8, 12, 16)] == [2.0, 2.0, 2.0, 2.5, 3.0]


def test_steps_of_nearly_as_many_rows_are_taken_together_and_a_slow_one_counts_little():
    assert measured((2, 1.0), (2, 2.0)).seconds(2) == pytest.approx(1.2)
    assert measured((2, 1.0), (2, 90.0)).seconds(2) == pytest.approx(1.2)
    assert measured((2, 1.0), (2, 0.0)).seconds(2) == pytest.approx(0.8)
    assert measured((16, 1.0), (19, 2.0)).seconds(16) < measured((16, 1.0), (20, 2.0)).seconds(17)
    together = measured((16, 1.0), (19, 2.0))
    assert together.seconds(17) == pytest.approx(1.2)  # 16.6 rows, 1.2 s: nothing beyond it is known
    assert together.seconds(8) == pytest.approx(1.2 * 8 / 16.6)


@pytest.mark.parametrize(
    ("rows", "other", "is_same"), [(2, 3, False), (7, 8, False), (8, 9, True), (9, 10, False), (15, 14, True)]
)
def test_sizes_of_steps(rows, other, is_same):
    assert (len(measured((rows, 1.0), (other, 1.0))._measured) == 1) is is_same


def test_what_was_measured_long_ago_is_measured_again():
    steps = [(9, 5.0), *[(1, 1.0)] * 999]
    assert measured(*steps).seconds(9) == 5.0
    assert measured(*steps, (1, 1.0)).seconds(9) == 1.0
    assert measured((9, 5.0), *steps, (1, 1.0)).seconds(9) == 1.0
    assert measured((9, 5.0), *steps).seconds(9) == 5.0


# --- who gets drafts --------------------------------------------------------------------------------------------------


def test_all_drafts_are_tried_as_long_as_nothing_is_known():
    assert DraftPolicy().allot([(make_request(), 4), (make_request("s"), 1)], 9) == [4, 1]
    assert DraftPolicy().allot([], 9) == []


def test_free_rows_are_given_to_all_drafts_and_dear_ones_to_none():
    free, dear = ((1, 1.0), (9, 1.0)), ((1, 1.0), (9, 9.0))
    assert policy_with(*free).allot([(make_request(), 8)], 1) == [8]
    assert policy_with(*dear).allot([(make_request(), 8)], 1) == [0]


def test_as_many_as_give_the_most_tokens_a_second():
    # 1, 1.7, 2.19 .. tokens of 1, 1.4, 1.8 .. seconds: 1, 1.214, 1.217, 1.15
    policy = policy_with((1, 1.0), (6, 3.0))
    assert policy.allot([(make_request(), 5)], 1) == [2]


def test_the_likeliest_drafts_go_first():
    policy = policy_with((4, 1.0), (12, 2.0))
    good, bad = make_request("good"), make_request("bad")
    for _ in range(20):
        policy.verified(good, 4, 4)
        policy.verified(bad, 4, 0)
    assert policy.allot([(bad, 4), (good, 4)], 4) == [0, 4]
    assert policy.allot([(good, 2), (bad, 2)], 4) == [2, 0]


def test_many_requests_leave_no_row_for_drafts():
    """Of a machine on which a step takes the longer of reading the weights and computing 16 rows."""
    policy = policy_with(*[(rows, max(1.0, rows / 16)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 320)])
    requests = [make_request(str(index)) for index in range(64)]
    given = [sum(policy.allot([(each, 4) for each in requests[:count]], count)) for count in (1, 2, 4, 12, 16, 32, 64)]
    assert given == [4, 8, 12, 4, 0, 0, 0]


def test_a_draft_that_gains_nothing_gets_no_row():
    assert policy_with((1, 1.0), (2, 1.7)).allot([(make_request(), 1)], 1) == [0]
    assert policy_with((1, 1.0), (2, 1.69)).allot([(make_request(), 1)], 1) == [1]


def test_nobody_gets_more_drafts_than_there_are():
    policy, short, long = policy_with((1, 1.0), (9, 1.0)), make_request("short"), make_request("long")
    for request in (short, long):
        policy.verified(request, 4, 4)
    assert policy.allot([(short, 1), (long, 4)], 2) == [1, 4]


def test_only_what_is_not_verified_fades():
    policy, good, bad = policy_with((2, 1.0), (4, 1.4)), make_request("good"), make_request("bad")
    for _ in range(20):
        policy.verified(good, 1, 1)
        policy.verified(bad, 1, 0)
    everyone, before = policy._everyone.rates([0.7]), [each.acceptance.rates([0.5]) for each in (good, bad)]
    assert policy.allot([(good, 1), (bad, 1)], 2) == [1, 0]
    after = [each.acceptance.rates([0.5]) for each in (good, bad)]
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert policy._everyone.rates([0.7]) == everyone  # as somebody's are verified
    assert policy.allot([(bad, 1)], 2) == [0]
    assert policy._everyone.rates([0.7]) > everyone


def test_a_new_request_is_taken_to_be_like_the_others():
    policy = policy_with((1, 1.0), (2, 1.3))
    assert policy.allot([(make_request(), 1)], 1) == [1]
    for _ in range(30):
        policy.verified(make_request(), 1, 0)
    assert policy.allot([(make_request(), 1)], 1) == [0]


def test_who_got_no_drafts_is_tried_again():
    policy, request = policy_with((1, 1.0), (2, 1.2)), make_request()
    for _ in range(30):
        policy.verified(request, 1, 0)
    num_steps = next(count for count in range(1000) if policy.allot([(request, 1)], 1) == [1])
    assert 10 < num_steps < 200


@pytest.mark.parametrize(
    ("counts", "drafts", "is_new", "is_told"),
    [
        ({"a": 1, "b": 3}, {"b": [1, 2]}, False, True),
        ({"a": 1}, {}, False, True),
        ({"a": 1, "b": 3}, {"b": [1]}, False, False),  # b computes a prompt
        ({"a": 1}, {}, True, False),
        ({}, {}, False, False),
    ],
)
def test_steps_with_prompts_tell_nothing_of_a_row(counts, drafts, is_new, is_told):
    policy = DraftPolicy()

    class Scheduled:
        num_scheduled_tokens = counts
        scheduled_spec_decode_tokens = drafts
        scheduled_new_reqs = [object()] * is_new
        total_num_scheduled_tokens = sum(counts.values())

    policy.learn(Scheduled(), 2.0)
    assert policy.step_cost.seconds(100) == 0.0  # nobody drafts
    policy.allot([(make_request("a"), 1)], 1)
    policy.learn(Scheduled(), 2.0)
    assert (policy.step_cost.seconds(100) == 2.0) is is_told
    assert (policy.step_cost.seconds(100) == 0.0) is not is_told


# --- in the scheduler -------------------------------------------------------------------------------------------------


def shares(make_core, num_requests, share_right, step_seconds, num_steps=400):
    """Run requests that have 4 drafts in every step; return the shares of them that were verified, of two halves."""
    now, rng = [0.0], random.Random(1)
    core = make_core(clock=lambda: now[0], max_num_seqs=64, max_num_batched_tokens=1000)
    for index in range(num_requests):
        core.add(f"r{index}", 2, max_tokens=9000)
    core.step()
    given, halves = 0, []
    for step in range(num_steps):
        core.scheduler.update_draft_token_ids({each.request_id: [1, 2, 3, 4] for each in core.scheduler.running})
        scheduled = core.scheduler.schedule()
        now[0] += step_seconds(scheduled.total_num_scheduled_tokens)
        sampled = {}
        for request_id in scheduled.num_scheduled_tokens:
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            given += len(drafts)
            num_right = next((i for i in range(len(drafts)) if rng.random() >= share_right), len(drafts))
            sampled[request_id] = [*range(1, num_right + 1), 9]
        core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, sampled))
        if step % (num_steps // 2) == num_steps // 2 - 1:
            halves.append(given / (4 * num_requests * num_steps / 2))
            given = 0
    return halves


def memory_bound(rows):
    return max(1.0, rows / 16) + 0.01 * rows


def test_what_pays_is_learned_from_the_steps(make_core):
    assert shares(make_core, 1, 0.9, memory_bound)[1] > 0.95
    assert 0.2 < shares(make_core, 1, 0.3, memory_bound)[1] < 0.9
    assert shares(make_core, 1, 0.0, memory_bound)[1] < 0.2  # they cost 1 % each
    assert shares(make_core, 48, 0.5, memory_bound)[1] < 0.02
    assert shares(make_core, 1, 0.5, lambda rows: rows)[1] < 0.02


def test_drafts_are_cut_to_what_is_given(make_core):
    core = make_core(clock=lambda: 0.0)
    request = core.add("a", 4, max_tokens=50)
    core.step()
    core.scheduler._draft_policy.step_cost = measured((1, 1.0), (6, 3.0))
    core.scheduler.update_draft_token_ids({"a": [5, 6, 7, 8]})
    assert request.spec_token_ids == [5, 6]
