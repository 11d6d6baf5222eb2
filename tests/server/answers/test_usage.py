"""Token counts of a request: over its prompts and choices, its computed positions, and its drafts."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, structs

from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.server.answers.usage import CompletionTokensDetails, PromptTokensDetails, Receipt, UsageCounter


def output(request_id: str, *texts: str, num_cached: int = 0, finished: bool = False, **metrics: Any) -> RequestOutput:
    """Return an output with three prompt tokens. Each choice has a token for each letter of its text."""
    choices = [
        CompletionOutput(index, text, [*text.encode()], finish_reason="stop" if finished else None)
        for index, text in enumerate(texts)
    ]
    return RequestOutput(
        request_id, None, [1, 2, 3], choices, finished,
        num_cached_tokens=num_cached, metrics=RequestMetrics(0.0, **metrics),
    )  # fmt: skip


def count(*outputs: RequestOutput, **options: Any) -> UsageCounter:
    counter = UsageCounter(**options)
    for each in outputs:
        counter.add(each, each.outputs)
    return counter


def test_usage_counts_prompt_once_and_each_choice_delta() -> None:
    usage = count(output("a", "xy", "z"), output("a", "x", num_cached=2), output("b", "uvw", num_cached=1)).usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 7, 13)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert (usage.receipt, usage.completion_tokens_details) == (UNSET, UNSET)


def test_counts_completions_false_reports_no_completion_tokens() -> None:
    assert count(output("a", "xy"), counts_completions=False).usage().completion_tokens == 0


def test_receipt_sums_costs_of_finished_requests() -> None:
    cost = {"num_computed_tokens": 5, "num_recomputed_tokens": 2, "num_wasted_tokens": 1}
    ended = output("a", "x", finished=True, **cost)
    counter = count(ended, ended, output("b", "y", num_computed_tokens=100), output("c", "z", finished=True, **cost))
    receipt = counter.usage().receipt
    assert (receipt.computed_tokens, receipt.recomputed_tokens, receipt.wasted_tokens) == (10, 4, 2)
    assert len(counter.metrics) == 2


def test_usage_reports_accepted_and_rejected_draft_tokens() -> None:
    drafts = {"num_draft_tokens": 7, "num_accepted_tokens": 5}
    details = count(output("a", "x", finished=True, **drafts), output("b", "x", finished=True, **drafts)).usage()
    assert details.completion_tokens_details.accepted_prediction_tokens == 10
    assert details.completion_tokens_details.rejected_prediction_tokens == 4
    assert details.completion_tokens_details.reasoning_tokens == 0


def test_usage_summary_lists_counts_and_finish_reasons() -> None:
    assert UsageCounter().summary() == {}
    counter = count(output("a", "x", "yz", num_cached=1), output("a", "", "", finished=True, num_computed_tokens=5))
    assert counter.summary() == {
        "prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 3, "computed_tokens": 5, "recomputed_tokens": 0,
        "wasted_tokens": 0, "finish_reasons": ["stop", "stop"],
    }  # fmt: skip


def test_usage_details_default_to_zero() -> None:
    assert PromptTokensDetails().cached_tokens == CompletionTokensDetails().reasoning_tokens == 0
    assert (Receipt().computed_tokens, Receipt().recomputed_tokens, Receipt().wasted_tokens) == (0, 0, 0)


def test_usage_is_zero_before_first_output() -> None:
    usage = UsageCounter().usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (0, 0, 0)
    assert PromptTokensDetails().cached_tokens == CompletionTokensDetails().reasoning_tokens == 0
    assert set(structs.asdict(Receipt()).values()) == {0}
