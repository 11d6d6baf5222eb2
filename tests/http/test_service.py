"""The common base of server and router: reloading keys, and shutting down in order."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from prometheus_client.registry import Collector

from octavo.config import ServerConfig
from octavo.errors import ConfigError, OctavoError
from octavo.http.errors import NoEngineError, ServerClosingError
from octavo.http.service import HttpService
from octavo.http.tenants import EVERYBODY, Tenant, add_key, remove_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from prometheus_client import Metric


class NoFigures(Collector):
    def collect(self) -> Iterator[Metric]:
        return iter(())


class FakeService(HttpService):
    """Records its calls."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config, NoFigures(), num_bodies=2, max_waiting_tokens=7)
        self.has_engine = True
        self.num_changes = 0
        self.ended: list[OctavoError] = []
        self.idle = asyncio.Event()

    @property
    def is_dead(self) -> bool:
        return False

    def check_engine(self) -> None:
        if not self.has_engine:
            raise NoEngineError(1.0)

    def _keys_changed(self) -> None:
        self.num_changes += 1

    async def _idle(self) -> None:
        await self.idle.wait()

    async def _end_open(self, why: Callable[[], OctavoError]) -> None:
        self.ended.append(why())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    add_key(path := tmp_path / "keys.toml", Tenant(name="alice"))
    return path


def test_limits_come_from_server_config() -> None:
    service = FakeService(ServerConfig(max_open_requests=3, max_body_bytes=10))
    assert (service.limiter.streams.limit, service.limiter.body_bytes.limit) == (3, 20)
    assert service.keyring is None
    assert service.present(EVERYBODY) is EVERYBODY


def test_reload_adds_new_keys_and_ignores_invalid_file(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.http.service")
    service = FakeService(ServerConfig(api_keys_file=keys))
    alice = Tenant(name="alice")
    assert service.present(alice) == alice
    add_key(keys, Tenant(name="bob", weight=2.0))
    service.reload()
    assert service.num_changes == 1
    bob = service.present(Tenant(name="bob"))
    assert bob is not None
    assert bob.weight == 2.0
    keys.write_text("[keys")
    service.reload()
    assert (service.num_changes, service.present(bob)) == (1, bob)
    new, kept = (record.getMessage() for record in caplog.records)
    assert new == "the API keys were reloaded: 2 keys"
    assert kept.startswith("the API keys were not reloaded: ")
    assert str(keys) in kept


def test_reload_without_keys_logs_zero_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.http.service")
    FakeService(ServerConfig()).reload()
    assert [record.getMessage() for record in caplog.records] == ["the API keys were reloaded: 0 keys"]


def test_close_flushes_trace_spans() -> None:
    service = FakeService(ServerConfig())
    service.close()
    service.tracing = tracing = Mock()
    service.close()
    tracing.close.assert_called_once_with()


def test_tenant_with_removed_key_is_not_present(keys: Path) -> None:
    add_key(keys, Tenant(name="bob"))
    service = FakeService(ServerConfig(api_keys_file=keys))
    remove_key(keys, "alice")
    service.reload()
    assert service.present(Tenant(name="alice")) is None


def test_invalid_key_file_is_refused_at_startup(keys: Path) -> None:
    keys.write_text("[keys")
    with pytest.raises(ConfigError):
        FakeService(ServerConfig(api_keys_file=keys))


def test_requests_are_refused_without_engine_and_while_closing() -> None:
    service = FakeService(ServerConfig())
    service.begin(EVERYBODY)
    service.has_engine = False
    with pytest.raises(NoEngineError):
        service.begin(EVERYBODY)
    service.is_closing = True
    with pytest.raises(ServerClosingError):
        service.begin(EVERYBODY)


def test_drain_refuses_new_requests_and_waits_for_open_ones() -> None:
    async def drained() -> None:
        service = FakeService(ServerConfig())
        draining = asyncio.create_task(service.drain(3600.0))
        await asyncio.sleep(0)
        with pytest.raises(ServerClosingError):
            service.check_ready()
        assert not service.ended
        service.idle.set()
        await draining
        assert [type(error) for error in service.ended] == [ServerClosingError]

    asyncio.run(drained())


def test_drain_waits_at_most_its_grace_period() -> None:
    service = FakeService(ServerConfig())
    asyncio.run(service.drain(0.0))
    assert len(service.ended) == 1
