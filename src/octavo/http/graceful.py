"""A process that listens, and that ends by itself when it is told to; what it serves is an application's."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from octavo.errors import ConfigError
from octavo.http.audit import tell_no_request
from octavo.http.connection import BoundedHttpProtocol
from octavo.http.listening import MAX_CONNECTIONS, check_certificate, hears_hang_up

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from starlette.types import ASGIApp

    from octavo.http.service import HttpService

logger = logging.getLogger(__name__)
_SLOW_READER_S = 10  # after the last event was handed over
_LOOK_S = 0.1  # whether there was a second signal


class GracefulServer(uvicorn.Server):
    """Refuses what is new and ends open requests with a last event each before its process leaves.

    A second signal leaves at once. SIGHUP reads the API keys and the certificate anew. Without an engine it leaves as
    well, where no request will ever be taken again: nobody but who starts it anew can help then.
    """

    def __init__(self, config: uvicorn.Config, service: HttpService) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Take a signal in; none of them kills the process from outside."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        if hears_hang_up():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)
            self.reload()  # the signal may have come since they were read
        await self._service.start()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Tell whether it is time to leave; uvicorn asks ten times a second."""
        return await super().on_tick(counter) or self._service.is_dead

    def reload(self) -> None:
        """Read the API keys and the certificate anew; what cannot be used stays as it was. Open connections go on."""
        config = self._service.config
        if config.api_keys_file is not None:
            self._service.reload()
        if config.ssl_certfile is None:
            return
        try:
            check_certificate(config)  # a pair that does not match would spoil the one that is in use
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)  # noqa: TRY400 - the error says all
        else:
            self.config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)  # type: ignore[union-attr]
            logger.info("the certificate was read anew")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let open requests end, and new ones hear that this server leaves; then stop listening."""
        self.server_state.default_headers.append((b"connection", b"close"))  # of every answer from now on
        drain = asyncio.create_task(self._service.drain(self._service.config.grace_s))
        while not (drain.done() or self.force_exit):
            await asyncio.wait([drain], timeout=_LOOK_S)
        drain.cancel()
        await asyncio.wait([drain])
        if not drain.cancelled() and (error := drain.exception()) is not None:
            logger.error("open requests could not be ended", exc_info=error)
        await super().shutdown(sockets)
        await asyncio.to_thread(self._service.close)


def http_server(app: ASGIApp, service: HttpService, *, max_connections: int = MAX_CONNECTIONS) -> GracefulServer:
    """Make a server of an application; `run(sockets=[...])` it with a socket of `bind`."""
    config = service.config
    http = partial(
        BoundedHttpProtocol,
        header_timeout_s=config.body_timeout_s,
        keep_alive_timeout_s=config.keep_alive_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
        max_connections=max_connections,
        timeouts=service.timeouts,
        on_refused=partial(tell_no_request, service.metrics),
    )
    return GracefulServer(
        uvicorn.Config(
            app,
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
