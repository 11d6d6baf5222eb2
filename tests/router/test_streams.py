"""Streams through the router: many in parallel, slow readers, and events cut at any place."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from router.routing import run_router
from router.streams import ask, ask_many, event, events_of, request, stream_engine
from running import connect, wait_until

from octavo.router.answer import MalformedAnswerError
from octavo.router.event_stream import EventStream


@pytest.fixture
def engine():
    with stream_engine() as running:
        yield running


def test_parallel_streams_deliver_all_events(engine):
    url, _ = engine
    with run_router(url) as routing:
        answers = asyncio.run(ask_many(routing.url, 50, 9))
        assert answers == [[event(f"s{index}", number, 20) for number in range(9)] for index in range(50)]
        assert routing.engine(url).open_tokens == 0


@pytest.mark.parametrize("piece", [1, 7, 100, 5000])
def test_events_are_forwarded_complete_for_any_piece_size(engine, piece):
    with run_router(engine[0]) as routing:
        answer = asyncio.run(ask(routing.url, name="a", events=60, size=40, piece=piece))
        assert answer == [event("a", number, 40) for number in range(60)]


class Counted:
    """A share of an engine's load that counts events."""

    num_events = 0

    def note_returned(self, num_events):
        self.num_events += num_events


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_lines_are_forwarded_complete_and_blanks_immediately(size):
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


def test_slow_client_applies_backpressure_to_engine(engine):
    """Unread data stays in the engine, and arrives when the client continues reading."""
    url, streams = engine
    size, count = 10_000, 2_000
    with run_router(url) as routing, contextlib.closing(connect(routing, receive_bytes=1 << 16)) as sock:
        sock.sendall(request(name="a", events=count, size=size, piece=1 << 14))
        seen = [-1]
        wait_until(lambda: seen.append(streams.num_sent_bytes) or seen[-1] == seen[-20:][0] > 0, "nothing is sent")
        assert streams.num_sent_bytes < size * count / 2
        with sock.makefile("rb") as answer:
            assert events_of(answer.read()) == [event("a", number, size) for number in range(count)]


def test_stream_keeps_first_and_last_events_for_usage():
    stream = EventStream(Counted(), is_of_lines=True, max_bytes=1 << 30)
    assert (stream.first, stream.last, stream.last_event) == (b"", b"", b"")
    stream.whole(b"a" * 3000 + b"\n")
    stream.whole(b"b\n")
    assert stream.first == b"a" * 2048
    for letter in b"cdef":
        stream.whole(bytes([letter]) + b"\n")
    assert stream.last == b"c\nd\ne\nf\n"  # at least four pieces
    assert stream.last_event == b"f"
    half = (1 << 19) - 1
    stream.whole(b"x" * half + b"\n")
    stream.whole(b"y" * half + b"\n")
    assert len(stream.last) == 1 << 20  # at least 1 MiB
    stream.whole(b"z\n")
    assert stream.last == b"y" * half + b"\nz\n"
    stream.whole(b"w" * (2 << 20) + b"\n")
    assert len(stream.last) == (2 << 20) + 1


@pytest.mark.parametrize("end", [b"\n\n", b"\n\r\n"])
def test_buffered_event_above_limit_is_refused(end):
    """The end is known only after it has arrived, so before that all bytes count."""
    stream = EventStream(Counted(), is_of_lines=False, max_bytes=10)
    assert stream.whole(b"x" * 11 + end) == b"x" * 11 + end  # it arrives complete, so it is not buffered
    assert stream.whole(b"x" * 10) == b""
    assert stream.whole(end) == b"x" * 10 + end
    stream.whole(b"x" * 10)
    with pytest.raises(MalformedAnswerError, match="exceeds the limit of 10 bytes"):
        stream.whole(b"x")


def test_events_are_counted_by_their_terminators():
    share = Counted()
    stream = EventStream(share, is_of_lines=False, max_bytes=1000)
    assert stream.whole(b"data: a\n\ndata: b\r\n\r\n") == b"data: a\n\ndata: b\r\n\r\n"
    assert share.num_events == 2
    assert stream.last_event == b"data: b"
    assert stream.whole(b"data: c\n") == b""
    assert (stream.rest, share.num_events) == (b"data: c\n", 2)
    assert stream.whole(b"\ndata") == b"data: c\n\n"
    assert (stream.rest, share.num_events) == (b"data", 3)


@pytest.mark.parametrize("end", [b"\n\n", b"\n\r\n"])
def test_event_terminator_may_arrive_byte_by_byte(end):
    for text in (b"", b"a", b"abc"):
        stream = EventStream(Counted(), is_of_lines=False, max_bytes=1000)
        pieces = [stream.whole(bytes([byte])) for byte in text + end]
        assert pieces == [*[b""] * (len(text + end) - 1), text + end]
