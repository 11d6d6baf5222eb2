"""A server that drains before exit."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from octavo.errors import ConfigError
from octavo.http.audit import audit_bad_input
from octavo.http.connection import BoundedHttpProtocol
from octavo.http.listening import MAX_CONNECTIONS, check_certificate, handles_sighup

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from starlette.types import ASGIApp

    from octavo.http.service import HttpService

logger = logging.getLogger(__name__)
_SLOW_READER_S = 10
_LOOK_S = 0.1  # between checks for a second signal


class GracefulServer(uvicorn.Server):
    """A uvicorn server that lets open requests finish before it exits.

    After the grace period, open requests end with an error. A second signal exits immediately. On SIGHUP, the
    server reads the API keys and the certificate again. The server also exits if `HttpService.is_dead`.
    """

    def __init__(self, config: uvicorn.Config, service: HttpService) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Begin the shutdown, or force it at a second signal. Unlike in uvicorn, the signal is not raised again."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start and listen."""
        if handles_sighup():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
            self.reload()  # a SIGHUP that arrived earlier was ignored
        await self._service.start()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Return True if the server must exit."""
        return await super().on_tick(counter) or self._service.is_dead

    def reload(self) -> None:
        """Read keys and certificate again. An invalid file changes nothing."""
        config = self._service.config
        if config.api_keys_file is not None:
            self._service.reload()
        if config.ssl_certfile is None:
            return
        try:
            check_certificate(config)  # loading a wrong key would damage the TLS context
        except ConfigError as error:
            logger.error("the certificate was not reloaded: %s", error)  # noqa: TRY400 - the error says all
        else:
            self.config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)  # type: ignore[union-attr]
            logger.info("the certificate was reloaded")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close."""
        self.server_state.default_headers.append((b"connection", b"close"))
        drain = asyncio.create_task(self._service.drain(self._service.config.grace_s))
        while not (drain.done() or self.force_exit):
            await asyncio.wait([drain], timeout=_LOOK_S)
        drain.cancel()
        await asyncio.wait([drain])
        if not drain.cancelled() and (error := drain.exception()) is not None:
            logger.error("open requests could not be aborted", exc_info=error)
        await super().shutdown(sockets)
        await asyncio.to_thread(self._service.close)


def http_server(app: ASGIApp, service: HttpService, *, max_connections: int = MAX_CONNECTIONS) -> GracefulServer:
    """Make a server. Run it by `run(sockets=[...])` with a socket from `bind`."""
    config = service.config
    http = partial(
        BoundedHttpProtocol,
        header_timeout_s=config.body_timeout_s,
        keep_alive_timeout_s=config.keep_alive_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        max_connections=max_connections,
        timeouts=service.timeouts,
        on_refused=partial(audit_bad_input, service.metrics),
    )
    return GracefulServer(
        uvicorn.Config(
            app,
            log_config=None,
            log_level=config.log_level,
            access_log=False,
            loop="auto",
            http=http,  # type: ignore[arg-type]
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
