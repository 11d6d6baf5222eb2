"""The engine's own work in a step, counted in Python functions entered: no neighbour changes it."""

import sys

import pytest
from kernels_available import COMPILED

from octavo import LLM, SamplingParams

pytestmark = [
    pytest.mark.performance,
    pytest.mark.skipif(not COMPILED, reason="plain torch enters Python for every operation"),
]
# Of a step with one request, and of each one more that runs; in brackets what they were when this was written.
BOUNDS = {"none": (175, 22), "suffix": (255, 56)}  # (158, 19), (229, 50): what is guessed comes true here, and is more


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


@pytest.mark.parametrize("method", BOUNDS)
def test_a_decode_step_enters_few_python_functions(method):
    engine = LLM(max_num_seqs=32, speculative_config={"method": method}).llm_engine
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
    assert counts[1] < BOUNDS[method][0], counts
    assert a_request < BOUNDS[method][1], counts
