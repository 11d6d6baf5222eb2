"""The dashboard's state."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any

from octavo.data import events
from octavo.data.draft_stats import DraftStats
from octavo.data.expert_stats import ExpertStats
from octavo.data.recent_events import RecentEvents
from octavo.data.snapshot import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.events import Event
    from octavo.data.snapshot import BlockMap, Snapshot

HISTORY_S = 600
_RECENT_S = 10
_MOST_OPEN_STEPS = 2
_NUM_STEPS = 240
_NUM_ENDED = 200
_NUM_ROWS = 100
_NUM_ROWS_ENDED = 30
_MAX_TIMES = 512  # kept for each `Second`
WAITING, PROMPT, GENERATING, PREEMPTED = "waiting", "prompt", "generating", "preempted"
_LIVE_ORDER = {GENERATING: 0, PROMPT: 1, PREEMPTED: 2, WAITING: 3}


class Times:
    """Durations in seconds, for percentiles. If there are many, only every n-th is kept."""

    __slots__ = ("_every", "_num_seen", "values")

    def __init__(self) -> None:
        self.values: list[float] = []
        self._every, self._num_seen = 1, 0

    def add(self, value: float) -> None:
        """Add a duration."""
        self._num_seen += 1
        if self._num_seen % self._every == 0:
            self.values.append(value)
            if len(self.values) >= _MAX_TIMES:
                self.values, self._every = self.values[::2], 2 * self._every


@dataclass(slots=True)
class Second:
    """The figures of one second of the engine's clock.

    prefill, generated: Numbers of prompt tokens and of generated tokens.
    running, waiting: Numbers of requests in the second's last step.
    usage: Used share of the KV blocks, 0 to 1.
    loaded_bytes, saved_bytes: Bytes of KV.
    """

    revision: int
    prefill: int = 0
    generated: int = 0
    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    loaded_bytes: int = 0
    saved_bytes: int = 0
    experts: ExpertStats = field(default_factory=ExpertStats)
    ttft: Times | None = field(default_factory=Times)  # None after `settle`
    itl: Times | None = field(default_factory=Times)
    percentiles: tuple[float | None, ...] = ()

    def settle(self) -> None:
        """Replace `ttft` and `itl` by their percentiles."""
        if self.ttft is not None:
            self.percentiles, self.ttft, self.itl = self._percentiles(), None, None

    def row(self, second: int) -> list[float | None]:
        """Return chart data."""
        times, moved = self._percentiles(), (self.loaded_bytes, self.saved_bytes, self.experts.read_bytes)
        return [second, self.prefill, self.generated, self.running, self.waiting, round(self.usage, 4), *times, *moved]

    def _percentiles(self) -> tuple[float | None, ...]:
        if self.ttft is None or self.itl is None:
            return self.percentiles
        return tuple(percentile(times.values, share) for times in (self.ttft, self.itl) for share in (0.5, 0.99))


@dataclass(frozen=True, slots=True)
class Step:
    """An ended step.

    start: Seconds of the engine's clock.
    parts: (request's number, number of tokens, True for prompt tokens), in the order of the batch.
    drafts: (request's number, number of draft tokens, number of accepted tokens).
    """

    number: int
    start: float
    seconds: float
    parts: list[tuple[int, int, bool]]
    drafts: list[tuple[int, int, int]]

    def row(self) -> list[Any]:
        """Return page data."""
        return [self.number, round(self.start, 4), round(self.seconds, 5), self.parts, self.drafts]


@dataclass(slots=True)
class Shown:
    """A request on the page. num_left: Number of tokens to compute before the next generated token."""

    number: int
    request_id: str
    tenant: str
    num_prompt_tokens: int
    arrival: float
    state: str = WAITING
    num_cached_tokens: int = 0
    num_generated: int = 0
    num_preemptions: int = 0
    num_left: int = 0
    first_token: float | None = None
    last_token: float = 0.0
    ended: float | None = None

    def row(self, now: float) -> dict[str, Any]:
        """Return a row of the page, with durations in seconds."""
        return {
            "number": self.number,
            "id": self.request_id,
            "key": self.tenant,
            "state": self.state,
            "prompt": self.num_prompt_tokens,
            "cached": self.num_cached_tokens,
            "generated": self.num_generated,
            "preemptions": self.num_preemptions,
            "ttft": None if self.first_token is None else round(self.first_token - self.arrival, 4),
            "age": round((now if self.ended is None else self.ended) - self.arrival, 3),
        }


class LiveView:
    """The dashboard's state, in bounded memory. Used in one thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.epoch = 0  # grows when all state is dropped
        self._forget()

    def _forget(self) -> None:
        self.epoch += 1
        self.recent = RecentEvents()
        self.steps: deque[Step] = deque(maxlen=_NUM_STEPS)
        self.num_steps = 0
        self.blocks: BlockMap | None = None
        self.revision = 0
        self.num_running = self.num_waiting = self.num_preemptions = 0
        self._moment: tuple[tuple[int, int], dict[str, Any]] = ((-1, -1), {})
        self.num_queried = self.num_hit = 0
        self._seconds: dict[int, Second] = {}
        self._shown: dict[str, Shown] = {}
        self._ended: deque[str] = deque()
        self._num_requests = 0
        self._open_steps: dict[int, tuple[events.StepScheduled, list[tuple[int, int, bool]]]] = {}
        self._last_end = 0.0
        self._drafts: list[tuple[int, int, int]] = []
        self._draft_stats = DraftStats()

    def take(self, snapshot: Snapshot) -> None:
        """Update the state from a snapshot. If `snapshot.is_first`, drop all earlier state."""
        if snapshot.is_first:
            self._forget()
        self.revision += 1
        for event in snapshot.events:
            self.recent.emit(event)
            self._follow(event)
        if snapshot.blocks is not None:
            self.blocks = snapshot.blocks
        if snapshot.events:
            self._settle(int(snapshot.events[-1].time))
        self._prune()

    # --- reading ---

    def numbers(self) -> dict[str, int]:
        """Return numbers by request id."""
        return {name: shown.number for name, shown in self._shown.items()}

    def names_since(self, number: int) -> list[tuple[int, str]]:
        """Return (number, request id) for numbers above `number`."""
        return [(shown.number, name) for name, shown in self._shown.items() if shown.number > number]

    def live_numbers(self) -> list[int]:
        """Return the numbers of requests that have started and not ended."""
        return [each.number for each in self._shown.values() if each.ended is None and each.state != WAITING]

    def seconds_since(self, revision: int, second: int, now: int) -> list[list[float | None]]:
        """Return chart rows for the new and changed seconds before `now`.

        second: The first new second.
        revision: The last revision that the page knows. A past second changes if its events arrive late.
        """
        self._fill(now)
        return [
            each.row(at)
            for at, each in sorted(self._seconds.items())
            if at < now and (each.revision > revision or at >= second)
        ]

    def _fill(self, now: int) -> None:
        last = max(self._seconds, default=now)
        before = self._seconds.get(last)
        for second in range(max(last + 1, now - HISTORY_S), now):
            usage = before.usage if before is not None and self.num_running else 0.0
            self._seconds[second] = Second(0, 0, 0, self.num_running, self.num_waiting, usage)

    def steps_since(self, number: int) -> list[Step]:
        """Return the steps after the first `number` steps, without dropped steps."""
        first = self.num_steps - len(self.steps)
        return list(islice(self.steps, max(number - first, 0), None))

    def moment(self) -> dict[str, Any]:
        """Return current figures and recent rates and latencies."""
        now = int(self.clock())
        if self._moment[0] != (now, self.revision):
            self._moment = ((now, self.revision), self._make_moment(now))
        return self._moment[1]

    def _make_moment(self, now: int) -> dict[str, Any]:
        last = [each for t in range(now - _RECENT_S, now + 1) if (each := self._seconds.get(t)) is not None]
        ttft = [t for each in last if each.ttft is not None for t in each.ttft.values]
        itl = [t for each in last if each.itl is not None for t in each.itl.values]
        whole = [each for t in range(now - 3, now) if (each := self._seconds.get(t)) is not None]
        return {
            "running": self.num_running,
            "waiting": self.num_waiting,
            "generated_per_s": round(sum(each.generated for each in whole) / 3, 1),
            "prefill_per_s": round(sum(each.prefill for each in whole) / 3, 1),
            "ttft": [percentile(ttft, 0.5), percentile(ttft, 0.99)],
            "itl": [percentile(itl, 0.5), percentile(itl, 0.99)],
            "usage": self._usage(),
            "preemptions": self.num_preemptions,
            "cache_hits": round(self.num_hit / self.num_queried, 4) if self.num_queried else None,
            "drafts": self._draft_figures(),
            "experts": _expert_figures(last),
        }

    def _draft_figures(self) -> dict[str, Any] | None:
        stats = self._draft_stats
        if not stats.num_drafts:
            return None
        return {
            "drafted": stats.num_draft_tokens,
            "accepted": stats.num_accepted_tokens,
            "tokens_per_step": round(stats.tokens_per_step, 2),
            "speed_up": stats.speed_up and round(stats.speed_up, 2),
        }

    def _usage(self) -> float:
        if self.blocks is None:
            return 0.0
        states = self.blocks.states
        return round(1 - (states.count(BlockState.FREE) + states.count(BlockState.CACHED)) / len(states), 4)

    def rows(self) -> list[dict[str, Any]]:
        """Return rows of open requests, then of ended requests."""
        now = self.clock()
        live = [shown for shown in self._shown.values() if shown.ended is None]
        live.sort(key=lambda shown: (_LIVE_ORDER[shown.state], shown.number))
        names = islice(dict.fromkeys(reversed(self._ended)), _NUM_ROWS_ENDED)
        ended = [shown for name in names if (shown := self._shown[name]).ended is not None]  # None if the id was reused
        return [shown.row(now) for shown in [*live[: _NUM_ROWS - len(ended)], *ended]]

    # --- following ---

    def _second(self, time: float) -> Second:
        second = self._seconds.get(int(time))
        if second is None:
            second = self._seconds[int(time)] = Second(0, running=self.num_running, waiting=self.num_waiting)
        second.revision = self.revision
        return second

    def _settle(self, newest: int) -> None:
        for second, each in self._seconds.items():
            if second < newest - _RECENT_S:
                each.settle()

    def _follow(self, event: Event) -> None:
        if isinstance(event, events.DraftsVerified | events.DraftsTimed):
            self._draft_stats.add(event)
        match event:
            case events.StepScheduled():
                self._open_step(event)
            case events.StepCompleted():
                self._close_step(event)
                self._take_tokens(event)
            case events.StepFailed():
                self._close_step(event)
            case events.RequestQueued():
                self._num_requests += 1
                self._shown[event.request_id] = Shown(
                    self._num_requests, event.request_id, event.tenant, event.num_prompt_tokens, event.arrival_time
                )
                self.num_waiting += 1
            case events.PrefixCacheQueried():
                self.num_queried += event.num_query_tokens
                self.num_hit += event.num_hit_tokens
            case events.KVLoadEnded():
                self._second(event.time).loaded_bytes += sum(move.num_bytes for move in event.moves)
            case events.RequestEvent():
                shown = self._shown.get(event.request_id)
                if shown is not None:  # otherwise the request began before the first snapshot
                    self._follow_one(shown, event)
            case _:
                self._follow_bytes(event)

    def _follow_bytes(self, event: Event) -> None:
        match event:
            case events.ExpertsComputed():
                self._second(event.time).experts.add(event.load)
            case events.KVSaveEnded():
                self._second(event.time).saved_bytes += sum(move.num_bytes for move in event.moves)
            case events.HostBlocksCopied():
                second = self._second(event.time)
                second.saved_bytes += event.saved.num_bytes
                second.loaded_bytes += event.loaded.num_bytes

    def _follow_one(self, shown: Shown, event: events.RequestEvent) -> None:
        match event:
            case events.RequestAdmitted():
                self._move(shown, PROMPT)
                shown.num_left = event.num_tokens - event.num_cached_tokens
                if not event.resumed:
                    shown.num_cached_tokens = event.num_cached_tokens
            case events.RequestPreempted():
                self._move(shown, PREEMPTED)
                shown.num_preemptions += 1
                self.num_preemptions += 1
            case events.DraftsVerified():
                self._drafts.append((shown.number, event.num_drafted, event.num_accepted))
            case events.RequestFinished():
                self._move(shown, event.reason)
                shown.ended, shown.num_generated = event.time, event.num_output_tokens
                self._ended.append(event.request_id)

    def _move(self, shown: Shown, state: str) -> None:
        for each, step in ((shown.state, -1), (state, 1)):
            if each in {PROMPT, GENERATING}:
                self.num_running += step
            elif each in {WAITING, PREEMPTED}:
                self.num_waiting += step
        shown.state = state

    def _open_step(self, event: events.StepScheduled) -> None:
        parts = []
        for request_id, count in event.num_scheduled_tokens.items():
            shown = self._shown.get(request_id)
            if shown is None:
                parts.append((0, count, count > 1))
                continue
            is_prompt = shown.num_left > 0
            shown.num_left -= count
            parts.append((shown.number, count, is_prompt))
        self._open_steps[event.step] = event, parts
        if len(self._open_steps) > _MOST_OPEN_STEPS:  # the oldest step's end is missing
            del self._open_steps[min(self._open_steps)]
        self.num_running, self.num_waiting = event.num_running, event.num_waiting
        second = self._second(event.time)
        second.prefill += sum(count for _, count, is_prompt in parts if is_prompt)
        second.running, second.waiting, second.usage = event.num_running, event.num_waiting, event.kv_cache_usage

    def _close_step(self, end: events.StepCompleted | events.StepFailed) -> None:
        opened = self._open_steps.pop(end.step, None)
        if opened is not None:
            event, parts = opened
            start = max(event.time, self._last_end)  # the step may be scheduled during the previous step
            self.steps.append(Step(event.step, start, end.time - start, parts, self._drafts))
            self.num_steps += 1
        self._last_end = end.time
        self._drafts = []

    def _take_tokens(self, event: events.StepCompleted) -> None:
        second, now = self._second(event.time), event.time
        ttft, itl = second.ttft or Times(), second.itl or Times()  # only settled seconds have None
        for request_id, count in event.num_new_tokens.items():
            second.generated += count
            shown = self._shown.get(request_id)
            if shown is None or not count:
                continue
            if shown.first_token is None:
                shown.first_token = now
                ttft.add(now - shown.arrival)
            else:
                itl.add(now - shown.last_token)
            shown.last_token = now
            if shown.ended is None:  # an ended request already has the total
                shown.num_generated += count
                if shown.state == PROMPT:
                    self._move(shown, GENERATING)

    def _prune(self) -> None:
        oldest = int(self.clock()) - HISTORY_S
        for second in [each for each in self._seconds if each < oldest]:
            del self._seconds[second]
        while len(self._ended) > _NUM_ENDED:
            name = self._ended.popleft()
            if name not in self._ended and self._shown[name].ended is not None:  # otherwise the id was reused
                del self._shown[name]


def _expert_figures(seconds: list[Second]) -> dict[str, float] | None:
    total = ExpertStats()
    for each in seconds:
        total.add(each.experts, each.experts.num_steps)
    if not total.num_steps:
        return None
    return {
        "tokens_per_read": round(total.tokens_per_read, 2),
        "step_bytes": total.read_bytes // total.num_steps,
        "imbalance": round(total.imbalance / total.num_steps, 2),
    }


def percentile(values: list[float], share: float) -> float | None:
    """Return the nearest-rank percentile, or None without values. share: 0.5 for the median."""
    if not values:
        return None
    return round(sorted(values)[max(ceil(share * len(values)) - 1, 0)], 5)
