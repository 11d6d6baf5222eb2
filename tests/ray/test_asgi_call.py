"""Calls of ASGI applications in this process."""

from __future__ import annotations

import asyncio

import pytest

from octavo.ray.asgi_call import posted

EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def start(status: int = 200, headers=()) -> dict:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def part(body: bytes, *, more: bool = False) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def ask(app, body: bytes = b"{}", headers: dict | None = None) -> tuple[int, bool, bytes]:
    async with posted(app, "/v1/x", body, headers or {}) as answer:
        return answer.status, answer.is_event_stream, await answer.body()


def test_application_gets_body_and_headers():
    async def app(scope, receive, send):
        message = await receive()
        fields = dict(scope["headers"])
        await send(start(201))
        await send(part(message["body"] + b" " + fields[b"x-request-id"] + b" " + scope["path"].encode()))

    assert asyncio.run(ask(app, b"hello", {"x-request-id": "7"})) == (201, False, b"hello 7 /v1/x")


def test_parts_that_arrived_together_are_one_piece():
    release = asyncio.Event()

    async def app(_scope, _receive, send):
        await send(start(headers=EVENTS))
        await send(part(b"a", more=True))
        await send(part(b"b", more=True))
        await release.wait()
        await send(part(b"c"))

    async def run():
        async with posted(app, "/", b"", {}) as answer:
            assert answer.is_event_stream
            pieces = []
            async for piece in answer.pieces():
                pieces.append(piece)
                release.set()
            return pieces

    assert asyncio.run(run()) == [b"ab", b"c"]


@pytest.mark.parametrize("num_sent", [1, 100])
def test_leaving_early_disconnects(num_sent):
    """Also when the application waits because nobody reads."""
    seen = []

    async def app(_scope, receive, send):
        seen.append((await receive())["type"])

        async def talk():
            for _ in range(num_sent):
                await send(part(b"x", more=True))

        await send(start())
        talking = asyncio.create_task(talk())
        seen.append((await receive())["type"])
        await talking

    async def run():
        async with posted(app, "/", b"", {}):
            for _ in range(num_sent):
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert seen == ["http.request", "http.disconnect"]


def test_cancelled_reader_disconnects():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def app(_scope, receive, send):
        await receive()
        await send(start())
        begun.set()
        await receive()
        ended.set()

    async def run():
        task = asyncio.create_task(ask(app))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_exception_of_application_is_raised(num_before):
    async def app(_scope, _receive, send):
        for message in [start(), part(b"a", more=True)][:num_before]:
            await send(message)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(ask(app))


def test_slow_reader_stops_application():
    num_sent = 0

    async def app(_scope, _receive, send):
        nonlocal num_sent
        await send(start())
        for _ in range(1000):
            await send(part(b"x", more=True))
            num_sent += 1
        await send(part(b""))

    async def run():
        async with posted(app, "/", b"", {}) as answer:
            for _ in range(100):
                await asyncio.sleep(0)
            assert num_sent < 50
            return await answer.body()

    assert asyncio.run(run()) == b"x" * 1000
