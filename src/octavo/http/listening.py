"""Sockets of a server, without a web framework."""

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

if sys.platform != "win32":
    import fcntl
    import resource
    import termios

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.config import AccessConfig

logger = logging.getLogger(__name__)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_CONNECTIONS = 8192
PROBE_CONNECTIONS = 32  # further connections, for health checks
# An answer waits for the client while kernel and process each hold this many unsent bytes.
MAX_UNSENT_BYTES = 16 << 10
_TCP_INFO_BYTES = 128
_INT_BYTES = 4
_SOCKET_CLOSED = (OSError, ValueError)
_BACKLOG = 2048
_EXIT_S = 10.0
_OWN_FILES = 256  # open files that are not connections


def check_binding(host: str, config: AccessConfig, *, insecure: bool) -> None:
    """Raise `ConfigError` if other machines can reach `host` without a key, unless `insecure`."""
    if not config.requires_key and not insecure and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines but no API key is set: give --api-keys FILE, --api-key "
            "or OCTAVO_API_KEY, or --insecure to allow requests without a key"
        )


def check_files(config: AccessConfig) -> None:
    """Raise `ConfigError` if the file of API keys or the certificate is invalid."""
    if config.api_keys_file is not None:
        Keyring.from_file(config.api_keys_file)
    check_certificate(config)


def check_certificate(config: AccessConfig) -> None:
    """Raise `ConfigError` if invalid."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # includes ssl.SSLError
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise ConfigError(f"the certificate for TLS and its key cannot be used ({files}): {error}") from None


@contextlib.contextmanager
def hearing_signals() -> Iterator[None]:
    """Until the server handles signals, let SIGTERM end the process, and ignore SIGHUP.

    Without a handler, a container's first process ignores SIGTERM. Does nothing outside the main thread.
    """
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, _exit_now)
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _exit_now(*_: object) -> NoReturn:
    last = threading.Timer(_EXIT_S, os._exit, [0])  # a download's threads would delay the exit
    last.daemon = True
    last.start()
    raise SystemExit(0)


def handles_sighup() -> bool:
    """Return True if this thread can handle SIGHUP."""
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
    """Bind a socket that refuses connections until `open_door` is called. Raises `ConfigError`.

    TCP_NOTSENT_LOWAT keeps Linux from buffering megabytes for a slow client.

    host: An address. "::" includes IPv4.
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
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # inherited by accepted connections
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    return sock


def _bind(sock: socket.socket, host: str, port: int) -> None:
    """Bind a socket so that no other socket can bind the address, even before this server listens.

    With SO_REUSEADDR, Linux would let several sockets bind one address. So the option is set only briefly, and only if
    the address is in use, perhaps by closed connections (TIME_WAIT).
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
    """Listen on a socket from `bind`. Raises `ConfigError` if another server listens already."""
    if sys.platform != "win32":  # connections inherit it, so that the next server can bind
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None


def bytes_taken(sock: socket.socket | None) -> int | None:
    """Return the number of acknowledged bytes, including TLS overhead, or None if unknown.

    Only Linux reports the number, as tcpi_bytes_acked of tcp_info (linux/tcp.h).
    """
    if sys.platform == "linux" and sock is not None:
        with contextlib.suppress(*_SOCKET_CLOSED):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return int.from_bytes(info[-8:], sys.byteorder) if len(info) == _TCP_INFO_BYTES else None
    return None


def bytes_under_way(sock: socket.socket | None) -> int:
    """Return how many sent bytes are not acknowledged (SIOCOUTQ of tcp(7)), or 0 if unknown."""
    if sys.platform == "linux" and sock is not None:
        with contextlib.suppress(*_SOCKET_CLOSED):
            queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT_BYTES))
            return int.from_bytes(queued, sys.byteorder)
    return 0


def reset_when_closed(sock: socket.socket | None) -> None:
    """Make `close` drop unsent bytes."""
    if sock is not None:
        with contextlib.suppress(*_SOCKET_CLOSED):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def allow_open_files(num_connections: int = MAX_CONNECTIONS, *, files_each: int = 1) -> int:
    """Raise the process's soft limit of open files. Return how many connections it allows."""
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
