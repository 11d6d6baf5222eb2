"""Application state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.http.errors import AuthenticationError, ServerClosingError
from octavo.http.limiter import RequestLimiter
from octavo.http.metrics import Metrics
from octavo.http.tenants import Keyring
from octavo.http.timeouts import TimeoutQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client.registry import Collector

    from octavo.config import AccessConfig
    from octavo.errors import OctavoError
    from octavo.http.audit import Spans
    from octavo.http.tenants import Tenant

logger = logging.getLogger(__name__)


class HttpService(ABC):
    """Base of the server's and the router's services. Used on one event loop only.

    num_bodies: How many request bodies of the largest size may be in memory.

    Raises `ConfigError` for an invalid key file.
    """

    config: AccessConfig
    keyring: Keyring | None
    tracing: Spans | None = None

    def __init__(
        self, config: AccessConfig, collector: Collector, *, num_bodies: int, max_waiting_tokens: int | None = None
    ) -> None:
        self.config = config
        self.limiter = RequestLimiter(config.max_open_requests, max_waiting_tokens, num_bodies * config.max_body_bytes)
        self.timeouts = TimeoutQueue()
        self.metrics = Metrics(collector)
        self.is_closing = False
        self._read_keys()

    @property
    @abstractmethod
    def is_dead(self) -> bool:
        """True if a restart is needed."""

    @abstractmethod
    def check_engine(self) -> None:
        """Raise if no engine can take a request."""

    @abstractmethod
    def _keys_changed(self) -> None:
        """Abort removed tenants' requests."""

    @abstractmethod
    async def _idle(self) -> None:
        """Wait until no request is open."""

    @abstractmethod
    async def _end_open(self, why: Callable[[], OctavoError]) -> None:
        """Abort all requests."""

    async def start(self) -> None:  # noqa: B027 - optional
        """Start background tasks."""

    def close(self) -> None:
        """Send remaining spans."""
        if self.tracing is not None:
            self.tracing.close()

    def check_ready(self) -> None:
        """Raise if no request can be accepted."""
        if self.is_closing:
            raise server_closing()
        self.check_engine()

    def begin(self, tenant: Tenant) -> None:
        """See `RequestLimiter.begin`."""
        self.check_ready()
        self.limiter.begin(tenant)

    def present(self, tenant: Tenant) -> Tenant | None:
        """Return a tenant's current settings, or None if the tenant was removed."""
        return tenant if self.keyring is None else self.keyring.named(tenant.name)

    def reload(self) -> None:
        """Read the keys again. An invalid file changes nothing."""
        try:
            self._read_keys()
        except ConfigError as error:
            logger.error("the API keys were not reloaded: %s", error)  # noqa: TRY400 - the error says all
            return
        logger.info("the API keys were reloaded: %d keys", len(self.keyring.tenants) if self.keyring else 0)
        self._keys_changed()

    def _read_keys(self) -> None:
        self.keyring = Keyring.of(self.config)
        if self.keyring is not None:
            self.limiter.change(self.keyring.tenants)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests. After `grace_s` seconds, abort open requests."""
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle()
        await self._end_open(server_closing)


def server_closing() -> ServerClosingError:
    """Make the error of requests aborted by the shutdown."""
    return ServerClosingError("closing")


def key_removed() -> AuthenticationError:
    """Make the error of requests with a removed key."""
    return AuthenticationError("the API key of this request was removed")
