"""The dashboard's data."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo import __version__
from octavo.engine.snapshot_feed import SNAPSHOT_INTERVAL_S
from octavo.errors import ConfigError, EngineDeadError, QueueFullError
from octavo.http.errors import NotFoundError
from octavo.journal.explain import explain
from octavo.server.telemetry.dashboard.cursor import Cursor
from octavo.server.telemetry.dashboard.experts import ExpertMap
from octavo.server.telemetry.dashboard.prefixes import prefix_figures
from octavo.server.telemetry.dashboard.tiers import tier_rows
from octavo.server.telemetry.dashboard.view import LiveView

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from octavo.data.snapshot import Snapshot
    from octavo.http.tenants import Tenant
    from octavo.server.service import Service

MAX_WATCHERS = 16
LINGER_S = 10.0  # so that a reloaded page keeps its history
_encode = msgspec.json.Encoder().encode


class Dashboard:
    """One engine's live view. Used only on the server's event loop.

    The engine sends snapshots until `LINGER_S` seconds after the last viewer disconnected.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_watchers = 0
        self._view: LiveView | None = None
        self._door = asyncio.Lock()
        self._closing: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        """Add a viewer. Raises `QueueFullError` above `MAX_WATCHERS` viewers."""
        if self._num_watchers >= MAX_WATCHERS:
            raise QueueFullError(f"{MAX_WATCHERS} dashboard pages are open, which is the limit; close one")
        self._num_watchers += 1

    def exit(self) -> None:
        """Remove a viewer."""
        self._num_watchers -= 1
        if not self._num_watchers and self._closing is None:
            self._closing = asyncio.get_running_loop().call_later(LINGER_S, self._start_closing)

    async def frames(self, tenant: Tenant) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: one `hello`, a few `frame` events per second, and one `bye` at the end.

        The stream ends when the server closes, or when the viewer's key is removed or loses `read_metrics`. A frame is
        made only after the previous frame was sent, so a slow viewer gets fewer frames.
        """
        cursor, experts = Cursor(await self._open()), ExpertMap()
        yield _event("hello", self._hello())
        while not self._service.is_closing and (now := self._service.present(tenant)) and now.read_metrics:
            loads = experts.changed(self._service.engine.client.stats.expert_tokens)
            yield _event("frame", {**self._state(), "experts": loads, **cursor.frame()})
            await asyncio.sleep(SNAPSHOT_INTERVAL_S)
        yield _event("bye", {})

    async def explain(self, request_id: str) -> dict[str, Any]:
        """Return a request's phases and their reasons. Raises `NotFoundError`."""
        view = self._view
        if view is None:
            raise NotFoundError("requests are recorded only while a dashboard is open: open /dashboard first")
        log, now = view.recent.since(0), view.clock()
        try:
            explanation = await asyncio.to_thread(explain, log, request_id, now)
        except ConfigError:
            raise NotFoundError("no request with this id is recorded; it may be too old") from None
        return {
            "id": request_id,
            "ending": explanation.ending,
            "seconds": round(explanation.wall_s, 4),
            "phases": [{"phase": each.phase, "start": each.start, "end": each.end} for each in explanation.intervals],
            "sums": [{"phase": phase, "seconds": round(seconds, 4)} for phase, seconds in explanation.seconds.items()],
            "reasons": explanation.reasons,
        }

    def _hello(self) -> dict[str, Any]:
        service = self._service
        return {
            "model": service.model_names[0],
            "version": __version__,
            "max_model_len": service.model_info.max_model_len,
            "has_chat": service.engine.input_processor.has_chat_template,
        }

    def _state(self) -> dict[str, Any]:
        engine = self._service.engine
        return {
            "ready": engine.is_alive,
            "dead": engine.is_dead,
            "restarts": engine.client.num_restarts,
            "tiers": tier_rows(engine.client.stats, engine.client.capacity),
            "prefixes": prefix_figures(engine.client.stats, engine.client.capacity),
        }

    async def _open(self) -> LiveView:
        async with self._door:
            if self._closing is not None:
                self._closing.cancel()
                self._closing = None
            if self._view is None:
                # Set before `watch`, so that `_close` finds the view if the viewer disconnects meanwhile.
                view = self._view = LiveView(self._service.engine.clock)
                loop = asyncio.get_running_loop()

                def listen(snapshot: Snapshot) -> None:
                    with contextlib.suppress(RuntimeError):  # the event loop is closed
                        loop.call_soon_threadsafe(view.take, snapshot)

                with contextlib.suppress(EngineDeadError):  # the page shows a dead engine
                    await self._service.engine.watch(listen)
            return self._view

    def _start_closing(self) -> None:
        self._closing = None
        self._task = asyncio.create_task(self._close())

    async def _close(self) -> None:
        async with self._door:
            if self._num_watchers or self._view is None:
                return
            self._view = None
            with contextlib.suppress(EngineDeadError):
                await self._service.engine.watch(None)


def read_static() -> dict[str, tuple[bytes, str]]:
    """Return (content, media type) of the page's files, by file name."""
    types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    folder = Path(__file__).parent / "static"
    return {
        path.name: (path.read_bytes(), f"{types[path.suffix]}; charset=utf-8")
        for path in sorted(folder.iterdir())
        if path.suffix in types
    }


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"
