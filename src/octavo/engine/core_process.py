"""Run the engine core in a process that exits with its parent."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from octavo.engine import ipc
from octavo.engine.local_core import LocalCore
from octavo.errors import EngineDeadError, OctavoError, RequestError
from octavo.runtime import logs
from octavo.runtime.faults import error_for
from octavo.runtime.parent_process import wake_when_parent_dies

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from octavo.config import EngineConfig
    from octavo.data.snapshot import Snapshot
    from octavo.engine.engine_core import EngineCore

    Progress: TypeAlias = Callable[[int, int], None]
    Build: TypeAlias = Callable[[EngineConfig, Progress], EngineCore]

logger = logging.getLogger(__name__)
BEAT_S = 0.5
IDLE_CHECK_MS = 1000
PREPARE_S = 10.0
TURN_S = 60.0
_SAVING_S = 2.0  # limit on saving KV; the parent kills this process 5 s after `Stop`
_HELD_CHECK_MS = 5
_HANG_UP = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []


def run_core_process(build: Build) -> None:
    """Read a `Launch` from standard input, build the core, and serve it until a `Stop` message.

    An error of build(config, progress), or a final error of the executor, is sent to the parent. The process then exits
    with status 1.
    """
    # Only the parent handles these signals, which reach the whole process group.
    for each in (signal.SIGINT, signal.SIGTERM, *_HANG_UP):
        signal.signal(each, signal.SIG_IGN)
    wake_when_parent_dies()
    launch = ipc.decode_launch(sys.stdin.buffer.readline())
    logs.configure(launch.log_level, launch.log_format, process="engine")
    folder = Path(launch.outputs_endpoint.removeprefix("ipc://")).parent
    threading.Thread(target=_end_with_parent, args=[folder], name="octavo-parent-watch", daemon=True).start()
    context = zmq.Context()
    news = context.socket(zmq.PUSH)
    news.connect(launch.outputs_endpoint)
    pulse = Pulse(context, launch.outputs_endpoint)
    pulse.start()
    try:
        core = build(launch.config, lambda done, total: news.send(ipc.encode(ipc.Loading(done, total))))
    except Exception as error:
        if not isinstance(error, OctavoError):  # the parent reports an `OctavoError`
            logger.exception("the engine cannot be built")
        news.send(ipc.encode(ipc.failure(error)))
        pulse.stop()  # its socket belongs to the context
        context.destroy(linger=1000)
        sys.exit(1)
    requests = context.socket(zmq.PULL)
    requests.connect(launch.requests_endpoint)
    server = CoreServer(core, requests, news, pulse)
    try:
        server.run()
    except EngineDeadError as error:
        news.send(ipc.encode(ipc.failure(error)))
        sys.exit(1)
    finally:
        core.shutdown()
        pulse.stop()
        context.destroy(linger=1000)


class Pulse:
    """Sends `Alive` messages from a separate thread, even during a long step."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.progress = 0
        self._context, self._endpoint = context, endpoint
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="octavo-pulse", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and close its socket."""
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.connect(self._endpoint)
            while not self._is_over.wait(BEAT_S):
                socket.send(ipc.encode(ipc.Alive(self.progress)))


class CoreServer:
    """Serves a `LocalCore` to the parent."""

    def __init__(self, core: EngineCore, requests: zmq.Socket[bytes], news: zmq.Socket[bytes], pulse: Pulse) -> None:
        self._core = LocalCore(core, prepare_s=PREPARE_S, turn_s=TURN_S)
        self._requests, self._news, self._pulse = requests, news, pulse
        self._is_over = False
        self._next_report = 0.0

    def run(self) -> None:
        """Serve until `Stop`."""
        self._send(ipc.Ready(self._core.capacity))
        while not self._is_over:
            if not self._core.has_work():
                self._wait_for_mail()
                self._pulse.progress += 1  # an idle core counts as progressing
            self._read_mail()
            self._step()
            if time.monotonic() > self._next_report:
                self._report()
        until = time.monotonic() + _SAVING_S
        self._core.core.finish_transfers(lambda: time.monotonic() < until)

    def _step(self) -> None:
        stats = self._core.stats
        num_tokens = stats.scheduled_tokens
        outputs = self._core.step()
        if outputs or stats.scheduled_tokens > num_tokens:
            self._pulse.progress += 1
        if outputs:
            self._send(ipc.Outputs(outputs))

    def _report(self) -> None:
        self._next_report = time.monotonic() + BEAT_S
        self._send(ipc.Report(self._core.stats))

    def _wait_for_mail(self) -> None:
        if not self._core.is_holding:
            self._report()
        self._core.check_when_idle()
        self._requests.poll(_HELD_CHECK_MS if self._core.is_holding else IDLE_CHECK_MS)

    def _read_mail(self) -> None:
        while not self._is_over:
            try:
                data = self._requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = ipc.decode_to_engine(data)
            except (ipc.DecodeError, OctavoError) as error:
                logger.warning("dropped %d bytes that are not a valid message: %s", len(data), error)
                if (request_id := ipc.request_id_of(data)) is not None:
                    self._answer(request_id, RequestError("the request cannot be read"))
                continue
            match message:
                case ipc.Add():
                    self._add(message)
                case ipc.Finish():
                    self._core.finish_requests(message.stream_ids, message.status)
                case ipc.Watch():
                    self._core.watch(self._show if message.is_on else None)
                case ipc.Stop():
                    self._is_over = True

    def _add(self, message: ipc.Add) -> None:
        answer = partial(self._answer, message.request_id)
        try:
            requests = message.to_requests()
        except Exception as error:  # noqa: BLE001 - `error_for` logs it
            answer(error_for(message.request_id, "it was read", error))
        else:
            self._core.add_request(message.request_id, requests, answer)

    def _answer(self, request_id: str, error: OctavoError | None) -> None:
        self._send(ipc.Accepted(request_id) if error is None else ipc.refusal(request_id, error))

    def _show(self, snapshot: Snapshot) -> None:
        self._send(ipc.Seen.of(snapshot))

    def _send(self, message: ipc.ToParent) -> None:
        self._news.send(ipc.encode(message))


def _end_with_parent(folder: Path) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(2)
