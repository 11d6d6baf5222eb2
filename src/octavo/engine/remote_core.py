"""A client of a core in another process. The core's process handles only token ids."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import zmq

from octavo.data.metrics import EngineStats
from octavo.engine import ipc
from octavo.engine.core_life import CoreLife
from octavo.engine.health import Patience
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineRestartingError,
    OctavoError,
    QueueFullError,
    RequestError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.config import EngineConfig
    from octavo.data.capacity import EngineCapacity
    from octavo.data.request import Request, RequestStatus
    from octavo.data.snapshot import Snapshot
    from octavo.engine.core_client import Answer
    from octavo.engine.engine_core import EngineCore
    from octavo.outputs import EngineCoreOutput

T = TypeVar("T")
logger = logging.getLogger(__name__)
_POLL_MS = 250
_PAUSE_POLL_MS = 20
_LAST_WORDS_MS = 100  # wait for last messages of an ended process
_STOP_S = 5.0
_STOP_POLL_MS = 20
_KILL_S = 5.0  # wait for a killed process at shutdown
_GIVE_BACK_S = 60.0  # wait for a killed process before a restart
_MAX_PENDING = 4096


class RemoteCore:
    """A `CoreClient` that watches and restarts the core's process.

    command: Command of a process that calls `run_core_process`.
    """

    def __init__(self, command: Sequence[str], config: EngineConfig, patience: Patience | None = None) -> None:
        self.capacity: EngineCapacity
        self.stats = EngineStats()  # at most half a second old, except during long steps
        self.num_restarts = 0
        self.num_failed_starts = 0
        self.rank_failures: Counter[int] = Counter()
        self._command, self._config = command, config
        self._patience = patience or Patience()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._pending: dict[str, Answer] = {}
        self._news: list[EngineCoreOutput] = []
        self._lose: Callable[[EngineDeadError], None] = lambda _error: None
        self._listener: Callable[[Snapshot], None] | None = None
        self._progress: Callable[[int, int], None] = lambda _done, _total: None
        self._life: CoreLife | None = None
        self._killed_process: subprocess.Popen[bytes] | None = None
        self._abandon_at = self._starts_at = self._expected_at = 0.0
        self._load_s = 0.0
        self._num_lives = self._num_failures = 0
        self._was_ready = self._is_shut_down = False

    def start(self, meanwhile: Callable[[], T], progress: Callable[[int, int], None] | None = None) -> T:
        """Start the process. Call `meanwhile` while the process loads, and return its result.

        progress(done, total): Called after `meanwhile` has returned, with loaded and total bytes of weights.

        Raises errors of `meanwhile` and of the process, and `EngineDeadError` if the process ends.
        """
        self._progress = progress or self._progress
        try:
            self._begin()
            result = meanwhile()
            while not self._was_ready:
                self.wait()
        except BaseException:
            self.shutdown()
            raise
        return result

    def _begin(self) -> None:
        config, number = self._config, self._num_lives
        if number and config.record is not None:  # keep the dead process's journal
            record = config.record.with_name(f"{config.record.stem}-{number}{config.record.suffix}")
            config = replace(config, record=record)
        self._num_lives += 1
        try:
            self._life = CoreLife.begin(self._context, self._command, config, self._patience)
            self._poller.register(self._life.news, zmq.POLLIN)
        except ConfigError as error:
            self._die(f"cannot be started: {error}")
        except Exception as error:
            logger.exception("the engine process cannot be started")
            self._die(f"cannot be started: {error}")

    def _tend(self) -> None:
        life, now = self._life, time.monotonic()
        if life is None:
            if now >= self._starts_at and self._is_gone(now):
                self._begin()
            return
        life.health.look(now)
        for data in life.received():
            self._receive(life, data)
        if (reason := life.why_over) is None:
            return
        if life.process.poll() is not None:
            for data in life.received(_LAST_WORDS_MS):
                self._receive(life, data)
        if self._news:
            return  # deliver the last outputs first
        self._die(reason)

    def _is_gone(self, now: float) -> bool:
        if self._killed_process is None or self._killed_process.poll() is not None:
            return True
        if now < self._abandon_at:
            return False
        logger.error(
            "the engine process %d was killed but has not ended; the next one starts anyway", self._killed_process.pid
        )
        return True

    def _die(self, reason: str) -> None:
        life, self._life = self._life, None
        failure, served_s, now = None, None, time.monotonic()
        if life is not None:
            self._poller.unregister(life.news)
            life.end()
            self._killed_process, self._abandon_at = life.process, now + _GIVE_BACK_S
            failure = life.failure
            served_s = None if life.ready_at is None else now - life.ready_at
        if not self._was_ready:
            raise failure or EngineDeadError(f"the engine process {reason} before it was ready")
        if (served_s or 0.0) > self._patience.healthy:
            self._num_failures = 0
        pause = self._patience.restarts[min(self._num_failures, len(self._patience.restarts) - 1)]
        self._num_failures += 1
        self.num_failed_starts += served_s is None
        self.num_restarts += 1
        self.stats = EngineStats()
        self._starts_at = now + pause
        self._expected_at = self._starts_at + self._load_s
        why = f"{reason}: {failure}" if failure else reason
        logger.error("the engine process %s; starting it again in %g s", why, pause)
        what = f"the engine process {reason}"
        if failure is not None and failure.rank is not None:
            self.rank_failures[failure.rank] += 1
            if isinstance(failure, EngineDeadError):  # of other failures, clients must not read paths and options
                what = str(failure)
        error = EngineRestartingError(f"{what}; the engine is being started again", retry_after_s=self.retry_after_s)
        self._refuse_pending(error)
        self._lose(error)

    def _receive(self, life: CoreLife, data: bytes) -> None:
        try:
            message = ipc.decode_from_engine(data)
        except ipc.DecodeError:
            logger.warning("the engine process sent %d bytes that are not a valid message", len(data))
            return
        life.health.note_report(message)
        match message:
            case ipc.Outputs():
                self._news += message.outputs
            case ipc.Accepted():
                self._answer(message.request_id, None)
            case ipc.Refused():
                self._answer(message.request_id, ipc.error_of(message))
            case ipc.Report():
                self.stats = message.stats
            case ipc.Seen() if self._listener is not None:
                self._listener(message.to_snapshot())
            case ipc.Loading():
                self._progress(message.done, message.total)
            case ipc.Failed():
                life.failure = ipc.error_of(message)
            case ipc.Ready():
                self._core_ready(life, message.capacity)
            case ipc.Alive():
                pass

    def _core_ready(self, life: CoreLife, capacity: EngineCapacity) -> None:
        life.requests.poll(1000, zmq.POLLOUT)  # the socket may not be connected yet
        life.ready_at = time.monotonic()
        self.capacity, self._was_ready = capacity, True
        self.num_failed_starts, self._load_s = 0, life.ready_at - life.born
        if self._listener is not None:
            self._send(ipc.Watch(is_on=True))

    @property
    def core(self) -> EngineCore:
        """Raise `EngineError`."""
        raise EngineError("the core of this engine runs in another process")

    @property
    def is_ready(self) -> bool:
        """See `CoreClient`."""
        life = self._life
        return life is not None and life.ready_at is not None and life.health.is_well

    @property
    def retry_after_s(self) -> float:
        """See `CoreClient`."""
        return max(self._expected_at - time.monotonic(), 1.0)

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return None if self._life is None else self._life.process.pid

    def on_lost(self, lose: Callable[[EngineDeadError], None]) -> None:
        """See `CoreClient.on_lost`."""
        self._lose = lose

    def add_request(self, request_id: str, streams: Sequence[Request], answer: Answer) -> None:
        """See `CoreClient`."""
        if len(self._pending) >= _MAX_PENDING:
            answer(QueueFullError(f"{_MAX_PENDING} requests have been sent to the engine, which has not answered yet"))
            return
        try:
            message = ipc.encode(ipc.Add.of(request_id, streams))
        except (TypeError, ValueError, OverflowError) as error:
            answer(RequestError(f"the request cannot be sent to the engine: {error}"))
            return
        if self._life is not None and self._life.send(message):
            self._pending[request_id] = answer
        else:
            answer(EngineRestartingError("the engine is being started again", retry_after_s=self.retry_after_s))

    def _answer(self, request_id: str, error: OctavoError | None) -> None:
        answer = self._pending.pop(request_id, None)
        if answer is None:
            logger.warning("the engine process answered an unknown request")
        else:
            answer(error)

    def _refuse_pending(self, error: EngineDeadError) -> None:
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer(error)

    def finish_requests(self, stream_ids: Sequence[str], status: RequestStatus) -> None:
        """See `CoreClient`."""
        if stream_ids:
            self._send(ipc.Finish([*stream_ids], status))

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """See `CoreClient`. Reports continue after a restart."""
        self._listener = listener
        self._send(ipc.Watch(listener is not None))

    def _send(self, message: ipc.ToEngine) -> bool:
        return self._life is not None and self._life.send(ipc.encode(message))

    def has_work(self) -> bool:
        """See `CoreClient`."""
        return bool(self._news)

    def step(self) -> list[EngineCoreOutput]:
        """See `CoreClient`."""
        news, self._news = self._news, []
        return news

    def wait(self) -> None:
        """See `CoreClient`."""
        poll_ms = _POLL_MS if self._life is not None else _PAUSE_POLL_MS
        for ready, _ in self._poller.poll(poll_ms):
            if ready == self._woken.fileno():
                self._woken.recv(4096)
        self._tend()

    def wake(self) -> None:
        """See `CoreClient.wake`."""
        with contextlib.suppress(OSError):  # the socket is closed, or is full, which ends `wait` anyway
            self._waker.send(b"\0")

    def finish_transfers(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Ask the process to end, and kill it after some seconds."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        until = time.monotonic() + (_STOP_S if self._send(ipc.Stop()) else 0.0)
        life, self._life = self._life, None
        if life is not None:
            while life.process.poll() is None and time.monotonic() < until:
                if life.news.poll(_STOP_POLL_MS):
                    life.news.recv()  # a full socket would block the process
            life.end()
            self._killed_process = life.process
        if self._killed_process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._killed_process.wait(_KILL_S)
        self._refuse_pending(EngineDeadError("the engine was shut down"))
        self._context.destroy(linger=0)
        self._waker.close()
        self._woken.close()
