"""Streams through the router: many at once, slow readers, events cut anywhere on their way."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from router.routing import run_router
from router.streams import ask, ask_many, event, events_of, request, stream_engine
from running import connect, wait_until

from octavo.router.event_stream import EventStream


@pytest.fixture
def engine():
    with stream_engine() as running:
        yield running


def test_of_many_streams_at_once_none_is_lost(engine):
    url, _ = engine
    with run_router(url) as routing:
        answers = asyncio.run(ask_many(routing.url, 50, 9))
        assert answers == [[event(f"s{index}", number, 20) for number in range(9)] for index in range(50)]
        assert routing.engine(url).open_tokens == 0


@pytest.mark.parametrize("piece", [1, 7, 100, 5000])
def test_events_are_whole_however_they_come(engine, piece):
    with run_router(engine[0]) as routing:
        answer = asyncio.run(ask(routing.url, name="a", events=60, size=40, piece=piece))
        assert answer == [event("a", number, 40) for number in range(60)]


class Counted:
    """A share of an engine's load that counts."""

    num_events = 0

    def came_back(self, num_events):
        self.num_events += num_events


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_lines_are_whole_and_blanks_between_them_go_at_once(size):
    text = b'  {"a": " b"}\n {"c": 1}\n   {"done": true}\n{"cut'
    share = Counted()
    stream = EventStream(share, is_of_lines=True, max_bytes=1000)
    told = [stream.whole(text[start : start + size]) for start in range(0, len(text), size)]
    assert b"".join(told) == text.removesuffix(b'{"cut')
    assert (share.num_events, stream.rest) == (3, b'{"cut')
    assert all(each.endswith(b"\n") or not each.strip() for each in told)
    assert stream.whole(b"") == b""
    silent = EventStream(share, is_of_lines=True, max_bytes=1000)
    assert silent.whole(b" ") == b" ", "a sign of life waits for nothing"


def test_a_client_that_does_not_read_fills_no_memory(engine):
    """What it does not read stays in its engine, and comes when it reads on."""
    url, streams = engine
    size, count = 10_000, 2_000
    with run_router(url) as routing, contextlib.closing(connect(routing, receive_bytes=1 << 16)) as sock:
        sock.sendall(request(name="a", events=count, size=size, piece=1 << 14))
        seen = [-1]
        wait_until(lambda: seen.append(streams.num_sent_bytes) or seen[-1] == seen[-20:][0] > 0, "nothing is sent")
        assert streams.num_sent_bytes < size * count / 2
        with sock.makefile("rb") as answer:
            assert events_of(answer.read()) == [event("a", number, size) for number in range(count)]
