"""Runs the same requests one by one and all together, for tests that compare the results with `==`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kernels_available import COMPILED

from octavo.config import kernels_required
from octavo.data.events import RequestPreempted

if TYPE_CHECKING:
    from octavo import LLMEngine, SamplingParams

needs_kernels = pytest.mark.skipif(
    not COMPILED and not kernels_required(), reason="octavo was installed without its compiled kernels"
)


def crowd(engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple]:
    """Answer all requests together; return (token ids, logprobs) of each."""
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = engine.generate_batch(prompts, [params for _, params in requests])
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs.values()]


def alone(engine: LLMEngine, requests: list[tuple[list[int], SamplingParams]]) -> list[tuple]:
    """Answer each request before the next one is added. Sampled requests need seeds, because arrival numbers
    increase.
    """
    return [crowd(engine, [request])[0] for request in requests]


def has_swapped(engine: LLMEngine) -> bool:
    """Return whether a preempted request was copied to host memory."""
    return any(isinstance(event, RequestPreempted) and event.swapped for event in engine.core.recent.since(0))
