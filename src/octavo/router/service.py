"""What a router's routes share: the engines, who may ask, and which requests are open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.http.errors import AuthenticationError, NoEngineError, ServerClosingError
from octavo.http.limiter import RequestLimiter
from octavo.http.metrics import Metrics
from octavo.http.tenants import Keyring
from octavo.http.timeouts import TimeoutQueue
from octavo.router.engines import EnginePool
from octavo.router.launcher import Launcher, NoLauncher
from octavo.router.metrics import RouterCollector
from octavo.router.policies import create_policy
from octavo.router.upstream import Upstream
from octavo.router.watching import EngineWatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.config import RouterConfig
    from octavo.http.tenants import Tenant
    from octavo.router.engines import Engine
    from octavo.router.flight import Flight

logger = logging.getLogger(__name__)
_SLOW_READER_S = 5.0
_BODIES = 64  # so many of the largest may be open at once


class RouterService:
    """The engines of a configuration, and who may use them. Used on one event loop only.

    launcher: what runs them, where that is this process.
    Raises `ConfigError` where the file of keys cannot be used.
    """

    upstream: Upstream  # from `start` on: connections belong to a loop that runs

    def __init__(self, config: RouterConfig, launcher: Launcher | None = None) -> None:
        self.config = config
        self.pool = EnginePool(create_policy(config))
        self.limiter = RequestLimiter(config.max_open_requests, None, _BODIES * config.max_body_bytes)
        self.timeouts = TimeoutQueue()
        self.metrics = self.answer_counts = Metrics(RouterCollector(self.pool))
        self.keyring: Keyring | None = None
        self._read_keys()
        self.is_closing = False
        self._launcher = launcher or NoLauncher()
        self._flights: set[Flight] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._watch: EngineWatch | None = None

    @property
    def is_dead(self) -> bool:
        """Whether there will never be an engine."""
        return self._launcher.has_failed

    async def start(self) -> None:
        """Begin to look after the engines."""
        self.upstream = Upstream(self.config)
        self._watch = EngineWatch(self.pool, self.upstream, self.config, self._launcher)
        self._watch.start()

    @property
    def request_timeout_s(self) -> float:
        """Seconds that a request may take: as configured, else as long as the engines allow, with a margin."""
        limit_s = self.config.request_timeout_s
        return self.pool.ends_within_s if limit_s is None else limit_s

    def check_ready(self) -> None:
        """Raise where no request can be taken now."""
        if self.is_closing:
            raise ServerClosingError("closing")
        if not self.pool.ready():
            raise NoEngineError(self.config.health_interval_s)

    def begin(self, tenant: Tenant) -> None:
        """Count a request whose headers are there. Raises why it cannot be taken."""
        self.check_ready()
        self.limiter.begin(tenant)

    @contextlib.contextmanager
    def entering(self, flight: Flight, *, takes_place: bool) -> Iterator[None]:
        """Have a request open until the block is left. Raises where it finds no place."""
        self.check_ready()
        with contextlib.ExitStack() as places:
            if takes_place:
                asked = flight.asked
                places.enter_context(self.limiter.enter(flight.tenant, asked.num_streams, at_least=asked.num_choices))
            self._flights.add(flight)
            self._is_idle.clear()
            try:
                yield
            finally:
                self._flights.discard(flight)
                if not self._flights:
                    self._is_idle.set()

    def charge(self, flight: Flight, num_tokens: int) -> None:
        """Count tokens that an engine says a request took."""
        if num_tokens:
            self.limiter.charge(flight.tenant, num_tokens)

    def suspect(self, engine: Engine) -> None:
        """Ask an engine at once whether it is still there."""
        if self._watch is not None:
            self._watch.suspect(engine)

    def reload(self) -> None:
        """Read the file of keys anew; one that cannot be used changes nothing. Whose key is gone is ended."""
        try:
            self._read_keys()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)  # noqa: TRY400 - the error says all
            return
        self._launcher.reload()
        for flight in list(self._flights):
            if self.keyring is not None and self.keyring.named(flight.tenant.name) is None:
                flight.end(AuthenticationError("the API key of this request was taken away"))

    def _read_keys(self) -> None:
        self.keyring = Keyring.of(self.config)
        if self.keyring is not None:
            self.limiter.change(self.keyring.tenants)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; give open requests some time, then end them: each fails with `server_closing`."""
        self.is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        if self._flights:
            logger.warning("ending %d open requests", len(self._flights))
        for flight in list(self._flights):
            flight.end(ServerClosingError("closing"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SLOW_READER_S):  # who does not read is not waited for
                await self._is_idle.wait()
        if self._watch is not None:
            await self._watch.stop()
            await self.upstream.close()

    def close(self) -> None:
        """Do nothing: all was closed by `drain`."""
