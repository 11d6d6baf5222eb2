"""Hits, saves and evictions of each tier, and the computing that they saved: in events, figures, sentences,
journals.
"""

from __future__ import annotations

import re

import pytest
from test_exactness import PRESSING, needs_kernels
from test_kv_stores import checkpoint, node

from octavo import CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from octavo.build import build_engine
from octavo.config import EngineConfig, KVTransferConfig
from octavo.data import events
from octavo.data.events import EventLog
from octavo.journal.explain import explain
from octavo.journal.recorder import RecordingScheduler
from octavo.journal.replay import replay
from octavo.kv_transfer.memory import GlobalKVPool
from octavo.server.telemetry.metrics import _tiers

pytestmark = needs_kernels
__all__ = ["checkpoint"]  # a fixture
SIZE = 16  # tokens of a block
PROMPT = list(range(2, 2 + 8 * SIZE + 1))
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
OF_TIERS = (
    events.PrefixCacheQueried,
    events.BlockEvicted,
    events.BlockOffloaded,
    events.HostBlocksFound,
    events.HostBlocksCopied,
    events.HostBlockEvicted,
    events.KVLoadStarted,
    events.KVLoadEnded,
    events.KVSaveStarted,
    events.KVSaveEnded,
    events.StoreBlocksEvicted,
)


class Told:
    """An engine with some tiers, its events, and a replay of its journal."""

    def __init__(self, checkpoint, path, make_store=None, num_blocks=512, swap_space_bytes=0, **stores):
        self.log, self.path = EventLog(), path
        config = EngineConfig(
            model=ModelConfig(model=str(checkpoint), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=512),
            cache=CacheConfig(num_gpu_blocks=num_blocks, swap_space_bytes=swap_space_bytes),
            scheduler=SchedulerConfig(min_tokens_to_cache=2, kv_lookup_timeout_s=20.0, **PRESSING),
            kv_transfer=KVTransferConfig(**stores),
            record=path,
        )
        self.engine = build_engine(config, sink=self.log, kv_store=make_store)

    def ask(self, name, prompt=PROMPT):
        self.engine.add_request(name, {"prompt_token_ids": prompt}, PARAMS)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        while self.engine.core.has_work():  # open saves
            self.engine.step()
        return explain(self.log.events, name)

    @property
    def tiers(self):
        return self.engine.core.metrics.stats.tiers

    def of_type(self, kind):
        return self.log.of_type(kind)

    def replayed(self):
        """Return the events of the tiers, as recorded and as replayed."""
        scheduler = self.engine.core.scheduler
        assert isinstance(scheduler, RecordingScheduler)
        scheduler.close()
        played = replay(self.path)
        assert played.mismatches == []
        return [[each for each in log if isinstance(each, OF_TIERS)] for log in (self.log.events, played.log.events)]

    def end(self):
        self.engine.core.executor.shutdown()


@pytest.fixture(autouse=True)
def _every_load_is_worth_it(monkeypatch):
    monkeypatch.setattr("octavo.core.transfer_cost.TransferCost.is_worth_loading", lambda *_: True)


def sums(told):
    """Return the sums for each tier, computed from the events."""
    found = {}
    for event in told.log.events:
        for move in getattr(event, "moves", ()):
            way = "loaded" if isinstance(event, events.KVLoadEnded) else "saved"
            add(found, move, way)
        if isinstance(event, events.HostBlocksCopied):
            add(found, event.saved, "saved")
            add(found, event.loaded, "loaded")
        if isinstance(event, events.StoreBlocksEvicted):
            found[event.tier, "evicted"] = found.get((event.tier, "evicted"), 0) + event.num_blocks
    return found


def add(found, move, way):
    for what, value in (("blocks", move.num_blocks), ("bytes", move.num_bytes), ("seconds", move.seconds)):
        found[move.tier, way, what] = found.get((move.tier, way, what), 0) + value


