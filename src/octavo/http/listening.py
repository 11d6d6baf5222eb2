"""Checks and sockets of a server before it has a model. Loads no web framework.

So `octavo serve` finds errors in address and files before the engine starts, and imports the application while the
engine loads.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
import struct
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from octavo.errors import ConfigError
from octavo.http.tenants import Keyring

if sys.platform != "win32":  # Windows has none of these
    import fcntl
    import resource
    import termios

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.config import AccessConfig

logger = logging.getLogger(__name__)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_CONNECTIONS = 8192
PROBE_CONNECTIONS = 32  # in addition, for health checks only
# An answer waits for its reader once about so many bytes are unsent in the system and as many in this process.
MAX_UNSENT_BYTES = 16 << 10
_TCP_INFO_BYTES = 128  # up to tcpi_bytes_acked
_INT_BYTES = 4  # of C
_GONE = (OSError, ValueError)  # raised for a closed socket by asyncio and by uvloop
_BACKLOG = 2048
_LEAVE_S = 10.0  # for ending the engine
_OWN_FILES = 256  # open files that are no connections: of libraries, of the engine's sockets, read by requests


def check_binding(host: str, config: AccessConfig, *, insecure: bool) -> None:
    """Raise `ConfigError` for an address that other machines can reach without an API key, unless `insecure`."""
    if not config.asks_for_key and not insecure and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines but no API key is set: give --api-keys FILE, --api-key "
            "or OCTAVO_API_KEY, or --insecure to allow requests without a key"
        )


def check_files(config: AccessConfig) -> None:
    """Raise `ConfigError` for an invalid file of API keys or an invalid certificate."""
    if config.api_keys_file is not None:
        Keyring.from_file(config.api_keys_file)
    check_certificate(config)


def check_certificate(config: AccessConfig) -> None:
    """Raise `ConfigError` if the TLS certificate or its key cannot be used."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # also for invalid content: ssl.SSLError is an OSError
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise ConfigError(f"the certificate for TLS and its key cannot be used ({files}): {error}") from None


@contextlib.contextmanager
def hearing_signals() -> Iterator[None]:
    """Handle signals until the server does so itself. Does nothing outside of the main thread.

    SIGHUP is ignored: its default would kill the process, and the server reads keys and certificate later anyway.
    SIGTERM ends the process, also the first process of a container, for which the system ignores a signal without a
    handler.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, _leave)
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _leave(*_: object) -> NoReturn:
    last = threading.Timer(_LEAVE_S, os._exit, [0])  # leaving a download would wait until its threads have finished
    last.daemon = True
    last.start()
    raise SystemExit(0)


def hears_hang_up() -> bool:
    """Return True if the system has SIGHUP and this thread can handle it."""
    return hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket to an address. It refuses connections until `open_door`. Raises `ConfigError` if that fails.

    host: "::" is every address of this machine, IPv4 included.
    Connections are refused so that a proxy tries another server while this one loads its model. On Linux the system is
    told to buffer few unsent bytes for a slow reader, because it would buffer megabytes. TCP_USER_TIMEOUT is not set:
    its time runs from the first full window, so Linux would also end connections whose reader is only slower than the
    sender. `BoundedHttpProtocol` checks readers itself.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if sock.family == socket.AF_INET6:
            is_any = host == "::" and socket.has_dualstack_ipv6()
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not is_any)
        _bind(sock, host, port)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted connections inherit it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    return sock


def _bind(sock: socket.socket, host: str, port: int) -> None:
    """Bind so that a second server cannot bind the same address while this one loads its model.

    Linux lets several sockets with SO_REUSEADDR bind one address as long as none of them listens. So the option is set
    only for a moment, and only if lingering connections of an earlier server block the address.
    """
    try:
        sock.bind((host, port))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or sys.platform == "win32":
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def open_door(sock: socket.socket) -> None:
    """Listen on a socket from `bind`. Raises `ConfigError` if another server was faster."""
    if sys.platform != "win32":  # connections inherit it and may linger: the next server must be able to bind then
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None


def bytes_taken(sock: socket.socket | None) -> int | None:
    """Return the number of sent bytes of a connection that have arrived, TLS overhead included; None if unknown.

    Unknown for a closed connection, and on systems other than Linux. Read from tcpi_bytes_acked of tcp_info
    (linux/tcp.h), because with TLS the bytes that wait in this process say nothing: its layers have own buffers.
    """
    if sys.platform != "linux" or sock is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except _GONE:
        return None
    return int.from_bytes(info[-8:], sys.byteorder) if len(info) == _TCP_INFO_BYTES else None


def bytes_under_way(sock: socket.socket | None) -> int:
    """Return the number of bytes of a connection that the system has and that have not arrived (SIOCOUTQ of tcp(7)).

    0 for a closed connection, and on systems other than Linux.
    """
    if sys.platform != "linux" or sock is None:
        return 0
    try:
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT_BYTES))
    except _GONE:
        return 0
    return int.from_bytes(queued, sys.byteorder)


def reset_when_closed(sock: socket.socket | None) -> None:
    """Make the system drop the unsent bytes of a connection when it is closed."""
    if sock is not None:
        with contextlib.suppress(*_GONE):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def allow_open_files(num_connections: int = MAX_CONNECTIONS, *, files_each: int = 1) -> int:
    """Raise this process's soft limit of open files for so many connections, and return how many connections fit.

    files_each: number of files for each connection. Logs a warning if fewer connections fit.
    """
    if sys.platform == "win32":
        return num_connections
    needed = num_connections * files_each + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return num_connections
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit == needed:
        return num_connections
    num_fit = max((limit - _OWN_FILES) // files_each, 1)
    logger.warning(
        "this process may open %d files: that allows %d connections instead of %d; raise its hard limit (ulimit -Hn, "
        "or LimitNOFILE= of its unit) to %d",
        limit,
        num_fit,
        num_connections,
        needed,
    )
    return num_fit
