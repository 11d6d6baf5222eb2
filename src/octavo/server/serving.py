"""From an engine to a process that listens, and that ends by itself when it is told to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING

import uvicorn

from octavo.errors import ConfigError
from octavo.server.app import DEFAULT_MAX_BODY_BYTES, create_app
from octavo.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from octavo.engine.async_llm import AsyncLLM

_SLOW_READER_S = 10  # after the last event was handed over


class GracefulServer(uvicorn.Server):
    """Ends open requests with a last event each before its process leaves; a second signal leaves at once."""

    def __init__(self, config: uvicorn.Config, service: Service, grace_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace_s = grace_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        """Take a signal in; none of them kills the process from outside."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door, then let open requests end."""
        drain = asyncio.create_task(self._service.drain(self._grace_s))
        await super().shutdown(sockets)
        drain.cancel()
        await asyncio.gather(drain, return_exceptions=True)


def check_binding(host: str, api_key: str | None, *, insecure: bool) -> None:
    """Raise `ConfigError` for an address that others can reach while no key is asked for."""
    if api_key is None and not insecure and not _is_loopback(host):
        raise ConfigError(
            f"host {host!r} can be reached from other machines and no API key is set: give --api-key or "
            "OCTAVO_API_KEY, or --insecure if that is what you want"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Bind an address; connections wait there until a server takes the socket. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error}") from None


def make_server(
    llm: AsyncLLM,
    *,
    served_model_names: Sequence[str] = (),
    api_key: str | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    grace_s: float,
    log_level: str = "info",
) -> GracefulServer:
    """Make a server; `run(sockets=[...])` it with a socket of `listen`. The engine stays its caller's."""
    service = Service(llm, served_model_names)
    config = uvicorn.Config(
        create_app(service, api_key=api_key, max_body_bytes=max_body_bytes),
        log_level=log_level,
        loop="auto",  # uvloop where there is one
        http="httptools",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(grace_s) + _SLOW_READER_S,
    )
    return GracefulServer(config, service, grace_s)
