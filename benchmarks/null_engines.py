"""Null engines: they answer as OpenAI's chat API without a model, each at an address of its own, many in one process.

    python benchmarks/null_engines.py --engines 32

The process prints a line of JSON with the ports of its engines, and serves them until its standard input ends. A chat
completion has `max_tokens` events with the time of their creation, at intervals of `pause_us`. An answer's `usage`
says that the whole prompt was cached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time

import httptools
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_STREAM = _HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764547200,"model":"null","choices":'
_EVENT += b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}],"time":%d}\n\n'
_USAGE = b'"usage":{"prompt_tokens":100,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":100}}'
_METRICS = b"process_start_time_seconds 1764547200.0\noctavo:num_requests_running{} 0.0\n"
_ANSWERS = {
    b"/v1/models": b'{"object":"list","data":[{"id":"null","object":"model"}]}',
    b"/model_info": b'{"role":"both","request_timeout":600}',
    b"/metrics": _METRICS,
}
_NUM_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_PAUSE_US = re.compile(rb'"pause_us": ?(\d+)')


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=32)
    uvloop.run(serve(parser.parse_args().engines))


async def serve(num_engines: int) -> None:
    """Serve engines until the standard input ends."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(NullEngine, "127.0.0.1", 0, backlog=4096) for _ in range(num_engines)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)


class NullEngine(asyncio.Protocol):
    """A connection to a null engine."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read requests."""
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""
        self._num_left = self._num_events = 0
        self._pause_s = 0.0

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """End the stream."""
        self._num_left = 0
        del self._parser

    def data_received(self, data: bytes) -> None:
        """Parse a request."""
        self._parser.feed_data(data)

    def on_url(self, path: bytes) -> None:
        """Begin a request."""
        self._path, self._body = path, b""

    def on_body(self, piece: bytes) -> None:
        """Add a piece of the body."""
        self._body += piece

    def on_message_complete(self) -> None:
        """Answer."""
        if not self._body:
            self._send_whole(_ANSWERS.get(self._path, b"{}"))
            return
        self._num_events = self._num_left = _number(_NUM_TOKENS, self._body)
        self._pause_s = _number(_PAUSE_US, self._body) / 1e6
        if b'"stream": true' in self._body:
            self._transport.write(_STREAM)
            self._send_event()
        else:
            self._send_whole(b'{"choices":[],' + _USAGE % self._num_events + b"}")

    def _send_event(self) -> None:
        if self._num_left:
            self._num_left -= 1
            self._send_chunk(_EVENT % time.perf_counter_ns())
            asyncio.get_running_loop().call_later(self._pause_s, self._send_event)
        elif not self._transport.is_closing():
            last = b'data: {"choices":[],' + _USAGE % self._num_events + b"}\n\ndata: [DONE]\n\n"
            self._send_chunk(last, end=b"0\r\n\r\n")

    def _send_chunk(self, piece: bytes, end: bytes = b"") -> None:
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(piece), piece, end))

    def _send_whole(self, body: bytes) -> None:
        self._transport.write(_HEAD % b"application/json" + b"content-length: %d\r\n\r\n%b" % (len(body), body))


def _number(pattern: re.Pattern[bytes], body: bytes) -> int:
    found = pattern.search(body)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
