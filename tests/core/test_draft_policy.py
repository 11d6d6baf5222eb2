"""How many drafts are verified: many if they are often accepted and extra rows are cheap, otherwise few or none."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.draft_policy import DraftPolicy
from octavo.core.step_cost import StepCost
from octavo.data.draft_stats import AcceptanceRates
from octavo.data.events import DraftsTimed
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request, RequestStatus
from octavo.sampling_params import SamplingParams


def make_request(name="r"):
    return Request(name, [1], SamplingParams(max_tokens=9))


def measured(*steps):
    """Return the step cost learned from measurements of (rows, seconds)."""
    cost = StepCost()
    for rows, seconds in steps:
        cost.learn(rows, seconds)
    return cost


def policy_with(*steps):
    """Return a policy that knows only these step costs."""
    policy = DraftPolicy()
    policy.step_cost = measured(*steps)
    return policy


# --- acceptance rates -------------------------------------------------------------------------------------------------


def test_unverified_places_get_default_acceptance_rates():
    assert AcceptanceRates().rates([0.5, 0.25]) == [0.5, 0.25]
    assert AcceptanceRates().rates([]) == []


def test_drafts_after_first_rejection_do_not_change_rates():
    rates = AcceptanceRates()
    rates.note(4, 2)
    assert rates.rates([0.5] * 4) == [2 / 3, 2 / 3, 1 / 3, 0.5]
    rates.note(1, 1)  # no second draft was verified
    first = (1 + 0.9 + 1) / (2 + 0.9 + 1)
    assert rates.rates([0.5] * 4) == [pytest.approx(first), 2 / 3, 1 / 3, 0.5]
    assert rates.rates([0.5]) == [pytest.approx(first)]


def test_older_verifications_count_less():
    rates = AcceptanceRates(decay=0.5)
    for _ in range(50):
        rates.note(1, 0)
    assert rates.rates([0.5]) == [pytest.approx(1 / 4)]  # the same as after two of them
    rates.note(1, 1)
    assert rates.rates([0.5]) == [pytest.approx(2 / 4)]


def test_acceptance_rate_fades_to_default_without_verification():
    rates = AcceptanceRates()
    rates.note(1, 0)
    assert rates.rates([0.5]) == [1 / 3]
    rates.fade()
    assert rates.rates([0.5]) == [1 / 2.98]
    for _ in range(500):
        rates.fade()
    assert rates.rates([0.5]) == [pytest.approx(0.5, abs=0.001)]


# --- what a row costs -------------------------------------------------------------------------------------------------


def test_step_cost_is_zero_before_first_measurement():
    assert StepCost().seconds(5) == 0.0


def test_step_cost_is_interpolated_and_optimistic_beyond_measurements():
    cost = measured((8, 3.0), (4, 2.0))
    assert [cost.seconds(rows) for rows in (1, 2, 4, 5, 6, 8, 9, 100)] == [0.5, 1.0, 2.0, 2.25, 2.5, 3.0, 3.0, 3.0]


def test_step_cost_never_falls_with_more_rows():
    cost = measured((4, 2.0), (8, 1.0), (16, 3.0))
    assert [cost.seconds(rows) for rows in (4, 6, 8, 12, 16)] == [2.0, 2.0, 2.0, 2.5, 3.0]


def test_similar_step_sizes_are_averaged_and_outliers_are_limited():
    assert measured((2, 1.0), (2, 2.0)).seconds(2) == pytest.approx(1.2)
    assert measured((2, 1.0), (2, 90.0)).seconds(2) == pytest.approx(1.2)
    assert measured((2, 1.0), (2, 0.0)).seconds(2) == pytest.approx(0.8)
    assert measured((16, 1.0), (19, 2.0)).seconds(16) < measured((16, 1.0), (20, 2.0)).seconds(17)
    together = measured((16, 1.0), (19, 2.0))
    assert together.seconds(17) == pytest.approx(1.2)  # 16.6 rows, 1.2 s: larger steps were not measured
    assert together.seconds(8) == pytest.approx(1.2 * 8 / 16.6)


@pytest.mark.parametrize(
    ("rows", "other", "is_same"), [(2, 3, False), (7, 8, False), (8, 9, True), (9, 10, False), (15, 14, True)]
)
def test_step_sizes_of_one_class_share_measurement(rows, other, is_same):
    assert (len(measured((rows, 1.0), (other, 1.0))._measured) == 1) is is_same


def test_old_step_measurements_expire():
    steps = [(9, 5.0), *[(1, 1.0)] * 999]
    assert measured(*steps).seconds(9) == 5.0
    assert measured(*steps, (1, 1.0)).seconds(9) == 1.0
    assert measured((9, 5.0), *steps, (1, 1.0)).seconds(9) == 1.0
    assert measured((9, 5.0), *steps).seconds(9) == 5.0


# --- which requests get drafts ----------------------------------------------------------------------------------------


def test_all_drafts_are_allotted_without_measurements():
    assert DraftPolicy().allot([(make_request(), 4), (make_request("s"), 1)], 9) == [4, 1]
    assert DraftPolicy().allot([], 9) == []


def test_all_drafts_get_free_rows_and_none_get_expensive_rows():
    free, dear = ((1, 1.0), (9, 1.0)), ((1, 1.0), (9, 9.0))
    assert policy_with(*free).allot([(make_request(), 8)], 1) == [8]
    assert policy_with(*dear).allot([(make_request(), 8)], 1) == [0]


def test_allotment_maximizes_tokens_per_second():
    # 1, 1.7, 2.19 .. tokens of 1, 1.4, 1.8 .. seconds: 1, 1.214, 1.217, 1.15
    policy = policy_with((1, 1.0), (6, 3.0))
    assert policy.allot([(make_request(), 5)], 1) == [2]


def test_likeliest_drafts_are_allotted_first():
    policy = policy_with((4, 1.0), (12, 2.0))
    good, bad = make_request("good"), make_request("bad")
    for _ in range(20):
        policy.verified(good, 4, 4)
        policy.verified(bad, 4, 0)
    assert policy.allot([(bad, 4), (good, 4)], 4) == [0, 4]
    assert policy.allot([(good, 2), (bad, 2)], 4) == [2, 0]


def test_many_decoding_requests_get_no_draft_rows():
    """On a machine where a step takes the longer of reading the weights and computing 16 rows."""
    policy = policy_with(*[(rows, max(1.0, rows / 16)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 320)])
    requests = [make_request(str(index)) for index in range(64)]
    given = [sum(policy.allot([(each, 4) for each in requests[:count]], count)) for count in (1, 2, 4, 12, 16, 32, 64)]
    assert given == [4, 8, 12, 4, 0, 0, 0]


def test_draft_without_gain_gets_no_row():
    assert policy_with((1, 1.0), (2, 1.7)).allot([(make_request(), 1)], 1) == [0]
    assert policy_with((1, 1.0), (2, 1.69)).allot([(make_request(), 1)], 1) == [1]


def test_allotment_never_exceeds_proposed_drafts():
    policy, short, long = policy_with((1, 1.0), (9, 1.0)), make_request("short"), make_request("long")
    for request in (short, long):
        policy.verified(request, 4, 4)
    assert policy.allot([(short, 1), (long, 4)], 2) == [1, 4]


def test_only_unverified_acceptance_rates_fade():
    policy, good, bad = policy_with((2, 1.0), (4, 1.4)), make_request("good"), make_request("bad")
    for _ in range(20):
        policy.verified(good, 1, 1)
        policy.verified(bad, 1, 0)
    overall, before = policy._overall.rates([0.7]), [each.acceptance.rates([0.5]) for each in (good, bad)]
    assert policy.allot([(good, 1), (bad, 1)], 2) == [1, 0]
    after = [each.acceptance.rates([0.5]) for each in (good, bad)]
    assert after[0] == before[0]
    assert after[1] > before[1]
    assert policy._overall.rates([0.7]) == overall  # drafts of one request were verified
    assert policy.allot([(bad, 1)], 2) == [0]
    assert policy._overall.rates([0.7]) > overall


def test_new_request_starts_with_acceptance_rates_of_all_requests():
    policy = policy_with((1, 1.0), (2, 1.3))
    assert policy.allot([(make_request(), 1)], 1) == [1]
    for _ in range(30):
        policy.verified(make_request(), 1, 0)
    assert policy.allot([(make_request(), 1)], 1) == [0]


def test_request_without_drafts_is_tried_again():
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
def test_steps_with_prompts_do_not_change_step_cost(counts, drafts, is_new, is_told):
    policy = DraftPolicy()

    step = SimpleNamespace(
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[object()] * is_new,
        total_num_scheduled_tokens=sum(counts.values()),
        max_drafts={},
    )
    result = ModelOutput(1, {})
    policy.learn(step, result, 2.0)
    assert policy.step_cost.seconds(100) == 0.0  # no request drafts
    policy.allot([(make_request("a"), 1)], 1)
    policy.learn(step, result, 2.0)
    assert (policy.step_cost.seconds(100) == 2.0) is is_told
    assert (policy.step_cost.seconds(100) == 0.0) is not is_told


# --- in the scheduler -------------------------------------------------------------------------------------------------


def shares(make_core, num_requests, share_right, step_seconds, num_steps=400):
    """Run requests with 4 drafts in every step; return the verified share in each half of the steps."""
    now, rng = [0.0], random.Random(1)
    core = make_core(clock=lambda: now[0], max_num_seqs=64, max_num_batched_tokens=1000)
    for index in range(num_requests):
        core.add(f"r{index}", 2, max_tokens=9000)
    core.step()
    given, halves = 0, []
    for step in range(num_steps):
        core.guess({each.request_id: [1, 2, 3, 4] for each in core.scheduler.running})
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


@pytest.mark.turn(12)
def test_draft_share_adapts_to_acceptance_and_step_cost(make_core):
    assert shares(make_core, 1, 0.9, memory_bound)[1] > 0.95
    assert 0.2 < shares(make_core, 1, 0.3, memory_bound)[1] < 0.9
    assert shares(make_core, 1, 0.0, memory_bound)[1] < 0.2  # they cost 1 % each
    assert shares(make_core, 48, 0.5, memory_bound)[1] < 0.02
    assert shares(make_core, 1, 0.5, lambda rows: rows)[1] < 0.02


def test_drafts_are_cut_to_allotment(make_core):
    core = make_core(clock=lambda: 0.0)
    request = core.add("a", 4, max_tokens=50)
    core.step()
    core.scheduler._state.draft_policy.step_cost = measured((1, 1.0), (6, 3.0))
    core.guess({"a": [5, 6, 7, 8]})
    assert request.spec_token_ids == [5, 6]


# --- drafts of a model ------------------------------------------------------------------------------------------------


class Scheduled:
    """A step in which each of these requests gets a token."""

    scheduled_new_reqs = ()

    def __init__(self, names="a", max_drafts=(), drafts=()):
        self.scheduled_spec_decode_tokens = dict(drafts)
        self.num_scheduled_tokens = {name: 1 + len(dict(drafts).get(name, ())) for name in names}
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())
        self.max_drafts = dict(max_drafts)


def guessed(seconds, num_passes, computed=""):
    """Return a result with this drafting time; each letter of `computed` names a request that a model drafted for."""
    return ModelOutput(1, {}, drafting_s=seconds, num_drafting_passes=num_passes, computed_drafts=frozenset(computed))


def bounds(policy, *requests):
    """Return the number of drafts allowed for each request; each has its newest token to compute."""
    return policy.bound({each.request_id: 1 for each in requests}, {each.request_id: each for each in requests})


def policy_of_model(step_costs, pass_costs, most=4):
    policy = policy_with(*step_costs)
    policy.pass_cost, policy._most_passes = measured(*pass_costs), most
    policy._computed = {"r"}
    return policy


def test_cheap_lookup_drafting_is_not_bounded():
    policy = policy_with((1, 1.0), (2, 9.0))
    assert bounds(policy, make_request()) == {}
    policy.learn(Scheduled("r"), guessed(0.014, 0), 1.014)
    assert bounds(policy, make_request()) == {}, "a credit, and a small share of the step"


def test_unprofitable_lookup_drafting_is_rarely_tried():
    policy, request = DraftPolicy(), make_request()

    def guesses(drafts=(), num_accepted=0):
        if drafts:
            policy.verified(request, len(drafts), num_accepted)
        policy.learn(Scheduled("r", drafts={"r": drafts} if drafts else {}), guessed(0.1, 0), 1.1)
        return bounds(policy, request) == {}

    assert [guesses() for _ in range(48)] == 3 * [*[False] * 15, True]
    assert guesses([5, 6], 2), "two tokens were had for nothing"
    assert all(guesses([5], 1) for _ in range(30))


def test_drafting_time_and_gain_decay_at_same_rate():
    policy, requests = policy_with((2, 1.0), (4, 1.4)), [make_request(), make_request("s")]
    policy.learn(Scheduled("rs"), guessed(0.01, 0), 1.01)
    assert (policy._spent_s, policy._gained_s, policy._steps_s) == pytest.approx((0.01, 0.0095, 1.0))
    policy.verified(requests[0], 2, 2)
    policy.learn(Scheduled("rs", drafts={"r": [5, 6]}), guessed(0.02, 0), 1.42)
    # two tokens more than the two that a step of two rows gives: half a step, less the time of the two extra rows
    assert (policy._spent_s, policy._gained_s, policy._steps_s) == pytest.approx((0.0295, 0.009025 + 0.6, 2.35))
    policy.verified(requests[0], 2, 0)
    policy.learn(Scheduled("rs", drafts={"r": [5, 6]}), guessed(0.02, 0), 1.42)
    assert (policy._spent_s, policy._gained_s) == pytest.approx((0.048025, 0.95 * 0.609025)), "rows in vain"


def test_step_without_requests_makes_no_drafting_trial():
    policy = DraftPolicy()
    policy.learn(Scheduled("r"), guessed(0.1, 0), 1.1)
    assert [bounds(policy) for _ in range(40)] == 40 * [{}]


def test_every_step_is_measured_if_drafting_pays_again():
    policy, request = DraftPolicy(), make_request()
    policy.learn(Scheduled("r"), guessed(0.1, 0), 1.1)
    assert bounds(policy, request) == {"r": 0}
    policy.verified(request, 2, 2)
    policy.learn(Scheduled("r", drafts={"r": [5, 6]}), guessed(0.1, 0), 1.1)
    assert bounds(policy, request) == {}
    policy.learn(Scheduled("r"), guessed(0.1, 0), 0.6)
    assert policy.step_cost.seconds(1) == pytest.approx(0.9)


def test_drafting_trial_rotates_over_groups_of_eight_requests():
    policy, requests = DraftPolicy(), [make_request(f"r{number}") for number in range(20)]
    tried = []
    for _ in range(3 * 16):
        policy.learn(Scheduled("r"), guessed(0.1, 0), 1.1)
        bound = bounds(policy, *requests)
        assert set(bound.values()) == {0}
        tried.append([number for number in range(20) if f"r{number}" not in bound])
    assert tried == [
        *[[]] * 15,
        [8, 9, 10, 11, 12, 13, 14, 15],
        *[[]] * 15,
        [0, 1, 2, 3, 16, 17, 18, 19],
        *[[]] * 15,
        [4, 5, 6, 7, 8, 9, 10, 11],
    ]
    assert bounds(policy) == {}


def test_bounded_steps_are_measured_only_with_drafts():
    policy, request = DraftPolicy(), make_request()
    for _ in range(2):
        policy.learn(Scheduled("r"), guessed(0.1, 0), 1.1)
        bounds(policy, request)
    assert policy.step_cost.seconds(1) == pytest.approx(1.0)
    policy.learn(Scheduled("r"), guessed(0.1, 0), 2.0)
    assert policy.step_cost.seconds(1) == pytest.approx(1.0)
    policy.learn(Scheduled("r", drafts={"r": [5]}), guessed(0.1, 0), 2.0)
    assert policy.step_cost.seconds(2) == pytest.approx(1.9)


def test_requests_are_not_bounded_without_step_cost():
    policy = DraftPolicy()
    policy.learn(Scheduled("r"), guessed(0.5, 4), 1.0)
    policy.step_cost = StepCost()
    assert bounds(policy, make_request()) == {}


def test_draft_bound_maximizes_tokens_per_second():
    # 1, 1.7, 2.19, 2.53 .. tokens of 1, 1.2, 1.4, 1.6 .. seconds: 1, 1.417, 1.564, 1.583, 1.541
    free = (1, 1.0), (9, 1.0)
    assert bounds(policy_of_model(free, [(1, 0.2)]), make_request()) == {"r": 3}
    assert bounds(policy_of_model(free, [(1, 0.5)]), make_request()) == {"r": 1}
    assert bounds(policy_of_model(free, [(1, 0.71)]), make_request()) == {"r": 0}
    assert bounds(policy_of_model(free, [(1, 0.01)]), make_request()) == {}, "all that it can"
    assert bounds(policy_of_model([(1, 1.0), (9, 9.0)], [(1, 0.01)]), make_request()) == {"r": 0}, "rows are dear"


def test_draft_bound_depends_on_number_of_requests_in_pass():
    policy, requests = (
        policy_of_model([(1, 1.0), (99, 1.0)], [(1, 0.8), (8, 0.8)]),
        [make_request(each) for each in "abcde"],
    )
    assert bounds(policy, *requests) == dict.fromkeys("abcde", 0)
    policy.pass_cost = measured((1, 0.6), (8, 0.6))
    assert bounds(policy, *requests) == dict.fromkeys("abcde", 1)
    policy.pass_cost = measured((1, 0.5), (4, 0.5), (5, 9.0))
    assert bounds(policy, *requests) == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 0}


def test_request_without_next_token_or_capacity_is_not_bounded():
    policy = policy_of_model([(1, 1.0), (9, 1.0)], [(1, 0.01), (9, 0.01)])
    prompt, last, short = (Request(name, [1] * 5, SamplingParams(max_tokens=9)) for name in ("prompt", "last", "short"))
    prompt.num_computed_tokens, last.num_computed_tokens, short.num_computed_tokens = 3, 4, 4
    last.max_total_tokens, short.max_total_tokens = 7, 9
    assert bounds(policy, prompt, last, short) == {}
    policy.pass_cost = measured((1, 9.0))
    assert bounds(policy, prompt, last, short) == {"short": 0}
    prompt.num_computed_tokens = 4
    last.max_total_tokens = 8
    assert bounds(policy, prompt, last, short) == {"prompt": 0, "last": 0, "short": 0}
    last.max_total_tokens, policy.pass_cost = 6, measured((1, 0.01), (2, 9.0))
    assert bounds(policy, last, short) == {}, "nobody shares a pass with it"
    assert policy.bound({}, {}) == {}


def test_drafting_time_is_excluded_from_step_cost_and_divided_by_passes():
    policy = DraftPolicy()
    policy.learn(Scheduled("ab", {"a": 1, "b": 0}), guessed(0.5, 1, "ab"), 2.0)
    assert policy.step_cost.seconds(2) == 1.5
    assert policy.pass_cost.seconds(1) == 0.5
    policy.learn(Scheduled("ab", {"b": 1}), guessed(0.9, 3, "ab"), 2.0)  # 3 and 1 in 3 passes: one row or two
    assert policy.pass_cost.seconds(1) == pytest.approx(0.8 * 0.5 + 0.2 * 0.3)
    policy.learn(Scheduled("ab"), guessed(0.9, 3, "ab"), 2.0)
    assert policy.pass_cost.seconds(2) == policy.pass_cost.seconds(1)  # two rows took 0.3; more are never faster
    assert policy.pass_cost._measured[2].seconds == pytest.approx(0.3)
    policy.learn(Scheduled("c"), guessed(9.0, 3, "c"), 8.0)  # clocks differ
    assert policy.step_cost.seconds(1) == 0.0
    other = DraftPolicy()
    other.learn(Scheduled("a", {"a": 0}), guessed(0.5, 1), 2.0)
    assert other.pass_cost._measured.keys() == {1}


def test_old_pass_cost_expires():
    policy = policy_of_model([(1, 1.0), (9, 1.0)], [(1, 2.0)])
    for _ in range(999):
        policy.learn(Scheduled("r"), guessed(0.001, 0), 1.001)
    assert bounds(policy, make_request()) == {"r": 0}
    policy.learn(Scheduled("r"), guessed(0.001, 0), 1.001)
    assert bounds(policy, make_request()) == {}


def test_lookup_and_model_drafts_have_separate_acceptance_rates():
    policy, request = policy_of_model([(1, 1.0), (9, 1.0)], [(1, 0.1)]), make_request()
    looked_up = make_request("looked up")
    for _ in range(50):
        policy.verified(request, 4, 0)
        policy.verified(looked_up, 4, 4)
    assert request.acceptance is looked_up.computed_acceptance is None
    assert bounds(policy, request, looked_up, make_request("new")) == {"r": 0, "looked up": 0, "new": 0}
    policy.step_cost = measured((1, 1.0), (2, 1.4))
    assert policy.allot([(looked_up, 1)], 1) == [1]
    assert policy.allot([(request, 1)], 1) == [0]
    policy.learn(Scheduled("r"), guessed(0.1, 0), 1.0)
    assert policy.allot([(request, 1)], 1) == [1], "its newest ones were looked up"


def test_bounded_model_drafts_fade_without_fading_lookup_rates():
    policy, request = policy_of_model([(1, 1.0), (2, 9.0)], [(1, 9.0)]), make_request()
    policy.verified(request, 2, 2)
    before, overall = request.computed_acceptance.rates([0.0]), policy._overall.rates([0.0])
    policy.verified(make_request("looked up"), 2, 1)
    looked_up = policy._overall.rates([0.0])
    assert bounds(policy, request) == {"r": 0}
    assert request.computed_acceptance.rates([0.0]) < before
    assert policy._overall.rates([0.0]) == looked_up > overall


def test_bounded_request_is_tried_again():
    policy, request = policy_of_model([(1, 1.0), (9, 1.0)], [(1, 0.3)]), make_request()
    for _ in range(50):
        policy.verified(request, 4, 0)
    num_steps = next(count for count in range(1000) if bounds(policy, request) != {"r": 0})
    assert 50 < num_steps < 300


@pytest.mark.turn(8)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=5),
    st.lists(st.floats(0.5, 4), min_size=3, max_size=3),
    st.floats(0, 2),
    st.integers(1, 8),
)
def test_draft_bound_of_single_request_is_optimal(verified, step_costs, pass_s, most):
    """According to the policy's own estimates, compared with every other number."""
    policy = policy_of_model(zip((1, 4, 9), step_costs, strict=True), [(1, pass_s)], most)
    request = Request("r", [1], SamplingParams(max_tokens=99))
    for num_drafted, num_accepted in verified:
        policy.verified(request, num_drafted, min(num_accepted, num_drafted))
    rates = policy._overall_computed.rates([0.7] * most)
    rates = request.computed_acceptance.rates(rates) if request.computed_acceptance else rates
    chances = list(itertools.accumulate(rates, lambda chance, rate: chance * rate, initial=1.0))
    speeds = [
        sum(chances[: count + 1]) / (policy.step_cost.seconds(1 + count) + count * policy.pass_cost.seconds(1))
        for count in range(most + 1)
    ]
    chosen = bounds(policy, request).get("r", most)
    assert speeds[chosen] == pytest.approx(max(speeds))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6), st.floats(0.01, 1.5), st.data()
)
def test_allotment_is_never_slower_than_no_drafts(asked, row_s, data):
    """According to the policy's own estimates. The drafts of each request are its first ones."""
    policy = policy_with(*((rows, 1 + row_s * rows) for rows in (1, 2, 4, 8, 16, 40)))
    policy._guessing_s = data.draw(st.floats(0, 1))
    wanted = []
    for index, (count, num_right) in enumerate(asked):
        request = make_request(str(index))
        policy.verified(request, max(count, 1), min(num_right, max(count, 1)))
        wanted.append((request, count))
    rates = [request.acceptance.rates(policy._overall.rates([0.7] * 6)) for request, _ in wanted]
    counts = policy.allot(wanted, len(wanted))
    assert all(0 <= count <= most for count, (_, most) in zip(counts, wanted, strict=True))
    gained = sum(math.prod(rates[i][: place + 1]) for i, count in enumerate(counts) for place in range(count))
    seconds, num_requests = policy.step_cost.seconds, len(wanted)
    none = num_requests / (seconds(num_requests) + policy._guessing_s)
    assert (num_requests + gained) / (seconds(num_requests + sum(counts)) + policy._guessing_s) >= none * (1 - 1e-9)


