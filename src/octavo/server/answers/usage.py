"""Token counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct, UnsetType, structs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from octavo.outputs import CompletionOutput, RequestMetrics, RequestOutput


class PromptTokensDetails(Struct):
    """Details of the prompt tokens. cached_tokens: Tokens found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct):
    """Details of the generated tokens.

    rejected_prediction_tokens: Rejected draft tokens. `completion_tokens` does not include these tokens.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Receipt(Struct):
    """The cost of a request. This object is octavo's extension.

    computed_tokens: Positions that the model computed.
    recomputed_tokens: Positions computed again after a preemption, plus rejected draft tokens.
    wasted_tokens: Tokens generated after a stop string, but in the same step.
    """

    computed_tokens: int = 0
    recomputed_tokens: int = 0
    wasted_tokens: int = 0

    @classmethod
    def of(cls, ended: Collection[RequestMetrics]) -> Receipt:
        """Add up the cost of ended requests."""
        return cls(
            sum(each.num_computed_tokens for each in ended),
            sum(each.num_recomputed_tokens for each in ended),
            sum(each.num_wasted_tokens for each in ended),
        )


class Usage(Struct):
    """Token counts over all prompts and choices. receipt: Cost of the ended requests, if any."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class UsageCounter:
    """Counts the tokens of outputs."""

    def __init__(self, *, counts_completions: bool = True) -> None:
        self._counts_completions = counts_completions
        self._prompts: dict[str, tuple[int, int]] = {}
        self._num_completion_tokens = 0
        self._ended: dict[str, RequestMetrics] = {}
        self._finish_reasons: dict[tuple[str, int], str] = {}

    @property
    def metrics(self) -> list[RequestMetrics]:
        """Metrics of ended requests."""
        return [*self._ended.values()]

    def add(self, output: RequestOutput, completions: Iterable[CompletionOutput]) -> None:
        """Count the tokens of `completions`. A prompt's tokens are counted only once."""
        self._prompts[output.request_id] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if output.finished and output.metrics is not None:
            self._ended.setdefault(output.request_id, output.metrics)
        for completion in completions:
            self._num_completion_tokens += len(completion.token_ids) if self._counts_completions else 0
            if completion.finish_reason is not None:
                self._finish_reasons.setdefault((output.request_id, completion.index), completion.finish_reason)

    def summary(self) -> dict[str, Any]:
        """Return counts for logs."""
        if not self._prompts:
            return {}
        usage = self.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            **structs.asdict(Receipt.of(self.metrics)),
            "finish_reasons": [*self._finish_reasons.values()],
        }

    def usage(self) -> Usage:
        """Return the counts."""
        num_prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompts.values())
        num_cached_tokens = sum(num_cached for _, num_cached in self._prompts.values())
        total = num_prompt_tokens + self._num_completion_tokens
        usage = Usage(num_prompt_tokens, self._num_completion_tokens, total, PromptTokensDetails(num_cached_tokens))
        if self._ended:
            usage.receipt = Receipt.of(self.metrics)
        if num_drafted := sum(each.num_draft_tokens for each in self.metrics):
            num_accepted = sum(each.num_accepted_tokens for each in self.metrics)
            usage.completion_tokens_details = CompletionTokensDetails(0, num_accepted, num_drafted - num_accepted)
        return usage
