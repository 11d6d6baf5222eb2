"""A prompt that is computed for another engine: no answer comes of it, whichever API it was asked by."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import Struct

from octavo.sampling_params import SamplingParams
from octavo.server.answers.usage import Usage  # noqa: TC001 - msgspec reads the types

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.outputs import RequestOutput
    from octavo.server.answers.jobs import Job


class Prefilled(Struct):
    """What is told when all prompts of a request are computed."""

    id: str
    model: str
    usage: Usage
    object: str = "prefill"


def prefill_of(job: Job) -> Job:
    """Return a job that computes another one's prompts and nothing of its answers.

    A model computes nothing without a next token: one of each prompt, which nobody sees. What shapes an answer (`n`,
    stop strings, a grammar, log probabilities) is the other engine's alone.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    return replace(job, params=params, stream=False, counts_completions=False)


class PrefillReply:
    """Tells that prompts are computed, in the same words whatever was asked."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def whole(self, _outputs: Sequence[RequestOutput], usage: Usage) -> Prefilled:
        """Return the whole answer."""
        return Prefilled(self._job.request_id, self._job.model, usage)