# --- gain of drafts ---------------------------------------------------------------------------------------------------


def test_draft_gain_is_returned_if_step_cost_is_known():
    policy = DraftPolicy()
    drafted = Scheduled("ab", drafts={"a": [1, 2]})
    policy.verified(make_request(), 2, 1)
    assert policy.learn(drafted, guessed(0.25, 0), 2.25) is None, "nobody knows what two rows take"
    assert policy.learn(Scheduled("ab"), guessed(0.5, 0), 1.5) is None, "no drafts"
    policy.verified(make_request(), 2, 2)
    # 2 s, and 0.5 s of drafting before it; two steps of 1 s give 4 tokens.
    assert policy.learn(drafted, guessed(0.25, 0), 2.25) == (2.5, 2.0)
    assert policy.learn(drafted, guessed(0.25, 0), 2.25) == (2.25, 1.0), "all were wrong"
    assert policy_with((2, 1.0)).learn(drafted, guessed(0.25, 0), 2.25) == (2.0, 1.0)
    assert policy.learn(Scheduled("ab"), guessed(0.5, 0), 1.5) is None


def test_slow_first_step_does_not_inflate_draft_gain():
    policy = policy_with((1, 60.0))
    policy.verified(make_request(), 3, 2)
    assert policy.learn(Scheduled("a", drafts={"a": [1, 2, 3]}), guessed(0.25, 0), 1.25) == (1.0, 3.0)


