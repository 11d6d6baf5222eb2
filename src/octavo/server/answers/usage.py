"""What a request took: counts of tokens, as each API tells them, and counted while outputs go by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct, UnsetType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput


class PromptTokensDetails(Struct):
    """Of the prompt's tokens, those whose KV was found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    """Of the generated tokens, those of the reasoning, and those that were guessed before.

    rejected_prediction_tokens: guessed in vain, which are none of the generated ones.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Receipt(Struct):
    """What a request cost, in positions that the model computed; cached ones are none of them.

    recomputed: of them those that a preemption had lost. wasted: tokens that came with those of
    the answer, but behind a stop string. What is computed until the engine hears of an end is in none of these.
    """

    computed_tokens: int = 0
    recomputed_tokens: int = 0
    wasted_tokens: int = 0

    def add(self, metrics: RequestMetrics) -> None:
        """Add what a request cost that has ended."""
        self.computed_tokens += metrics.num_computed_tokens
        self.recomputed_tokens += metrics.num_recomputed_tokens
        self.wasted_tokens += metrics.num_wasted_tokens


class Usage(Struct):
    """Token counts over all prompts and choices of a request. receipt: octavo's own, once a request has ended."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class UsageCounter:
    """Counts tokens of a stream as they go by; those of completions where they count (`Job`)."""

    def __init__(self, *, counts_completions: bool = True) -> None:
        self._counts_completions = counts_completions
        self._prompts: dict[str, tuple[int, int]] = {}
        self._num_completion_tokens = 0
        self._receipt = Receipt()
        self._ended: set[str] = set()
        self._ended_choices: set[tuple[str, int]] = set()
        self.metrics: list[RequestMetrics] = []
        self.finish_reasons: list[str] = []

    def add(self, output: RequestOutput, completions: Iterable[CompletionOutput]) -> None:
        """Count an output's prompt, once, and the tokens of some of its completions."""
        self._prompts[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if output.finished and output.metrics is not None and output.request_id not in self._ended:
            self._ended.add(output.request_id)
            self.metrics.append(output.metrics)
            self._receipt.add(output.metrics)
        for completion in completions:
            self._num_completion_tokens += len(completion.token_ids) if self._counts_completions else 0
            if completion.finish_reason is not None:
                choice = output.request_id, completion.index
                if choice not in self._ended_choices:
                    self._ended_choices.add(choice)
                    self.finish_reasons.append(completion.finish_reason)

    def summary(self) -> dict[str, Any]:
        """Return the counts so far, for a log; none where nothing was heard of."""
        if not self._prompts:
            return {}
        usage = self.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "computed_tokens": self._receipt.computed_tokens,
            "recomputed_tokens": self._receipt.recomputed_tokens,
            "wasted_tokens": self._receipt.wasted_tokens,
            "finish_reasons": self.finish_reasons,
        }

    def usage(self) -> Usage:
        """Return the counts so far."""
        num_prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompts.values())
        num_cached_tokens = sum(num_cached for _, num_cached in self._prompts.values())
        total = num_prompt_tokens + self._num_completion_tokens
        usage = Usage(num_prompt_tokens, self._num_completion_tokens, total, PromptTokensDetails(num_cached_tokens))
        if self._ended:
            usage.receipt = self._receipt
        num_drafted = sum(each.num_draft_tokens for each in self.metrics)
        if num_drafted:
            num_accepted = sum(each.num_accepted_tokens for each in self.metrics)
            usage.completion_tokens_details = CompletionTokensDetails(0, num_accepted, num_drafted - num_accepted)
        return usage
