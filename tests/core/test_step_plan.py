"""The token budget of a step: tokens given and taken back."""

from __future__ import annotations

from octavo.core.step_plan import StepPlan
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def test_take_back_restores_given_budget():
    plan = StepPlan(20, 20)
    first, second = (Request(name, [1], SamplingParams()) for name in "ab")
    assert (plan.budget, plan.is_balanced, plan.has_admitted, plan.is_short) == (20, True, False, False)
    plan.give(first, 5, 3)
    plan.give(second, 4)
    assert (plan.budget, plan.num_tokens, plan.surcharge) == (8, {"a": 5, "b": 4}, {"a": 3})
    assert plan.is_balanced
    for request, budget in ((first, 16), (second, 20), (second, 20)):
        plan.take_back(request)
        assert plan.budget == budget
        assert plan.is_balanced
    assert (plan.num_tokens, plan.surcharge) == ({}, {})
    plan.budget -= 1
    assert not plan.is_balanced


def test_budget_can_be_lowered_but_not_raised():
    plan = StepPlan(20, 20)
    plan.lower_budget(30)
    assert (plan.initial_budget, plan.budget) == (20, 20)
    plan.lower_budget(7)
    assert (plan.initial_budget, plan.budget) == (7, 7)


def test_prompts_share_prompt_budget_and_take_back_returns_part():
    plan = StepPlan(20, 8)
    first, second, third = (Request(name, [1], SamplingParams()) for name in "abc")
    assert plan.within_prompt_budget(99, of_prompt=True) == 8
    assert plan.within_prompt_budget(99, of_prompt=False) == 99
    plan.give(first, 5, [], of_prompt=True)
    plan.give(second, 4, [])
    assert (
        plan.prompt_budget,
        plan.within_prompt_budget(9, of_prompt=True),
        plan.within_prompt_budget(2, of_prompt=True),
    ) == (3, 3, 2)
    plan.give(third, 3, [], of_prompt=True)
    assert plan.within_prompt_budget(1, of_prompt=True) == 0
    plan.take_back(second)
    assert plan.prompt_budget == 0
    plan.take_back(first)
    plan.take_back(first)
    assert (plan.prompt_budget, plan.budget, plan.num_tokens) == (5, 17, {"c": 3})
    unlimited = StepPlan(20, 20)
    unlimited.give(first, 5, [], of_prompt=True)
    unlimited.take_back(first)
    assert (unlimited.prompt_budget, unlimited.within_prompt_budget(99, of_prompt=True)) == (20, 20)
