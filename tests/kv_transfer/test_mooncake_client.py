"""The process that runs Mooncake, from its owner's side: calls, areas and its end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from octavo.kv_transfer import mooncake_client
from octavo.kv_transfer.interface import StoreError
from octavo.kv_transfer.mooncake_client import (
    AREA_BYTES,
    PROCESS_BYTES,
    Area,
    BusyError,
    ClientOrder,
    MooncakeClient,
    Opened,
    client_bytes,
    local_address,
)


class Clock:
    """A clock that the test sets."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(mooncake_client, "time", clock)
    return clock


class Process:
    """A fake process inside this one. It answers when the test says so."""

    opened = Opened(session="here:1", address=5000)
    pid = 77

    def __init__(self, command, **options):
        self.command, self.options = command, options
        self.order = ClientOrder.decode(command[-1])
        self.control = Connection(os.dup(self.order.control))
        self.channels = [Connection(os.dup(channel)) for channel in self.order.channels]
        self.memory_bytes = os.fstat(self.order.memory).st_size
        self.code = None
        self.waits = []
        self.is_stuck = False
        self.ended = threading.Event()
        if self.opened is None:
            self.control.close()
        elif self.opened:
            self.control.send_bytes(self.opened.encode())

    def poll(self):
        return self.code

    def kill(self):
        self.code = -9
        self.ended.set()

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if self.is_stuck and timeout is not None:
            raise subprocess.TimeoutExpired("python", timeout)
        if timeout is not None:
            self.ended.set()


@pytest.fixture
def started(monkeypatch):
    """Return an object that makes clients. `.processes` lists their processes."""
    started = SimpleNamespace(processes=[])

    def start(command, **options):
        started.processes.append(Process(command, **options))
        return started.processes[-1]

    def make(**options):
        return MooncakeClient(**{"host": "10.0.0.1", "protocol": "tcp", "object_bytes": 1000, **options})

    started.make = make
    monkeypatch.setattr(
        mooncake_client,
        "subprocess",
        SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL),
    )
    return started


@pytest.fixture
def area():
    """Return an area of three objects of four bytes, and the other end of its channel."""
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    area = Area(ours, memoryview(bytearray(b"aaaabbbbcccc")), 4)
    yield area, theirs
    ours.close()
    theirs.close()


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [12, 13, 15])
def test_area_holds_only_whole_objects(num_bytes):
    memory = memoryview(b"aaaabbbbccccddd")[:num_bytes]
    assert [bytes(each) for each in Area(None, memory, 4).objects] == [b"aaaa", b"bbbb", b"cccc"]


def test_call_returns_codes_of_reply(area, clock):
    area, theirs = area
    assert (area.address, area.is_pending, area.rests_until, area.requested_at) == (0, False, 0.0, 0.0)
    theirs.send_bytes(b"[1, 0, -704]")
    assert area.call("has", ("a", "b", "c", "d")) == [1, 0, -704]
    assert json.loads(theirs.recv_bytes()) == ["has", ["a", "b", "c", "d"]]
    assert (area.is_pending, area.requested_at, area.is_free(100.0)) == (False, 100.0, True)


@pytest.mark.parametrize(
    ("name", "codes", "rests"),
    [
        ("get", [4, -800], True),
        ("get", [4, -704], False),
        ("put", [-800], False),
        ("has", [1], False),
        ("write", [0, 0], False),
        ("write", [0, -1], True),
    ],
)
def test_area_rests_after_failed_transfer_into_memory(area, clock, name, codes, rests):
    area, theirs = area
    theirs.send_bytes(json.dumps(codes).encode())
    assert area.call(name, []) == codes
    until = 100.0 + mooncake_client.REST_S * rests
    assert area.is_free(until)
    assert area.is_free(until - 0.01) is not rests


def test_unanswered_call_keeps_area_busy(area, clock, monkeypatch):
    area, theirs = area
    monkeypatch.setattr(mooncake_client, "CALL_S", 0.0)
    with pytest.raises(StoreError, match=r"^Mooncake has not answered within 0 s \(get\)$"):
        area.call("get", ["a"])
    assert (area.is_pending, area.requested_at, area.is_free(1e9)) == (True, 100.0, False)
    theirs.send_bytes(b"[4]")
    assert not area.is_free(200.0), "the transfer may still be under way"
    assert area.is_free(200.0 + mooncake_client.REST_S)
    assert not area.is_free(200.0 + mooncake_client.REST_S - 0.01)


def test_call_to_ended_process_raises_store_error(area):
    area, theirs = area
    theirs.close()
    with pytest.raises(StoreError, match=r"^the process that holds the client of Mooncake has ended \(get\)$"):
        area.call("get", ["a"])
    area.is_pending = True
    assert not area.is_free(1e9)


