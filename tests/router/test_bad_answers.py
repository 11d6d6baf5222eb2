"""Malformed or too large answers of engines: a client gets a clear error, or another engine's answer, once."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
import tracemalloc

import pytest
from allocations import allocated_in
from router.routing import run_router
from router.streams import HEAD, raw_engine
from running import asking, connect, wait_until

from octavo.router.answer import MalformedAnswerError
from octavo.router.event_stream import EventStream

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
PATH = "/v1/chat/completions"
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"text":""}'
CLOSING_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
EVENT, DONE = b'data: {"text":"a"}\n\n', b"data: [DONE]\n\n"


def head(status: str, *headers: str, kind: str = "application/json") -> bytes:
    lines = "".join(f"{header}\r\n" for header in (f"Content-Type: {kind}", *headers))
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode()


def refusal(status: int, *headers: str) -> bytes:
    return head(f"{status} No", *headers, "Content-Length: 2") + b"{}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


BAD = {
    "status 999": head("999 Odd", "Content-Length: 2") + b"{}",
    "status 000": head("000 Odd", "Content-Length: 2") + b"{}",
    "204 with a length": head("204 No Content", "Content-Length: 5") + b"hello",
    "unknown coding": head("200 OK", "Transfer-Encoding: gzip, chunked") + b"1\r\na\r\n0\r\n\r\n",
    "two lengths": head("200 OK", "Content-Length: 2", "Content-Length: 3") + b"{}",
    "split header": head("200 OK", "A: b\r\n Set-Cookie: c", "Content-Length: 2") + b"{}",
    "long header": b"HTTP/1.1 200 OK\r\nA: " + b"x" * (1 << 17),
    "interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 5000,
    "chunk line": head("200 OK", "Transfer-Encoding: chunked") + b"1;" + b"x" * (1 << 17),
    "status 999 of a stream": head("999 Odd", "Content-Length: 2", kind="text/event-stream") + b"{}",
    "huge event": HEAD + chunk(b"data: " + b"x" * 5000),
}


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", BAD)
def test_malformed_answer_is_retried_or_gives_502(name):
    with (
        raw_engine(BAD[name], "silent") as (bad, failing),
        run_router(bad, max_answer_bytes=4000) as routing,
        routing.http() as http,
    ):
        answer = http.post(PATH, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_engine_answer")
        wait_until(lambda: failing.num_left == 1, "its connection is closed")
        with (
            raw_engine(ANSWER) as (good, answering),
            run_router(bad, good, policy="round_robin", max_answer_bytes=4000) as both,
            both.http() as client,
        ):
            assert [client.post(PATH, json=CHAT).content for _ in range(3)] == [b'{"text":""}'] * 3
            assert answering.num_posts == 3


@pytest.mark.parametrize("status", [299, 418, 499, 520, 599])
def test_unregistered_status_is_forwarded_and_5xx_is_counted(status):
    with raw_engine(refusal(status)) as (url, engine), run_router(url) as routing, routing.http() as http:
        assert [http.post(PATH, json=CHAT).status_code for _ in range(2)] == [status] * 2
        assert engine.num_posts == 2
        assert (f'code="status_{status}"' in http.get("/metrics").text) == (status in {520, 599})


def test_answer_304_is_forwarded_without_body():
    get = b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 5\r\n\r\n"
    with raw_engine(b"", get=get) as (url, _), run_router(url) as routing, routing.http() as http:
        answers = [http.get("/dashboard") for _ in range(2)]
        assert [(answer.status_code, answer.headers["etag"], answer.content) for answer in answers] == [
            (304, "x", b"")
        ] * 2


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("waits", "soonest"),
    [
        (["7", "3", "9"], "3"),
        (["3", "7", "9"], "3"),
        (["9", "7", "3"], "3"),
        ([None, "7", "9"], "7"),
        (["9" * 5000, "7"], "7"),
        (["Wed, 21 Oct 2015 07:28:00 GMT", "7"], "Wed, 21 Oct 2015 07:28:00 GMT"),
        (["9" * 5000], None),
        (["1 Jan 99999999999999999999 1:1:1"], None),
        (["1 Jan 99999999999999999999 1:1:1", "7"], "7"),
        ([None, None], None),
    ],
)
def test_refusal_with_soonest_retry_after_is_forwarded(waits, soonest, engines):
    urls = [engines(refusal(429, *(() if wait is None else (f"Retry-After: {wait}",)))) for wait in waits]
    with run_router(*urls, policy="round_robin") as routing, routing.http() as http:
        for _ in waits:  # whichever engine is asked first
            answer = http.post(PATH, json=CHAT)
            assert (answer.status_code, answer.headers.get("retry-after")) == (429, soonest)


@pytest.fixture
def engines():
    """Return a function that runs an engine until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda answer, *more: stack.enter_context(raw_engine(answer, *more))[0]


