"""An engine's answer as bytes, valid and malformed, cut at any place and in pieces of any size."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref
from typing import Any

import pytest
from router.asking_engine import RequestSummary

from octavo.config import RouterConfig
from octavo.router.answer import AnswerError, NoAnswerError
from octavo.router.engines import EngineHandle
from octavo.router.upstream import Upstream

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n[1,2,34]"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[1,2,\r\n3;x=y\r\n34]\r\n0\r\nTrailer: t\r\n\r\n"
UNTIL_END = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n[1,2,34]"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
CLOSING = LENGTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"


async def got(data: bytes, size: int, *, is_head: bool = False) -> tuple[int, bytes]:
    return await RequestSummary(is_head=is_head).gets(data, size)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("data", [LENGTH, CHUNKED, UNTIL_END, CONTINUE + LENGTH, EMPTY])
def test_answer_is_read_from_pieces_of_any_size(data, size):
    expected = (204, b"") if data is EMPTY else (200, b"[1,2,34]")
    assert asyncio.run(got(data, size)) == expected


@pytest.mark.parametrize("data", [LENGTH, CHUNKED])
@pytest.mark.parametrize("behind", [b"", LENGTH, b"\x00garbage", b"\r\n\r\n"])
def test_connection_with_extra_bytes_is_not_reused(data, behind):
    async def ask():
        summary = RequestSummary()
        assert await summary.gets(data + behind, 1000, ends=False) == (200, b"[1,2,34]")
        return summary

    summary = asyncio.run(ask())
    is_clean = not behind.strip()
    assert (len(summary.idle), summary.transport.is_closed) == ((1, False) if is_clean else (0, True))
    if is_clean:
        summary.connection.data_received(b"x")
        assert summary.transport.is_closed, "what nobody has asked for ends it"


def test_head_answer_has_no_body_despite_content_length():
    assert asyncio.run(got(LENGTH.partition(b"[")[0], 1000, is_head=True)) == (200, b"")


@pytest.mark.parametrize("data", [LENGTH, CHUNKED])
def test_truncated_answer_raises_at_every_cut(data):
    async def cut():
        with pytest.raises(NoAnswerError):
            await got(b"", 1)
        for end in range(1, len(data)):
            with pytest.raises(AnswerError, match="cut"):
                await got(data[:end], 1000)

    asyncio.run(cut())


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nContent-Length: 9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n[1,2,xx\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 5_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
    ],
)
def test_invalid_answer_raises_and_closes_connection(data):
    async def ask():
        summary = RequestSummary()
        with pytest.raises(AnswerError):
            await summary.gets(data, 1 << 16, ends=False)
        return summary.transport.is_closed

    assert asyncio.run(ask())


@pytest.mark.parametrize("data", [LENGTH, CHUNKED, CONTINUE + CHUNKED])
def test_mutated_answer_is_read_or_raises_os_error(data):
    rng = random.Random(len(data))

    async def ask():
        for _ in range(400):
            changed = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                place = rng.randrange(len(changed))
                changed[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
            with contextlib.suppress(OSError):
                await got(bytes(changed), rng.choice([1, 5, 1000]))

    asyncio.run(ask())


def test_relay_keeps_order_and_applies_backpressure():
    async def ask():
        summary = RequestSummary()
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED.partition(b"5\r\n")[0])
        answer = await summary.answer
        got, room = [], asyncio.Event()

        def take(piece):
            got.append(piece)
            return len(got) != 2

        relaying = asyncio.ensure_future(answer.relay(take, room.wait))
        for text in (b"a", b"b", b"c", b"d"):
            await asyncio.sleep(0)
            summary.connection.data_received(b"1\r\n" + text + b"\r\n")
            assert got == [b"a", b"b"][: len(got)]
        assert (got, summary.transport.is_reading) == ([b"a", b"b"], False)
        room.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (got, summary.transport.is_reading) == ([b"a", b"b", b"cd"], True)
        summary.connection.data_received(b"1\r\ne\r\n0\r\n\r\n")
        await relaying
        assert got == [b"a", b"b", b"cd", b"e"]

    asyncio.run(ask())


@pytest.mark.parametrize("when", ["before", "behind"])
def test_relay_raises_error_of_receiver(when):
    def take(_piece):
        raise ValueError("mine")

    async def room():
        raise AssertionError

    async def ask():
        summary = RequestSummary()
        await asyncio.sleep(0)
        summary.connection.data_received(CHUNKED if when == "before" else CHUNKED.partition(b"5\r\n")[0])
        answer = await summary.answer
        relaying = asyncio.ensure_future(answer.relay(take, room))
        await asyncio.sleep(0)
        if when == "behind":
            summary.connection.data_received(b"1\r\na\r\n")
        with pytest.raises(ValueError, match="mine"):
            await relaying

    asyncio.run(ask())


def test_unread_large_body_pauses_reading():
    async def ask():
        summary = RequestSummary()
        await asyncio.sleep(0)
        summary.connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n" + b"x" * 300_000)
        answer = await summary.answer
        assert not summary.transport.is_reading
        assert len(await answer.next()) == 300_000
        assert summary.transport.is_reading

    asyncio.run(ask())


class Server:
    """A small fake engine on a real socket. does: its action on each connection, in turn."""

    def __init__(self, *does: str) -> None:
        self.does, self.num_connections, self.num_requests = list(does), 0, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        does = self.does[self.num_connections]
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer.transport):
            while await reader.readuntil(b"\r\n\r\n"):
                self.num_requests += 1
                if does == "answers once" and self.num_requests > 1:
                    return
                writer.write(LENGTH if does != "closes" else CLOSING)
                if does == "closes":
                    return


async def ask_of(server: Server, method: str, times: int) -> list[Any]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    engine = EngineHandle(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    upstream, found = Upstream(RouterConfig(engines=(engine.url,))), []
    scope = {"method": method, "raw_path": b"/", "query_string": b"", "headers": []}
    async with listening:
        for _ in range(times):
            try:
                async with await upstream.ask(engine, scope, b"", "id") as answer:
                    found.append(await answer.read())
            except OSError as error:
                found.append(type(error))
            await asyncio.sleep(0.01)  # lets the connection's end arrive
        await upstream.close()
        await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize(("does", "num_connections"), [(["keeps"], 1), (["closes", "closes", "closes"], 3)])
def test_connection_is_reused_unless_engine_closes_it(does, num_connections):
    server = Server(*does)
    assert asyncio.run(ask_of(server, "POST", 3)) == [b"[1,2,34]"] * 3
    assert server.num_connections == num_connections


@pytest.mark.parametrize(("method", "second"), [("GET", b"[1,2,34]"), ("POST", NoAnswerError)])
def test_closed_idle_connection_retries_only_get(method, second):
    """A request is not repeated if the engine may have begun it."""
    server = Server("answers once", "keeps")
    assert asyncio.run(ask_of(server, method, 2)) == [b"[1,2,34]", second]


def test_reading_pauses_above_256_kib():
    """It pauses exactly above 256 KiB, and resumes when the reader has taken the buffered bytes."""

    async def ask():
        summary = RequestSummary()
        await asyncio.sleep(0)
        summary.connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n")
        answer = await summary.answer
        summary.connection.data_received(b"x" * (256 << 10))
        assert summary.transport.is_reading
        summary.connection.data_received(b"x")
        assert not summary.transport.is_reading
        assert len(await answer.next()) == (256 << 10) + 1
        assert summary.transport.is_reading
        summary.connection.data_received(b"x" * (256 << 10))
        assert summary.transport.is_reading

    asyncio.run(ask())


def test_read_answer_is_freed_without_garbage_collector():
    """It does not wait for the garbage collector, because an answer may have megabytes."""

    async def ask():
        summary = RequestSummary()
        await asyncio.sleep(0)
        summary.connection.data_received(LENGTH)
        answer = await summary.answer
        async with answer:
            await answer.read()
        gone = weakref.ref(answer)
        del answer, summary.answer
        return gone

    gc.disable()
    try:
        assert asyncio.run(ask())() is None
    finally:
        gc.enable()
