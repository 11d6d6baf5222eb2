"""How a server starts, handles signals and ends, without a socket."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from octavo.errors import ConfigError
from octavo.http import graceful
from octavo.http.connection import BoundedHttpProtocol
from octavo.http.graceful import GracefulServer, http_server
from octavo.http.timeouts import TimeoutQueue


class Service:
    """A service that records its calls. drain_s: seconds that `drain` takes."""

    def __init__(self, **config: Any) -> None:
        self.heard: list[Any] = []
        self.is_dead = False
        self.drain_s, self.error = 0.0, None
        self.timeouts, self.metrics = TimeoutQueue(), None
        settings = {"api_keys_file": None, "ssl_certfile": None, "ssl_keyfile": None, "grace_s": 7.0, **config}
        self.config: Any = SimpleNamespace(**settings)

    def reload(self) -> None:
        self.heard.append("reload")

    async def start(self) -> None:
        self.heard.append("start")

    async def drain(self, grace_s: float) -> None:
        self.heard.append(("drain", grace_s))
        await asyncio.sleep(self.drain_s)
        if self.error is not None:
            raise self.error
        self.heard.append("drained")

    def close(self) -> None:
        self.heard.append("close")


def server_of(service: Service) -> GracefulServer:
    given: Any = service
    return GracefulServer(uvicorn.Config(lambda: None, log_config=None), given)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of calls of uvicorn's own server."""
    calls: list[Any] = []

    async def startup(_self: Any, sockets: Any = None) -> None:
        calls.append(("startup", sockets))

    async def shutdown(_self: Any, sockets: Any = None) -> None:
        calls.append(("shutdown", sockets))

    async def on_tick(_self: Any, counter: int) -> bool:
        return counter > 5

    for function in (startup, shutdown, on_tick):
        monkeypatch.setattr(uvicorn.Server, function.__name__, function)
    return calls


def test_second_signal_forces_exit() -> None:
    server = server_of(Service())
    server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, server.force_exit) == (True, False)
    server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, server.force_exit) == (True, True)


@pytest.mark.parametrize("hears", [False, True])
def test_server_reloads_files_at_startup_if_it_handles_sighup(
    monkeypatch: pytest.MonkeyPatch, base: list[Any], hears: bool
) -> None:
    monkeypatch.setattr(graceful, "handles_sighup", lambda: hears)
    service = Service(api_keys_file="keys")
    server = server_of(service)
    sockets: Any = ["socket"]

    async def run() -> None:
        await server.startup(sockets)
        removed = asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        assert removed is hears

    asyncio.run(run())
    assert service.heard == (["reload", "start"] if hears else ["start"])
    assert base == [("startup", sockets)]


@pytest.mark.parametrize(
    ("counter", "is_dead", "leaves"), [(0, False, False), (0, True, True), (9, False, True), (9, True, True)]
)
def test_dead_server_exits(base: list[Any], counter: int, is_dead: bool, leaves: bool) -> None:
    service = Service()
    service.is_dead = is_dead
    assert asyncio.run(server_of(service).on_tick(counter)) is leaves
    assert base == []


def test_reload_reads_keys_and_certificate(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    loaded: list[Any] = []
    checked: list[Any] = []
    wrong: list[Exception] = []

    def check(config: Any) -> None:
        checked.append(config)
        if wrong:
            raise wrong[0]

    monkeypatch.setattr(graceful, "check_certificate", check)
    service = Service()
    server = server_of(service)
    server.reload()
    assert (service.heard, checked) == ([], [])
    service.config.ssl_certfile, service.config.ssl_keyfile = "cert", "key"
    server.config.ssl = SimpleNamespace(load_cert_chain=lambda *files: loaded.append(files))  # type: ignore[assignment]
    caplog.set_level(logging.INFO)
    server.reload()
    assert (service.heard, checked, loaded) == ([], [service.config], [("cert", "key")])
    assert "the certificate was reloaded" in caplog.text
    wrong.append(ConfigError("no pair"))
    service.config.api_keys_file = "keys"
    server.reload()
    assert (service.heard, loaded) == (["reload"], [("cert", "key")])
    assert "the certificate was not reloaded: no pair" in caplog.text


def test_shutdown_drains_requests_then_closes_connections_and_service(base: list[Any]) -> None:
    service = Service()
    server = server_of(service)
    sockets: Any = ["socket"]
    asyncio.run(server.shutdown(sockets))
    assert service.heard == [("drain", 7.0), "drained", "close"]
    assert base == [("shutdown", sockets)]
    assert server.server_state.default_headers == [(b"connection", b"close")]


def test_forced_exit_does_not_wait_for_requests(base: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    service.drain_s = 1000.0
    server = server_of(service)
    server.force_exit = True
    asyncio.run(server.shutdown())
    assert "drained" not in service.heard
    assert service.heard[-1] == "close"
    assert base == [("shutdown", None)]
    assert not caplog.text


def test_drain_fault_is_logged_and_shutdown_continues(base: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    service.error = RuntimeError("a fault")  # type: ignore[assignment]
    asyncio.run(server_of(service).shutdown())
    assert service.heard == [("drain", 7.0), "close"]
    assert base == [("shutdown", None)]
    assert "open requests could not be aborted" in caplog.text


@pytest.mark.parametrize("trusted", [[], ["10.0.0.1"]])
def test_http_server_takes_its_configuration_from_service(trusted: list[str]) -> None:
    given: Any = Service(
        body_timeout_s=1.0,
        keep_alive_timeout_s=2.0,
        idle_timeout_s=3.0,
        log_level="critical",
        forwarded_allow_ips=trusted,
    )
    server = http_server("app", given, max_connections=9)  # type: ignore[arg-type]
    config = server.config
    assert (config.app, config.log_level, config.access_log, config.log_config) == ("app", "critical", False, None)
    assert (config.ws, config.loop, config.server_header) == ("none", "auto", False)
    assert (config.proxy_headers, config.forwarded_allow_ips) == (bool(trusted), trusted)
    assert (config.ssl_certfile, config.ssl_keyfile, config.timeout_graceful_shutdown) == (None, None, 10)
    made: Any = config.http
    assert made.func is BoundedHttpProtocol
    names = ("header_timeout_s", "keep_alive_timeout_s", "idle_timeout_s", "max_connections", "timeouts")
    assert [made.keywords[name] for name in names] == [1.0, 2.0, 3.0, 9, given.timeouts]
