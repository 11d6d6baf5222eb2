"""The engine's work in a step, counted in Python function calls, which do not depend on the load of the machine."""

import sys

import pytest
from kernels_available import COMPILED

from octavo import LLM, LLMEngine, SamplingParams, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore

pytestmark = [
    pytest.mark.performance,
    pytest.mark.skipif(not COMPILED, reason="plain torch enters Python for every operation"),
]
# Bounds for a step with one request, and for each further running request. The comment has the counts when they were
# set.
BOUNDS = {"none": (189, 21), "suffix": (254, 55)}  # (188, 15), (224, 25): drafts are accepted here, and there are more


def python_calls(call):
    """Return the number of Python functions that a call enters."""
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


def calls_of_a_decode_step(engine):
    """Return the fewest function calls of a step with one request, and of a step with 32."""
    counts = []
    for running in (1, 32):
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, detokenize=False)
        names = [f"{running}-{index}" for index in range(running)]
        for index, name in enumerate(names):
            engine.add_request(name, {"prompt_token_ids": [index + 1] * 8}, params)
        for _ in range(4):
            engine.step()
        counts.append(min(python_calls(engine.step) for _ in range(8)))
        engine.abort_request(names)
        engine.step()
    return counts


@pytest.mark.parametrize("method", BOUNDS)
def test_decode_step_enters_few_python_functions(method):
    one, many = calls_of_a_decode_step(LLM(max_num_seqs=32, speculative_config={"method": method}).llm_engine)
    assert one < BOUNDS[method][0]
    assert (many - one) / 31 < BOUNDS[method][1], (one, many)


class WantsNothing(MemoryStore):
    """A store that is asked and offered blocks, and never has any."""

    def __init__(self, block_bytes):
        super().__init__(GlobalKVPool(1), "nothing", block_bytes)

    def lacks(self, _keys):
        return set()


def test_store_without_hits_costs_one_function_call_per_decode_step():
    without, over_store = (
        LLMEngine(
            scheduler_config=SchedulerConfig(max_num_seqs=32),
            speculative_config=SpeculativeConfig(method="none"),
            kv_store=store,
        )
        for store in (None, WantsNothing)
    )
    assert calls_of_a_decode_step(over_store) == [count + 1 for count in calls_of_a_decode_step(without)]
