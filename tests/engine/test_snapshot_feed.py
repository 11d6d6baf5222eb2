"""A watcher of an engine gets every event once and in order, the known past, and the holders of all blocks."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
from collections import Counter

import pytest
from fakes import make_engine
from streams import run
from test_remote_core import running as running_remotely
from test_remote_core import until

from octavo.data.events import (
    EVENT_TYPES,
    EventLog,
    HitLimit,
    RequestQueued,
    StepCompleted,
    StepScheduled,
    WaitReason,
)
from octavo.data.expert_stats import ExpertLoad
from octavo.data.kv_tiers import TierMove
from octavo.data.recent_events import RecentEvents
from octavo.data.snapshot import BlockMap, BlockState, Snapshot
from octavo.data.state_slots import StateSlots
from octavo.engine import ipc, snapshot_feed
from octavo.engine.snapshot_feed import SnapshotFeed
from octavo.sampling_params import SamplingParams

MOVE = TierMove("disk", 3, 300, 0.25)
SAMPLES = {
    "int": 7, "float": 1.5, "str": "cmpl-1", "bool": True, "int | None": None, "str | None": "why",
    "ExpertLoad": ExpertLoad(12, 4, 1 << 40, 1.5), "TierMove": MOVE, "tuple[TierMove, ...]": (MOVE, MOVE),
    "WaitReason": WaitReason.NO_BLOCKS, "Mapping[str, int]": {"a": 1, "b": 512}, "tuple[int, ...]": (1, 2),
    "HitLimit | None": HitLimit.CHECKPOINT, "StateSlots | None": StateSlots(3, 4, 5),
}  # fmt: skip


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_every_event_type_survives_encoding(kind):
    event = kind(*(SAMPLES[field.type] for field in dataclasses.fields(kind)))
    blocks = BlockMap(16, bytes([0, 1, 2]), {"a": [2]})
    snapshot = Snapshot([event, event], is_first=True, blocks=blocks)
    seen = ipc.decode_from_engine(ipc.encode(ipc.Seen.of(snapshot)))
    assert isinstance(seen, ipc.Seen)
    assert seen.to_snapshot() == snapshot
    assert type(seen.to_snapshot().events[0]) is kind


def test_newest_events_are_kept_within_max_weight():
    recent, every = RecentEvents(max_weight=100), []
    rng = random.Random(5)
    for number in range(500):
        many = {str(each): 1 for each in range(rng.choice([0, 1, 30]))}
        event = StepScheduled(number, 0.0, many, len(many), 0, 0, 0.0)
        every.append(event)
        recent.emit(event)
        kept = recent.since(0)
        assert kept == every[-len(kept) :]
        assert recent.weight == sum(1 + len(each.num_scheduled_tokens) for each in kept) <= 100
        assert recent.num_seen == number + 1
        assert recent.since(number) == [event]
        assert recent.since(number + 1) == []
    recent.emit(StepCompleted(1, 0.0, dict.fromkeys(map(str, range(1000)), 1)))
    assert len(recent.since(0)) == 1, "one that is too heavy is kept alone"


def serve_some(engine, rng, watch):
    """Let random requests arrive, end and be aborted; call `watch` after each step."""
    names = iter(range(10**6))
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            text = rng.choice(["the same beginning of many prompts ", ""]) + "x" * rng.randrange(1, 60)
            engine.add_request(f"r{next(names)}", text, SamplingParams(max_tokens=rng.randrange(1, 30)))
        if rng.random() < 0.1:
            engine.abort_request(f"r{rng.randrange(40)}")
        engine.step()
        watch()
    while engine.has_unfinished_requests():
        engine.step()
        watch()


def check_blocks(engine, blocks):
    """Compare a block map with the pool and the block tables."""
    scheduler = engine.core.scheduler
    pool, held = scheduler.kv_cache_manager.pool, Counter()
    for name, table in blocks.holders.items():
        assert table == scheduler.requests[name].sequence.block_table
        held.update(table)
    free, counts = pool.free_block_ids(), Counter(map(BlockState, blocks.states))
    assert counts[BlockState.FREE] + counts[BlockState.CACHED] == pool.num_free_blocks
    for block, state in enumerate(blocks.states):
        expected = {0: BlockState.CACHED if pool.blocks[block].hash else BlockState.FREE, 1: BlockState.OWNED}
        assert (held[block] == 0) == (block in free)
        assert state == expected.get(held[block], BlockState.SHARED)


def test_feed_delivers_every_event_and_correct_block_map(monkeypatch):
    monkeypatch.setattr(snapshot_feed, "_MAX_WEIGHT", 40)
    engine, log, seen = make_engine(num_blocks=24, block_size=4, max_num_seqs=6), EventLog(), []
    engine.core.scheduler._emitter._sink._sinks += (log,)
    rng, watcher, states = random.Random(3), SnapshotFeed(engine.core), set()

    def watch():
        if rng.random() < 0.5:
            *parts, last = snapshots = list(watcher.look())
            assert all(part.blocks is None for part in parts)
            check_blocks(engine, last.blocks)
            states.update(last.blocks.states)
            seen.extend(snapshots)

    serve_some(engine, rng, watch)
    seen.extend(watcher.look())
    assert [event for snapshot in seen for event in snapshot.events] == log.events
    assert [snapshot.is_first for snapshot in seen] == [True] + [False] * (len(seen) - 1)
    assert list(watcher.look()) == [], "nothing is new"
    assert states == {0, 1, 2, 3}
    assert len({*map(type, log.events)}) > 8


def test_late_watcher_gets_recent_events(monkeypatch):
    monkeypatch.setattr(snapshot_feed, "_MAX_WEIGHT", 40)
    engine = make_engine()
    serve_some(engine, random.Random(4), lambda: None)
    snapshots = list(SnapshotFeed(engine.core).look())
    assert [event for snapshot in snapshots for event in snapshot.events] == engine.core.recent.since(0)
    assert len(snapshots) > 3
    assert [bool(snapshot.blocks) for snapshot in snapshots] == [False] * (len(snapshots) - 1) + [True]


def test_watcher_that_missed_events_starts_over():
    engine = make_engine()
    engine.core.recent._max_weight = 50
    watcher = SnapshotFeed(engine.core)
    list(watcher.look())
    engine.generate("hello", SamplingParams(max_tokens=3))
    assert [snapshot.is_first for snapshot in watcher.look()] == [False]
    for _ in range(5):
        engine.generate("hello", SamplingParams(max_tokens=30, ignore_eos=True))
    assert [snapshot.is_first for snapshot in watcher.look()] == [True], "more happened than is kept"
    engine.step()
    assert not any(snapshot.is_first for snapshot in watcher.look())


def queued(snapshots):
    """Return the ids of the queued requests."""
    return [e.request_id for each in list(snapshots) for e in each.events if isinstance(e, RequestQueued)]


def test_local_engine_can_be_watched():
    engine, seen = make_engine(), []
    engine.generate("before")
    engine.client.watch(seen.append)
    assert seen[0].is_first
    engine.generate("after")
    while engine.has_unfinished_requests():  # until the worker is notified of their end
        engine.step()
    assert queued(seen) == ["0", "1"]
    engine.client.watch(None)
    before = len(seen)
    engine.generate("nobody listens")
    assert len(seen) == before


@pytest.mark.turn(8)
def test_remote_engine_is_watched_across_restart():
    seen = []

    async def ask(llm, name):
        async for _ in llm.generate("hello", SamplingParams(max_tokens=3), name):
            pass

    async def scenario(llm):
        await ask(llm, "before")
        await llm.call(lambda engine: engine.client.watch(seen.append))
        await ask(llm, "after")
        await until(lambda: queued(seen) == ["before", "after"])
        pid = llm.engine.client.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: llm.engine.client.pid not in {None, pid} and llm.is_alive)
        await ask(llm, "in a new life")
        await until(lambda: queued(seen)[2:] == ["in a new life"])
        assert [snapshot.is_first for snapshot in seen].count(True) == 2
        await llm.call(lambda engine: engine.client.watch(None))
        await ask(llm, "unseen")
        await asyncio.sleep(1.5 * snapshot_feed.SNAPSHOT_INTERVAL_S)
        assert queued(seen)[2:] == ["in a new life"]

    with running_remotely() as llm:
        run(scenario(llm))
