"""A router's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from octavo.http.errors import NoEngineError
from octavo.http.service import HttpService, key_removed
from octavo.router.engines import EnginePool
from octavo.router.launcher import Launcher
from octavo.router.metrics import RouterCollector
from octavo.router.policies import CacheAware, create_policy
from octavo.router.state_file import StateFile
from octavo.router.upstream import Upstream
from octavo.router.watching import EngineWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from octavo.config import RouterConfig
    from octavo.errors import OctavoError
    from octavo.router.engines import EngineHandle
    from octavo.router.routed_request import RoutedRequest

logger = logging.getLogger(__name__)
_SLOW_READER_S = 5.0
_SAVE_INTERVAL_S = 60.0
_BODIES = 64  # of the largest size


class RouterService(HttpService):
    """State of a router.

    launcher: None if this process starts no engines. Raises `ConfigError`.
    """

    config: RouterConfig
    upstream: Upstream

    def __init__(self, config: RouterConfig, launcher: Launcher | None = None) -> None:
        policy = create_policy(config)
        self.pool = EnginePool(policy)
        super().__init__(config, RouterCollector(self.pool), num_bodies=_BODIES)
        self._launcher = launcher or Launcher()
        self._routed_requests: set[RoutedRequest] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._watch: EngineWatch | None = None
        self._state: StateFile | None = None
        if config.state_file is not None and isinstance(policy, CacheAware):
            self._state = StateFile(config.state_file, self.pool, policy.tree)
        self._saving: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()

    @property
    def is_dead(self) -> bool:
        """True if all launched engines failed."""
        return self._launcher.has_failed

    async def start(self) -> None:
        """Read the state file, and watch the engines."""
        if self._state is not None:
            await self._state.read()
            self._saving = asyncio.create_task(self._save(self._state))
        self.upstream = Upstream(self.config)
        self._watch = EngineWatch(self.pool, self.upstream, self.config, self._launcher)
        self._watch.start()

    async def _save(self, state: StateFile) -> None:
        while not self._is_ending.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SAVE_INTERVAL_S):
                    await self._is_ending.wait()
            await state.save()

    @property
    def request_timeout_s(self) -> float:
        """The time limit of a request. Default: the engines' longest limit plus a margin."""
        limit_s = self.config.request_timeout_s
        return self.pool.ends_within_s if limit_s is None else limit_s

    def check_engine(self) -> None:
        """Raise `NoEngineError` if no engine is ready."""
        if not self.pool.has_ready:
            raise NoEngineError(self.config.health_interval_s)

    @contextlib.contextmanager
    def entering(self, routed: RoutedRequest, *, takes_place: bool) -> Iterator[None]:
        """Count a request as open during the block, or raise an error."""
        self.check_ready()
        with contextlib.ExitStack() as places:
            if takes_place:
                summary = routed.summary
                places.enter_context(
                    self.limiter.enter(routed.tenant, summary.num_streams, at_least=summary.num_choices)
                )
            self._routed_requests.add(routed)
            self._is_idle.clear()
            try:
                yield
            finally:
                self._routed_requests.discard(routed)
                if not self._routed_requests:
                    self._is_idle.set()

    def charge(self, routed: RoutedRequest, num_tokens: int) -> None:
        """Charge the tenant."""
        if num_tokens:
            self.limiter.charge(routed.tenant, num_tokens)

    def suspect(self, engine: EngineHandle) -> None:
        """Recheck an engine."""
        if self._watch is not None:
            self._watch.suspect(engine)

    def _keys_changed(self) -> None:
        self._launcher.reload()
        for routed in list(self._routed_requests):
            if self.present(routed.tenant) is None:
                routed.end(key_removed())

    async def _idle(self) -> None:
        await self._is_idle.wait()

    async def _end_open(self, why: Callable[[], OctavoError]) -> None:
        if self._routed_requests:
            logger.warning("aborting %d open requests", len(self._routed_requests))
        for routed in list(self._routed_requests):
            routed.end(why())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SLOW_READER_S):
                await self._is_idle.wait()
        if self._watch is not None:
            await self._watch.stop()
            await self.upstream.close()
        if self._saving is not None:
            self._is_ending.set()
            await self._saving