def assert_figures_are_the_sum_of_events(told):
    found = sums(told)
    for name, tier in told.tiers.items():
        assert tier.num_loaded_blocks == found.get((name, "loaded", "blocks"), 0)
        assert tier.loaded_bytes == found.get((name, "loaded", "bytes"), 0)
        assert tier.load_seconds == pytest.approx(found.get((name, "loaded", "seconds"), 0))
        assert tier.num_saved_blocks == found.get((name, "saved", "blocks"), 0)
        assert tier.saved_bytes == found.get((name, "saved", "bytes"), 0)
        assert tier.save_seconds == pytest.approx(found.get((name, "saved", "seconds"), 0))
    metrics = {
        (sample.name, sample.labels.get("tier")): sample.value
        for family in _tiers(told.engine.core.metrics.stats, told.engine.core.capacity, ["model"])
        for sample in family.samples
    }
    for name, tier in told.tiers.items():
        assert metrics["octavo:kv_tier_loaded_bytes_total", name] == tier.loaded_bytes
        assert metrics["octavo:kv_tier_hit_tokens_total", name] == tier.num_hit_tokens
        assert metrics["octavo:evicted_blocks_total", name] == tier.num_evicted
    return metrics


def test_disk_hit_is_reported_with_tokens_time_and_saved_compute(checkpoint, tmp_path):
    first = Told(checkpoint, tmp_path / "first", disk_dir=tmp_path / "kv", disk_bytes=1 << 30)
    first.ask("cold")
    first.end()
    saved = first.tiers["disk"]
    block_bytes = first.engine.core.executor.__dict__.get("block_bytes", saved.saved_bytes // saved.num_saved_blocks)
    assert (saved.num_saved_blocks, saved.saved_bytes) == (8, 8 * block_bytes)
    second = Told(checkpoint, tmp_path / "second", disk_dir=tmp_path / "kv", disk_bytes=1 << 30)
    second.ask("other", [7] * 40)  # the cost of computing is known from now on
    text = second.ask("warm").text()
    assert re.search(r"128 tokens from disk, [\d.]+ ms, instead of about [\d.]+ ms of computing", text), text
    disk = second.tiers["disk"]
    assert (disk.num_hit_tokens, disk.num_loaded_blocks, disk.loaded_bytes) == (128, 8, 8 * block_bytes)
    [load] = second.of_type(events.KVLoadEnded)
    assert [(move.tier, move.num_blocks) for move in load.moves] == [("disk", 8)]
    assert 0 < disk.load_seconds <= disk.wait_seconds == load.seconds
    assert disk.computing_seconds == load.computing_s > 0
    metrics = assert_figures_are_the_sum_of_events(second)
    assert metrics["octavo:kv_tier_wait_seconds_total", "disk"] == load.seconds
    was, now = second.replayed()
    assert was == now
    second.end()


@pytest.mark.turn(8)
def test_load_from_two_tiers_is_reported_per_tier(checkpoint, tmp_path):
    """Memory has only the first three blocks of the chain; the following ones come from disk."""
    stores, pool = {"disk_dir": tmp_path / "kv", "disk_bytes": 1 << 30}, GlobalKVPool(5000)
    for name, prompt, tiers in (("a", PROMPT, ({}, None)), ("b", PROMPT[: 3 * SIZE + 1], (stores, node(pool)))):
        first = Told(checkpoint, tmp_path / name, tiers[1], **(tiers[0] if tiers[1] else stores))
        first.ask("cold", prompt)
        first.end()
    second = Told(checkpoint, tmp_path / "second", node(pool, "b"), **stores)
    second.ask("other", [7] * 40)
    text = second.ask("warm").text()
    given = r"48 tokens from memory \([\d.]+ ms\) and 80 tokens from disk \([\d.]+ ms\)"
    assert re.search(rf"{given}, [\d.]+ ms in all, instead of about [\d.]+ ms of computing", text), text
    disk, memory = second.tiers["disk"], second.tiers["memory"]
    assert (memory.num_hit_tokens, disk.num_hit_tokens) == (48, 80)
    [load] = second.of_type(events.KVLoadEnded)
    assert disk.wait_seconds + memory.wait_seconds == pytest.approx(load.seconds)
    assert disk.computing_seconds + memory.computing_seconds == pytest.approx(load.computing_s)
    assert memory.num_saved_blocks == 2 + 8 - 3, "of the other prompt, and what came from disk"
    assert disk.num_saved_blocks == 2
    assert_figures_are_the_sum_of_events(second)
    was, now = second.replayed()
    assert was == now
    second.end()


@pytest.mark.turn(12)
def test_memory_tier_evictions_are_counted_only_by_their_engine(checkpoint, tmp_path):
    pool = GlobalKVPool(3)
    first = Told(checkpoint, tmp_path / "first", node(pool), disk_dir=tmp_path / "kv", disk_bytes=1 << 30)
    first.ask("cold")
    [saved], [evicted] = first.of_type(events.KVSaveEnded), first.of_type(events.StoreBlocksEvicted)
    assert [(move.tier, move.num_blocks) for move in saved.moves] == [("memory", 8), ("disk", 8)]
    assert (evicted.tier, evicted.num_blocks) == ("memory", 5)
    assert (first.tiers["memory"].num_evicted, first.tiers["disk"].num_evicted) == (5, 0)
    first.end()
    for name in ("a", "b"):
        again = Told(checkpoint, tmp_path / name, node(pool, name))
        again.ask("short", [5] * 40)
        assert again.tiers["memory"].num_evicted == (2 if name == "a" else 0)
        again.end()


@pytest.mark.turn(8)
def test_evictions_of_full_disk_tier_are_counted(checkpoint, tmp_path):
    probe = Told(checkpoint, tmp_path / "probe", node(GlobalKVPool()))
    size = probe.engine.core.executor.worker.kv_cache.block_bytes
    probe.end()
    told = Told(checkpoint, tmp_path / "journal", disk_dir=tmp_path / "kv", disk_bytes=20 * size)
    for index in range(6):
        told.ask(f"r{index}", [index + 2, *PROMPT])
    evicted = told.of_type(events.StoreBlocksEvicted)
    assert {each.tier for each in evicted} == {"disk"}
    held = told.engine.core.metrics.stats.kv_stores["disk"].num_blocks
    assert told.tiers["disk"].num_evicted == sum(each.num_blocks for each in evicted)
    assert told.tiers["disk"].num_saved_blocks == held + told.tiers["disk"].num_evicted
    was, now = told.replayed()
    assert was == now
    told.end()


@pytest.mark.turn(8)
def test_host_memory_hit_is_reported_with_tokens_and_time(checkpoint, tmp_path):
    told = Told(checkpoint, tmp_path / "journal", num_blocks=12, swap_space_bytes=1 << 24)
    told.ask("first")
    told.ask("other", [9, *PROMPT])  # there is no room for both
    text = told.ask("again").text()
    assert re.search(r"\d+ tokens from host memory, [\d.]+ ms, instead of about [\d.]+ ms of computing", text), text
    host, device = told.tiers["host"], told.tiers["device"]
    [found] = told.of_type(events.HostBlocksFound)
    assert host.num_hit_tokens == found.num_tokens > 0
    assert host.num_loaded_blocks == found.num_blocks
    assert host.num_saved_blocks == len(told.of_type(events.BlockOffloaded)) > 0
    assert host.loaded_bytes == host.num_loaded_blocks * told.engine.core.executor.worker.kv_cache.block_bytes
    assert 0 < host.wait_seconds == host.load_seconds
    assert host.computing_seconds == found.computing_s > 0
    assert device.num_evicted == len(told.of_type(events.BlockEvicted)) > 0
    assert_figures_are_the_sum_of_events(told)
    was, now = told.replayed()
    assert was == now
    told.end()
