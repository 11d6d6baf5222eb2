"""Both clients of the core answer each request once and end it once, in any order of messages and faults."""

from __future__ import annotations

import ast
import inspect
import random
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from fakes import FakeExecutor, make_core, make_engine

import octavo.engine
from octavo.config import EngineConfig
from octavo.data.request import RequestStatus
from octavo.engine import ipc, remote_core
from octavo.engine.core_client import CoreClient
from octavo.engine.core_process import CoreServer
from octavo.engine.health import Health, Patience
from octavo.engine.llm_engine import Engine
from octavo.engine.local_core import LocalCore
from octavo.engine.remote_core import RemoteCore
from octavo.errors import EngineDeadError, EngineError, RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_RUNS = 30


class Preparing(FakeExecutor):
    """Prepares every second request in the background, until the test completes the preparation or makes it fail."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Future[None]] = []
        self._count = 0

    def prepare(self, _params: Any, _tenant: str) -> Any:
        self._count += 1
        if self._count % 2:
            return None
        self.open.append(Future())
        self.open[-1].set_running_or_notify_cancel()
        return self.open[-1]

    def end_one(self, rng: random.Random) -> None:
        if self.open:
            future = self.open.pop(rng.randrange(len(self.open)))
            if rng.random() < 0.3:
                future.set_exception(RequestError("a grammar that cannot be compiled"))
            else:
                future.set_result(None)


class Wire(list[bytes]):
    """One direction between two processes, in place of a socket on either side."""

    def recv(self, _flags: int = 0) -> bytes:
        if not self:
            raise zmq.Again
        return self.pop(0)

    def send(self, data: bytes) -> None:
        self.append(data)

    def poll(self, *_: Any) -> bool:
        return bool(self)


class Life:
    """An engine process without a process: its `CoreServer` reads messages and steps when the test asks for it."""

    def __init__(self) -> None:
        self.requests, self.news, self.executor = Wire(), Wire(), Preparing()
        pulse: Any = SimpleNamespace(progress=0)
        self.server = CoreServer(make_core(self.executor), self.requests, self.news, pulse)  # type: ignore[arg-type]
        self.why_over: str | None = None
        self.process = SimpleNamespace(poll=lambda: None if self.why_over is None else 1, pid=1, wait=lambda _: 1)
        self.health, self.failure = Health(Patience(), time.monotonic()), None
        self.born, self.ready_at = 0.0, None
        self.server._send(ipc.Ready(self.server._core.capacity))

    def send(self, data: bytes) -> bool:
        self.requests.send(data)
        return True

    def received(self, _wait_ms: int = 0) -> Iterator[bytes]:
        while self.news:
            yield self.news.recv()

    def end(self) -> None:
        self.requests.clear()
        self.news.clear()

    def run(self) -> None:
        self.server._read_mail()
        self.server._step()


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[Life]:
    """Return the list of all processes that are started."""
    started: list[Life] = []

    def begin(*_: Any) -> Life:
        started.append(Life())
        return started[-1]

    monkeypatch.setattr(remote_core.CoreLife, "begin", begin)
    monkeypatch.setattr(remote_core, "_STOP_S", 0.0)
    return started


@pytest.fixture
def remote(lives: list[Life]) -> Iterator[RemoteCore]:
    core = RemoteCore([], EngineConfig(), Patience(restarts=(0.0,)))
    core._poller = SimpleNamespace(register=lambda *_: None, unregister=lambda _: None, poll=lambda _: [])  # type: ignore[assignment]
    core.start(lambda: None)
    yield core
    core.shutdown()


class Driven:
    """An engine on top of one of the clients; counts how often each request is answered and ends."""

    def __init__(self, client: CoreClient) -> None:
        text = make_engine()
        self.engine = Engine(client, text.input_processor, text.output_processor, lambda: 0.0)
        self.answers, self.refused, self.ended = Counter[str](), Counter[str](), Counter[str]()
        self.engine.on_lost(lambda request_id, _error: self.ended.update([request_id]))

    def submit(self, request_id: str, rng: random.Random) -> None:
        params = SamplingParams(max_tokens=rng.choice([1, 5, 30]), n=rng.choice([1, 1, 3]))
        processed = self.engine.input_processor.process(request_id, "hello", params)

        def accept(error: Exception | None) -> None:
            self.answers[request_id] += 1
            if error is not None:
                self.refused[request_id] += 1

        self.engine.submit(processed, accept)

    def step(self) -> None:
        for output in self.engine.step():
            self.ended[output.request_id] += output.finished

    def check(self, names: list[str]) -> None:
        assert self.answers == Counter(names)
        assert self.refused + self.ended == Counter(names)
        assert not self.engine.output_processor.request_ids()
        assert not self.engine._submitted


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_LocalCore_answers_and_ends_each_request_once(seed: int) -> None:
    rng, executor = random.Random(seed), Preparing()
    driven, names = Driven(LocalCore(make_core(executor))), [f"r{index}" for index in range(rng.randrange(1, 12))]
    waiting = list(names)
    while waiting or driven.engine.has_unfinished_requests() or executor.open:
        match rng.randrange(4):
            case 0 if waiting:
                driven.submit(waiting.pop(), rng)
            case 1:
                driven.engine.abort_request(rng.choice(names))
            case 2:
                executor.end_one(rng)
            case _:
                driven.step()
        executor.open = [future for future in executor.open if not future.cancelled()]
    driven.step()
    while driven.engine.has_unfinished_requests():
        driven.step()
    driven.check(names)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_RemoteCore_answers_and_ends_each_request_once(seed: int, remote: RemoteCore, lives: list[Life]) -> None:
    """Messages arrive late, requests are aborted between two messages, and the process dies and restarts."""
    rng = random.Random(seed)
    driven, names = Driven(remote), [f"r{index}" for index in range(rng.randrange(1, 12))]
    waiting = list(names)
    for _ in range(20_000):
        match rng.randrange(8):
            case 0 if waiting:
                driven.submit(waiting.pop(), rng)
            case 1:
                driven.engine.abort_request(rng.choice(names))
            case 2:
                lives[-1].executor.end_one(rng)
            case 3 if rng.random() < 0.05:
                lives[-1].why_over = "was killed"
            case 4 | 5:
                lives[-1].run()
            case 6:
                driven.step()
            case _:
                remote.wait()
        if not waiting and driven.refused.total() + driven.ended.total() >= len(names):
            break
    for _ in range(3):  # nothing follows an end
        lives[-1].run()
        remote.wait()
        driven.step()
    driven.check(names)


def test_dead_core_refuses_pending_requests_before_open_ones_end(remote: RemoteCore, lives: list[Life]) -> None:
    driven, told = Driven(remote), list[str]()
    driven.engine.on_lost(lambda request_id, _error: told.append(f"{request_id} ends"))
    driven.submit("open", random.Random(0))
    lives[0].run()
    remote.wait()
    late = driven.engine.input_processor.process("late", "hello", SamplingParams())
    driven.engine.submit(late, lambda error: told.append(f"late: {type(error).__name__}"))
    remote.step()  # takes received messages, which would otherwise be delivered before the process counts as ended
    lives[0].why_over = "was killed"
    remote.wait()
    assert told == ["late: EngineRestartingError", "open ends"]


def test_RemoteCore_refuses_access_to_core_object() -> None:
    core = RemoteCore([], EngineConfig())
    with pytest.raises(EngineError, match="another process"):
        _ = core.core
    core.shutdown()
    core.shutdown()
    core.wake()  # a late call does no harm


def test_shutdown_refuses_held_requests() -> None:
    core, answers = LocalCore(make_core(executor := Preparing())), list[Any]()
    executor.prepare(None, "")  # the next request is held
    processed = make_engine().input_processor.process("r", "hello", SamplingParams())
    core.add_request("r", processed.streams, answers.append)
    assert core.is_holding
    core.finish_requests(["unknown"], RequestStatus.FINISHED_ABORTED)
    core.shutdown()
    assert [type(answer) for answer in answers] == [EngineDeadError]


def test_interrupt_during_preparation_frees_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Preparing()
    engine = make_engine(executor)

    def interrupt(_core: LocalCore) -> None:
        raise KeyboardInterrupt

    executor.prepare(None, "")  # the next request is held
    with monkeypatch.context() as patch:
        patch.setattr(LocalCore, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request("a", "hello")
    assert not [output for _ in range(3) for output in engine.step()]
    engine.add_request("a", "hello", SamplingParams(max_tokens=1))
    assert [output.request_id for output in engine.step()] == ["a"]


def test_interrupt_during_submission_frees_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(FakeExecutor())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FakeExecutor, "prepare", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.add_request("a", "hello")
    engine.add_request("a", "hello", SamplingParams(max_tokens=1))
    assert [output.request_id for output in engine.step()] == ["a"]


@pytest.mark.parametrize("client", [LocalCore, RemoteCore])
def test_both_clients_match_signatures_of_CoreClient(client: type) -> None:
    for name, member in vars(CoreClient).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            assert inspect.signature(getattr(client, name)) == inspect.signature(member), name


def test_only_local_core_prepares_and_adds_requests() -> None:
    """The package has one call of each, so that the rules exist once."""
    calls = {
        (path.name, node.func.attr)
        for path in Path(octavo.engine.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func).endswith(("scheduler.add_request", "executor.prepare"))
    }
    assert calls == {("local_core.py", "add_request"), ("local_core.py", "prepare")}
