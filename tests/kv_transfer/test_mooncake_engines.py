"""Engines that share a Mooncake pool: the second one loads the first one's blocks, and gives equal answers."""

from __future__ import annotations

import signal
import time

import pytest
from mooncake_master import Master, needs_mooncake

from octavo import SamplingParams
from octavo.config import CacheConfig, KVTransferConfig, SchedulerConfig
from octavo.data.events import KVLoadEnded, KVLoadStarted
from octavo.llm import LLMEngine

pytestmark = needs_mooncake
PROMPTS = [f"{number}: " + "To be, or not to be, that is the question. " * 12 for number in range(3)]
NUM_BLOCKS = 3 * 17  # full blocks of the prompts
PARAMS = SamplingParams(max_tokens=12, temperature=0.7, seed=7, logprobs=3)


class Engine:
    """An engine with the built-in model. master: of its pool, if it has one."""

    def __init__(self, master=None, *, lent_bytes=64 << 20, kv_cache_dtype="auto"):
        config = None
        if master is not None:
            config = KVTransferConfig(mooncake=master.address, mooncake_segment_bytes=lent_bytes)
        self.events = []
        self.engine = LLMEngine(
            cache_config=CacheConfig(num_gpu_blocks=512, kv_cache_dtype=kv_cache_dtype),
            scheduler_config=SchedulerConfig(kv_lookup_timeout_s=20.0),  # other tests may keep the machine busy
            kv_transfer_config=config,
            sink=self,
        )
        if master is not None:
            (self.tier,) = self.engine.core.executor._kv_mover._store.tiers
            wait_for(lambda: self.tier._store is not None and self.tier.is_usable)

    @property
    def process(self):
        return self.tier._store._client._process

    @property
    def num_loaded_tokens(self):
        """Tokens of the loads that were complete."""
        done = {each.transfer_id for each in self.events if isinstance(each, KVLoadEnded) and each.outcome == "done"}
        return sum(
            each.num_tokens for each in self.events if isinstance(each, KVLoadStarted) and each.transfer_id in done
        )

    def emit(self, event):
        self.events.append(event)

    def ask(self, prompts=PROMPTS):
        return list(self.engine.generate_batch(prompts, PARAMS).values())

    def fill_pool(self):
        """Repeat the requests until all blocks are saved, because a step may be unable to save some of them."""
        wait_for(lambda: self.ask() and self.tier.stats().num_blocks >= NUM_BLOCKS)

    def shutdown(self):
        self.engine.shutdown()


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def told(outputs):
    return [
        (one.token_ids, [{token: each.logprob for token, each in step.items()} for step in one.logprobs])
        for output in outputs
        for one in output.outputs
    ]


@pytest.fixture
def master():
    master = Master()
    yield master
    master.kill()


@pytest.fixture
def engines():
    started = []

    def start(*args, **kwargs):
        started.append(Engine(*args, **kwargs))
        return started[-1]

    yield start
    for each in started:
        each.shutdown()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_second_engine_loads_blocks_from_pool(master, engines, kv_cache_dtype):
    alone = engines(kv_cache_dtype=kv_cache_dtype).ask()
    first = engines(master, kv_cache_dtype=kv_cache_dtype)
    assert told(first.ask()) == told(alone)
    first.fill_pool()
    second = engines(master, lent_bytes=0, kv_cache_dtype=kv_cache_dtype)
    outputs = second.ask()
    assert told(outputs) == told(alone)
    assert second.num_loaded_tokens == 16 * NUM_BLOCKS


def test_blocks_of_engine_remain_after_another_engine_exits(master, engines):
    first, second = engines(master), engines(master)
    others = [f"another {prompt}" for prompt in PROMPTS]
    first.fill_pool()
    wait_for(lambda: second.ask(others) and second.tier.stats().num_blocks >= NUM_BLOCKS)
    first.shutdown()
    third = engines(master, lent_bytes=0)
    third.ask(others)
    assert third.num_loaded_tokens >= 16 * NUM_BLOCKS


@pytest.mark.sweep(16)
@pytest.mark.parametrize("whom", ["donor", "master"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_engine_answers_if_donor_or_master_fails(master, engines, whom, end):
    alone = engines().ask()
    first, second = engines(master), engines(master, lent_bytes=0)
    first.fill_pool()
    (first.process if whom == "donor" else master.process).send_signal(end)
    start = time.monotonic()
    assert told(second.ask()) == told(alone)
    assert time.monotonic() - start < 10
    (first.process if whom == "donor" else master.process).send_signal(signal.SIGCONT)


def test_engine_serves_without_master(master, engines):
    alone = engines().ask()
    master.kill()
    config = KVTransferConfig(mooncake=master.address)
    engine = LLMEngine(cache_config=CacheConfig(num_gpu_blocks=512), kv_transfer_config=config)
    outputs = list(engine.generate_batch(PROMPTS, PARAMS).values())
    assert engine.stats.kv_stores["mooncake"].is_usable == 0
    engine.shutdown()
    assert told(outputs) == told(alone)
