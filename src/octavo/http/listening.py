"""What a server does before it has a model: its address, its files, its connections. Loads no framework.

`octavo serve` finds what is wrong of these before the engine starts; the application is imported while that loads.
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

if sys.platform != "win32":  # where there are no such limits
    import fcntl
    import resource
    import termios

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.config import AccessConfig

logger = logging.getLogger(__name__)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_CONNECTIONS = 8192
PROBE_CONNECTIONS = 32  # beside them, for those who only ask whether the server lives
# Answers wait for their reader once so much of them is unsent in the system or a little more, and so much here.
MAX_UNSENT_BYTES = 16 << 10
_TCP_INFO_BYTES = 128  # up to tcpi_bytes_acked
_INT_BYTES = 4  # of C
_GONE = (OSError, ValueError)  # of a closed socket, as asyncio and uvloop say it
_BACKLOG = 2048
_LEAVE_S = 10.0  # in which an engine is told to end
_OWN_FILES = 256  # open besides connections: of libraries, of the engine's sockets, of a request that reads one


def check_binding(host: str, config: AccessConfig, *, insecure: bool) -> None:
    """Raise `ConfigError` for an address that others can reach while no key is asked for."""
    if not config.asks_for_key and not insecure and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines and no API key is set: give --api-keys FILE, --api-key "
            "or OCTAVO_API_KEY, or --insecure if that is what you want"
        )


def check_files(config: AccessConfig) -> None:
    """Raise `ConfigError` for a file of API keys or a certificate that cannot be used."""
    if config.api_keys_file is not None:
        Keyring.from_file(config.api_keys_file)
    check_certificate(config)


def check_certificate(config: AccessConfig) -> None:
    """Raise `ConfigError` for a certificate, or its key, that cannot be used."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # of the files, or of what is in them
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise ConfigError(f"the certificate for TLS and its key cannot be used ({files}): {error}") from None


@contextlib.contextmanager
def hearing_signals() -> Iterator[None]:
    """Hear signals while no server does that itself; in another thread than the first nothing is done.

    SIGHUP does nothing: the server will read keys and certificate anyway, and it would kill. SIGTERM ends the process,
    also the first one of a container, which the system lets live on where it does not ask for the signal.
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
    last = threading.Timer(_LEAVE_S, os._exit, [0])  # a download joins its threads, which go on until it is over
    last.daemon = True
    last.start()
    raise SystemExit(0)


def hears_hang_up() -> bool:
    """Tell whether there is a SIGHUP, and this thread can hear it."""
    return hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread()


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Take an address, at which nobody is let in before `open_door`. Raises `ConfigError` where another has it.

    Until then connections are refused, so that a proxy goes on to another server while this one loads its model.
    "::" is every address of this machine, those of IPv4 too. The system is told to take little of what a client does
    not read, where it can be (Linux): it would take megabytes. It is not told to end connections that take nothing
    (TCP_USER_TIMEOUT): Linux ends those with it, too, whose reader takes less than it is sent, as the time goes on from
    the first full window; `BoundedHttpProtocol` looks itself.
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
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted connections have it, too
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    return sock


def _bind(sock: socket.socket, host: str, port: int) -> None:
    """Bind in a way that another server, which loads a model as well, is refused the address.

    Linux gives an address to several sockets that all allow it (SO_REUSEADDR) as long as none of them listens. So it is
    allowed only to bind beside connections of a server that was here before and that linger.
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
    """Let connections come. Raises `ConfigError` where another server was faster."""
    if sys.platform != "win32":  # connections inherit it, and linger: the next server must be able to bind beside them
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        host, port = sock.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None


def bytes_taken(sock: socket.socket | None) -> int | None:
    """Return how much of what was sent on a connection has arrived, TLS and all; None where the system does not say.

    It says nothing of a connection that is gone, and systems other than Linux of none. tcpi_bytes_acked of tcp_info
    (linux/tcp.h): what waits in this process says nothing of it under TLS, whose layers have buffers of their own.
    """
    if sys.platform != "linux" or sock is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except _GONE:
        return None
    return int.from_bytes(info[-8:], sys.byteorder) if len(info) == _TCP_INFO_BYTES else None


def bytes_under_way(sock: socket.socket | None) -> int:
    """Return how much of what the system was given on a connection has not arrived yet (SIOCOUTQ of tcp(7), Linux).

    0 of a connection that is gone, and on other systems.
    """
    if sys.platform != "linux" or sock is None:
        return 0
    try:
        queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_INT_BYTES))
    except _GONE:
        return 0
    return int.from_bytes(queued, sys.byteorder)


def reset_when_closed(sock: socket.socket | None) -> None:
    """Let the system keep nothing of a connection for its reader once it is closed."""
    if sock is not None:
        with contextlib.suppress(*_GONE):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def allow_open_files(num_connections: int = MAX_CONNECTIONS, *, files_each: int = 1) -> int:
    """Raise this process's soft limit of open files as far as so many connections need; return how many fit.

    files_each: that a connection takes. Warns where these are fewer.
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
        "the system lets this process open %d files: %d connections fit, of the %d that it would take; "
        "raise its hard limit (ulimit -Hn, or LimitNOFILE= of its unit) to %d",
        limit,
        num_fit,
        num_connections,
        needed,
    )
    return num_fit