def test_scheduler_emits_draft_gain_event(make_core):
    now = [0.0]
    core = make_core(clock=lambda: now[0])
    core.add("a", 4, max_tokens=50)
    for drafts, sampled in (([], [7]), ([], [7]), ([7, 7, 8], [7, 7, 9])):
        core.guess({"a": drafts})
        scheduled = core.scheduler.schedule()
        now[0] += 2.0
        result = ModelOutput(scheduled.step, {"a": sampled}, drafting_s=0.5)
        core.scheduler.update_from_output(scheduled, result)
    (event,) = core.log.of_type(DraftsTimed)
    assert (event.step, event.seconds, event.seconds_without) == (3, 2.0, 4.5)


# --- in the scheduler, with a draft model -----------------------------------------------------------------------------


class Machine:
    """Requests on a simulated machine with given times of a step and of a pass of the draft model."""

    def __init__(self, make_core, num_requests, share_right, step_s, pass_s, most=4):
        self.now, self.rng = 0.0, random.Random(1)
        self.share_right, self.step_s, self.pass_s, self.most = share_right, step_s, pass_s, most
        self.core = make_core(num_blocks=30_000, clock=lambda: self.now, max_num_seqs=64, max_num_batched_tokens=1000)
        for index in range(num_requests):
            self.core.add(f"r{index}", 2, max_tokens=9000)
        self.core.step()
        self.num_tokens = self.num_guessed = 0
        self.start = 0.0

    def run(self, num_steps, fixed=None):
        """Step `num_steps` times. fixed: number of drafts for each request, instead of the policy's choice."""
        scheduler = self.core.scheduler
        if fixed is not None:
            scheduler._state.draft_policy.allot = lambda wanted, _num_decoding: [count for _, count in wanted]
            scheduler._state.draft_policy.bound = lambda *_: {}
        self.num_tokens, self.num_guessed, self.start = 0, 0, self.now
        for _ in range(num_steps):
            scheduled = scheduler.schedule()
            step_s = self.step_s(scheduled.total_num_scheduled_tokens)
            sampled, guesses = {}, {}
            for name in scheduled.num_scheduled_tokens:
                drafts = scheduled.scheduled_spec_decode_tokens.get(name, [])
                num_right = next((i for i in range(len(drafts)) if self.rng.random() >= self.share_right), len(drafts))
                sampled[name] = [*range(1, num_right + 1), 9]
                most = self.most if fixed is None else fixed
                guesses[name] = [1, 2, 3, 4, 5, 6, 7, 8][: min(scheduled.max_drafts.get(name, most), most)]
            lengths = [len(each) for each in guesses.values()]
            passes = [sum(length > place for length in lengths) for place in range(max(lengths))]
            drafting_s = sum(map(self.pass_s, passes))
            self.now += step_s + drafting_s
            self.num_tokens += sum(map(len, sampled.values()))
            self.num_guessed += sum(lengths)
            result = ModelOutput(
                scheduled.step,
                sampled,
                drafting_s=drafting_s,
                num_drafting_passes=len(passes),
                computed_drafts=frozenset(guesses),
                draft_token_ids={name: drafts for name, drafts in guesses.items() if drafts},
            )
            scheduler.update_from_output(scheduled, result)

    @property
    def speed(self):
        return self.num_tokens / (self.now - self.start)


