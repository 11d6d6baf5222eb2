"""Prefills for a decode engine."""

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
    """The response to a prefill."""

    id: str
    model: str
    usage: Usage
    object: str = "prefill"


def prefill_of(job: Job) -> Job:
    """Return a job that computes the prompts of `job`, and generates one token for each prompt.

    The decode engine applies the client's parameters.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    return replace(job, params=params, stream=False, counts_completions=False)


class PrefillReply:
    """Writes `Prefilled`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def whole(self, _outputs: Sequence[RequestOutput], usage: Usage) -> Prefilled:
        """Return the response."""
        return Prefilled(self._job.request_id, self._job.model, usage)
