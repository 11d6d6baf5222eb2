"""Sizes of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.engine.input_processor import ProcessedInput
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.sampling_params import SamplingParams

_NUMBERS_PER_ENTRY = 16


def num_entries(output: RequestOutput, completions: Iterable[CompletionOutput], *, with_prompt: bool) -> int:
    """Return an answer's size: tokens + log probabilities + (embedding values / 16).

    with_prompt: True to add the prompt's tokens and log probabilities for each completion.
    """
    prompt = len(output.prompt_token_ids) + _num_logprobs(output.prompt_logprobs) if with_prompt else 0
    vector = len(output.pooled or b"") // (4 * _NUMBERS_PER_ENTRY)
    for completion in completions:
        vector += prompt + len(completion.token_ids) + _num_logprobs(completion.logprobs)
    return vector


def _num_logprobs(positions: Sequence[dict[int, Logprob] | None] | None) -> int:
    return 0 if not positions else len(positions) * len(positions[-1] or ())


class LogprobLimit:
    """Limits the log probabilities over all prompts of a request."""

    def __init__(self, limit: int, max_model_len: int, params: SamplingParams, num_prompts: int) -> None:
        """Count n x maximum tokens x (logprobs + 1) for every prompt. Raises `RequestError` above the limit."""
        self._limit = limit
        self._num_requested = 0
        if params.logprobs is not None:
            num_tokens = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
            self._take(num_prompts * params.n * num_tokens * (params.logprobs + 1), "logprobs")

    def check(self, processed: ProcessedInput) -> None:
        """Count the log probabilities of a prompt's tokens. Raises `RequestError` above the limit."""
        params, num_tokens = processed.sampling_params, len(processed.prompt_token_ids)
        if params.prompt_logprobs is not None:
            self._take(params.n * num_tokens * (params.prompt_logprobs + 1), "prompt_logprobs")

    def _take(self, num_logprobs: int, parameter: str) -> None:
        self._num_requested += num_logprobs
        if self._num_requested > self._limit:
            raise RequestError(
                f"the request may bring {self._num_requested} log probabilities or more; the limit is {self._limit}: "
                "n x tokens x (logprobs + 1), over all prompts; lower max_tokens, n or logprobs",
                parameter=parameter,
            )