@pytest.mark.sweep(144)
@pytest.mark.parametrize("pass_s", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("share_right", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("num_requests", [1, 8, 24])
def test_learned_draft_count_is_nearly_as_fast_as_best_fixed_count(make_core, num_requests, share_right, pass_s):
    """It is never slower than without drafts. The difference is spent on trials, and comes from interpolation between
    measured step sizes.
    """

    def speed(num_steps, fixed=None):
        machine = Machine(make_core, num_requests, share_right, memory_bound, lambda n: pass_s * max(1.0, n / 16))
        for count in num_steps:
            machine.run(count, fixed)
        return machine.speed

    learned, fixed = speed([100, 200]), [speed([60], count) for count in range(5)]
    assert learned > 0.97 * fixed[0]
    assert learned > 0.85 * max(fixed)


@pytest.mark.turn(12)
def test_drafting_stops_under_load_and_resumes_for_single_request(make_core):
    machine = Machine(make_core, 48, 0.7, memory_bound, lambda rows: 0.2 * max(1.0, rows / 16))
    machine.run(300)
    machine.run(200)
    assert machine.num_guessed < 0.02 * 200 * 48
    machine.core.scheduler.finish_requests([f"r{index}" for index in range(47)], RequestStatus.FINISHED_ABORTED)
    machine.run(50)
    assert machine.num_guessed > 50
