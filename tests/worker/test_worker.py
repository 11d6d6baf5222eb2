"""Steps of a device: torch's own threads during a step, and logits without a valid token."""

from __future__ import annotations

import threading

import pytest
import torch
from alone_and_crowd import needs_kernels

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.outputs import ErrorCode
from octavo.worker import worker


@pytest.fixture
def two_threads():
    """Give torch two threads for one test."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@needs_kernels
@pytest.mark.parametrize("fails", [False, True])
def test_torch_uses_one_thread_in_step_and_restores_count(two_threads, monkeypatch, fails):
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


def test_logits_without_valid_token_end_only_their_request():
    """One step has a row of NaN, a request that excludes every token, and a valid one."""
    engine = LLM(max_num_seqs=4).llm_engine
    asked = {
        "broken": {},
        "excluded": {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
        "whole": {"logprobs": 1},
    }
    params = {name: SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, **asked[name]) for name in asked}
    alone = engine.generate({"prompt_token_ids": [9, 8, 7]}, params["whole"])
    runner = engine.core.executor.worker.runner
    compute = runner._compute_logits

    def break_one(hidden):
        logits = compute(hidden)
        broken = next(i for i, row in enumerate(sampled) if row == runner.batch.requests["broken"].row)
        logits[broken, 3] = torch.nan
        return logits

    prepare, sampled = runner.batch.prepare_inputs, []

    def watch(scheduled):
        inputs = prepare(scheduled)
        sampled[:] = inputs.sampled_rows.tolist()
        return inputs

    runner._compute_logits, runner.batch.prepare_inputs = break_one, watch
    for name in asked:
        engine.add_request(name, {"prompt_token_ids": [9, 8, 7]}, params[name])
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs["broken"].error == "the logits are NaN"
    assert outputs["excluded"].error_code is ErrorCode.NOTHING_ALLOWED
    assert outputs["whole"].error is None
    assert outputs["whole"].outputs[0].logprobs == alone.outputs[0].logprobs
    assert outputs["whole"].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize(("name", "expected"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_indexed_gpu_is_made_current_before_kernels_are_created(monkeypatch, name, expected):
    """Triton compiles for the current device and launches on it, regardless of the tensors' device."""
    used = []

    def create_kernels(*_arguments):
        raise InterruptedError("seen enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(str(device)))
    monkeypatch.setattr(worker, "create_kernels", create_kernels)
    with pytest.raises(InterruptedError):
        LLM(device=name)
    assert used == expected


def test_step_sets_gpu_of_worker_in_any_thread(monkeypatch):
    engine, used = LLM(max_num_seqs=2).llm_engine, []
    made = engine.core.executor.worker
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((str(device), threading.get_ident())))
    monkeypatch.setattr(made, "device", torch.device("cuda:1"))
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=1, detokenize=False))
    thread = threading.Thread(target=engine.step)
    thread.start()
    thread.join()
    assert used == [("cuda:1", thread.ident)]


def test_missing_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device 'cuda:2' was requested, but torch finds 2 GPUs"):
        worker.resolve_device("cuda:2")
