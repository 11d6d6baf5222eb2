"""Watches engines: membership, readiness, restarts, load from other clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import TYPE_CHECKING, Annotated

import msgspec

from octavo.router.discovery import make_sources
from octavo.router.partners import PromptFigures
from octavo.router.upstream import FAILURES, is_local_failure, is_refusal

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from octavo.config import RouterConfig
    from octavo.router.discovery import Source
    from octavo.router.engines import EngineHandle, EnginePool
    from octavo.router.launcher import Launcher
    from octavo.router.upstream import Upstream

logger = logging.getLogger(__name__)
_MAX_SILENT = 2  # consecutive timeouts before an engine is lost
_INCARNATION = (b"process_start_time_seconds", b"octavo:engine_restarts_total")
_LOADED = b"octavo:kv_load_tokens_total"
_LOOKED_UP, _HITS = b"octavo:prefix_cache_queries_total", b"octavo:prefix_cache_hits_total"
_OPEN = (b"octavo:num_requests_running", b"octavo:num_requests_waiting")
_SAMPLE = re.compile(
    b"^(" + b"|".join((*_INCARNATION, _LOADED, _LOOKED_UP, _HITS, *_OPEN)) + rb")(?:\{[^\n]*\})? (\S+)$",
    re.MULTILINE,
)


class _ModelCard(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_ModelCard]


class _Info(msgspec.Struct):
    role: str = "both"
    kv_transfer_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    kv_format: dict[str, str] | None = None
    request_timeout: Annotated[float, msgspec.Meta(ge=0)] | None = None


class EngineWatch:
    """Runs a task that finds engines, and one task for each engine."""

    def __init__(self, pool: EnginePool, upstream: Upstream, config: RouterConfig, launcher: Launcher) -> None:
        self._pool, self._upstream, self._config, self._launcher = pool, upstream, config, launcher
        self._sources: list[Source] = [*make_sources(config), launcher]
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: dict[EngineHandle, asyncio.Event] = {}

    def start(self) -> None:
        """Start all tasks."""
        self._begin(self._discover())

    async def stop(self) -> None:
        """End all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def suspect(self, engine: EngineHandle) -> None:
        """Recheck an engine."""
        if engine in self._wake:
            self._wake[engine].set()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the checks of engines have stopped", exc_info=error)

    async def _discover(self) -> None:
        while True:
            try:
                found = [url for source in self._sources for url in await source.urls()]
            except Exception:
                logger.exception("the engines could not be discovered")
            else:
                self._change([*self._config.engines, *found])
            await asyncio.sleep(self._config.health_interval_s)

    def _change(self, urls: list[str]) -> None:
        new, gone = self._pool.change(urls)
        for engine in gone:
            logger.info("%s was removed", engine.url)
        for engine in new:
            self._wake[engine] = asyncio.Event()
            self._begin(self._look_after(engine))

    async def _look_after(self, engine: EngineHandle) -> None:
        num_silent = 0
        while engine.is_member or engine.routed_requests:
            try:
                status, _ = await self._upstream.get(engine, "/ready", None, self._config.health_timeout_s)
                num_silent = 0
                await self._record_health(engine, is_ready=status == 200)
            except FAILURES as error:
                is_gone = is_refusal(error)
                num_silent = 0 if is_gone else num_silent + (not is_local_failure(error))
                if num_silent >= _MAX_SILENT or is_gone:
                    self._lost(engine, error)
                    self._launcher.silent(engine.url, num_silent)
                elif isinstance(error, TimeoutError):
                    continue  # no pause, because the engine's requests wait
            except Exception:
                logger.exception("%s could not be checked", engine.url)
            await self._pause(engine)
        del self._wake[engine]
        self._upstream.close_idle(engine.url)

    def _lost(self, engine: EngineHandle, error: Exception) -> None:
        if engine.is_ready:
            logger.warning("%s is lost: %s: %s", engine.url, type(error).__name__, error)
        if is_refusal(error):
            self._pool.forget(engine)  # an engine that comes back has an empty cache
        engine.models = None
        self._pool.lost(engine)

    async def _record_health(self, engine: EngineHandle, *, is_ready: bool) -> None:
        if is_ready and (engine.models is None or engine.role != "both"):  # port and KV format may change at a restart
            await self._read_role(engine)
        if is_ready and engine.models is None:
            await self._read_models(engine)
        if is_ready and self._pool.is_saved(engine):  # its first requests may need the restored prefixes
            with contextlib.suppress(TimeoutError):
                await self._read_figures(engine)
        if is_ready is not engine.is_ready and engine.is_member:
            logger.info("%s %s", engine.url, "is ready" if is_ready else "accepts no new requests")
            engine.is_ready = is_ready
        if is_ready:
            await self._read_figures(engine)

    async def _pause(self, engine: EngineHandle) -> None:
        wake = self._wake[engine]
        try:
            async with asyncio.timeout(self._config.health_interval_s):
                await wake.wait()
        except TimeoutError:
            return
        wake.clear()

    async def _read_figures(self, engine: EngineHandle) -> None:
        text = await self._get(engine, "/metrics")
        if text is None:
            return
        figures: dict[bytes, float] = {}
        for name, value in _SAMPLE.findall(text):
            figures[name] = figures.get(name, 0.0) + float(value)
        self._pool.identify(engine, tuple(figures.get(name, 0.0) for name in _INCARNATION))
        engine.prompt_figures = _prompt_figures(figures, engine)
        self._pool.partners.figures_read(engine, asyncio.get_running_loop().time())
        num_there = sum(figures.get(name, 0.0) for name in _OPEN)
        num_routed = len(engine.routed_requests)
        per_request = engine.num_sent_tokens / engine.num_requests if engine.num_requests else 0.0
        engine.other_tokens = int(max(num_there - num_routed, 0) * per_request)

    async def _read_models(self, engine: EngineHandle) -> None:
        text = await self._get(engine, "/v1/models")
        if text is not None:
            try:
                engine.models = frozenset(card.id for card in msgspec.json.decode(text, type=_Models).data)
            except msgspec.MsgspecError:
                logger.debug("%s does not list its models", engine.url)
                engine.models = frozenset()

    async def _read_role(self, engine: EngineHandle) -> None:
        text = await self._get(engine, "/model_info")
        if text is not None:
            try:
                info = msgspec.json.decode(text, type=_Info)
            except msgspec.MsgspecError:
                info = _Info()
            engine.role, engine.kv_transfer_port, engine.kv_format = info.role, info.kv_transfer_port, info.kv_format
            engine.request_timeout_s = info.request_timeout

    async def _get(self, engine: EngineHandle, path: str) -> bytes | None:
        try:
            status, text = await self._upstream.get(
                engine, path, self._config.engine_api_key, self._config.health_timeout_s
            )
        except TimeoutError:
            raise
        except FAILURES as error:
            logger.debug("%s does not answer %s: %s", engine.url, path, error)
            return None
        return text if status == 200 else None


def _prompt_figures(figures: dict[bytes, float], engine: EngineHandle) -> PromptFigures | None:
    if (num_loaded := figures.get(_LOADED)) is None:
        return None
    num_looked_up, num_hits = figures.get(_LOOKED_UP), figures.get(_HITS)
    num_computed = None if num_looked_up is None or num_hits is None else num_looked_up - num_hits
    return PromptFigures(num_loaded, num_computed, engine.num_sent_prompt_tokens)
