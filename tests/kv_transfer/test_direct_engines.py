"""A prefill and a decode engine without a store give the same tokens as one engine, even if either fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace

import pytest
from mooncake_master import needs_mooncake
from pairs import add_decode, add_prefill, decode
from rank_threads import RankThread
from test_exactness import make_requests, needs_kernels
from test_kv_stores import DTYPES, NUM_TRIED, SCHEDULES, alone, checkpoint, count, engine_over, settle

from octavo import CacheConfig, DeviceConfig, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import EngineConfig, KVTransferConfig
from octavo.data import events
from octavo.data.events import EventLog
from octavo.data.request_options import RequestOptions
from octavo.engine.async_llm import AsyncEngine
from octavo.ranks import leader
from octavo.startup.launch import launch_engine

__all__ = ["alone", "checkpoint"]  # fixtures
pytestmark = [needs_kernels, needs_mooncake]
LONG = (list(range(2, 482)), SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2))
NUM_LONG_BLOCKS = 480 // 16
MIN_TOKENS = 2


class Pair:
    """Two engines of this process. come: per arrived block, the number of tokens computed by then."""

    def __init__(self, checkpoint, schedule=SCHEDULES[0], dtype="bfloat16", **options):
        self.log = EventLog()
        self.prefill, self.decode = (
            engine_over(
                None,
                checkpoint,
                schedule,
                dtype,
                self.log if role == "decode" else None,
                KVTransferConfig(role=role, direct=True),
                **options,
            )
            for role in ("prefill", "decode")
        )
        self.source = f"127.0.0.1:{self.prefill.capacity.kv_transfer_port}"
        self.donor, self.receiver = (
            engine.core.scheduler.transfers._connector._direct for engine in (self.prefill, self.decode)
        )
        self.come = []
        for side in (self.donor, self.receiver):
            assert side._client.get("127.0.0.1", 20) is not None
        take = self.receiver._take

        def note(*args):
            requests = list(self.prefill.core.scheduler.requests.values())
            self.come.append(requests[0].num_computed_tokens if requests else None)
            return take(*args)

        self.receiver._take = note

    def step_prefill(self):
        if self.prefill.has_unfinished_requests():
            self.prefill.step()

    def ask(self, requests, source=None, salts=None):
        for index, request in enumerate(requests):
            add_prefill(self.prefill, index, request, salts and salts[index])
        return decode(self.decode, requests, source or self.source, salts=salts, also=self.step_prefill)

    def close(self):
        for engine in (self.prefill, self.decode):
            settle(engine)
            engine.core.executor.shutdown()


@pytest.fixture
def unused_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def pairs(checkpoint):
    made = []

    def make(*args, **kwargs):
        made.append(Pair(checkpoint, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_prefill_decode_pair_gives_tokens_of_single_engine(pairs, alone, schedule, dtype):
    pair = pairs(schedule, dtype)
    requests = make_requests()[:NUM_TRIED]
    is_counted = schedule.name in {"crowd", "chunks_of_7"}
    # Salts prevent prefix hits, which would change how much is worth fetching.
    told, num_found = pair.ask(requests, salts=[str(index) for index in range(NUM_TRIED)] if is_counted else None)
    assert told == alone(dtype)
    assert count(pair.log, events.KVLoadEnded, outcome="done") >= 4
    if is_counted:
        lengths, size = [len(prompt) for prompt, _ in requests], schedule.block_size
        most = [min(length // size * size, length - 1) for length in lengths]
        assert num_found == [length if length >= MIN_TOKENS else 0 for length in most]
        assert pair.receiver.stats().num_errors == 0


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_prefill_decode_pair_of_ranks_gives_tokens_of_one_process(pairs, alone, schedule, dtype, monkeypatch):
    monkeypatch.setattr(leader, "start_process", RankThread)
    pair = pairs(schedule, dtype, num_ranks=2)
    told, _ = pair.ask(make_requests()[:NUM_TRIED])
    assert told == alone(dtype)
    assert count(pair.log, events.KVLoadEnded, outcome="done") >= 4


def test_blocks_arrive_during_prefill(pairs, checkpoint):
    pair = pairs(replace(SCHEDULES[0], threshold=16))
    want = engine_over(None, checkpoint).generate({"prompt_token_ids": LONG[0]}, LONG[1]).outputs[0]
    step, end = pair.prefill.step, time.monotonic() + 20  # the prompt takes 30 steps

    def step_behind_blocks():
        """Delay a step while few blocks have arrived, but not beyond the deadline."""
        num_computed = sum(each.num_computed_tokens for each in pair.prefill.core.scheduler.requests.values())
        num_come = len(pair.come) * len(LONG[0]) // NUM_LONG_BLOCKS
        if num_computed - num_come > 100 and time.monotonic() < end:
            time.sleep(0.001)
            return []
        return step()

    pair.prefill.step = step_behind_blocks
    told, num_found = pair.ask([LONG])
    assert told == [(want.token_ids, want.logprobs)]
    assert num_found == [len(LONG[0]) - 1]
    assert len(pair.come) == NUM_LONG_BLOCKS
    early = [computed for computed in pair.come if computed is not None and computed < len(LONG[0])]
    assert early[0] < len(LONG[0]) // 2
    assert len(early) > NUM_LONG_BLOCKS // 2


def test_n_outputs_of_pair_equal_single_engine(pairs, checkpoint):
    pair = pairs()
    request = (LONG[0], SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=5, logprobs=2))
    want = engine_over(None, checkpoint).generate({"prompt_token_ids": LONG[0]}, request[1])
    add_prefill(pair.prefill, 0, LONG)
    add_decode(pair.decode, 0, request, pair.source)
    outputs = []
    while pair.decode.has_unfinished_requests():
        pair.step_prefill()
        outputs += pair.decode.step()
    assert [each.token_ids for each in outputs[-1].outputs] == [each.token_ids for each in want.outputs]


@pytest.mark.sweep(8)
@pytest.mark.parametrize("what", ["prompt never sent there", "nobody there", "aborted there", "stopped here"])
def test_missing_kv_is_computed_by_decode_engine(pairs, alone, monkeypatch, what, unused_port):
    monkeypatch.setattr("octavo.kv_transfer.direct_donor._GRACE_S", 0.3)
    pair = pairs()
    requests = make_requests()[:NUM_TRIED]
    start = time.monotonic()
    if what == "nobody there":
        told, _ = pair.ask(requests, f"127.0.0.1:{unused_port}")
    elif what == "aborted there":
        for index, request in enumerate(requests):
            add_prefill(pair.prefill, index, request)
        pair.prefill.abort_request([f"p-{index}" for index in range(len(requests))])
        told, _ = decode(pair.decode, requests, pair.source, also=pair.step_prefill)
    elif what == "stopped here":
        told, _ = pair.ask(requests)
        assert told == alone("bfloat16")
        os.kill(pair.receiver._client.process_id, signal.SIGKILL)
        assert pair.decode.core.scheduler.reset_prefix_cache()
        pair.decode.input_processor._arrivals = iter(range(100))
        told, _ = pair.ask(requests)
    else:
        told, _ = decode(pair.decode, requests, pair.source)
    assert told == alone("bfloat16")
    assert time.monotonic() - start < 20


def test_abort_during_prefill_drops_expected_blocks(pairs):
    pair = pairs(replace(SCHEDULES[0], threshold=16))
    add_prefill(pair.prefill, 0, LONG)
    add_decode(pair.decode, 0, LONG, pair.source)
    while not pair.come:
        pair.prefill.step()
        pair.decode.step()
    pair.decode.abort_request("0")
    settle(pair.decode)
    assert not pair.receiver._expected


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_frozen_prefill_engine_does_not_change_tokens(checkpoint, end):
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512),
        cache=CacheConfig(num_gpu_blocks=512),
        scheduler=SchedulerConfig(min_tokens_to_cache=2, long_prefill_token_threshold=16),
        device=DeviceConfig(device="cpu"),
        kv_transfer=KVTransferConfig(role="prefill", direct=True),
    )
    want = engine_over(None, checkpoint).generate({"prompt_token_ids": LONG[0]}, LONG[1]).outputs[0]
    remote = launch_engine(config)
    process = remote.client._life.process
    decoding = engine_over(None, checkpoint, stores=KVTransferConfig(role="decode", direct=True))
    receiver = decoding.core.scheduler.transfers._connector._direct
    take, num_taken = receiver._take, []

    def end_in_the_midst(*args):
        num_taken.append(None)
        if len(num_taken) == 3:
            os.kill(process.pid, end)
        return take(*args)

    receiver._take = end_in_the_midst
    driving = AsyncEngine(remote)
    try:
        driving._post(lambda: add_prefill(_Adding(driving.engine), 0, LONG))
        add_decode(decoding, 0, LONG, f"127.0.0.1:{remote.capacity.kv_transfer_port}")
        start, outputs = time.monotonic(), []
        while decoding.has_unfinished_requests():
            outputs += decoding.step()
        assert time.monotonic() - start < 10
        assert (outputs[-1].outputs[0].token_ids, outputs[-1].outputs[0].logprobs) == (want.token_ids, want.logprobs)
        assert len(num_taken) >= 3
        settle(decoding)
    finally:
        if end is signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
        driving.shutdown()
        decoding.core.executor.shutdown()


class _Adding:
    """Adds requests to an engine with its core in another process."""

    def __init__(self, engine):
        self.engine = engine

    def add_request(self, request_id, prompt, params, **options):
        processed = self.engine.input_processor.process(request_id, prompt, params, options=RequestOptions(**options))
        self.engine.submit(processed, lambda error: None)
