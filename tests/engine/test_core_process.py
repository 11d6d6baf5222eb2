"""Requests that the core's process holds until their grammar is compiled."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from fakes import FakeExecutor, make_engine

from octavo.data.request import Request, RequestStatus
from octavo.engine import core_process, ipc
from octavo.engine.core_process import CoreServer
from octavo.errors import RequestFailedError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 8  # less than the limits of `core_process`: a test that waits for those fails


class _Mail:
    """Both sockets of a core server, under their names; read what the server sends with `answer`."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.news: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def recv(self, _flags: int) -> bytes:
        try:
            return self.requests.get_nowait()
        except queue.Empty:
            raise zmq.Again from None

    def poll(self, timeout_ms: int) -> None:
        time.sleep(min(timeout_ms, 5) / 1000)

    def send(self, data: bytes) -> None:
        self.news.put(data)

    def answer(self, *kinds: type) -> Any:
        """Return the next message of one of these kinds."""
        while True:
            message = ipc.decode_from_engine(self.news.get(timeout=WAIT_S))
            if isinstance(message, kinds):
                return message


class _Preparing(FakeExecutor):
    """Prepares as the test asks."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: dict[str, Future[None]] = {}

    def prepare(self, _params: Any, tenant: str) -> Any:
        return self.prepared.setdefault(tenant, Future())


@pytest.fixture
def executor() -> _Preparing:
    return _Preparing()


@pytest.fixture
def mail(executor: _Preparing, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[_Mail]:
    """Sockets of a running server. A parameter sets limits of `core_process`, which the server reads as it starts."""
    for name, limit_s in getattr(request, "param", {}).items():
        monkeypatch.setattr(core_process, name, limit_s)
    mail, pulse = _Mail(), SimpleNamespace(progress=0)
    server = CoreServer(make_engine(executor).core, mail, mail, pulse)  # type: ignore[arg-type]  # stand-ins
    thread = threading.Thread(target=server.run)
    thread.start()
    yield mail
    mail.requests.put(ipc.encode(ipc.Stop()))
    thread.join(WAIT_S)
    assert not thread.is_alive()


def ask(mail: _Mail, request_id: str, tenant: str) -> None:
    request = Request(request_id, [65], SamplingParams(max_tokens=1), tenant=tenant)
    mail.requests.put(ipc.encode(ipc.Add.of(request_id, [request])))


@pytest.mark.turn(12)
@pytest.mark.parametrize("mail", [{"PREPARE_S": 0.05}], indirect=True)
def test_preparation_timeout_counts_from_start_of_preparation(mail: _Mail, executor: _Preparing) -> None:
    begins, waits = executor.prepared.setdefault("slow", Future()), executor.prepared.setdefault("fast", Future())
    begins.set_running_or_notify_cancel()
    ask(mail, "waits", "fast")
    ask(mail, "begins", "slow")
    refused = mail.answer(ipc.Accepted, ipc.Refused)
    assert (refused.request_id, refused.kind, refused.parameter) == ("begins", "RequestError", "structured_outputs")
    waits.set_running_or_notify_cancel()
    waits.set_result(None)
    assert mail.answer(ipc.Accepted, ipc.Refused) == ipc.Accepted("waits")


@pytest.mark.turn(12)
@pytest.mark.parametrize("mail", [{"TURN_S": 0.0}], indirect=True)
def test_request_waiting_too_long_for_preparation_gets_QueueFullError(mail: _Mail, executor: _Preparing) -> None:
    ask(mail, "a", "one of many")
    refused = mail.answer(ipc.Accepted, ipc.Refused)
    assert (refused.request_id, refused.kind) == ("a", "QueueFullError")
    assert executor.prepared["one of many"].cancelled()


def test_request_aborted_during_preparation_ends_with_abort(mail: _Mail, executor: _Preparing) -> None:
    ask(mail, "a", "x")
    mail.requests.put(ipc.encode(ipc.Finish(["a"], RequestStatus.FINISHED_ABORTED)))
    assert mail.answer(ipc.Accepted, ipc.Refused) == ipc.Accepted("a")
    (ending,) = mail.answer(ipc.Outputs).outputs
    assert (ending.request_id, ending.finish_reason) == ("a", "abort")
    assert executor.prepared["x"].cancelled()


@pytest.mark.parametrize("fails_at_once", [True, False])
def test_preparation_fault_refuses_only_its_request(
    mail: _Mail,
    executor: _Preparing,
    monkeypatch: pytest.MonkeyPatch,
    fails_at_once: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real, fault = executor.prepare, RuntimeError("secret/path/of/a/fault")

    def prepare(params: Any, tenant: str) -> Any:
        if tenant == "bad" and fails_at_once:
            raise fault
        return real(params, tenant)

    monkeypatch.setattr(executor, "prepare", prepare)
    executor.prepared.setdefault("bad", Future()).set_exception(fault)
    executor.prepared.setdefault("good", Future()).set_result(None)
    ask(mail, "a", "bad")
    ask(mail, "b", "good")
    answers = [mail.answer(ipc.Accepted, ipc.Refused) for _ in range(2)]
    refused = next(each for each in answers if isinstance(each, ipc.Refused))
    assert ipc.Accepted("b") in answers
    error = ipc.error_of(refused)
    assert isinstance(error, RequestFailedError)
    assert "request a:" in str(error)
    assert "secret" not in str(error)
    (logged,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "request a failed" in logged.getMessage()


@pytest.mark.parametrize(("saving_s", "may_go_on"), [(60.0, True), (-1.0, False)])
def test_stopped_server_finishes_transfers_for_limited_time(
    monkeypatch: pytest.MonkeyPatch, saving_s: float, may_go_on: bool
) -> None:
    monkeypatch.setattr(core_process, "_SAVING_S", saving_s)
    mail, told = _Mail(), list[bool]()
    engine = make_engine(FakeExecutor())
    monkeypatch.setattr(engine.core, "finish_transfers", lambda goes_on: told.append(goes_on()))
    mail.requests.put(ipc.encode(ipc.Stop()))
    CoreServer(engine.core, mail, mail, SimpleNamespace(progress=0)).run()  # type: ignore[arg-type]  # stand-ins
    assert told == [may_go_on]
