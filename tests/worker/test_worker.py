"""A device's steps: what torch's own threads do meanwhile."""

from __future__ import annotations

import pytest
import torch
from kernels_available import COMPILED

from octavo import LLM, SamplingParams


@pytest.fixture
def two_threads():
    """Torch with two threads, as it was afterwards."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.skipif(not COMPILED, reason="only kernels with threads of their own keep torch's asleep")
@pytest.mark.parametrize("fails", [False, True])
def test_torch_computes_alone_in_a_step_and_as_before_after_it(two_threads, monkeypatch, fails):
    engine = LLM(max_num_seqs=2).llm_engine
    assert torch.get_num_threads() == 2
    runner = engine.core.executor.worker.runner
    execute, seen = runner.execute, []

    def watch(scheduled):
        seen.append(torch.get_num_threads())
        if fails:
            raise ValueError("a broken model")
        return execute(scheduled)

    monkeypatch.setattr(runner, "execute", watch)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2, detokenize=False))
    outputs = engine.step()
    assert seen == [1]
    assert torch.get_num_threads() == 2
    assert [output.finished for output in outputs] == [fails]
