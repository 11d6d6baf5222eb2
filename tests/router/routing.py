"""A real router on a loopback port, in a thread, with real servers on fake engines, or with fake servers."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
from running import ALL_KEPT, DEADLINE_S, short_pauses, wait_until

from octavo.config import RouterConfig
from octavo.http.listening import bind
from octavo.router.app import make_router
from octavo.router.service import RouterService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from octavo.http.graceful import GracefulServer
    from octavo.router.engines import EngineHandle


@dataclass
class Routing:
    """A running router."""

    url: str
    server: GracefulServer
    service: RouterService
    thread: threading.Thread

    def engine(self, url: str) -> EngineHandle:
        return self.service.pool.engines[url]

    def http(self) -> httpx.Client:
        headers = {"Content-Type": "application/json"}
        return httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False, limits=ALL_KEPT, headers=headers)

    def wait_ready(self, num_engines: int) -> None:
        wait_until(lambda: len(self.service.pool.ready()) == num_engines, f"{num_engines} engines are ready")


@contextlib.contextmanager
def run_router(*urls: str, num_ready: int | None = None, **options: Any) -> Iterator[Routing]:
    """Run a router. num_ready: number of engines to wait for, by default all."""
    settings: dict[str, Any] = {"grace_s": 0.0, "log_level": "critical", "health_interval_s": 0.05}
    service = RouterService(RouterConfig(engines=urls, **{**settings, **options}))
    server = make_router(service)
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="test-router")
    with short_pauses():
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive(), "the router listens")
            routing = Routing(f"http://127.0.0.1:{port}", server, service, thread)
            routing.wait_ready(len(urls) if num_ready is None else num_ready)
            yield routing
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            if thread.is_alive():
                raise RuntimeError("the router did not end")