def test_refusal_with_stream_content_type_is_retried(engines):
    refused = head("429 No", "Content-Length: 2", kind="text/event-stream") + b"{}"
    with run_router(engines(refused), engines(ANSWER), policy="round_robin") as routing, routing.http() as http:
        assert [http.post(PATH, json=CHAT).status_code for _ in range(2)] == [200, 200]


def test_truncated_json_without_length_is_retried(engines):
    closing = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    cut, whole = engines(closing + b'{"text":', "end"), engines(closing + b'{"text":""}', "end")
    with run_router(cut, whole, policy="round_robin") as routing, routing.http() as http:
        assert [http.post(PATH, json=CHAT).content for _ in range(2)] == [b'{"text":""}'] * 2
    with run_router(cut) as routing, routing.http() as http:
        answer = http.post(PATH, json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")


def test_compressed_json_without_length_is_forwarded_unchanged(engines):
    head_of_it = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n"
    )
    packed = gzip.compress(b'{"text":""}')
    with run_router(engines(head_of_it + packed, "end")) as routing, routing.http() as http:
        assert http.post(PATH, json=CHAT).json() == {"text": ""}


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("events", "is_whole"),
    [(EVENT + DONE, True), (EVENT + DONE.removesuffix(b"\n"), True), (EVENT, False), (EVENT + EVENT[:9], False)],
)
def test_stream_closed_without_last_event_reports_engine_lost(engines, events, is_whole):
    with run_router(engines(CLOSING_STREAM + events, "end")) as routing, routing.http() as http:
        answer = http.post(PATH, json={**CHAT, "stream": True})
        if is_whole:
            assert answer.content == events
            return
        error, last = answer.content.removeprefix(EVENT).decode().removesuffix("\n\n").split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_lost"
        assert last == "data: [DONE]"


def test_empty_closed_stream_is_retried(engines):
    with (
        run_router(engines(CLOSING_STREAM, "end"), engines(ANSWER), policy="round_robin") as routing,
        routing.http() as http,
    ):
        assert [http.post(PATH, json=CHAT).content for _ in range(2)] == [b'{"text":""}'] * 2


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\r\n"])
def test_events_with_crlf_are_forwarded_immediately(end):
    """Engines that use sse-starlette send such events."""
    event = b'data: {"text":"a"}' + end
    with (
        raw_engine(HEAD + chunk(event) + chunk(event[:9]), "silent") as (url, _),
        run_router(url) as routing,
        routing.http() as http,
        http.stream("POST", PATH, json={**CHAT, "stream": True}) as response,
    ):
        assert next(response.iter_bytes()) == event


def test_oversized_event_ends_stream_with_error():
    with (
        raw_engine(HEAD + chunk(EVENT), "repeat", more=chunk(b"x" * 5000)) as (url, engine),
        run_router(url, max_answer_bytes=4000) as routing,
        routing.http() as http,
    ):
        answer = http.post(PATH, json={**CHAT, "stream": True})
        error, _ = answer.content.removeprefix(EVENT).decode().removesuffix("\n\n").split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "bad_engine_answer"
        wait_until(lambda: engine.num_left == 1, "its connection is closed")


