"""From an engine to a process that listens, and that ends by itself when it is told to."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import ssl
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.audit import tell_no_request
from octavo.server.connection import MAX_CONNECTIONS, MAX_UNSENT_BYTES, BoundedHttpProtocol
from octavo.server.service import Service
from octavo.server.tenants import Keyring

if sys.platform != "win32":  # where there is no such limit
    import resource

if TYPE_CHECKING:
    from types import FrameType

    from octavo.config import ServerConfig
    from octavo.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
_SLOW_READER_S = 10  # after the last event was handed over
_LOOK_S = 0.1  # whether there was a second signal
_OWN_FILES = 256  # open besides connections: of libraries, of the engine's sockets, of a request that reads one


class GracefulServer(uvicorn.Server):
    """Refuses what is new and ends open requests with a last event each before its process leaves.

    A second signal leaves at once. SIGHUP reads the API keys anew.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Take a signal in; none of them kills the process from outside."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the door."""
        if _hears_hang_up(self._service.config):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._service.reload)
            self._service.reload()  # the signal may have come since they were read
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open requests end, and whoever comes meanwhile hear that this server leaves; then close the door."""
        self.server_state.default_headers.append((b"connection", b"close"))  # of every answer from now on
        drain = asyncio.create_task(self._service.drain(self._service.config.grace_s))
        while not (drain.done() or self.force_exit):
            await asyncio.wait([drain], timeout=_LOOK_S)
        drain.cancel()
        await asyncio.wait([drain])
        if not drain.cancelled() and (error := drain.exception()) is not None:
            logger.error("open requests could not be ended", exc_info=error)
        await super().shutdown(sockets)
        if self._service.tracing is not None:
            await asyncio.to_thread(self._service.tracing.close)


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
    if _hears_hang_up(config):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _hears_hang_up(config: ServerConfig) -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return config.api_keys_file is not None and hasattr(signal, "SIGHUP") and is_main


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, idle_timeout_s: float = 60.0) -> socket.socket:
    """Bind an address; connections wait there until a server takes the socket. Raises `ConfigError`.

    idle_timeout_s: so long may a client take nothing of what was sent to it; then its connection ends.
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


def make_server(llm: AsyncLLM, config: ServerConfig) -> GracefulServer:
    """Make a server; `run(sockets=[...])` it with a socket of `listen`. The engine stays its caller's.

    Raises `ConfigError` where the file of API keys cannot be used, or packages are missing for what is asked for.
    """
    service = Service(llm, config)
    http = partial(
        BoundedHttpProtocol,
        header_timeout_s=config.body_timeout_s,
        keep_alive_timeout_s=config.keep_alive_timeout_s,
        cutter=service.cutter,
        on_refused=partial(tell_no_request, service.metrics),
    )
    return GracefulServer(
        uvicorn.Config(
            create_app(service),
            log_config=None,  # one log for all
            log_level=config.log_level,
            access_log=False,  # the audit log says more
            loop="auto",  # uvloop where there is one
            http=http,  # type: ignore[arg-type]  # whatever makes protocols
            ws="none",
            proxy_headers=bool(config.forwarded_allow_ips),
            forwarded_allow_ips=list(config.forwarded_allow_ips),
            server_header=False,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_graceful_shutdown=_SLOW_READER_S,
        ),
        service,
    )
