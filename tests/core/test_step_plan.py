"""The budget of a step: what is given, what is taken back."""

from __future__ import annotations

from octavo.core.step_plan import StepPlan
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def test_what_is_given_is_taken_of_the_budget_and_comes_back_whole():
    plan = StepPlan(20)
    first, second = (Request(name, [1], SamplingParams()) for name in "ab")
    assert (plan.budget, plan.is_balanced, plan.has_admitted, plan.is_short) == (20, True, False, False)
    plan.give(first, 5, [7], 3)
    plan.give(second, 4, [8, 9])
    assert (plan.budget, plan.num_tokens, plan.surcharge) == (8, {"a": 5, "b": 4}, {"a": 3})
    assert plan.new_block_ids == {"a": [7], "b": [8, 9]}
    assert plan.is_balanced
    for request, budget in ((first, 16), (second, 20), (second, 20)):
        plan.take_back(request)
        assert plan.budget == budget
        assert plan.is_balanced
    assert (plan.num_tokens, plan.surcharge, plan.new_block_ids) == ({}, {}, {})
    plan.budget -= 1
    assert not plan.is_balanced


def test_a_budget_is_lowered_and_never_raised():
    plan = StepPlan(20)
    plan.lower_budget(30)
    assert (plan.whole_budget, plan.budget) == (20, 20)
    plan.lower_budget(7)
    assert (plan.whole_budget, plan.budget) == (7, 7)