@pytest.mark.sweep(8)
@pytest.mark.parametrize("size", [100, 4000, 4001, 300_000])
def test_json_above_limit_is_forwarded_and_its_usage_charged(size):
    body = b'{"text":"%b","usage":{"prompt_tokens":9,"completion_tokens":2}}' % (b"x" * size)
    answer = head("200 OK", f"Content-Length: {len(body)}") + body
    with raw_engine(answer) as (url, _), run_router(url, max_answer_bytes=4000) as routing, routing.http() as http:
        charged: list[int] = []
        routing.service.limiter.charge = lambda _tenant, num_tokens: charged.append(num_tokens)
        got = http.post(PATH, json=CHAT)
        assert (got.content, got.headers["content-length"]) == (body, str(len(body)))
        wait_until(lambda: charged == [11], "it is charged, after the last byte")


def test_truncated_json_above_limit_closes_client_connection():
    body = b'{"text":"' + b"x" * 9000
    answer = head("200 OK", "Content-Length: 99999") + body
    with (
        raw_engine(answer, "end") as (url, _),
        run_router(url, max_answer_bytes=4000) as routing,
        connect(routing) as sock,
    ):
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 14\r\n\r\n" + b'{"prompt":"a"}')
        with sock.makefile("rb") as got:
            assert got.read().endswith(body[-1000:])


def test_endless_event_is_stopped_if_client_does_not_read():
    """The client does not read either."""
    more = chunk(b"x" * 65536)
    with (
        raw_engine(HEAD, "repeat", more=more) as (url, engine),
        run_router(url, max_answer_bytes=1 << 20) as routing,
        asking(routing, PATH, CHAT),
    ):
        wait_until(lambda: engine.num_left == 1, "it is ended")
        assert routing.engine(url).num_failures == 1


class Uncounted:
    """A share of an engine's load that counts nothing."""

    def note_returned(self, num_events):
        pass


def stream_of(max_bytes: int = 1 << 30) -> EventStream:
    return EventStream(Uncounted(), is_of_lines=False, max_bytes=max_bytes)


def cpu_s(num_pieces: int, piece: bytes) -> float:
    """Return the processor time of one event in `num_pieces` pieces, the minimum of three runs."""
    times = []
    for _ in range(3):
        stream, start = stream_of(), time.thread_time()
        for _ in range(num_pieces):
            if stream.whole(piece):
                raise ValueError("no event ends there")
        if len(stream.whole(b"\n\n")) != num_pieces * len(piece) + 2:
            raise ValueError("it is not whole")
        times.append(time.thread_time() - start)
    return min(times)


@pytest.mark.turn(8)
def test_event_buffering_time_is_linear_in_size():
    """16 times the pieces take about 16 times as long. If each piece copied all earlier ones, it would be 256 times."""
    piece = b"x" * 4096
    assert cpu_s(4096, piece) < 64 * cpu_s(256, piece)


def test_large_event_is_buffered_once_and_released():
    tracemalloc.start()
    try:
        stream = stream_of()
        for _ in range(1000):
            stream.whole(b"x" * 10_000)
        assert allocated_in("octavo/router") < 15_000_000
        assert len(stream.whole(b"\n\n")) == 10_000_002
        assert allocated_in("octavo/router") < 15_000_000, "its counts may yet be read"
        stream.whole(EVENT)
        assert allocated_in("octavo/router") < 1_000_000
        assert stream.last == EVENT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n"])
def test_events_are_reassembled_from_pieces_of_any_size(size, end):
    events = [b"data: %d" % number + end for number in range(9)]
    text, stream = b"".join(events) + b"data: cut", stream_of()
    told = [stream.whole(text[start : start + size]) for start in range(0, len(text), size)]
    assert all(piece.endswith(end) for piece in told if piece)
    assert sum(bool(piece) for piece in told) == 9, "each comes as soon as it is complete"
    assert (b"".join(told), stream.rest) == (b"".join(events), b"data: cut")
    assert (stream.first, stream.last) == (events[0], b"".join(events[-4:]))
    assert stream.last_event == b"data: 8"


def test_event_above_max_bytes_is_refused():
    stream = stream_of(100)
    assert stream.whole(b"x" * 100) == b""
    assert stream.whole(b"\n\n") == b"x" * 100 + b"\n\n"
    with pytest.raises(MalformedAnswerError, match="exceeds the limit of 100 bytes"):
        stream.whole(b"x" * 101)
