"""The state that an application's routes share: keys, limits, counts, and whether it is shutting down."""

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
    """The common base of the server's and the router's services. Used on one event loop only.

    num_bodies: number of bodies of the largest size that may be held at once. max_waiting_tokens: see `RequestLimiter`.
    collector: reads the figures of the engine or engines.
    Raises `ConfigError` if the file of keys cannot be used.
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
        """True if no request can ever be taken again."""

    @abstractmethod
    def check_engine(self) -> None:
        """Raise if there is no engine that can take a request now."""

    @abstractmethod
    def _keys_changed(self) -> None:
        """React to a new keyring: end open requests of tenants that are not present any more with `key_removed`."""

    @abstractmethod
    async def _idle(self) -> None:
        """Wait until no request is open."""

    @abstractmethod
    async def _end_open(self, why: Callable[[], OctavoError]) -> None:
        """End all open requests with an error; called once, at shutdown."""

    async def start(self) -> None:  # noqa: B027 - a server's engine runs already
        """Start background tasks. Called when the event loop runs."""

    def close(self) -> None:
        """Send the last spans, after the last connection is closed; may block for a while."""
        if self.tracing is not None:
            self.tracing.close()

    def check_ready(self) -> None:
        """Raise if no request can be taken now: while the server closes, or without an engine."""
        if self.is_closing:
            raise server_closing()
        self.check_engine()

    def begin(self, tenant: Tenant) -> None:
        """Count a request whose headers have arrived. Raises if even the smallest request could not be taken."""
        self.check_ready()
        self.limiter.begin(tenant)

    def present(self, tenant: Tenant) -> Tenant | None:
        """Return the current settings of a tenant; None if its key was removed after its request began."""
        return tenant if self.keyring is None else self.keyring.named(tenant.name)

    def reload(self) -> None:
        """Read the file of keys again. An invalid file changes nothing. Open requests of removed keys are ended."""
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
        """Refuse new requests, give open ones `grace_s` seconds, then end each of them with `server_closing`."""
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._idle()
        await self._end_open(server_closing)


def server_closing() -> ServerClosingError:
    """Make the error of a request that the shutdown refuses or ends."""
    return ServerClosingError("closing")


def key_removed() -> AuthenticationError:
    """Make the error of an open request after its key was removed."""
    return AuthenticationError("the API key of this request was removed")
