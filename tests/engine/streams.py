"""Helpers that read the streams of an `AsyncEngine`."""

from __future__ import annotations

import asyncio

from octavo.sampling_params import RequestOutputKind, SamplingParams

TIMEOUT_S = 30


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


async def collect(llm, prompt: str, request_id: str, **params) -> str:
    text = ""
    async for output in llm.generate(prompt, SamplingParams(output_kind=RequestOutputKind.DELTA, **params), request_id):
        text += output.outputs[0].text
    return text
