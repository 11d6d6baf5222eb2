"""Reads the load of engines from their metrics."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.ray.fetch import fetch
from octavo.ray.scaling import Load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TIMEOUT_S = 1.0
_NUM_THREADS = 16
_QUEUE_SUM, _QUEUE_COUNT = b"request_queue_time_seconds_sum", b"request_queue_time_seconds_count"
_RUNNING, _WAITING, _LIMIT = b"num_requests_running", b"num_requests_waiting", b"max_num_seqs"
_NAMES = (_QUEUE_SUM, _QUEUE_COUNT, _RUNNING, _WAITING, _LIMIT)
_SAMPLE = re.compile(b"^(octavo|vllm):(" + b"|".join(_NAMES) + rb")(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)

Figures = dict[bytes, float]


def read_figures(text: bytes) -> Figures:
    """Read the metrics of an engine, by their names without prefix. The prefix depends on `--metrics-prefix`."""
    figures: dict[bytes, Figures] = {b"vllm": {}, b"octavo": {}}
    for prefix, name, value in _SAMPLE.findall(text):
        figures[prefix][name] = figures[prefix].get(name, 0.0) + float(value)
    return {**figures[b"vllm"], **figures[b"octavo"]}


@dataclass(slots=True)
class _Queue:
    """The queue of one engine.

    since: When a request began to wait although no request has begun to run since then, or None.
    """

    sum_s: float
    count: float
    since: float | None = None
    num_open: float = 0.0


@dataclass(slots=True)
class LoadReader:
    """Computes loads from successive metrics. key: For reading the metrics."""

    key: str | None
    _queues: dict[str, _Queue] = field(default_factory=dict)
    _answered_at: dict[str, float] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_NUM_THREADS, "octavo-figures"))

    def read(self, urls: Sequence[str], now: float) -> Load | None:
        """Read the metrics of engines. Return None if no engine answers."""
        texts = list(self._pool.map(lambda url: fetch(f"{url}/metrics", self.key, _TIMEOUT_S), urls))
        if all(text is None for text in texts):
            return None
        figures = [None if text is None else read_figures(text) for text in texts]
        return self.load(dict(zip(urls, figures, strict=True)), now)

    def load(self, figures: Mapping[str, Figures | None], now: float) -> Load:
        """Return the load at a time. The queue time of a silent engine is the time since its last answer.

        figures: Of each engine. None if it does not answer.
        """
        self._queues = {url: queue for url, queue in self._queues.items() if url in figures}
        self._answered_at = {url: at for url, at in self._answered_at.items() if url in figures}
        waits = [self._wait(url, each, now) for url, each in figures.items()]
        known = [each for each in figures.values() if each is not None]
        limits = [each[_LIMIT] for each in known if _LIMIT in each]
        return Load(
            now,
            max(waits),
            sum(each.get(_RUNNING, 0.0) for each in known),
            sum(limits) / len(limits) if len(limits) == len(figures) else None,
        )

    def num_open(self, url: str) -> float:
        """Return the number of requests that an engine had at the last reading."""
        queue = self._queues.get(url)
        return 0.0 if queue is None else queue.num_open

    def _wait(self, url: str, figures: Figures | None, now: float) -> float:
        """Return the mean queue time since the previous reading, or the time for which the queue has not moved."""
        if figures is None:
            return now - self._answered_at.setdefault(url, now)
        self._answered_at[url] = now
        sum_s, count = figures.get(_QUEUE_SUM, 0.0), figures.get(_QUEUE_COUNT, 0.0)
        num_waiting = figures.get(_WAITING, 0.0)
        queue = self._queues.get(url)
        if queue is None or count < queue.count:
            queue = self._queues[url] = _Queue(sum_s, count)
        num_left, waited_s = count - queue.count, sum_s - queue.sum_s
        if not num_waiting:
            queue.since = None
        elif num_left or queue.since is None:
            queue.since = now
        queue.sum_s, queue.count = sum_s, count
        queue.num_open = figures.get(_RUNNING, 0.0) + num_waiting
        standing_s = 0.0 if queue.since is None else now - queue.since
        return max(waited_s / num_left if num_left else 0.0, standing_s)
