"""An engine whose core runs in a process of its own: started, watched, and started again when it dies or freezes.

Text stays on this side: prompts are token ids before they cross over, and answers become text when they have come back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import zmq

from octavo.config import SECRET_VARIABLES
from octavo.data.metrics import EngineStats
from octavo.data.request import RequestStatus
from octavo.engine import ipc
from octavo.engine.health import Health, Patience
from octavo.errors import (
    ConfigError,
    EngineDeadError,
    EngineRestartingError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.runtime import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from octavo.config import EngineConfig
    from octavo.data.capacity import EngineCapacity
    from octavo.data.snapshot import Snapshot
    from octavo.engine.input_processor import InputProcessor, ProcessedInput
    from octavo.engine.llm_engine import Accept, Lose, Post
    from octavo.engine.output_processor import OutputProcessor
    from octavo.outputs import EngineCoreOutput, RequestOutput

logger = logging.getLogger(__name__)
_POLL_MS = 250
_LAST_WORDS_MS = 100  # so long may what a dead process said be on its way
_STOP_S = 5.0
_KILL_S = 5.0  # after which requests hear that a process is gone that the system has not ended yet
_GIVE_BACK_S = 60.0  # so long may that take: it gives memory back, which the next one needs
_STANDARD_ERROR = 2
_MAX_PENDING = 4096


@dataclass(slots=True)
class _Life:
    """One engine process, from its start to its end."""

    process: subprocess.Popen[bytes]
    folder: Path
    news: zmq.Socket[bytes]
    requests: zmq.Socket[bytes]
    health: Health
    born: float = field(default_factory=time.monotonic)
    ready_at: float | None = None
    is_open: bool = False  # requests can be sent
    failure: OctavoError | None = None

    @property
    def why_over(self) -> str | None:
        """Why it is over, or has to be given up."""
        if self.process.poll() is not None:
            return f"ended with status {self.process.returncode}"
        return self.health.why_given_up

    def end(self, reason: str) -> _End:
        """Kill what still runs, and take its sockets away."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_KILL_S)
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        self.news.close(linger=0)
        if self.ready_at is None:  # else it was handed over
            self.requests.close(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)
        served_s = None if self.ready_at is None else time.monotonic() - self.ready_at
        return _End(reason, self.failure, served_s, self.process)


@dataclass(frozen=True, slots=True)
class _End:
    """How a life ended, and what the process said of it. served_s: how long it took requests; None if it never did.

    process: which the system may not have ended yet.
    """

    reason: str
    failure: OctavoError | None = None
    served_s: float | None = None
    process: subprocess.Popen[bytes] | None = None


