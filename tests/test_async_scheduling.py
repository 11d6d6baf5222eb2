"""The built-in model with steps decided ahead gives the same answers, text and ends, for all options of requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from late_queue import LateQueue

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig, build
from octavo.config import EngineConfig, SpeculativeConfig
from octavo.errors import ConfigError
from octavo.sampling_params import StructuredOutputsParams
from octavo.worker import model_runner
from octavo.worker.host_copies import PinnedMemory
from octavo.worker.local_executor import LocalExecutor
from octavo.worker.step_modes import ComputesAtOnce, ComputesInBackground, LaunchesAhead

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = ["Once upon a time there was a"]
PROMPTS += map(CHAT.format, ("Sort these words: pear apple fig", "What can you do?", "Write a long story about a cat."))
PLAIN = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 1.0, "seed": 3, "max_tokens": 1},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 4, "max_tokens": 40},
    {"temperature": 0.7, "min_p": 0.05, "seed": 5, "max_tokens": 30, "logprobs": 3},
    {"temperature": 1.0, "seed": 6, "max_tokens": 30, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.0, "max_tokens": 30, "stop": ["e"]},
    {"temperature": 0.0, "max_tokens": 30, "min_tokens": 25},
    {"temperature": 0.0, "max_tokens": 5, "prompt_logprobs": 2},
    {"temperature": 1.0, "n": 3, "seed": 7, "max_tokens": 12},
]
WAITING = [
    {"temperature": 0.0, "max_tokens": 20, "structured_outputs": StructuredOutputsParams(regex=r"[a-z]{3,9} [0-9]+")}
]


ASKED = {"plain": PLAIN, "with a grammar": PLAIN + WAITING}
WAYS = ["in background", "launched"]


def make_engine(*, ahead=None, **options):
    """Make an engine. ahead: how the next step is begun before a result is collected; None: it is not.

    "in background": a thread computes. "launched": as on a GPU; sampled tokens are fed on the device, here a CPU with
    late copies.
    """
    with pytest.MonkeyPatch.context() as patch:
        if ahead == "launched":
            patch.setattr(model_runner, "create_host_copies", lambda device: PinnedMemory(device, LateQueue()))
        engine = LLMEngine(
            ModelConfig(),
            SchedulerConfig(async_scheduling=ahead is not None, max_num_seqs=8, max_num_batched_tokens=48, **options),
            cache_config=CacheConfig(kv_cache_memory_bytes=4 << 20),
            speculative_config=SpeculativeConfig(method="none"),
        )
    if ahead == "launched":
        worker = engine.core.executor.worker
        engine.core.executor.shutdown()
        engine.core.executor = LocalExecutor(worker, mode=LaunchesAhead)
    return engine


def answers(engine, params):
    requests = [SamplingParams(**each) for each in params for _ in PROMPTS]
    outputs = engine.generate_batch(PROMPTS * len(params), requests)
    return [
        (
            output.prompt_logprobs,
            [
                (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
                for each in output.outputs
            ],
        )
        for output in outputs.values()
    ]


def count_ahead(engine, monkeypatch):
    """Record for each step whether it is decided ahead."""
    scheduler, ahead = engine.core.scheduler, []
    schedule = scheduler.schedule

    def counted():
        ahead.append(scheduler.in_flight is not None)
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", counted)
    return ahead


def count_launched(engine, monkeypatch):
    """Record for each step whether it is launched before the previous one is collected."""
    worker, ahead, num_open = engine.core.executor.worker, [], 0
    launch, collect = worker.launch, worker.collect

    def launched(scheduled):
        nonlocal num_open
        ahead.append(num_open > 0)
        num_open += 1
        return launch(scheduled)

    def collected(step):
        nonlocal num_open
        num_open -= 1
        return collect(step)

    monkeypatch.setattr(worker, "launch", launched)
    monkeypatch.setattr(worker, "collect", collected)
    return ahead


@pytest.fixture(scope="module")
def expected():
    """Return answers without steps decided ahead."""
    return {name: answers(make_engine(), params) for name, params in ASKED.items()}


@pytest.mark.sweep(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", ASKED)
def test_async_scheduling_does_not_change_outputs(asked, way, expected, monkeypatch):
    engine = make_engine(ahead=way)
    ahead = count_ahead(engine, monkeypatch)
    launched = count_launched(engine, monkeypatch)
    assert answers(engine, ASKED[asked]) == expected[asked]
    assert sum(ahead) > len(ahead) / 3
    assert (sum(launched) > 0) == (way == "launched")
    engine.core.executor.shutdown()


def test_steps_are_launched_ahead_if_host_needs_no_tokens(monkeypatch):
    engine = make_engine(ahead="launched")
    launched = count_launched(engine, monkeypatch)
    answers(engine, [{"temperature": 1.0, "seed": 1, "max_tokens": 30, "logprobs": 2, "ignore_eos": True}])
    assert sum(launched) >= 28


@pytest.mark.parametrize(("device", "mode"), [("cpu", ComputesInBackground), ("cuda", LaunchesAhead)])
@pytest.mark.parametrize("ahead", [False, True])
def test_device_selects_executor_mode_of_async_scheduling(device, mode, ahead, monkeypatch):
    chosen = {}
    monkeypatch.setattr(build, "LocalExecutor", lambda *_, **options: chosen.update(options))
    info = SimpleNamespace(device=device, scheduler_config=SchedulerConfig(async_scheduling=ahead).resolved())
    build._make_executor(EngineConfig(), info, SimpleNamespace(), None)
    assert chosen["mode"] is (mode if ahead else ComputesAtOnce)


@pytest.mark.parametrize("breaks", ["execute", "launch", "collect"])
def test_worker_error_ends_only_requests_of_its_step(breaks, expected, monkeypatch):
    engine = make_engine(ahead="in background" if breaks == "execute" else "launched")
    do, calls = getattr(engine.core.executor.worker, breaks), []

    def breaking(argument):
        calls.append(argument)
        if len(calls) == 5:
            raise MemoryError
        return do(argument)

    monkeypatch.setattr(engine.core.executor.worker, breaks, breaking)
    engine.add_request("first", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step()}
    assert outputs["first"].outputs[0].finish_reason == "error"
    assert answers(engine, PLAIN[:3]) == expected["plain"][: 3 * len(PROMPTS)]
    engine.core.executor.shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_aborted_or_failed_request_in_flight_does_not_change_remaining_outputs(way, expected, monkeypatch):
    """One request is aborted, and one gets NaN logits, while a step in flight computes both again."""
    engine = make_engine(ahead=way)
    runner, names = engine.core.executor.worker.runner, ["stays", "aborted", "broken"]
    sample = runner.sample

    def broken(step, inputs, hidden):
        requests = [inputs.requests[index].request_id for index in inputs.sampled]
        if step.scheduled.step == 6:
            hidden[requests.index("broken")] = torch.nan
        sample(step, inputs, hidden)

    monkeypatch.setattr(runner, "sample", broken)
    for name in names:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=name != "stays")
        engine.add_request(name, PROMPTS[0], params)
    outputs, num_steps = {}, 0
    while engine.has_unfinished_requests():
        outputs |= {each.request_id: each for each in engine.step()}
        num_steps += 1
        if num_steps == 4:
            engine.abort_request("aborted")
            engine.add_request("next in its row", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=24))
    assert outputs["aborted"].outputs[0].finish_reason == "abort"
    assert outputs["broken"].error == "the logits are NaN"
    whole = expected["plain"][0][1][0]
    for name in ("stays", "next in its row"):
        (output,) = outputs[name].outputs
        assert (output.token_ids, output.text) == whole[:2]
    assert runner.batch.num_awaited.sum() == 0
    assert engine.core.scheduler.num_kept_records == 0
    engine.core.executor.shutdown()


def test_async_scheduling_with_speculative_decoding_is_refused():
    for speculative in (SpeculativeConfig(method="ngram"), SpeculativeConfig(model="octavo-demo-draft")):
        with pytest.raises(ConfigError, match="async_scheduling"):
            EngineConfig(scheduler=SchedulerConfig(async_scheduling=True), speculative=speculative)
    EngineConfig(scheduler=SchedulerConfig(async_scheduling=True))
