"""Tokens and log probabilities are `==` wherever KV was meanwhile: host memory has blocks evicted from a tiny cache."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import pytest
from alone_and_crowd import needs_kernels
from kernels_available import kv_precision, precision
from scripted_drafts import verify_all

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.assets import BUILT_IN_DRAFT, built_in_model_path
from octavo.config import SpeculativeConfig
from octavo.data.events import (
    BlockOffloaded,
    DraftsVerified,
    EventLog,
    HostBlockEvicted,
    HostBlocksFound,
    RequestPreempted,
)

pytestmark = needs_kernels
NUM_REQUESTS = 24
NUM_TOKENS = 12
ROOM = 64 << 20


@dataclass(frozen=True)
class Run:
    """How the requests are computed. swap_space_bytes: host memory."""

    name: str
    num_blocks: int = 56
    max_num_seqs: int = 2
    threshold: int = 0
    preemption: str = "recompute"
    swap_space_bytes: int = ROOM
    speculative: tuple[tuple[str, object], ...] = (("method", "none"),)
    preempts: bool = False
    all_drafts_are_right: bool = False


DRAFT_MODEL = (("method", "draft_model"), ("model", BUILT_IN_DRAFT), ("num_speculative_tokens", 3))
ITSELF = (("method", "draft_model"), ("model", str(built_in_model_path())), ("num_speculative_tokens", 3))
RUNS = [
    Run("one_at_a_time", max_num_seqs=1),
    Run("preempted", num_blocks=70, max_num_seqs=6, preempts=True),
    Run("swapped", num_blocks=70, max_num_seqs=6, preemption="swap", preempts=True),
    Run("chunks", threshold=21, max_num_seqs=3, preempts=True),
    Run("little_room", max_num_seqs=4, preemption="auto", swap_space_bytes=1 << 20),
    Run("default_speculation", max_num_seqs=4, speculative=()),
    Run("draft_model", max_num_seqs=4, speculative=DRAFT_MODEL),
    Run("drafts_with_itself", max_num_seqs=4, speculative=ITSELF, all_drafts_are_right=True),
]


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Return requests with four prefixes of 130 tokens in turns, too many for the cache. Some answers continue as
    prompts.
    """
    rng = random.Random(3)
    beginnings = [[rng.randrange(2, 900) for _ in range(130)] for _ in range(4)]
    requests = []
    for index in range(NUM_REQUESTS):
        own = [rng.randrange(2, 900) for _ in range(index % 5)]
        way = [{"temperature": 0.0}, {"temperature": 1.0, "seed": index}][index % 3 == 2]
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, **way)
        requests.append((beginnings[index % 4] + own, params))
    return requests


def make_engine(number_format: str, run: Run, log: EventLog, *, caches: bool = True) -> LLMEngine:
    engine = LLMEngine(
        ModelConfig(**precision(number_format)),
        SchedulerConfig(
            max_num_seqs=run.max_num_seqs,
            max_num_batched_tokens=256,
            long_prefill_token_threshold=run.threshold,
            preemption=run.preemption,
            mixed_step_ms=0.0,
        ),
        cache_config=CacheConfig(
            block_size=4,
            num_gpu_blocks=run.num_blocks,
            enable_prefix_caching=caches,
            swap_space_bytes=run.swap_space_bytes // (2 if "int8 KV" in number_format else 1),
            **kv_precision(number_format),
        ),
        device_config=DeviceConfig(device="cpu", kernels="cpu"),
        speculative_config=SpeculativeConfig(**dict(run.speculative)),
        sink=log,
    )
    if run.speculative and run.speculative[0] != ("method", "none"):
        verify_all(engine)
    return engine


def answers(engine: LLMEngine) -> list[tuple[list[int], object]]:
    """Return tokens and log probabilities of each request. They arrive three at a time, between steps."""
    told, pending = {}, list(enumerate(make_requests()))
    while pending or engine.has_unfinished_requests():
        for index, (prompt, params) in pending[:3]:
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        del pending[:3]
        for output in engine.step():
            if output.finished:
                assert output.error is None
                told[int(output.request_id)] = output
    return [(told[i].outputs[0].token_ids, told[i].outputs[0].logprobs) for i in range(NUM_REQUESTS)]


@functools.cache
def expected(number_format: str) -> list[tuple[list[int], object]]:
    """Return the answer to each request alone, without any cache."""
    run = Run("alone", max_num_seqs=1, swap_space_bytes=0)
    return answers(make_engine(number_format, run, EventLog(), caches=False))


@pytest.mark.sweep(64)
@pytest.mark.parametrize("number_format", ["bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_host_memory_cache_does_not_change_tokens(run, number_format):
    log = EventLog()
    engine = make_engine(number_format, run, log)
    for index, (got, right) in enumerate(zip(answers(engine), expected(number_format), strict=True)):
        assert got == right, f"request {index} differs in {run.name}"
    found = log.of_type(HostBlocksFound)
    assert sum(event.num_tokens for event in found) > 500
    assert len(log.of_type(BlockOffloaded)) > 100
    assert bool(log.of_type(HostBlockEvicted)) == (run.swap_space_bytes < ROOM)
    preempted = log.of_type(RequestPreempted)
    assert bool(preempted) == run.preempts
    assert any(event.swapped for event in preempted) == (run.preemption == "swap")
    assert engine.core.scheduler.kv_cache_manager.pool.usage == 0.0
    verified = log.of_type(DraftsVerified)
    num_drafted, num_accepted = (sum(getattr(e, name) for e in verified) for name in ("num_drafted", "num_accepted"))
    if run.all_drafts_are_right:  # keys and values of the draft model come back as well
        assert num_accepted == num_drafted > 0


def test_host_memory_hits_count_as_cached_tokens():
    """In the answer, in its receipt and in the figures; and bytes are really copied."""
    engine = make_engine("bfloat16", Run("alone", max_num_seqs=1), EventLog())
    prompt = {"prompt_token_ids": make_requests()[0][0]}
    params = SamplingParams(max_tokens=1, temperature=0.0)
    first = engine.generate(prompt, params)
    for other, _ in make_requests()[1:4]:
        engine.generate({"prompt_token_ids": other}, params)
    again = engine.generate(prompt, params)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 128)
    assert again.metrics.num_computed_tokens == 2
    stats, capacity = engine.core.metrics.stats, engine.core.capacity
    assert (stats.host_cache_hits, stats.host_cache_hit_blocks) == (128, 32)
    worker = engine.core.executor.worker
    assert capacity.kv_block_bytes == worker.kv_cache.num_bytes // worker.kv_cache.num_blocks
