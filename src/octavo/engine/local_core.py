"""An in-process core client."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from octavo.data.request import RequestStatus
from octavo.engine.snapshot_feed import SnapshotFeed
from octavo.errors import EngineDeadError, QueueFullError, RequestError
from octavo.outputs import EngineCoreOutput
from octavo.runtime.faults import error_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from octavo.data.capacity import EngineCapacity
    from octavo.data.metrics import EngineStats
    from octavo.data.request import Request
    from octavo.data.snapshot import Snapshot
    from octavo.engine.core_client import Answer
    from octavo.engine.engine_core import EngineCore

logger = logging.getLogger(__name__)
HELD_CHECK_S = 0.005
IDLE_CHECK_S = 1.0
_SAVING_S = 5.0  # limit on the wait until the next transfer ends
_ABORTED = RequestStatus.FINISHED_ABORTED.finish_reason


@dataclass(slots=True)
class _Held:
    request_id: str
    streams: Sequence[Request]
    answer: Answer
    prepared: Future[None]
    deadline: float
    has_begun: bool = False


class LocalCore:
    """A `CoreClient` of a core in this process.

    prepare_s: Limit on compiling a request's grammar, in seconds.
    turn_s: Limit on waiting for the compilation's start, in seconds.
    """

    num_restarts = num_failed_starts = 0
    rank_failures: Mapping[int, int] = MappingProxyType({})
    retry_after_s = 1.0
    is_ready = True

    def __init__(self, core: EngineCore, *, prepare_s: float = math.inf, turn_s: float = math.inf) -> None:
        self.core = core
        self._prepare_s, self._turn_s = prepare_s, turn_s
        self._held: list[_Held] = []
        self._undelivered: list[EngineCoreOutput] = []
        self._woken = threading.Event()
        self._feed: SnapshotFeed | None = None
        self._listener: Callable[[Snapshot], None] = lambda _snapshot: None

    @property
    def capacity(self) -> EngineCapacity:
        """See `CoreClient`."""
        return self.core.capacity

    @property
    def stats(self) -> EngineStats:
        """See `CoreClient`."""
        return self.core.metrics.stats

    @property
    def is_holding(self) -> bool:
        """True if a request is being prepared."""
        return bool(self._held)

    def on_lost(self, lose: Callable[[EngineDeadError], None]) -> None:
        """Do nothing."""

    def add_request(self, request_id: str, streams: Sequence[Request], answer: Answer) -> None:
        """See `CoreClient`."""
        try:
            prepared = self.core.executor.prepare(streams[0].sampling_params, streams[0].tenant)
        except BaseException as error:  # noqa: BLE001 - see octavo.runtime.faults
            answer(error_for(request_id, "it was prepared", error))
            return
        if prepared is None:
            self._add(streams, answer)
            return
        self._held.append(_Held(request_id, streams, answer, prepared, time.monotonic() + self._turn_s))
        prepared.add_done_callback(lambda _: self.wake())

    def _add(self, streams: Sequence[Request], answer: Answer) -> None:
        scheduler, added = self.core.scheduler, list[str]()
        try:
            for stream in streams:
                scheduler.add_request(stream)
                added.append(stream.request_id)
        except RequestError as error:
            scheduler.finish_requests(added, RequestStatus.FINISHED_ABORTED)
            answer(error)
        else:
            answer(None)

    def _take_prepared(self) -> None:
        held, self._held = self._held, []
        now = time.monotonic()
        for each in held:
            if each.prepared.running() and not each.has_begun:
                each.has_begun, each.deadline = True, now + self._prepare_s
            if not each.prepared.done() and now < each.deadline:
                self._held.append(each)
                continue
            try:
                each.prepared.result(timeout=0)
            except TimeoutError:
                each.prepared.cancel()
                each.answer(self._lateness(each))
            except BaseException as error:  # noqa: BLE001
                each.answer(error_for(each.request_id, "it was prepared", error))
            else:
                self._add(each.streams, each.answer)

    def _lateness(self, held: _Held) -> RequestError:
        if held.has_begun:
            message = f"the grammar was not compiled within {self._prepare_s:g} s"
            return RequestError(message, parameter="structured_outputs")
        return QueueFullError(f"too many grammars wait to be compiled: this one had no turn within {self._turn_s:g} s")

    def finish_requests(self, stream_ids: Sequence[str], status: RequestStatus) -> None:
        """End streams. If a request is still being prepared, all its streams are aborted."""
        ended = set(stream_ids)
        for each in [each for each in self._held if any(stream.request_id in ended for stream in each.streams)]:
            self._held.remove(each)
            each.prepared.cancel()
            each.answer(None)
            self._undelivered += [EngineCoreOutput(s.request_id, finish_reason=_ABORTED) for s in each.streams]
        outputs = self.core.scheduler.finish_requests(stream_ids, status)
        if status is RequestStatus.FINISHED_ABORTED:
            self._undelivered += outputs

    def has_work(self) -> bool:
        """See `CoreClient`."""
        return bool(self._undelivered) or self.core.has_work()

    def step(self) -> list[EngineCoreOutput]:
        """Add prepared requests. If requests were aborted, return their last outputs. Otherwise compute a step."""
        self._take_prepared()
        if self._undelivered:
            outputs, self._undelivered = self._undelivered, []
        else:
            outputs = self.core.step() if self.core.has_work() else []
        if self.core.kv_events is not None:
            self.core.kv_events.end_step()
        if self._feed is not None and (self._feed.is_due or not self.core.has_work()):
            self._show()
        return outputs

    def check_when_idle(self) -> None:
        """Check an idle core's invariants, and log violations. Raises `EngineDeadError` if the executor failed."""
        self.core.executor.check()
        for breach in self.core.scheduler.check_when_idle():
            logger.error("%s; the blocks concerned are not used any more", breach)
        if self.core.kv_events is not None:
            self.core.kv_events.end_step()

    def wait(self) -> None:
        """See `CoreClient`. Also adds prepared requests."""
        if not self.core.has_work():
            self.check_when_idle()
        self._woken.wait(HELD_CHECK_S if self._held else IDLE_CHECK_S)
        self._woken.clear()
        self._take_prepared()

    def wake(self) -> None:
        """See `CoreClient`."""
        self._woken.set()

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """See `CoreClient`."""
        self._feed = None if listener is None else SnapshotFeed(self.core)
        self._listener = listener or self._listener
        self._show()

    def _show(self) -> None:
        if self._feed is not None:
            for snapshot in self._feed.look():
                self._listener(snapshot)

    def finish_transfers(self) -> None:
        """See `Engine.finish_transfers`."""
        scheduler = self.core.scheduler
        if not scheduler.get_num_transfers():
            return
        num_left, until = -1, 0.0

        def is_progressing() -> bool:
            nonlocal num_left, until
            now, num_now = time.monotonic(), scheduler.get_num_transfers()
            if num_now != num_left:
                num_left, until = num_now, now + _SAVING_S
            return now < until

        self.core.finish_transfers(is_progressing)
        self._show()
        if scheduler.get_num_transfers() and not scheduler.get_num_unfinished_requests():
            logger.warning("no transfer of KV ended within %g s; later steps continue %d of them", _SAVING_S, num_left)

    def shutdown(self) -> None:
        """See `CoreClient`."""
        held, self._held = self._held, []
        for each in held:
            each.answer(EngineDeadError("the engine was shut down"))
        self.core.shutdown()
