"""Create the HTTP server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.http.graceful import GracefulServer, http_server
from octavo.http.listening import MAX_CONNECTIONS
from octavo.server.app import create_app
from octavo.server.service import Service

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.config import ServerConfig
    from octavo.engine.async_llm import AsyncEngine


def make_server(
    engine: AsyncEngine,
    config: ServerConfig,
    *,
    max_connections: int = MAX_CONNECTIONS,
    settings: Mapping[str, Any] | None = None,
) -> GracefulServer:
    """Return an HTTP server. The caller must shut down the engine.

    To serve, call `run(sockets=[...])` with a socket from `octavo.http.listening.bind`. For errors, see `Service`.
    """
    service = Service(engine, config, settings)
    return http_server(create_app(service), service, max_connections=max_connections)
