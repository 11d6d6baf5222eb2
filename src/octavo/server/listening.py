"""What a server does before it has a model: its address, its files, its connections. Loads no framework.

`octavo serve` finds what is wrong of these before the engine starts; the application is imported while that loads.
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import ssl
import sys
import threading
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.server.tenants import Keyring

if sys.platform != "win32":  # where there is no such limit
    import resource

if TYPE_CHECKING:
    from octavo.config import ServerConfig

logger = logging.getLogger(__name__)
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_CONNECTIONS = 8192
# Answers wait for their reader once so much of them is unsent in the system or a little more, and so much here.
MAX_UNSENT_BYTES = 16 << 10
_TCP_INFO_BYTES = 128  # up to tcpi_bytes_acked
_OWN_FILES = 256  # open besides connections: of libraries, of the engine's sockets, of a request that reads one


def check_binding(host: str, config: ServerConfig, *, insecure: bool) -> None:
    """Raise `ConfigError` for an address that others can reach while no key is asked for."""
    if not config.asks_for_key and not insecure and not is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines and no API key is set: give --api-keys FILE, --api-key "
            "or OCTAVO_API_KEY, or --insecure if that is what you want"
        )


def check_files(config: ServerConfig) -> None:
    """Raise `ConfigError` for a file of API keys or a certificate that cannot be used."""
    if config.api_keys_file is not None:
        Keyring.from_file(config.api_keys_file)
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as error:  # of the files, or of what is in them
        files = f"{config.ssl_certfile} and {config.ssl_keyfile}"
        raise ConfigError(f"the certificate for TLS and its key cannot be used ({files}): {error}") from None


def hold_hang_up(config: ServerConfig) -> None:
    """Where SIGHUP is to reload keys, let it do nothing until a server listens, which reads them: it would kill."""
    if hears_hang_up(config):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def hears_hang_up(config: ServerConfig) -> bool:
    """Tell whether SIGHUP reloads keys: there are some, and this thread can hear it."""
    is_main = threading.current_thread() is threading.main_thread()
    return config.api_keys_file is not None and hasattr(signal, "SIGHUP") and is_main


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, idle_timeout_s: float = 60.0) -> socket.socket:
    """Bind an address; connections wait there until a server takes the socket. Raises `ConfigError`.

    idle_timeout_s: so long may a client take nothing of what was sent to it; then its connection ends. The system is
    told to take little of what a client does not read, where it can be (Linux): it would take megabytes.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None
    # accepted connections have these, too
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # closing one waits for its reader else
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * idle_timeout_s))
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # the system would take megabytes of a stream that nobody reads
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
    return sock


def bytes_taken(sock: socket.socket) -> int | None:
    """Return how much of what was sent on a connection has arrived, TLS and all; None where the system does not say.

    tcpi_bytes_acked of Linux's tcp_info (linux/tcp.h): what waits in this process says nothing of it under TLS, whose
    layers have buffers of their own.
    """
    if sys.platform != "linux":
        return None
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[-8:], sys.byteorder) if len(info) == _TCP_INFO_BYTES else None


def allow_open_files(num_connections: int = MAX_CONNECTIONS) -> None:
    """Raise this process's soft limit of open files as far as so many connections need; warn where it stays lower."""
    if sys.platform == "win32":
        return
    needed = num_connections + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        logger.warning(
            "the system lets this process open %d files: some %d connections fit, of the %d that it would take; "
            "raise its hard limit (ulimit -Hn, or LimitNOFILE= of its unit) to %d",
            limit,
            max(limit - _OWN_FILES, 0),
            num_connections,
            needed,
        )
