"""The process for direct transfers: start, reuse, replacement and end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from octavo.kv_transfer import direct_client
from octavo.kv_transfer.direct_client import TransferClient, _usual_address
from octavo.kv_transfer.interface import StoreError

GUESS, PEER_SIDE = "10.0.0.1", "192.168.0.1"


class Client:
    """A Mooncake client without a process."""

    def __init__(self, options):
        self.options = options
        self.host = options["host"]
        self.is_alive = True
        self.is_closed = False
        self.process_id = 7

    def close(self):
        self.is_closed = True


class Opening:
    """Opens clients. error: raised instead. may_open: event that it waits for."""

    def __init__(self):
        self.clients, self.hosts = [], []
        self.error = None
        self.may_open = threading.Event()
        self.may_open.set()

    def __call__(self, **options):
        self.hosts.append(options["host"])
        assert self.may_open.wait(10)
        if self.error is not None:
            raise self.error
        self.clients.append(Client(options))
        return self.clients[-1]


@pytest.fixture
def opening(monkeypatch):
    opening = Opening()
    monkeypatch.setattr(direct_client, "MooncakeClient", opening)
    monkeypatch.setattr(direct_client, "_usual_address", lambda: GUESS)
    return opening


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(direct_client, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def make():
    return TransferClient(protocol="rdma", object_bytes=100, num_areas=3)


def test_process_starts_with_engine(opening):
    client = make()
    assert client._changed.acquire(timeout=10)
    assert client._changed.wait_for(lambda: not client._is_opening, 10)
    client._changed.release()
    [opened] = opening.clients
    assert opened.options == {"host": GUESS, "protocol": "rdma", "object_bytes": 100, "num_areas": 3, "gone_s": 10.0}
    assert client.process_id == 7
    assert client.get("127.0.0.1", 10) is opened
    client.close()


def test_get_returns_none_while_process_starts(opening):
    opening.may_open.clear()
    client = make()
    assert client.get("127.0.0.1", 0.0) is None
    assert client.process_id is None
    opening.may_open.set()
    assert client.get("127.0.0.1", 10) is opening.clients[0]
    assert opening.hosts == [GUESS], "a second get starts no second process"
    client.close()


def test_first_peer_address_replaces_default_address(opening):
    client = make()
    first = client.get("127.0.0.1", 10)
    second = client.get(PEER_SIDE, 10)
    assert (first.is_closed, second.host, second.is_closed) == (True, PEER_SIDE, False)
    assert client.get("192.168.0.2", 10) is second
    assert opening.hosts == [GUESS, PEER_SIDE]
    client.close()
    assert second.is_closed


def test_starting_process_with_other_address_is_replaced(opening, monkeypatch):
    opening.may_open.clear()
    client = make()
    wait_for = client._changed.wait_for

    def open_now(*args):
        opening.may_open.set()
        return wait_for(*args)

    monkeypatch.setattr(client._changed, "wait_for", open_now)
    assert client.get(PEER_SIDE, 10).host == PEER_SIDE
    assert opening.clients[0].is_closed
    client.close()


def test_peer_that_confirms_default_address_keeps_process(opening):
    client = make()
    first = client.get(GUESS, 10)
    assert client.get("192.168.0.2", 10) is first
    assert (opening.hosts, first.is_closed) == ([GUESS], False)
    client.close()


def test_dead_process_is_replaced(opening):
    client = make()
    first = client.get(GUESS, 10)
    first.is_alive = False
    second = client.get(GUESS, 10)
    assert second is not first
    assert second is client.get(GUESS, 10)
    client.close()


def test_failed_start_is_retried_after_pause(opening, clock):
    opening.error = StoreError("no library")
    client = make()
    with pytest.raises(StoreError, match=r"^no library$"):
        client.get(GUESS, 10)
    opening.error = None
    clock.now += 4.9
    with pytest.raises(StoreError, match=r"^no library$"):
        client.get(GUESS, 10)
    clock.now += 0.1
    assert client.get(GUESS, 10) is opening.clients[0]
    opening.clients[0].is_alive = False
    assert client.get(GUESS, 10) is opening.clients[1], "a process that ends later is replaced at once"
    client.close()


@pytest.mark.parametrize(("error", "message"), [(ZeroDivisionError("wrong"), "wrong"), (KeyError(), "KeyError")])
def test_unexpected_start_failure_is_logged(opening, caplog, error, message):
    opening.error = error
    client = make()
    with pytest.raises(StoreError, match=f"^{message}$"):
        client.get(GUESS, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "the process for direct transfers of KV could not be started"
    ]
    client.close()


def test_expected_start_failure_is_not_logged(opening, caplog):
    opening.error = StoreError("no library")
    client = make()
    with pytest.raises(StoreError):
        client.get(GUESS, 10)
    assert caplog.records == []
    client.close()


def test_process_that_starts_after_close_is_closed(opening):
    opening.may_open.clear()
    before = set(threading.enumerate())
    client = make()
    [starting] = set(threading.enumerate()) - before
    client.close()
    opening.may_open.set()
    starting.join(10)
    assert opening.clients[0].is_closed
    assert client.process_id is None
    with pytest.raises(StoreError, match=r"^the client of direct transfers is closed$"):
        client.get(GUESS, 10)


def test_start_failure_after_close_raises_store_error(opening):
    opening.may_open.clear()
    opening.error = StoreError("no library")
    before = set(threading.enumerate())
    client = make()
    [starting] = set(threading.enumerate()) - before
    client.close()
    opening.may_open.set()
    starting.join(10)
    with pytest.raises(StoreError, match=r"^no library$"):
        client.get(GUESS, 10)


def test_close_without_process_closes_no_client(opening):
    opening.error = StoreError("no library")
    client = make()
    with pytest.raises(StoreError):
        client.get(GUESS, 10)
    client.close()
    assert opening.clients == []


def test_default_address_without_route_is_loopback(monkeypatch):
    asked = []

    def local_address(peer):
        asked.append(peer)
        if len(asked) == 2:
            raise StoreError("no route")
        return GUESS

    monkeypatch.setattr(direct_client, "local_address", local_address)
    assert [_usual_address(), _usual_address()] == [GUESS, "127.0.0.1"]
    assert asked == ["192.0.2.1:9"] * 2
