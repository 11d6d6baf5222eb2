"""A server before it has a model: its address, open files, signals, and the system's counters of a connection."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from octavo.errors import ConfigError
from octavo.http import listening
from octavo.http.listening import (
    MAX_UNSENT_BYTES,
    allow_open_files,
    bind,
    bytes_taken,
    bytes_under_way,
    check_binding,
    check_certificate,
    check_files,
    handles_sighup,
    hearing_signals,
    is_loopback,
    open_door,
    reset_when_closed,
)
from octavo.http.tenants import Tenant, add_key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

linux = pytest.mark.skipif(sys.platform != "linux", reason="the system does not say it")


@pytest.mark.parametrize(
    ("host", "asks", "insecure", "fits"),
    [
        ("127.0.0.1", False, False, True),
        ("0.0.0.0", False, False, False),
        ("0.0.0.0", True, False, True),
        ("0.0.0.0", False, True, True),
    ],
)
def test_non_loopback_address_requires_api_key(host: str, asks: bool, insecure: bool, fits: bool) -> None:
    config: Any = SimpleNamespace(requires_key=asks)
    if fits:
        check_binding(host, config, insecure=insecure)
    else:
        with pytest.raises(ConfigError, match="no API key is set"):
            check_binding(host, config, insecure=insecure)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.8.8.8", True), ("::1", True), ("::", False), ("10.0.0.1", False), ("name", False)],
)
def test_only_local_addresses_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_check_files_refuses_invalid_keys_and_certificates(tmp_path: Path) -> None:
    path, broken = tmp_path / "keys.toml", tmp_path / "broken"
    add_key(path, Tenant(name="a"))
    broken.write_text("nonsense")
    nothing = {"ssl_certfile": None, "ssl_keyfile": None}
    check_files(SimpleNamespace(api_keys_file=None, **nothing))
    check_files(SimpleNamespace(api_keys_file=path, **nothing))
    with pytest.raises(ConfigError, match="not valid TOML"):
        check_files(SimpleNamespace(api_keys_file=broken, **nothing))
    wrong: Any = SimpleNamespace(api_keys_file=None, ssl_certfile=str(broken), ssl_keyfile=str(broken))
    for check in (check_files, check_certificate):
        with pytest.raises(ConfigError, match=f"certificate for TLS and its key cannot be used .{broken} and"):
            check(wrong)


@pytest.fixture
def handlers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Return a fake table of signal handlers."""
    present: dict[int, Any] = {signal.SIGTERM: "first", signal.SIGHUP: "second"}

    def change(number: int, handler: Any) -> Any:
        before, present[number] = present[number], handler
        return before

    monkeypatch.setattr(listening.signal, "signal", change)
    return present


def test_signal_handlers_are_restored_after_block(handlers: dict[int, Any]) -> None:
    with contextlib.suppress(ZeroDivisionError), hearing_signals():
        assert handlers == {signal.SIGTERM: listening._exit_now, signal.SIGHUP: signal.SIG_IGN}
        raise ZeroDivisionError
    assert handlers == {signal.SIGTERM: "first", signal.SIGHUP: "second"}


