"""The peers of a router in benchmarks/routing.py, each in a process of its own.

engine sends events, each with its time; uvicorn does the same with plain uvicorn; relay passes bytes on to --to-port by
system calls alone, one connection after another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import select
import socket
import time
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
READY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["engine", "uvicorn", "relay"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to-port", type=int)
    options = parser.parse_args()
    if options.what == "engine":
        asyncio.run(serve_events(options.port))
    elif options.what == "uvicorn":
        uvicorn.run(events_app, port=options.port, log_level="warning")
    else:
        relay_bytes(options.port, options.to_port)


def event() -> bytes:
    """Return an event with its time of creation."""
    return b'data: {"time": %d, "choices": [{"index": 0, "text": " word"}]}\n\n' % time.perf_counter_ns()


async def serve_events(port: int) -> None:
    """Serve streams of max_tokens events at intervals of pause_us."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if not body:
                    writer.write(READY)
                    continue
                asked = json.loads(body)
                writer.write(HEAD)
                for _ in range(asked["max_tokens"]):
                    await asyncio.sleep(asked.get("pause_us", 0) / 1e6)
                    piece = event()
                    writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    await writer.drain()
                writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


async def events_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Do the same as an ASGI application."""
    if scope["type"] != "http":
        return
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    kind = b"text/event-stream" if body else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if body:
        asked = json.loads(body)
        for _ in range(asked["max_tokens"]):
            await asyncio.sleep(asked.get("pause_us", 0) / 1e6)
            await send({"type": "http.response.body", "body": event(), "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if body else MODELS})


def relay_bytes(port: int, to_port: int) -> None:
    """Pass bytes on in both directions, one connection after another."""
    with socket.create_server(("127.0.0.1", port)) as listening:
        while True:
            client, _ = listening.accept()
            with client, socket.create_connection(("127.0.0.1", to_port)) as engine:
                poll, other = select.poll(), {client.fileno(): (client, engine), engine.fileno(): (engine, client)}
                for sock in (client, engine):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    poll.register(sock, select.POLLIN)
                is_open = True
                while is_open:
                    for number, _ in poll.poll():
                        source, target = other[number]
                        piece = source.recv(1 << 16)
                        is_open = is_open and bool(piece)
                        target.sendall(piece)


if __name__ == "__main__":
    main()
