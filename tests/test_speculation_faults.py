"""Known faults of drafts, injected on purpose: each fault is detected by the test that is meant for it.

`make mutants` changes every statement of the core. These faults are known for speculation; some are in the worker and
in proposers, which it does not change.
"""

from __future__ import annotations

import inspect
import random
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import test_speculation
from alone_and_crowd import needs_kernels
from simulation.world import SimulationError, draw_config, run_world

from octavo.core import result_processor
from octavo.speculative.answers import Answers
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sample_tasks import SampleTasks

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = needs_kernels


@dataclass(frozen=True)
class Fault:
    """A function with one piece of source replaced, and the check that detects it."""

    name: str
    function: Callable[..., Any]
    before: str
    after: str
    judge: Callable[[], None]


def run_worlds() -> None:
    """Simulate with many drafts, half of them wrong."""
    for index in range(20):
        config = draw_config(random.Random(f"drafts:{index}"), 100)
        config = replace(
            config, enable_prefix_caching=True, draft_rate=1.0, draft_error=0.5, max_drafts=8, stop_rate=0.5
        )
        run_world(f"drafts:{index}", config)


def compare_tokens() -> None:
    """Compare with the answers without drafts: every way of sampling, most drafts right."""
    test_speculation.check(test_speculation.Run("faults", num_drafts=5, share_right=0.7), "bfloat16", 30)


FAULTS = [
    Fault(
        "a rejected draft's block is shared",
        result_processor.ResultProcessor._update,
        "self._state.manager.commit(request)",
        "request.num_computed_tokens += num_due - num_sampled\n        self._state.manager.commit(request)\n"
        "        request.num_computed_tokens -= num_due - num_sampled",
        run_worlds,
    ),
    Fault(
        "rejected drafts count as computed",
        result_processor.ResultProcessor._update,
        "num_computed - (num_due - num_sampled)\n",
        "num_computed\n",
        run_worlds,
    ),
    Fault(
        "drafts past a stop token are kept",
        result_processor._append_tokens,
        "return sampled[:count], status",
        "token_ids += sampled[count:]; return sampled, status",
        run_worlds,
    ),
    Fault(
        "noise of the newest token's position",
        ModelRunner.sample,
        "gather(inputs.sampled_rows, inputs.known_there)",
        "gather(inputs.sampled_rows, inputs.known_there[inputs.cu_num_logits[:-1]].repeat_interleave("
        "torch.from_numpy(np.diff(inputs.cu_num_logits))))",
        compare_tokens,
    ),
    Fault(
        "a grammar is not rolled back",
        SampleTasks._walk,
        "matcher.step_back(len(masks) - 1)",
        "pass",
        test_speculation.test_rejected_drafts_are_rolled_back_in_grammar,
    ),
    Fault(
        "penalties of drafts that do not stand yet",
        SampleTasks.make,
        "_task(request, known[: inputs.num_known[row]], allowed)",
        "_task(request, known, allowed)",
        compare_tokens,
    ),
    Fault(
        "another tenant's answer is drafted",
        Answers.propose,
        "_digest(cache_salt)",
        "next(iter(self._owners), None)",
        test_speculation.test_earlier_answers_are_drafted_only_for_their_cache_salt,
    ),
]


def break_function(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Replace the code of the fault's function, wherever it was imported, until the patch is undone."""
    source = textwrap.dedent(inspect.getsource(fault.function))
    if source.count(fault.before) != 1:
        raise ValueError(f"{fault.before} does not stand once in {fault.function.__qualname__}")
    names = dict(fault.function.__globals__)
    exec("from __future__ import annotations\n" + source.replace(fault.before, fault.after), names)
    patch.setattr(fault.function, "__code__", names[fault.function.__name__].__code__)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_injected_draft_fault_is_detected(monkeypatch, fault):
    test_speculation.expected("bfloat16", 30)  # once, before any fault is injected
    break_function(monkeypatch, fault)
    with pytest.raises((AssertionError, SimulationError)):
        fault.judge()


@pytest.mark.turn(8)
def test_simulation_passes_without_injected_fault():
    run_worlds()
