"""Limits on an engine's answer, in virtual time: silence, trickles, endless bytes, and malformed HTTP."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from router.asking_engine import RequestSummary
from router.virtual_time import run_virtually

from octavo.router.answer import AnswerError, AnswerLimits, MalformedAnswerError, NoAnswerError, SilentEngineError
from octavo.router.answer_headers import headers_for_client, retry_after_s

LIMITS = AnswerLimits(first_byte_s=30.0, idle_s=10.0, max_bytes=1 << 20)
LONG_LIMITS = AnswerLimits(first_byte_s=1e9, idle_s=1e9, max_bytes=1 << 20)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def trickle(summary: RequestSummary, data: bytes, every_s: float, then: bytes = b"") -> None:
    """Receive `data` once, then `then` (by default `data`) every `every_s` seconds."""
    summary.connection.data_received(data)
    while not summary.transport.is_closed:
        await asyncio.sleep(every_s)
        if not summary.transport.is_closed:
            summary.connection.data_received(then or data)


def silent_after(data: bytes, then: bytes = b"", every_s: float = 1.0) -> float:
    """Return the time in seconds at which an answer with these bytes fails."""

    async def work(now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        task = asyncio.ensure_future(trickle(summary, data, every_s, then)) if data else None
        with pytest.raises(SilentEngineError):
            await summary.read()
        assert summary.transport.is_closed
        if task is not None:
            task.cancel()
        return now()

    return run_virtually(work)


@pytest.mark.parametrize(
    ("data", "then"),
    [
        (b"", b""),
        (b"HTTP/1.1 200 OK\r\nA: ", b"x"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["silence", "header that trickles", "interim answers"],
)
def test_late_first_byte_fails_answer(data, then):
    assert silent_after(data, then) == pytest.approx(LIMITS.first_byte_s, abs=1.0)


@pytest.mark.parametrize(
    ("begin", "then"),
    [(b"5\r\nhello\r\n3;", b"x"), (b"5\r\nhello\r\n0\r\nTrailer: ", b"x"), (b"5\r\nhello\r\n0\r\n", b"a: b\r\n")],
    ids=["chunk extension", "trailer", "trailers"],
)
def test_trickling_chunk_framing_hits_idle_timeout(begin, then):
    assert silent_after(CHUNKED + begin, then) == pytest.approx(LIMITS.idle_s, abs=1.0)


def test_pauses_below_idle_timeout_keep_body_open():
    async def work(now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED)
        reading = asyncio.ensure_future(summary.read())
        for _ in range(20):
            await asyncio.sleep(0.9 * LIMITS.idle_s)
            summary.connection.data_received(b"1\r\nx\r\n")
        summary.connection.data_received(b"0\r\n\r\n")
        assert await reading == (200, b"x" * 20)
        return now()

    assert run_virtually(work) > 10 * LIMITS.idle_s


def test_idle_timeout_starts_after_headers():
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        reading = asyncio.ensure_future(summary.read())
        await asyncio.sleep(0.9 * LIMITS.first_byte_s)
        summary.connection.data_received(CHUNKED)
        await asyncio.sleep(0.9 * LIMITS.idle_s)
        summary.connection.data_received(b"1\r\nx\r\n0\r\n\r\n")
        assert await reading == (200, b"x")

    run_virtually(work)


def test_stalled_relayed_body_fails():
    async def work(now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED)
        answer = await summary.answer
        relaying = asyncio.ensure_future(answer.relay(lambda _: True, None))
        for _ in range(3):
            await asyncio.sleep(5.0)
            summary.connection.data_received(b"1\r\nx\r\n")
        with pytest.raises(SilentEngineError, match="its answer did not continue within 10 s"):
            await relaying
        return now()

    assert run_virtually(work) == pytest.approx(15.0 + LIMITS.idle_s)


def test_slow_client_does_not_count_as_engine_idle_time():
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED + b"1\r\na\r\n")
        answer = await summary.answer
        relaying = asyncio.ensure_future(answer.relay(lambda _: False, lambda: asyncio.sleep(10 * LIMITS.idle_s)))
        await asyncio.sleep(10.5 * LIMITS.idle_s)
        summary.connection.data_received(b"1\r\nb\r\n0\r\n\r\n")
        await relaying
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n" + b"x" * 399_999)
        answer = await summary.answer
        await asyncio.sleep(10 * LIMITS.idle_s)
        assert len(await answer.next()) == 399_999
        rest = asyncio.ensure_future(answer.next())
        await asyncio.sleep(0.9 * LIMITS.idle_s)
        summary.connection.data_received(b"x")
        assert await rest == b"x"

    run_virtually(work)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nA: ", b"x" * 1000),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 100),
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 10),
        (CHUNKED + b"1;", b"x" * 1000),
        (CHUNKED + b"1\r\na\r\n0\r\nTrailer: ", b"x" * 1000),
        (CHUNKED + b"1\r\na\r\n0\r\n", b"A: b\r\n" * 100),
    ],
    ids=["header", "headers", "interim answers", "chunk extension", "trailer", "trailers"],
)
def test_endless_headers_and_chunk_lines_are_refused_with_bounded_memory(begin, piece):
    async def work(_now):
        summary = RequestSummary(limits=LONG_LIMITS)
        await asyncio.sleep(0)
        reading = asyncio.ensure_future(summary.read())
        summary.connection.data_received(begin)
        num_bytes = 0
        while not summary.transport.is_closed:
            summary.connection.data_received(piece)
            await asyncio.sleep(0)
            num_bytes += len(piece)
            assert num_bytes < 1 << 17, "nobody stops it"
        with pytest.raises(MalformedAnswerError, match="exceed 65536 bytes"):
            await reading

    run_virtually(work)


def test_oversized_headers_in_one_piece_are_refused():
    async def work(_now):
        summary = RequestSummary(limits=LONG_LIMITS)
        data = b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70_000 + b"\r\nContent-Length: 1\r\n\r\na"
        with pytest.raises(MalformedAnswerError, match="exceed 65536 bytes"):
            await summary.gets(data, 1 << 20)

    run_virtually(work)


def test_many_small_chunks_are_not_limited():
    async def work(_now):
        summary = RequestSummary(limits=LONG_LIMITS)
        return await summary.gets(CHUNKED + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n", 4096)

    assert run_virtually(work) == (200, b"x" * 100_000)


def test_buffered_body_above_limit_is_refused():
    async def work(_now):
        summary = RequestSummary(limits=LONG_LIMITS)
        await asyncio.sleep(0)
        reading = asyncio.ensure_future(summary.read())
        summary.connection.data_received(CHUNKED)
        num_bytes = 0
        while not summary.transport.is_closed:
            assert num_bytes <= LONG_LIMITS.max_bytes + (1 << 17)
            summary.connection.data_received(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            num_bytes += 0x10000
            await asyncio.sleep(0)
        with pytest.raises(MalformedAnswerError, match="exceeds the limit of 1048576 bytes"):
            await reading

    run_virtually(work)


def test_body_of_exactly_max_bytes_is_read():
    async def work(_now):
        for size, is_read in ((9, True), (10, True), (11, False)):
            summary = RequestSummary(limits=AnswerLimits(first_byte_s=30.0, idle_s=10.0, max_bytes=10))
            data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
            if is_read:
                assert await summary.gets(data, 1000) == (200, b"x" * size)
            else:
                with pytest.raises(MalformedAnswerError):
                    await summary.gets(data, 1000)

    run_virtually(work)


@pytest.mark.parametrize(
    ("head", "is_head", "ends_with_connection"),
    [
        (b"HTTP/1.1 200 OK", False, True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", False, False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", False, False),
        (b"HTTP/1.1 200 OK", True, False),
        (b"HTTP/1.1 204 No Content", False, False),
        (b"HTTP/1.1 304 Not Modified", False, False),
    ],
)
def test_only_body_without_length_ends_with_connection(head, is_head, ends_with_connection):
    async def work(_now):
        summary = RequestSummary(limits=LIMITS, is_head=is_head)
        await asyncio.sleep(0)
        summary.connection.data_received(head + b"\r\n\r\n")
        assert (await summary.answer).ends_with_connection == ends_with_connection

    run_virtually(work)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", "status is 999"),
        (b"HTTP/1.1 600 Odd\r\nContent-Length: 0\r\n\r\n", "status is 600"),
        (b"HTTP/1.1 000 Odd\r\nContent-Length: 0\r\n\r\n", "status is 0"),
        (b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n", "status is 99"),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nhello", "204"),
        (b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "204"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", "gzip, chunked"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\na", "gzip"),
        (b"HTTP/1.1 200 OK\r\nA: b\r\n Set-Cookie: c\r\nContent-Length: 0\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: b\rSet-Cookie: c\r\nContent-Length: 0\r\n\r\n", "valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: b\nSet-Cookie: c\nContent-Length: 0\n\n", "valid HTTP"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "valid HTTP"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_malformed_http_answer_is_refused_with_reason(data, why, size):
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        with pytest.raises(MalformedAnswerError, match=why):
            await summary.gets(data, size)
        assert summary.transport.is_closed

    run_virtually(work)


@pytest.mark.parametrize("length", [b"", b"Content-Length: 0\r\n", b"Content-Length: 00\r\n"])
def test_answer_204_drops_content_length(length):
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(b"HTTP/1.1 204 No Content\r\nA: b\r\n" + length + b"\r\n")
        async with await summary.answer as answer:
            assert (await answer.read(), answer.headers) == (b"", [(b"a", b"b")])
        assert len(summary.idle) == 1

    run_virtually(work)


def test_answer_304_keeps_content_length_only_for_head():
    async def work(_now):
        for is_head, told in ((False, [(b"etag", b"x")]), (True, [(b"etag", b"x"), (b"content-length", b"5")])):
            summary = RequestSummary(limits=LIMITS, is_head=is_head)
            await asyncio.sleep(0)
            summary.connection.data_received(b"HTTP/1.1 304 Not Modified\r\nETag: x\r\nContent-Length: 5\r\n\r\n")
            async with await summary.answer as answer:
                assert (await answer.read(), answer.headers) == (b"", told)
            assert len(summary.idle) == (not is_head), "a body may follow in spite of all"

    run_virtually(work)


def test_compressed_event_stream_is_not_parsed_as_stream():
    async def work(_now):
        for coding, is_stream in ((b"gzip", False), (b"identity", True)):
            summary = RequestSummary(limits=LIMITS)
            await asyncio.sleep(0)
            head = CHUNKED[:-2] + b"Content-Type: Text/Event-Stream; charset=utf-8\r\nContent-Encoding: "
            summary.connection.data_received(head + coding + b"\r\n\r\n")
            assert (await summary.answer).is_stream == is_stream

    run_virtually(work)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"7", 7.0),
        (b" 0 ", 0.0),
        (b"999999999", 999999999.0),
        (b"9" * 5000, None),
        (b"-1", None),
        (b"1.5", None),
        (b"soon", None),
        (b"", None),
        ("٣".encode(), None),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (b"Wed, 99 Oct 2015 07:28:00 GMT", None),
        (b"Wed, 21 Oct " + b"2" * 5000, None),
        (b"Wed, 21 Oct 2015 07:28:00 GMT (" + b"x" * 32 + b")", 0.0),
        (b"Wed, 21 Oct 2015 07:28:00 GMT (" + b"x" * 33 + b")", None),
        (b"9" * 10, None),
        (b"Wed, 21 Oct 2015 07:28:00", 0.0),
        (b"1 Jan 99999999999999999999 1:1:1", None),
        (b"1 Jan 2024 1:1:1 +99999999999999999999", None),
    ],
)
def test_retry_after_accepts_seconds_or_date(value, seconds):
    assert retry_after_s(value) == seconds
    passed = headers_for_client([(b"retry-after", value)], "http://e", has_length=True)
    assert passed == ([] if seconds is None else [(b"retry-after", value)])


def test_retry_after_of_future_date_gives_remaining_seconds():
    date = datetime.now(UTC) + timedelta(hours=1)
    assert 3500 < retry_after_s(format_datetime(date, usegmt=True).encode()) <= 3600


@pytest.mark.parametrize(("size", "fits"), [(1 << 16, True), ((1 << 16) + 1, False)])
def test_headers_of_exactly_max_size_are_read(size, fits):
    """Names and values count without separators; until the headers are complete, all bytes count."""

    async def work(_now):
        whole = b"HTTP/1.1 200 OK\r\nA: " + b"x" * (size - 1 - 15) + b"\r\nContent-Length: 1\r\n\r\na"
        begun = b"HTTP/1.1 200 OK\r\nA: "
        begun += b"x" * (size - len(begun))
        if fits:
            assert await RequestSummary(limits=LIMITS).gets(whole, 1 << 20) == (200, b"a")
        else:
            with pytest.raises(MalformedAnswerError, match="its headers exceed 65536 bytes"):
                await RequestSummary(limits=LIMITS).gets(whole, 1 << 20)
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(begun)
        await asyncio.sleep(0)
        assert summary.answer.done() is not fits
        if not fits:
            with pytest.raises(MalformedAnswerError, match="its headers or chunk lines exceed 65536 bytes"):
                await summary.answer

    run_virtually(work)


def test_framing_bytes_reset_after_each_body_piece():
    async def work(_now):
        summary = RequestSummary(limits=LONG_LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED)
        answer = await summary.answer
        for _ in range(3):
            summary.connection.data_received(b"1\r\nx\r\n3;")
            summary.connection.data_received(b"y" * (1 << 16))
            summary.connection.data_received(b"\r\nabc\r\n")
            assert await answer.next() == b"xabc"
        summary.connection.data_received(b"3;")
        summary.connection.data_received(b"y" * ((1 << 16) - 2))
        summary.connection.data_received(b"y")
        with pytest.raises(MalformedAnswerError, match="chunk lines exceed 65536 bytes"):
            await answer.next()

    run_virtually(work)


@pytest.mark.parametrize("error", [None, ConnectionResetError("reset")])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", NoAnswerError),
        (b"HTTP/1.1 20", AnswerError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", AnswerError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", AnswerError),
        (CHUNKED + b"3\r\nabc\r\n", AnswerError),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    ],
)
def test_connection_end_completes_or_cuts_answer(data, expected, error):
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        reading = asyncio.ensure_future(summary.read())
        summary.connection.data_received(data)
        summary.connection.connection_lost(error)
        outcome = (AnswerError if error else b"abc") if expected is None else expected
        if isinstance(outcome, bytes):
            assert await reading == (200, outcome)
            return
        with pytest.raises(
            outcome, match=f"{'closed the connection' if outcome is NoAnswerError else 'cut off'}: {error}"
        ):
            await reading

    run_virtually(work)


def test_relay_pauses_reading_until_full_receiver_drains():
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED + b"1\r\na\r\n")
        answer = await summary.answer
        taken, rooms = [], []

        def take(piece):
            taken.append((piece, answer._num_waiting_bytes))
            return len(taken) != 2

        async def room():
            await asyncio.sleep(1.0)
            rooms.append(summary.transport.is_reading)

        relaying = asyncio.ensure_future(answer.relay(take, room))
        await asyncio.sleep(0)
        assert (taken, answer._take) == ([(b"a", 0)], take)
        summary.connection.data_received(b"1\r\nb\r\n")
        await asyncio.sleep(0.5)
        summary.connection.data_received(b"1\r\nc\r\n1\r\nd\r\n")
        assert not summary.transport.is_reading
        await asyncio.sleep(1.0)
        summary.connection.data_received(b"1\r\ne\r\n0\r\n\r\n")
        await relaying
        assert [piece for piece, _ in taken] == [b"a", b"b", b"cd", b"e"]
        assert (rooms, answer._take, summary.transport.is_reading) == ([False], None, True)
        async with answer:
            pass
        assert len(summary.idle) == 1

    run_virtually(work)


def test_relay_ends_after_slow_receiver_drains():
    async def work(now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED + b"1\r\na\r\n")
        answer, taken = await summary.answer, []
        relaying = asyncio.ensure_future(answer.relay(taken.append, lambda: asyncio.sleep(5.0)))  # a slow client
        await asyncio.sleep(1.0)
        summary.connection.data_received(b"1\r\nb\r\n0\r\n\r\n")
        await relaying
        assert (taken, now()) == ([b"a", b"b"], 10.0)

    run_virtually(work)


def test_abandoned_answer_closes_connection():
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        async with await summary.answer as answer:
            assert await answer.read() == b"a"
            answer.give_up()
            assert summary.transport.is_closed
        assert summary.idle == []

    run_virtually(work)


@pytest.mark.parametrize(
    ("headers", "is_stream", "is_of_lines", "is_json", "is_plain"),
    [
        (b"Content-Type: application/x-ndjson", True, True, False, True),
        (b"Content-Type: text/event-stream", True, False, False, True),
        (b"Content-Type:  Application/JSON ; a=b", False, False, True, True),
        (b"Content-Type: application/json\r\nContent-Encoding: GZIP", False, False, True, False),
        (b"Content-Type: application/x-ndjson\r\nContent-Encoding: br", False, True, False, False),
        (b"Content-Encoding: Identity", False, False, False, True),
    ],
)
def test_headers_determine_answer_kind(headers, is_stream, is_of_lines, is_json, is_plain):
    async def work(_now):
        summary = RequestSummary(limits=LIMITS)
        await asyncio.sleep(0)
        summary.connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n" + headers + b"\r\n\r\nab")
        async with await summary.answer as answer:
            found = (answer.is_stream, answer.is_of_lines, answer.is_json, answer.is_plain)
            assert found == (is_stream, is_of_lines, is_json, is_plain)
            assert ((b"content-length", b"2") in answer.headers) is not is_stream
            assert answer.retry_after_s is None

    run_virtually(work)


def test_hop_headers_and_engine_address_are_not_forwarded():
    headers = [
        (b"connection", b"X-Own ,close"),
        (b"x-own", b"1"),
        (b"location", b"http://e:1/a"),
        (b"x", b"http://e:1"),
    ]
    headers += [(b"date", b"d"), (b"server", b"s"), (b"x-request-id", b"i"), (b"content-length", b"5")]
    kept = [(b"location", b"/a"), (b"x", b"http://e:1")]
    assert headers_for_client(headers, "http://e:1", has_length=False) == kept
    assert headers_for_client(headers, "http://e:1", has_length=True) == [*kept, (b"content-length", b"5")]
