"""The engine's own work in a step, counted in Python functions entered: no neighbour changes it."""

import sys

import pytest
from kernels_available import COMPILED

from octavo import LLM, SamplingParams

pytestmark = [
    pytest.mark.performance,
    pytest.mark.skipif(not COMPILED, reason="plain torch enters Python for every operation"),
]
CALLS_OF_A_STEP = 175  # 158 when this was written
CALLS_OF_A_REQUEST = 22  # 19, for each one more that runs


def python_calls(call):
    """Return how many Python functions a call enters."""
    count = 0

    def watch(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_a_decode_step_enters_few_python_functions():
    engine = LLM(max_num_seqs=32).llm_engine
    counts = {}
    for running in (1, 32):
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, detokenize=False)
        names = [f"{running}-{index}" for index in range(running)]
        for index, name in enumerate(names):
            engine.add_request(name, {"prompt_token_ids": [index + 1] * 8}, params)
        for _ in range(4):
            engine.step()
        counts[running] = min(python_calls(engine.step) for _ in range(8))
        engine.abort_request(names)
        engine.step()
    a_request = (counts[32] - counts[1]) / 31
    assert counts[1] < CALLS_OF_A_STEP, counts
    assert a_request < CALLS_OF_A_REQUEST, counts
