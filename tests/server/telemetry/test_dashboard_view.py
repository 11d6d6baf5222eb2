"""The dashboard shows what the engine did: compared with the scheduler itself, step by step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from fakes import make_engine

from octavo.data.events import (
    DraftsTimed,
    DraftsVerified,
    HostBlocksCopied,
    KVLoadEnded,
    KVSaveEnded,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    RequestQueued,
    StepCompleted,
    StepScheduled,
)
from octavo.data.kv_tiers import TierMove
from octavo.data.request import RequestStatus
from octavo.data.snapshot import BlockMap, Snapshot
from octavo.engine.llm_engine import Engine
from octavo.engine.snapshot_feed import SnapshotFeed
from octavo.sampling_params import SamplingParams
from octavo.server.telemetry.dashboard import view as view_module
from octavo.server.telemetry.dashboard.cursor import Cursor
from octavo.server.telemetry.dashboard.view import LiveView, Times, percentile

LIVE = {"waiting", "prompt", "generating", "preempted"}


class Page:
    """Applies frames as the page does."""

    def __init__(self) -> None:
        self.states: list[int] = []
        self.tables: dict[int, list[int]] = {}
        self.seconds: dict[int, list[Any]] = {}
        self.names: dict[int, str] = {}
        self.steps: list[list[Any]] = []
        self.num_left_out = self.num_resets = 0

    def take(self, frame: dict[str, Any]) -> None:
        if frame["is_first"]:
            self.num_resets += 1
            self.seconds, self.steps, self.num_left_out, self.names = {}, [], 0, {}
        self.seconds |= {row[0]: row for row in frame["seconds"]}
        self.names |= dict(frame["names"])
        self.steps += frame["steps"]
        self.num_left_out += frame["steps_left_out"]
        change = frame["blocks"]
        if change is None:
            return
        if isinstance(change["states"], str):
            self.states, self.tables = [int(digit) for digit in change["states"]], {}
        else:
            for block, state in change["states"]:
                self.states[block] = state
        for number in change["gone"]:
            del self.tables[number]
        for number, start, blocks in change["grown"]:
            self.tables[number] = self.tables.get(number, [])[:start] + blocks


class Watched:
    """A small engine under random load, a view of it, and a page that reads the view."""

    def __init__(self, seed: int) -> None:
        self.engine: Engine = make_engine(num_blocks=24, block_size=4, max_num_seqs=6)
        self.rng = random.Random(seed)
        self.feed = SnapshotFeed(self.engine.core)
        self.view = LiveView(self.engine.clock)
        self.cursor, self.page = Cursor(self.view), Page()
        self.events: list[Any] = []

    def look(self) -> None:
        for snapshot in self.feed.look():
            self.events += snapshot.events
            self.view.take(snapshot)

    def serve(self, num_steps: int) -> None:
        names = iter(range(10**6))
        for _ in range(num_steps):
            for _ in range(self.rng.choice([0, 0, 1, 2]) if len(self.engine.core.scheduler.requests) < 30 else 0):
                text = self.rng.choice(["the same beginning of many prompts ", ""]) + "x" * self.rng.randrange(1, 50)
                self.engine.add_request(f"r{next(names)}", text, SamplingParams(max_tokens=self.rng.randrange(1, 30)))
            if self.rng.random() < 0.05:
                self.engine.abort_request(f"r{self.rng.randrange(200)}")
            self.engine.step()
            self.look()
            self.check()

    def check(self) -> None:
        scheduler, view = self.engine.core.scheduler, self.view
        told = {row["id"]: row for row in view.rows() if row["state"] in LIVE}
        assert told.keys() == scheduler.requests.keys()
        expected = {RequestStatus.WAITING: {"waiting"}, RequestStatus.PREEMPTED: {"preempted"}}
        for name, request in scheduler.requests.items():
            row = told[name]
            assert row["state"] in expected.get(request.status, {"prompt", "generating"}), name
            assert row["generated"] == request.sequence.num_output_tokens
            assert row["prompt"] == request.num_prompt_tokens
            assert row["preemptions"] == request.num_preemptions
            if request.status is RequestStatus.RUNNING:
                assert (row["state"] == "prompt") == (request.num_computed_tokens < request.num_tokens - 1)
        assert (view.num_running, view.num_waiting) == scheduler.get_request_counts()
        if self.rng.random() < 0.5:
            self.page.take(self.cursor.frame())
            assert bytes(self.page.states) == view.blocks.states  # type: ignore[union-attr]
            numbers = view.numbers()
            tables = {numbers[name]: list(r.sequence.block_table) for name, r in scheduler.requests.items()}
            assert self.page.tables == {number: table for number, table in tables.items() if table}
            assert numbers.items() <= {name: number for number, name in self.page.names.items()}.items()


@pytest.mark.turn(12)
@pytest.mark.parametrize("seed", range(3))
def test_live_view_matches_scheduler_events(seed: int) -> None:
    watched = Watched(seed)
    watched.serve(200)
    of = Counter(type(event) for event in watched.events)
    assert of[RequestPreempted] > 3, "the cache was scarce"
    view, page = watched.view, watched.page
    done = [event for event in watched.events if isinstance(event, StepCompleted)]
    seconds = list(view._seconds.values())
    assert sum(each.generated for each in seconds) == sum(sum(event.num_new_tokens.values()) for event in done)
    firsts = sum(len(each.ttft.values) for each in seconds if each.ttft)
    assert firsts == sum(bool(row["ttft"] is not None) for row in (s.row(0) for s in view._shown.values()))
    num_news = sum(1 for event in done for count in event.num_new_tokens.values() if count)
    assert firsts + sum(len(each.itl.values) for each in seconds if each.itl) == num_news
    page.take(watched.cursor.frame())
    assert len(page.steps) + page.num_left_out == of[StepScheduled]
    scheduled = [event for event in watched.events if isinstance(event, StepScheduled)]
    for step, event in zip(page.steps[::-1], scheduled[::-1], strict=False):
        assert step[0] == event.step
        assert [count for _, count, _ in step[3]] == list(event.num_scheduled_tokens.values())
    endings = {event.request_id: event for event in watched.events if isinstance(event, RequestFinished)}
    for row in view.rows():
        if row["state"] not in LIVE:
            assert (row["state"], row["generated"]) == (
                endings[row["id"]].reason,
                endings[row["id"]].num_output_tokens,
            )


def test_step_parts_distinguish_prompt_and_generated_tokens() -> None:
    watched = Watched(0)
    watched.engine.add_request("one", "x" * 30, SamplingParams(max_tokens=4, ignore_eos=True))
    while watched.engine.has_unfinished_requests():
        watched.engine.step()
    watched.look()
    parts = [part for step in watched.view.steps for part in step.parts]
    assert parts == [(1, 30, True), (1, 1, False), (1, 1, False), (1, 1, False)]


def test_step_reports_accepted_draft_tokens() -> None:
    watched = Watched(0)
    watched.engine.core.executor.guesses = (True, True, False)  # type: ignore[attr-defined]
    watched.engine.add_request("one", "x" * 30, SamplingParams(max_tokens=8, ignore_eos=True))
    while watched.engine.has_unfinished_requests():
        watched.engine.step()
    watched.look()
    watched.page.take(watched.cursor.frame())
    steps = watched.page.steps
    assert [step[3:] for step in steps[:2]] == [[[(1, 30, True)], []], [[(1, 4, False)], [(1, 3, 2)]]]
    verified = {
        each.step: (1, each.num_drafted, each.num_accepted)
        for each in watched.events
        if isinstance(each, DraftsVerified)
    }
    assert {step[0]: step[4][0] for step in steps if step[4]} == verified
    figures = watched.view.moment()["drafts"]
    drafted, accepted = (sum(each[place] for each in verified.values()) for place in (1, 2))
    assert (figures["drafted"], figures["accepted"]) == (drafted, accepted)
    assert figures["tokens_per_step"] == round(1 + accepted / len(verified), 2)
    timed = [each for each in watched.events if isinstance(each, DraftsTimed)]
    without_s, with_s = sum(each.seconds_without for each in timed), sum(each.seconds for each in timed)
    # If every one of these few steps had drafts, the time of a step without drafts is unknown.
    assert figures["speed_up"] == (round(without_s / with_s, 2) if timed else None)


def test_draft_figures_are_none_without_speculation() -> None:
    watched = Watched(0)
    watched.serve(5)
    assert watched.view.moment()["drafts"] is None


def test_late_watcher_gets_kept_steps_and_count_of_omitted() -> None:
    watched = Watched(1)
    watched.serve(5)
    watched.page.take(watched.cursor.frame())
    for _ in range(300):
        watched.engine.add_request("again", "x", SamplingParams(max_tokens=2, ignore_eos=True))
        while watched.engine.has_unfinished_requests():
            watched.engine.step()
        watched.look()
    watched.page.take(watched.cursor.frame())
    page, view = watched.page, watched.view
    assert page.num_left_out > 0
    assert len(page.steps) + page.num_left_out == view.num_steps


def test_live_view_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "_NUM_ENDED", 20)
    watched = Watched(2)
    watched.serve(150)
    view = watched.view
    assert len(view._ended) <= 20
    assert len(view._shown) <= 20 + len(watched.engine.core.scheduler.requests)
    assert len(view.rows()) <= 100
    assert view.recent.weight <= 200_000


def test_engine_restart_resets_live_view() -> None:
    watched = Watched(3)
    watched.serve(20)
    watched.page.take(watched.cursor.frame())
    watched.view.take(Snapshot([], is_first=True, blocks=BlockMap(4, bytes(8), {})))
    watched.page.take(watched.cursor.frame())
    assert watched.page.num_resets == 2
    assert (watched.page.states, watched.page.tables, watched.page.steps) == ([0] * 8, {}, [])
    assert watched.view.rows() == []


def test_request_older_than_view_is_not_shown() -> None:
    engine = make_engine()
    engine.add_request("old", "x" * 20, SamplingParams(max_tokens=10, ignore_eos=True))
    engine.step()
    view = LiveView(engine.clock)
    known = engine.core.recent.num_seen
    while engine.has_unfinished_requests():
        engine.step()
    view.take(Snapshot(engine.core.recent.since(known), is_first=True, blocks=engine.core.scheduler.block_map()))
    assert view.rows() == []
    assert (view.num_running, view.num_waiting) == (1, 0), "as of the last step"
    assert sum(each.generated for each in view._seconds.values()) == 9


def test_late_events_update_gapless_seconds() -> None:
    now = 100.0
    view, page = LiveView(lambda: now), Page()
    cursor = Cursor(view)

    def charted() -> dict[int, tuple[int, int]]:
        page.take(cursor.frame())
        fresh = Page()
        fresh.take(Cursor(view).frame())
        assert fresh.seconds == page.seconds, "who comes later sees the same"
        return {second: (row[1], row[2]) for second, row in page.seconds.items()}

    queued = RequestQueued(1, 90.0, "a", 4000, 0, "", 0, 90.0)
    admitted = RequestAdmitted(1, 90.0, "a", 0, 4000, resumed=False)
    view.take(Snapshot([queued, admitted, StepScheduled(1, 90.2, {"a": 3000}, 3000, 1, 2, 0.5)]))
    view.take(Snapshot([StepCompleted(1, 90.4, {"a": 0})]))
    assert charted() == {90: (3000, 0), **dict.fromkeys(range(91, 100), (0, 0))}
    now = 103.5  # a long step has been running since 97.2, and is not reported yet
    assert charted()[97] == (0, 0)
    view.take(Snapshot([StepScheduled(2, 97.2, {"a": 1000}, 1000, 1, 0, 0.6), StepCompleted(2, 103.4, {"a": 1})]))
    assert charted()[97] == (1000, 0)
    now = 105.0
    told = charted()
    assert told[103] == (0, 1)
    assert list(told) == list(range(90, 105))
    assert page.seconds[103][6] == pytest.approx(13.4), "the first token came then"
    now = 2000.0
    view.take(Snapshot([]))
    assert len(view._seconds) <= view_module.HISTORY_S + 1


def test_kv_transfer_bytes_are_counted_in_their_second() -> None:
    view, page = LiveView(lambda: 200.0), Page()
    memory, disk, nothing = TierMove("memory", 1, 100, 0.1), TierMove("disk", 2, 200, 0.1), TierMove("host", 0, 0, 0.0)
    load = KVLoadEnded(2, 190.2, "a", 7, "done", 12, 0.1, 0.2, "memory, disk", (memory, disk), resumed=False)
    copies = HostBlocksCopied(3, 190.9, TierMove("host", 3, 1000, 0.1), TierMove("host", 4, 5000, 0.1))
    view.take(Snapshot([KVSaveEnded(1, 190.0, 8, 2, "done", (disk, memory)), load, copies]))
    view.take(Snapshot([KVSaveEnded(4, 191.0, 9, 0, "expired", ()), HostBlocksCopied(4, 191.5, nothing, nothing)]))
    page.take(Cursor(view).frame())
    assert page.seconds[190][10:] == [5300, 1300, 0]
    assert page.seconds[191][10:] == page.seconds[195][10:] == [0, 0, 0]


def test_latency_samples_per_second_are_bounded_and_dropped_later() -> None:
    times = Times()
    for value in range(100_000):
        times.add(float(value))
    assert len(times.values) < 512
    assert percentile(times.values, 0.5) == pytest.approx(50_000, rel=0.02)
    assert percentile(times.values, 0.99) == pytest.approx(99_000, rel=0.02)
    view = LiveView(lambda: 200.0)
    view.take(Snapshot([RequestQueued(1, 100.0, "a", 4, 0, "", 0, 100.0), StepCompleted(1, 100.5, {"a": 1})]))
    row = view._seconds[100].row(100)
    assert row[6] == 0.5
    view.take(Snapshot([StepCompleted(2, 150.0, {"a": 1})]))
    assert view._seconds[100].ttft is None
    assert view._seconds[100].row(100) == row


def test_dashboard_percentiles_use_nearest_rank() -> None:
    values = [float(value) for value in random.Random(1).sample(range(1, 201), 200)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0, 0.0)] == [100.0, 198.0, 200.0, 1.0]
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