class RemoteEngine:
    """What `AsyncLLM` needs of an engine, with the core elsewhere.

    It belongs to the thread of `AsyncLLM`, but for `start`, `is_ready` and `shutdown`; a thread of its own watches the
    process and posts what it hears. command: what runs `octavo.engine.core_process.run_core_process`.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: EngineConfig,
        make_processors: Callable[[], tuple[InputProcessor, OutputProcessor]],
        clock: Callable[[], float] = time.monotonic,
        patience: Patience | None = None,
    ) -> None:
        self.input_processor: InputProcessor  # these three are there when it has started
        self.output_processor: OutputProcessor
        self.capacity: EngineCapacity  # of the process that was ready last
        self.clock = clock
        self.stats = EngineStats()  # of the present process, half a second old at most unless a step takes longer
        self.num_restarts = 0
        self.num_failed_starts = 0  # in a row: of processes that never took a request
        self._make_processors = make_processors
        self._command, self._config = command, config
        self._patience = patience or Patience()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._heard_before: list[Callable[[], None]] = []  # anybody listened
        self._post: Post = self._heard_before.append
        self._lose: Lose = lambda _request_id, _error: None
        self._pending: dict[str, tuple[ProcessedInput, Accept]] = {}
        self._news: list[EngineCoreOutput] = []
        self._requests: zmq.Socket[bytes] | None = None
        self._life: _Life | None = None
        self._watch_with: Callable[[Snapshot], None] | None = None
        self._is_closing = threading.Event()
        self._closes_at = 0.0
        self._load_s = self._expected_at = 0.0  # how long the last load took; when the next one will be over
        self._started: threading.Event = threading.Event()
        self._failure: OctavoError | None = None
        self._progress: Callable[[int, int], None] = lambda _done, _total: None
        self._watcher = threading.Thread(target=self._watch, name="octavo-engine-watch", daemon=True)

    def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Start the process and wait until it is ready. Raises what keeps it from that: `ConfigError`, `ModelError`."""
        self._progress = progress or self._progress
        self._watcher.start()
        try:
            self.input_processor, self.output_processor = self._make_processors()
            self._started.wait()
        except BaseException:  # an interrupt as well: the process must not outlive this
            self.shutdown()
            raise
        if self._failure is not None:
            self._watcher.join()
            raise self._failure

    # --- on the thread of AsyncLLM ------------------------------------------------------------------------------------

    def attach(self, post: Post, lose: Lose) -> None:
        """Hear from now on: post(function) runs it on that thread, lose(request_id, error) ends a request's stream."""
        self._lose = lose
        for function in self._heard_before:
            post(function)
        self._post = post

    @property
    def is_ready(self) -> bool:
        """Whether the process takes requests, was heard of lately and gets further. Any thread may ask."""
        life = self._life
        return life is not None and life.is_open and life.health.is_well and self._watcher.is_alive()

    @property
    def retry_after_s(self) -> float:
        """When to ask one that is not ready again: after the pause before it is started, and a load like the last."""
        return max(self._expected_at - time.monotonic(), 1.0)

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return None if self._life is None else self._life.process.pid

    def submit(self, processed: ProcessedInput, accept: Accept) -> None:
        """Send a request over; accept(None) when it is in the queue, accept(error) when it cannot be served."""
        request_id = processed.request_id
        if len(self._pending) >= _MAX_PENDING:
            accept(QueueFullError(f"{_MAX_PENDING} requests have been sent to the engine, which has not answered yet"))
        elif request_id in self._pending or request_id in self.output_processor:
            accept(RequestError(f"request id {request_id!r} is in use", parameter="request_id"))
        else:
            try:
                message = ipc.encode(ipc.Add.of(request_id, processed.streams))
            except (TypeError, ValueError, OverflowError) as error:  # a text that is not valid Unicode, say
                accept(RequestError(f"the request cannot be sent to the engine: {error}"))
                return
            if self._send(message):
                self._pending[request_id] = processed, accept
            else:
                accept(EngineRestartingError("the engine is being started again", retry_after_s=self.retry_after_s))

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each gets its last output, with finish_reason "abort". Unknown ids are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            stream_ids = self.output_processor.stream_ids(request_id)
            if request_id in self._pending:  # its end will follow its acceptance
                stream_ids = [stream.request_id for stream in self._pending[request_id][0].streams]
            self._finish(stream_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[RequestOutput]:
        """Make outputs of the news that came in."""
        news, self._news = self._news, []
        processed = self.output_processor.process(news)
        self._finish(processed.streams_to_stop, RequestStatus.FINISHED_STOPPED)
        self._finish(processed.streams_to_fail, RequestStatus.FINISHED_ERROR)
        return processed.request_outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to tell."""
        return bool(self._news)

    def check_when_idle(self) -> None:
        """The process does that itself."""

    def watch(self, listener: Callable[[Snapshot], None] | None) -> None:
        """Let a listener hear what happens from now on, on this thread, or nobody; also in later processes."""
        self._watch_with = listener
        self._send(ipc.encode(ipc.Watch(listener is not None)))

    def shutdown(self) -> None:
        """Ask the process to end, and see to it that it does."""
        self._closes_at = time.monotonic() + (_STOP_S if self._send(ipc.encode(ipc.Stop())) else 0.0)
        self._is_closing.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._refuse_pending(EngineDeadError("the engine was shut down"))
        self._close_requests()
        self._context.destroy(linger=0)

    def _finish(self, stream_ids: list[str], status: RequestStatus) -> None:
        if stream_ids:
            self._send(ipc.encode(ipc.Finish(stream_ids, status)))

    def _send(self, message: bytes) -> bool:
        """Send; False where there is nobody to send it to. There is room for all: `_MAX_PENDING` bounds what waits."""
        if self._requests is None:
            return False
        try:
            self._requests.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _refuse_pending(self, error: EngineDeadError) -> None:
        pending, self._pending = self._pending, {}
        for _, accept in pending.values():
            accept(error)

    def _close_requests(self) -> None:
        if self._requests is not None:
            self._requests.close(linger=0)
            self._requests = None

    def _take(self, message: ipc.ToParent) -> None:
        match message:
            case ipc.Outputs():
                self._news += message.outputs
            case ipc.Accepted() | ipc.Refused():
                self._answer(message)
            case ipc.Seen():
                if self._watch_with is not None:
                    self._watch_with(message.to_snapshot())

    def _answer(self, message: ipc.Accepted | ipc.Refused) -> None:
        """Tell who waits what became of a request; an answer that nobody waits for changes nothing."""
        processed, accept = self._pending.pop(message.request_id, (None, None))
        if processed is None or accept is None:
            logger.warning("the engine process answered a request that nobody sent")
        elif isinstance(message, ipc.Refused):
            accept(ipc.error_of(message))
        else:
            self.output_processor.add_request(
                processed.request_id,
                [stream.request_id for stream in processed.streams],
                processed.prompt,
                processed.prompt_token_ids,
                processed.sampling_params,
                arrival_time=processed.streams[0].arrival_time,
            )
            accept(None)

    def _came_up(self, life: _Life) -> None:
        self._requests, life.is_open = life.requests, True
        if self._watch_with is not None:
            self._send(ipc.encode(ipc.Watch(is_on=True)))

    def _went_down(self, error: EngineDeadError) -> None:
        """Nothing of the process is left: every open request ends here."""
        self._close_requests()
        self._news = []
        self._refuse_pending(error)
        for request_id in self.output_processor.forget_all():
            self._lose(request_id, error)

    # --- on the watching thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._keep_alive()
        except Exception as error:  # a mistake of ours: nobody else would notice, and requests would wait for ever
            logger.exception("the engine process is not watched any more")
            dead = EngineDeadError(f"the engine is not watched any more: {error}")
            if self._started.is_set():
                self._post(partial(_raise, dead))
            else:
                self._failure = dead
        self._started.set()

    def _keep_alive(self) -> None:
        """Start a process, and a new one whenever one is over."""
        num_failures = num_lives = 0
        while not self._is_closing.is_set():
            end = self._live(num_lives)
            num_lives += 1
            if self._is_closing.is_set():
                break
            if not self._started.is_set():
                self._failure = end.failure or EngineDeadError(f"the engine process {end.reason} before it was ready")
                break
            num_failures = 0 if (end.served_s or 0.0) > self._patience.healthy else num_failures
            pause = self._patience.restarts[min(num_failures, len(self._patience.restarts) - 1)]
            num_failures += 1
            self.num_failed_starts += end.served_s is None
            self.num_restarts += 1
            self.stats = EngineStats()
            self._expected_at = time.monotonic() + pause + self._load_s
            why = f"{end.reason}: {end.failure}" if end.failure else end.reason
            logger.error("the engine process %s; starting it again in %g s", why, pause)
            text = f"the engine process {end.reason}; it is being started again"
            error = EngineRestartingError(text, retry_after_s=self.retry_after_s)
            self._post(lambda error=error: self._went_down(error))  # type: ignore[misc]
            if end.process is not None:
                self._wait_until_gone(end.process)
            self._is_closing.wait(pause)

    def _wait_until_gone(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the system to end a process that was killed, but not for ever: a disk may never answer."""
        end = time.monotonic() + _GIVE_BACK_S
        while process.poll() is None and not self._is_closing.is_set():
            if time.monotonic() > end:
                logger.error("the system does not end the engine process %d; it is left behind", process.pid)
                return
            self._is_closing.wait(_POLL_MS / 1000)

    def _live(self, number: int) -> _End:
        """Start a process and listen to it until it is over."""
        try:
            life = self._life = self._begin(number)
        except ConfigError as error:
            return _End(f"cannot be started: {error}")
        except Exception as error:  # whatever the system refuses (memory, files, disk) may be granted the next time
            logger.exception("the engine process cannot be started")
            return _End(f"cannot be started: {error}")
        try:
            reason = self._listen(life)
        except Exception as error:
            logger.exception("the engine process cannot be heard")
            reason = f"cannot be heard: {error}"
        self._life = None
        return life.end(reason)

    def _begin(self, number: int) -> _Life:
        """Start a process with sockets of its own, in a folder that only this user can enter."""
        config = self._config
        if number and config.record is not None:  # the journal of the one that died is what one wants to read
            record = config.record.with_name(f"{config.record.stem}-{number}{config.record.suffix}")
            config = replace(config, record=record)
        with contextlib.ExitStack() as stack:
            folder = ipc.make_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            endpoints = [f"ipc://{folder / name}" for name in ("requests", "news")]
            requests = stack.enter_context(self._context.socket(zmq.PUSH))
            news = stack.enter_context(self._context.socket(zmq.PULL))
            requests.sndhwm = 0
            for socket, endpoint in zip((requests, news), endpoints, strict=True):
                socket.linger = 0
                socket.bind(endpoint)
            order = ipc.encode_launch(ipc.Launch(config, endpoints[0], endpoints[1], *logs.in_use()))
            environment = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
            process = subprocess.Popen(  # noqa: S603 - a command of ours
                self._command, stdin=subprocess.PIPE, stdout=_STANDARD_ERROR, env=environment, close_fds=True
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead already, which will be noticed
                process.stdin.write(order)
                process.stdin.flush()
            stack.pop_all()
        return _Life(process, folder, news, requests, Health(self._patience, time.monotonic()))

    def _listen(self, life: _Life) -> str:
        """Pass on what a process says until it is over; return how it ended."""
        while True:
            has_news = bool(life.news.poll(_POLL_MS))
            life.health.look(time.monotonic())
            if has_news:
                self._hear(life, life.news.recv())
            if self._is_closing.is_set() and time.monotonic() > self._closes_at:
                return "was stopped"
            reason = life.why_over
            if reason is not None and (life.process.poll() is None or not life.news.poll(_LAST_WORDS_MS)):
                return reason

    def _hear(self, life: _Life, data: bytes) -> None:
        try:
            message = ipc.decode_from_engine(data)
        except ipc.DecodeError:
            logger.warning("the engine process sent %d bytes that are no message", len(data))
            return
        life.health.hear(message)
        match message:
            case ipc.Alive():
                pass  # that is all it says
            case ipc.Report():
                self.stats = message.stats
            case ipc.Loading():
                self._progress(message.done, message.total)
            case ipc.Failed():
                life.failure = ipc.error_of(message)
            case ipc.Ready():
                life.ready_at = time.monotonic()
                self.capacity = message.capacity
                self.num_failed_starts, self._load_s = 0, life.ready_at - life.born
                life.requests.poll(1000, zmq.POLLOUT)  # its connection may take a moment more
                self._post_or_do(lambda: self._came_up(life))
                self._started.set()
            case _:
                self._post(lambda: self._take(message))

    def _post_or_do(self, function: Callable[[], None]) -> None:
        """At the first start nobody has attached yet, and `start` waits: there is no other thread."""
        if self._started.is_set():
            self._post(function)
        else:
            function()


def _raise(error: OctavoError) -> NoReturn:
    """End the thread that runs this; see `AsyncLLM`."""
    raise error
