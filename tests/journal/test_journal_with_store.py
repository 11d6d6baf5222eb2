"""A run with a KV store is recorded with the store's answers, so that it can be repeated."""

from __future__ import annotations

import itertools

from stores import Store

from octavo import CacheConfig, SamplingParams, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.data import events
from octavo.data.events import EventLog
from octavo.data.kv_tiers import EndedTransfer, TierMove
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request
from octavo.journal.explain import GENERATING, LOADING, explain
from octavo.journal.format import read_journal
from octavo.journal.recorder import RecordedClock, RecordingScheduler, describe
from octavo.journal.replay import replay
from octavo.journal.stores import RecordedConnector
from octavo.journal.trace import chrome_trace

OF_TIERS = (
    events.KVLoadStarted,
    events.KVLoadEnded,
    events.KVSaveStarted,
    events.KVSaveEnded,
    events.StoreBlocksEvicted,
    events.HostBlocksCopied,
)


def test_journal_with_kv_store_replays_and_explains_transfers(tmp_path, monkeypatch):
    """The journal has the store's answers; loads, saves and waits for an answer are repeated equally."""
    monkeypatch.setattr("octavo.core.transfer_cost.TransferCost.is_worth_loading", lambda *_: True)
    now = [0.0]
    clock = RecordedClock(lambda: now[0])
    store = StoreOfSome()
    recorded, log = RecordedConnector(store), EventLog()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, min_tokens_to_cache=1, kv_lookup_timeout_s=10.0),
        CacheConfig(block_size=4),
        num_blocks=64,
        max_model_len=200,
        clock=clock,
        sink=log,
        connector=recorded,
    )
    path = tmp_path / "journal"
    recorder = RecordingScheduler(scheduler, clock, path, describe(scheduler), recorded)
    ended, pending = [], [(f"r{index}", list(range(100 * index, 100 * index + 30))) for index in range(8)]
    for _ in range(60):
        now[0] += 0.01
        if pending:
            name, prompt = pending.pop(0)
            recorder.add_request(Request(name, prompt, SamplingParams(max_tokens=6)))
        if not recorder.has_work():
            continue
        scheduled = recorder.schedule()
        ended += [moved(each) for each in scheduled.kv_transfers]
        sampled = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            if request.num_computed_tokens + count >= request.num_tokens:
                sampled[name] = [7]
        told, ended = ended[:1], ended[1:]
        now[0] += 0.02
        moves = [TierMove("host", 2, 200, 0.25), TierMove("host", 1, 100, 0.125)] if scheduled.step % 5 == 0 else []
        result = ModelOutput(scheduled.step, sampled, kv_transfers=told, host_moves=moves)
        recorder.update_from_output(scheduled, result)
    assert not scheduler.requests
    recorder.close()
    played = replay(path)
    assert played.mismatches == []
    assert [each for each in played.log.events if isinstance(each, OF_TIERS)] == [
        each for each in log.events if isinstance(each, OF_TIERS)
    ]
    assert {type(each) for each in log.events} >= set(OF_TIERS)
    loads = [each for each in played.log.events if isinstance(each, events.KVLoadEnded)]
    assert {each.outcome for each in loads} == {"done", "failed"}
    assert any(isinstance(each, events.KVSaveEnded) for each in played.log.events)
    assert all(each.store == "disk" for each in loads)
    done = next(each for each in loads if each.outcome == "done" and each.computing_s)
    text = explain(played.log.events, done.request_id).text()
    ms = f"{1e3 * done.seconds:.0f} ms, instead of about {1e3 * done.computing_s:.0f} ms of computing"
    assert f"8 tokens from memory (1 ms) and 8 tokens from disk (3 ms), {ms.replace(' ms,', ' ms in all,')}" in text
    failed = next(each for each in loads if each.outcome == "failed")
    explained = explain(played.log.events, failed.request_id)
    assert "12 tokens from disk, " in explained.text()
    assert GENERATING in explained.seconds, "it goes on with what came"
    spans = [each for each in chrome_trace(played)["traceEvents"] if each["name"] == LOADING]
    whole, part = {"memory": "8 tokens, 1 ms", "disk": "8 tokens, 3 ms"}, {"disk": "12 tokens, 3 ms"}
    assert [each["args"] for each in spans] == [part if each is failed else whole for each in loads]


def moved(order):
    """Return how a transfer ends: complete and from two tiers, except for one with a missing block."""
    count = len(order.keys) - (order.request_id == "r2")
    disk = TierMove("disk", count, 100 * count, 0.003)
    moves = (disk,) if count < 4 else (TierMove("memory", 2, 200, 0.001), TierMove("disk", 2, 200, 0.003))
    return EndedTransfer(order.transfer_id, count, moves, (("disk", 1),))


class StoreOfSome(Store):
    """Has 16 tokens of every other request, after one late answer; wants all offered blocks."""

    name = "disk"

    def __init__(self):
        super().__init__(16, wants=True)
        self.asked = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id not in self.asked:
            self.asked.add(request.request_id)
            return None
        return (
            0 if int(request.request_id[1:]) % 2 else super().get_num_new_matched_tokens(request, num_computed_tokens)
        )


def test_store_answers_at_aborts_and_failed_steps_replay(tmp_path):
    """The store is offered blocks when a request ends, also between steps."""
    now = itertools.count()
    clock, recorded = RecordedClock(lambda: float(next(now))), RecordedConnector(Store(num_tokens=0, wants=True))
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, min_tokens_to_cache=1)
    scheduler = Scheduler(
        config, CacheConfig(block_size=4), num_blocks=64, max_model_len=200, clock=clock, connector=recorded
    )
    path = tmp_path / "journal"
    recorder = RecordingScheduler(scheduler, clock, path, describe(scheduler), recorded)
    for index in range(6):
        recorder.add_request(Request(f"r{index}", list(range(100 * index, 100 * index + 9)), SamplingParams()))
    for step in range(30):
        if not recorder.requests:
            break
        scheduled = recorder.schedule()
        if step == 12:
            recorder.fail_step(scheduled, "injected")
            continue
        ended = [EndedTransfer(each.transfer_id, len(each.keys)) for each in scheduled.kv_transfers]
        sampled = {name: [7] for name in scheduled.num_scheduled_tokens}
        recorder.update_from_output(scheduled, ModelOutput(scheduled.step, sampled, kv_transfers=ended))
        if step in {5, 6, 7}:  # with a full block of its answer, which is offered when it ends
            recorder.abort_request(f"r{step - 5}")
    assert not recorder.requests
    recorder.close()
    kinds = "".join(line[0] for line in read_journal(path)[1])
    assert kinds.count("kf") == 3
    assert kinds.count("kx") == 1
    assert replay(path).mismatches == []