def test_only_main_thread_installs_signal_handlers(handlers: dict[int, Any]) -> None:
    seen: list[Any] = []

    def look() -> None:
        with hearing_signals():
            seen.append((dict(handlers), handles_sighup()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [({signal.SIGTERM: "first", signal.SIGHUP: "second"}, False)]
    assert handles_sighup()


def test_platform_without_sighup_handles_only_sigterm(
    handlers: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "signal", SimpleNamespace(SIGTERM=signal.SIGTERM, signal=listening.signal.signal))
    assert not handles_sighup()
    with hearing_signals():
        assert handlers == {signal.SIGTERM: listening._exit_now, signal.SIGHUP: "second"}


def test_sigterm_forces_exit_after_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timer:
        daemon = False

        def __init__(self, *arguments: object) -> None:
            made.append((self, arguments))

        def start(self) -> None:
            assert self.daemon
            made.append(self)

    made: list[Any] = []
    monkeypatch.setattr(listening.threading, "Timer", Timer)
    with pytest.raises(SystemExit) as leaving:
        listening._exit_now(signal.SIGTERM, None)
    assert leaving.value.code == 0
    (timer, arguments), started = made
    assert (timer is started, arguments) == (True, (10.0, os._exit, [0]))


class Socket:
    """A fake socket. outcomes: results of `bind` or `listen`, in turn."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes, self.calls, self.is_closed = list(outcomes), [], False
        self.family = socket.AF_INET

    def bind(self, address: object) -> None:
        self._act("bind", address)

    def listen(self, backlog: int) -> None:
        self._act("listen", backlog)

    def _act(self, *call: object) -> None:
        self.calls.append(call)
        if (outcome := self.outcomes.pop(0)) is not None:
            raise outcome

    def setsockopt(self, _level: int, option: int, value: object) -> None:
        self.calls.append((option, value))

    def getsockname(self) -> tuple[str, int]:
        return "h", 1

    def close(self) -> None:
        self.is_closed = True


IN_USE = OSError(errno.EADDRINUSE, "in use")
ADDRESS = ("bind", ("h", 1))


def test_bind_retries_with_reuseaddr_only_if_address_is_in_use() -> None:
    sock: Any = Socket(None)
    listening._bind(sock, "h", 1)
    assert sock.calls == [ADDRESS]
    sock = Socket(IN_USE, None)
    listening._bind(sock, "h", 1)
    assert sock.calls == [ADDRESS, (socket.SO_REUSEADDR, 1), ADDRESS, (socket.SO_REUSEADDR, 0)]
    sock = Socket(IN_USE, IN_USE)
    with pytest.raises(OSError, match="in use"):
        listening._bind(sock, "h", 1)
    sock = Socket(OSError(errno.EACCES, "not allowed"))
    with pytest.raises(OSError, match="not allowed"):
        listening._bind(sock, "h", 1)
    assert sock.calls == [ADDRESS]


def test_listen_sets_reuseaddr_and_reports_used_port() -> None:
    sock: Any = Socket(None)
    open_door(sock)
    assert sock.calls == [(socket.SO_REUSEADDR, 1), ("listen", 2048)]
    with pytest.raises(ConfigError, match=r"cannot listen on h, port 1: .*in use"):
        open_door(Socket(IN_USE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "is_dual", "expected"), [("h", True, []), ("::", True, [0]), ("::", False, [1]), ("::1", True, [1])]
)
def test_only_ipv6_wildcard_bind_accepts_ipv4(
    monkeypatch: pytest.MonkeyPatch, host: str, is_dual: bool, expected: list[int]
) -> None:
    sock: Any = Socket(None)
    families: list[int] = []

    def make(family: int, kind: int) -> Any:
        assert kind == socket.SOCK_STREAM
        families.append(family)
        sock.family = family
        return sock

    monkeypatch.setattr(listening.socket, "socket", make)
    monkeypatch.setattr(listening.socket, "has_dualstack_ipv6", lambda: is_dual)
    assert bind(host, 1) is sock
    assert families == [socket.AF_INET6 if ":" in host else socket.AF_INET]
    assert [value for option, value in sock.calls if option == socket.IPV6_V6ONLY] == expected
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        assert sock.calls[-1] == (socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)


def test_bind_to_invalid_port_raises_config_error() -> None:
    for port in (70_000, -1):
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}: "):
            bind("127.0.0.1", port)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return both ends of a connection."""
    with bind("127.0.0.1", 0) as door:
        open_door(door)
        with socket.create_connection(door.getsockname()) as client:
            server, _ = door.accept()
            with server:
                yield server, client


@linux
def test_byte_counters_are_empty_for_closed_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    server, client = pair
    before = bytes_taken(server)
    assert before is not None
    server.sendall(b"x" * 5000)
    assert client.recv(5000, socket.MSG_WAITALL) == b"x" * 5000
    under_way = bytes_under_way(server)
    assert under_way in {0, 5000}  # the acknowledgement may be on its way
    server.close()
    assert (bytes_taken(server), bytes_under_way(server)) == (None, 0)
    assert (bytes_taken(None), bytes_under_way(None)) == (None, 0)


@pytest.mark.parametrize(("length", "taken"), [(128, 7), (120, None)])
@linux
def test_bytes_taken_is_none_if_tcp_info_lacks_acked_bytes(length: int, taken: int | None) -> None:
    info = bytes(length - 8) + (7).to_bytes(8, sys.byteorder)
    sock: Any = SimpleNamespace(getsockopt=lambda *_: info)
    assert bytes_taken(sock) == taken


@pytest.mark.parametrize("ask", [bytes_taken, bytes_under_way])
def test_byte_counters_are_empty_on_other_platforms(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setattr(listening.sys, "platform", "other")
    with socket.socket() as sock:
        assert not ask(sock)


@linux
def test_bytes_under_way_reads_kernel_send_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def ioctl(*arguments: Any) -> bytes:
        calls.append(arguments)
        return struct.pack("i", 70_000)

    monkeypatch.setattr(listening.fcntl, "ioctl", ioctl)
    sock: Any = SimpleNamespace(fileno=lambda: 5)
    assert bytes_under_way(sock) == 70_000
    assert calls == [(5, listening.termios.TIOCOUTQ, bytes(4))]


def test_reset_when_closed_resets_connection_on_close(pair: tuple[socket.socket, socket.socket]) -> None:
    server, client = pair
    reset_when_closed(server)
    assert server.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == struct.pack("ii", 1, 0)
    server.close()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    reset_when_closed(server)  # it is closed already
    reset_when_closed(None)


INFINITE = -1


@pytest.mark.parametrize(
    ("soft", "hard", "files_each", "limit", "num_fit"),
    [
        (INFINITE, INFINITE, 1, None, 1000),
        (1256, 2000, 1, None, 1000),
        (1255, 1256, 1, 1256, 1000),
        (300, INFINITE, 1, 1256, 1000),
        (300, 2256, 2, 2256, 1000),
        (300, 1255, 1, 1255, 999),
        (300, 1255, 3, 1255, 333),
        (100, 200, 1, 200, 1),
    ],
)
def test_allow_open_files_raises_soft_limit_up_to_hard_limit(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    files_each: int,
    limit: int | None,
    num_fit: int,
) -> None:
    told: list[Any] = []
    system = SimpleNamespace(
        RLIM_INFINITY=INFINITE,
        RLIMIT_NOFILE="files",
        getrlimit=lambda _: (soft, hard),
        setrlimit=lambda *arguments: told.append(arguments),
    )
    monkeypatch.setattr(listening, "resource", system)
    assert allow_open_files(1000, files_each=files_each) == num_fit
    assert told == ([] if limit is None else [("files", (limit, hard))])
    needed = 1000 * files_each + 256
    warning = f"this process may open {limit} files: that allows {num_fit} connections instead of 1000"
    assert (warning in caplog.text) is (num_fit < 1000)
    assert (f"of its unit) to {needed}" in caplog.text) is (num_fit < 1000)


def test_platform_without_file_limits_allows_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening.sys, "platform", "win32")
    monkeypatch.setattr(listening, "resource", None)
    assert allow_open_files(77) == 77