@pytest.mark.parametrize("name", ["get", "put"])
def test_call_with_more_objects_than_area_fails_assertion(area, name):
    area, theirs = area
    theirs.send_bytes(b"[0, 0, 0]")
    assert area.call(name, ["a", "b", "c"]) == [0, 0, 0]
    with pytest.raises(AssertionError):
        area.call(name, ["a", "b", "c", "d"])


def test_ping_returns_true_only_if_answered(area, clock, monkeypatch):
    area, theirs = area
    monkeypatch.setattr(mooncake_client, "PING_S", 0.0)
    assert not area.ping()
    assert (area.is_pending, area.requested_at) == (True, 100.0)
    theirs.send_bytes(b"[]")
    assert area.ping()
    assert (area.is_pending, area.rests_until) == (False, 0.0)
    assert json.loads(theirs.recv_bytes()) == ["ping", []]


# --- a process --------------------------------------------------------------------------------------------------------


def test_process_receives_client_order(started):
    client = started.make(master="here:2", segment_bytes=4096, num_areas=3)
    [process] = started.processes
    order = process.order
    assert process.command[:3] == [sys.executable, "-m", mooncake_client.MODULE]
    area_bytes = AREA_BYTES // 1000 * 1000
    assert (order.master, order.host, order.protocol) == ("here:2", "10.0.0.1", "tcp")
    assert (order.segment_bytes, order.object_bytes, order.area_bytes) == (4096, 1000, area_bytes)
    assert (len(order.channels), process.memory_bytes) == (3, 3 * area_bytes)
    assert process.options["pass_fds"] == (order.memory, order.control, *order.channels)
    assert process.options["start_new_session"] is True
    assert {process.options[name] for name in ("stdin", "stdout", "stderr")} == {subprocess.DEVNULL}
    assert (client.session, client.process_id, client.is_alive) == ("here:1", 77, True)
    assert [area.address for area in client._areas] == [5000 + index * area_bytes for index in range(3)]
    assert [len(area.objects) for area in client._areas] == [AREA_BYTES // 1000] * 3


def test_client_without_master_lends_no_memory(started):
    client = started.make()
    [process] = started.processes
    assert (process.order.master, process.order.segment_bytes, len(process.order.channels)) == ("", 0, 4)
    for descriptor in (process.order.memory, process.order.control, *process.order.channels):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    client.close()


def test_shared_memory_areas_do_not_overlap(started):
    client = started.make(object_bytes=AREA_BYTES // 2, num_areas=2)
    for number, area in enumerate(client._areas):
        for stored in area.objects:
            stored[:4] = bytes([number + 1]) * 4
    assert [area.objects[0][0] for area in client._areas] == [1, 2]
    assert [len(area.objects) for area in client._areas] == [2, 2]


def test_open_fails_with_reason_of_process(started, monkeypatch):
    for opened, message in [
        (Opened("no library"), "the client of Mooncake could not be opened: no library"),
        (None, "the client of Mooncake could not be opened: it cannot connect"),
        ("", "the client of Mooncake could not be opened: no answer in 0 s"),
    ]:
        monkeypatch.setattr(Process, "opened", opened)
        monkeypatch.setattr(mooncake_client, "OPEN_S", 15.0 if opened != "" else 0.0)
        with pytest.raises(StoreError, match=f"^{message}$"):
            started.make()
        assert started.processes[-1].code == -9
        assert started.processes[-1].waits == [None]


def test_opened_message_round_trips():
    opened = Opened("no", "here:1", 7)
    assert Opened.decode(opened.encode()) == opened
    assert Opened() == Opened("", "", 0)


@pytest.mark.parametrize(("gone_s", "limit_s"), [(None, mooncake_client.GONE_S), (10.0, 10.0)])
def test_process_with_unanswered_call_is_killed_after_limit(started, clock, gone_s, limit_s):
    client = started.make(gone_s=gone_s)
    [process] = started.processes
    client._areas[1].is_pending, client._areas[1].requested_at = True, 100.0
    clock.now = 100.0 + limit_s
    assert client.is_alive
    clock.now += 0.01
    assert not client.is_alive
    assert (process.code, process.waits) == (-9, [None])


def test_idle_process_stays_alive(started, clock):
    client = started.make()
    client._areas[0].requested_at = 1.0
    clock.now = 1e6
    assert client.is_alive


# --- areas ------------------------------------------------------------------------------------------------------------


def test_each_caller_gets_separate_area(started):
    client = started.make(num_areas=2)
    with client.area() as one, client.area() as other:
        assert one is not other
        with pytest.raises(BusyError, match=r"^Mooncake answers none of 2 calls$"), client.area(0.0):
            pass
    with client.area(0.0) as again:
        assert again in (one, other)
    assert sorted(map(id, client._idle)) == sorted(map(id, client._areas))


def test_resting_area_is_set_aside_until_free(started, clock):
    client = started.make(num_areas=2)
    with client.area() as area:
        area.rest()
    assert client._aside == [area]
    with client.area(0.0) as other:
        assert other is not area
    clock.now += mooncake_client.REST_S
    taken = {id(client._take(0.0)) for _ in range(2)}
    assert taken == {id(area), id(other)}
    assert client._aside == []


def test_area_raises_busy_error_at_once_if_all_rest(started, clock, monkeypatch):
    client = started.make(num_areas=2)
    for area in client._areas:
        area.rest()
    client._idle, client._aside = [], list(client._areas)
    monkeypatch.setattr(client._free, "wait", lambda _: pytest.fail("the caller waits"))
    with pytest.raises(BusyError), client.area(1000.0):
        pass


def test_caller_waits_for_area_held_by_another_caller(started, clock, monkeypatch):
    client = started.make(num_areas=2)
    held = [client._take(0.0) for _ in range(2)]
    waits = []

    def wait(seconds):
        waits.append(seconds)
        clock.now += 1.0
        if len(waits) == 2:
            client._idle.append(held[0])

    monkeypatch.setattr(client._free, "wait", wait)
    monkeypatch.setattr(mooncake_client, "CALL_S", 3.0)
    with client.area() as area:
        assert area is held[0]
        assert waits == [3.0, 2.0]
        with pytest.raises(BusyError), client.area(1.5):
            pass
        assert waits == [3.0, 2.0, 1.5, 0.5]
        with pytest.raises(BusyError), client.area(2.0):
            pass
    assert waits == [3.0, 2.0, 1.5, 0.5, 2.0, 1.0]


def test_returned_area_notifies_waiters(started, monkeypatch):
    client, announced = started.make(), []
    monkeypatch.setattr(client._free, "notify", lambda: announced.append(len(client._idle)))
    with client.area():
        assert announced == []
    assert announced == [4]


def test_returned_area_wakes_waiting_caller(started):
    client = started.make(num_areas=1)
    taken, is_held = [], threading.Event()

    def take():
        is_held.wait(10)
        with client.area(60.0) as area:
            taken.append(area)

    thread = threading.Thread(target=take)
    thread.start()
    with client.area() as area:
        is_held.set()
    thread.join(10)
    assert taken == [area]


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stuck", [False, True])
def test_close_kills_process_only_if_it_does_not_exit(started, is_stuck):
    client = started.make()
    [process] = started.processes
    process.is_stuck = is_stuck
    client.close()
    with pytest.raises(EOFError):
        process.control.recv_bytes()
    assert process.ended.wait(10)
    assert process.waits[0] == mooncake_client.CLOSE_S
    assert process.code == (-9 if is_stuck else None)


def test_close_waits_for_process_in_daemon_thread(started, monkeypatch):
    client, threads = started.make(), []
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(threading, "Thread", lambda **options: (threads.append(options), thread)[1])
    client.close()
    assert threads == [{"target": client._end, "name": "octavo-mooncake-close", "daemon": True}]


# --- sizes and addresses ----------------------------------------------------------------------------------------------


def test_client_bytes_sum_areas_process_and_segment():
    assert client_bytes(AREA_BYTES, 7) == PROCESS_BYTES + 4 * AREA_BYTES + 7
    assert client_bytes(AREA_BYTES + 1, 7, 2) == PROCESS_BYTES + 2 * (AREA_BYTES + 1) + 7, "one object at least"
    assert client_bytes(AREA_BYTES // 2 - 1, 0, 1) == PROCESS_BYTES + AREA_BYTES - 2


def test_local_address_is_on_route_to_peer():
    assert local_address("127.0.0.1:9") == "127.0.0.1"


@pytest.mark.parametrize("peer", ["[2001:db8::1]:90", "10.0.0.9:90"])
def test_local_address_lookup_parses_host_and_port_of_peer(monkeypatch, peer):
    asked = []

    def getaddrinfo(*args, **options):
        asked.append((*args, options))
        raise OSError("no route")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(StoreError, match=rf"^{re.escape(peer)} cannot be reached: no route$"):
        local_address(peer)
    assert asked == [(peer.rpartition(":")[0].strip("[]"), 90, {"type": socket.SOCK_DGRAM})]
