"""Bounds on the cost of a client: floods, trickles, clients that do not read, and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from allocations import allocated_in
from certificates import make_certificate
from fakes import FakeExecutor, answer_text
from running import DEADLINE_S, connect, let_time_pass, read_all, run_server, wait_until

from octavo.config import ServerConfig
from octavo.http import connection
from octavo.http.body import FREE_BYTES
from octavo.http.connection import MAX_HEADER_BYTES
from octavo.http.listening import MAX_UNSENT_BYTES, bind, bytes_taken, bytes_under_way, open_door
from octavo.http.routes import ROUTES
from octavo.http.tenants import Tenant, add_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from running import Running

COMPLETIONS = "/v1/completions"
JSON = "Content-Type: application/json\r\n"


def head(path: str, num_bytes: int, key: str = "") -> bytes:
    asked = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{JSON}{asked}Content-Length: {num_bytes}\r\n\r\n".encode()


def trickle(sock: socket.socket) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        sock.sendall(b"X")
        time.sleep(0.05)


def read_until(sock: socket.socket, text: bytes) -> bytes:
    """Read until `text` has arrived: the head and the body of an answer may arrive in separate pieces."""
    answer = b""
    while text not in answer:
        piece = sock.recv(1 << 16)
        assert piece, answer
        answer += piece
    return answer


def check_serves(running: Running) -> None:
    with running.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 5}).json()
    assert answer["choices"][0]["text"] == answer_text(5, 0, 5)


@contextlib.contextmanager
def flat_memory(running: Running, num_sent_bytes: int, *, at_once: float, kept: float) -> Iterator[None]:
    """Check the allocated memory, as fractions of the bytes sent. at_once: limit of the peak; kept: of the rest.

    The rest is measured for the server's packages after its last connection has closed. The peak includes all
    allocations of this process. Other threads may allocate 1 to 2 MB, so tests send much more than that.
    """
    gc.collect()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        state = running.server.server_state
        wait_until(lambda: not state.connections and not state.tasks, "all is over")
        gc.collect()
        rest = allocated_in("asyncio", "octavo", "uvicorn")
    finally:
        tracemalloc.stop()
    assert peak < at_once * num_sent_bytes, f"{peak} bytes at once of {num_sent_bytes}"
    assert rest < kept * num_sent_bytes, f"{rest} bytes of {num_sent_bytes} were kept"


FLOODS = {
    "in one header": b"GET /version HTTP/1.1\r\nX-Flood: " + b"a" * MAX_HEADER_BYTES,
    "in many headers": b"GET /version HTTP/1.1\r\n" + b"X-Flood: aaaaaaaaaaaaaaaaaaaa\r\n" * 5000,
    "in many names": b"GET /version HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % number for number in range(10_000)),
    "in the path": b"GET /" + b"a" * MAX_HEADER_BYTES,
}


def flood(running: Running, name: str) -> int:
    """Send one byte more than the limit, and no more: a reset because of unread bytes would overtake the answer."""
    sent = FLOODS[name][: MAX_HEADER_BYTES + 1]
    with connect(running) as sock:
        for start in range(0, len(sent), 8192):
            sock.sendall(sent[start : start + 8192])
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    return len(sent)


def test_s8_endless_headers_answer_431(shared: Running) -> None:
    assert sum(flood(shared, name) for name in FLOODS) == len(FLOODS) * (MAX_HEADER_BYTES + 1)
    check_serves(shared)  # make the one-time allocations first
    with flat_memory(shared, 32 * len(FLOODS) * MAX_HEADER_BYTES, at_once=1 / 2, kept=1 / 64):
        for _ in range(32):
            for name in FLOODS:
                flood(shared, name)
    check_serves(shared)


def test_s8_client_that_keeps_sending_headers_is_disconnected(shared: Running) -> None:
    piece, num_pieces = b"a" * (1 << 16), 1600

    def flood_on(sock: socket.socket) -> None:
        sock.sendall(b"GET /version HTTP/1.1\r\nX-Flood: ")
        for _ in range(num_pieces):
            sock.sendall(piece)

    check_serves(shared)  # make the one-time allocations first
    with (
        flat_memory(shared, num_pieces * len(piece), at_once=1 / 32, kept=1 / 1024),
        connect(shared) as sock,
        pytest.raises((BrokenPipeError, ConnectionResetError)),
    ):
        flood_on(sock)
    check_serves(shared)


def test_s8_complete_headers_over_limit_answer_431(shared: Running) -> None:
    with connect(shared) as sock:
        for piece in (b"GET /version HTTP/1.1\r\nX-Flood: ", b"a" * 60_000, b"a" * 6000 + b"\r\n\r\n"):
            sock.sendall(piece)
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")
    check_serves(shared)


@pytest.mark.turn(12)
def test_s8_body_in_tiny_chunks_uses_memory_of_its_bytes() -> None:
    chunks = b"1\r\na\r\n" * 10_000
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n".encode()
    with run_server(max_body_bytes=1 << 20) as running:
        check_serves(running)
        sent = 0
        with flat_memory(running, 104 * len(chunks), at_once=1, kept=1 / 12), connect(running) as sock:
            sock.sendall(request)
            for _ in range(104):
                sock.sendall(chunks)
                sent += 10_000
            assert sent <= 1 << 20  # up to this size is read
            sock.sendall(b"1\r\na\r\n" * ((1 << 20) + 1 - sent))
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        check_serves(running)


def test_headers_below_limit_are_accepted(shared: Running) -> None:
    with shared.http() as http:
        assert http.get("/version", headers={"X-Large": "a" * 30_000}).status_code == 200


@pytest.mark.turn(12)
def test_s8_trailers_are_dropped(shared: Running) -> None:
    """Headers after a chunked body are read and dropped."""
    body = json.dumps({"prompt": "hello", "max_tokens": 5}).encode()
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n".encode()
    request += b"Connection: close\r\n\r\n"
    check_serves(shared)  # make the one-time allocations first
    trailers = (b"a: " + b"b" * 1019 + b"\r\n") * 64
    with flat_memory(shared, 1000 * len(trailers), at_once=1 / 16, kept=1 / 512), connect(shared) as sock:
        sock.sendall(request + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n")
        wait_until(lambda: shared.server.server_state.connections, "it is connected")
        for _ in range(1000):
            sock.sendall(trailers)
        kept = [len(each.headers or ()) for each in list(shared.server.server_state.connections)]
        sock.sendall(b"\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert max(kept) < 10
    check_serves(shared)


@pytest.mark.parametrize("size", [1000, 300_000])
def test_unread_body_after_401_is_not_parsed_as_request(size: int) -> None:
    """The key is wrong, so the answer comes immediately. The body that follows is not parsed as a request."""
    with run_server(api_key="key", body_timeout_s=5.0) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, size))
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 401 ")
        sock.sendall(b"x" * size)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        rest = read_all(sock)
    assert rest.count(b"HTTP/1.1") == 1
    assert rest.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("num_bytes", [1, 10_000])
def test_protocol_upgrade_request_is_answered_with_http_1(shared: Running, protocol: str, num_bytes: int) -> None:
    """The JDK's client asks for an upgrade with each request over plain HTTP. num_bytes: sent together."""
    body = json.dumps({"prompt": "hello", "max_tokens": 5}).encode()
    extra = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n\r\n"
    request = head(COMPLETIONS, len(body)).removesuffix(b"\r\n") + extra.encode() + body
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(shared) as sock:
        sent = request + request + last
        for start in range(0, len(sent), num_bytes):
            sock.sendall(sent[start : start + num_bytes])
        answers = read_all(sock)
    assert answers.count(b"HTTP/1.1 200 ") == 3
    assert answers.count(b'"text":"') == 2
    check_serves(shared)


@pytest.mark.turn(12)
def test_s8_thousands_of_pipelined_upgrade_requests_are_answered(shared: Running) -> None:
    """The pipelined requests reach the parser in one piece."""
    asking = b"GET /version HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(shared) as sock:
        sock.sendall(asking * 2000 + last)
        assert read_all(sock).count(b"HTTP/1.1 200 ") == 2001
    check_serves(shared)


def test_s8_upgrade_request_over_header_limit_answers_431(shared: Running) -> None:
    with connect(shared) as sock:
        sock.sendall(head(COMPLETIONS, 10).removesuffix(b"\r\n") + b"Connection: Upgrade\r\nUpgrade: h2c\r\n")
        sock.sendall(b"x: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 431 ")
    check_serves(shared)


@pytest.mark.turn(12)
def test_pipelined_request_gets_full_body_timeout() -> None:
    executor = FakeExecutor(step_s=0.03)
    body = json.dumps({"prompt": "hello", "max_tokens": 40, "ignore_eos": True}).encode()
    with run_server(executor, body_timeout_s=0.4) as running, connect(running) as sock:
        close = head(COMPLETIONS, len(body)).replace(b"Host: x", b"Host: x\r\nConnection: close") + body
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + close)
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer_text(5, 0, 40).encode()[:20] in answer


def test_connection_over_limit_answers_503_except_for_probes() -> None:
    with run_server(max_connections=2) as running, connect(running), connect(running):
        connections = running.server.server_state.connections
        wait_until(lambda: len(connections) == 2, "both are connected")
        body = b'{"prompt": "a"}'
        for request in (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", head(COMPLETIONS, len(body)) + body):
            with connect(running) as third:
                third.sendall(request)
                answer = read_all(third)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"too_many_connections" in answer
            assert b"Retry-After: 1\r\n" in answer
        for path in (b"/health", b"/live", b"/ready?x"):
            with connect(running) as third:
                third.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = read_all(third)  # returns because the server closes the connection
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.lower().count(b"connection: close\r\n") == 1
        wait_until(lambda: len(connections) == 2, "the others are gone")


def test_silent_connection_is_closed_for_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROBE_CONNECTIONS", 1)
    with run_server(max_connections=1) as running, connect(running):
        connections = running.server.server_state.connections
        with connect(running) as silent, connect(running) as probe:
            assert b"too_many_connections" in read_all(silent)
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")  # this request has begun, and keeps its place
            wait_until(lambda: any(each._num_header_bytes for each in set(connections)), "it has begun")
            with connect(running) as late:
                assert b"too_many_connections" in read_all(late)
            probe.sendall(b"\r\n")
            assert read_all(probe).startswith(b"HTTP/1.1 200 ")


def test_silent_probe_connection_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_PROBE_TIMEOUT_S", 0.1)
    with run_server(max_connections=1) as running, connect(running), connect(running) as silent:
        assert read_all(silent) == b""
        wait_until(lambda: len(running.server.server_state.connections) == 1, "who asked for nothing is gone")


ENDLESS = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}


@pytest.mark.parametrize("is_stream", [True, False])
def test_disconnect_with_pipelined_request_aborts_running_request(is_stream: bool) -> None:
    body = json.dumps({**ENDLESS, "stream": is_stream}).encode()
    with run_server(FakeExecutor(step_s=0.02)) as running:
        with connect(running) as sock:
            sock.sendall(head(COMPLETIONS, len(body)) + body)
            wait_until(lambda: running.num_blocks_in_use, "it is computed")
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            connections = running.server.server_state.connections
            wait_until(lambda: any(each.pipeline for each in set(connections)), "the next one waits")
        wait_until(lambda: running.num_unfinished == 0, "it is aborted")
        check_serves(running)


def test_invalid_bytes_after_request_close_connection_without_answer() -> None:
    """The bytes follow a request that is being computed, or are the body of a request that was answered already.

    An error answer would look like the answer of the earlier request.
    """
    body = json.dumps(ENDLESS).encode()
    wrong_key = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with run_server(FakeExecutor(step_s=0.02)) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, len(body)) + body)
        wait_until(lambda: running.num_blocks_in_use, "it is computed")
        sock.sendall(b"what is this?\r\n\r\n")
        assert read_all(sock) == b""
        wait_until(lambda: running.num_unfinished == 0, "it is aborted")
    with run_server(api_key="key") as running, connect(running) as sock:
        sock.sendall(wrong_key)
        assert read_until(sock, b"}}").startswith(b"HTTP/1.1 401 ")
        sock.sendall(b"no number\r\n")
        assert read_all(sock) == b""


def stall(stack: contextlib.ExitStack, running: Running, *, num_bytes: int, key: str = "") -> socket.socket:
    """Send a large body except its last byte."""
    sock = stack.enter_context(connect(running))
    sock.sendall(head(COMPLETIONS, num_bytes, key) + b" " * (num_bytes - 1))
    return sock


def arrived(running: Running) -> int:
    return running.server._service.limiter.body_bytes.num_held


def test_concurrent_large_bodies_share_one_byte_budget() -> None:
    """While the budget is full, large bodies are refused and small ones are not."""
    size = 1 << 20
    with run_server(max_body_bytes=size) as running:
        with contextlib.ExitStack() as stack:
            for _ in range(17):
                stall(stack, running, num_bytes=size)
            wait_until(lambda: arrived(running) == 17 * (size - FREE_BYTES - 1), "they have arrived")
            assert stall(stack, running, num_bytes=size).recv(1 << 16).startswith(b"HTTP/1.1 429 ")
            check_serves(running)
        wait_until(lambda: arrived(running) == 0, "all room is given back")


def test_large_bodies_of_one_key_leave_budget_for_other_keys(tmp_path: Path) -> None:
    path, size = tmp_path / "keys.toml", 1 << 20
    flood, other = add_key(path, Tenant(name="flood")), add_key(path, Tenant(name="other"))
    with run_server(max_body_bytes=size, api_keys_file=path) as running, contextlib.ExitStack() as stack:
        socks = [stall(stack, running, num_bytes=size, key=flood) for _ in range(20)]
        for sock in socks:
            sock.setblocking(False)
        wait_until(lambda: arrived(running) > 5 * size, "much has arrived")
        body = json.dumps({"prompt": "hello", "max_tokens": 5}).encode()
        for padding in (0, 900_000):
            with running.http() as http:
                headers = {"Authorization": f"Bearer {other}"}
                response = http.post(COMPLETIONS, content=body + b" " * padding, headers=headers)
            assert response.status_code == 200, response.text
        assert arrived(running) <= (16 + 1) / 2 * size  # half of the budget, and the body that arrives
        refused = wait_until(lambda: [sock for sock in socks if (told := peek(sock)) and b" 429 " in told], "refusals")
        assert len(refused) <= 12


def peek(sock: socket.socket) -> bytes:
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        return sock.recv(16, socket.MSG_PEEK)
    return b""


def test_requests_with_missing_bodies_count_for_rate_limit(tmp_path: Path) -> None:
    key = add_key(path := tmp_path / "keys.toml", Tenant(name="few", requests_per_minute=2))
    with run_server(api_keys_file=path) as running, contextlib.ExitStack() as stack:
        for route in (COMPLETIONS, "/tokenize"):
            sock = stack.enter_context(connect(running))
            sock.sendall(head(route, 1000, key))
        last = stack.enter_context(connect(running))
        wait_until(lambda: len(running.server.server_state.tasks) == 2, "two have begun")
        last.sendall(head(COMPLETIONS, 1000, key))
        read_until(last, b"rate_limit_exceeded")


@pytest.mark.turn(8)
def test_request_with_more_prompts_than_capacity_is_served_in_turns() -> None:
    """There are more prompts than places, and more tokens than may wait: they are served one after the other."""
    prompts = [f"hello {number}" for number in range(50)]
    options: dict[str, Any] = {"max_open_requests": 9, "max_num_waiting_tokens": 40}
    with run_server(FakeExecutor(step_s=0.001), **options) as running, running.http() as http:
        limiter = running.server._service.limiter
        held, take = list[tuple[int, int]](), limiter.waiting_tokens.take

        def watched(*amount: Any) -> None:
            take(*amount)
            held.append((limiter.streams.num_held, limiter.waiting_tokens.num_held))

        limiter.waiting_tokens.take = watched  # type: ignore[method-assign]
        whole = http.post(COMPLETIONS, json={"prompt": prompts, "n": 2, "max_tokens": 4}).json()
        lines = http.post(COMPLETIONS, json={"prompt": prompts, "max_tokens": 4, "stream": True}).text.split("\n")
        assert [choice["text"] for choice in whole["choices"]] == [
            answer_text(len(prompt), choice, 4) for prompt in prompts for choice in range(2)
        ]
        streamed = dict.fromkeys(range(50), "")
        for line in lines:
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed[choice["index"]] += choice["text"]
        assert list(streamed.values()) == [answer_text(len(prompt), 0, 4) for prompt in prompts]
        assert len(held) == 100
        assert max(num_streams for num_streams, _ in held) == 4
        assert max(num_tokens for _, num_tokens in held) <= 40
        wait_until(lambda: limiter.streams.num_held == limiter.waiting_tokens.num_held == 0, "all is given back")


@pytest.mark.turn(8)
def test_request_timeout_covers_all_prompts_of_request() -> None:
    executor = FakeExecutor(step_s=0.02)
    body = {"prompt": ["hello"] * 50, "max_tokens": 20, "ignore_eos": True}
    with run_server(executor, max_open_requests=2) as running, running.http() as http:
        response = http.post(COMPLETIONS, json=body, headers={"X-Request-Timeout": "0.6"})
        assert response.status_code == 504  # each single request takes less time
        wait_until(lambda: running.server._service.limiter.streams.num_held == 0, "its place is given back")


@pytest.mark.parametrize(
    ("fields", "parameter", "limit"),
    [({"n": 9}, "n", "8"), ({"n": 9, "prompt": ["a"] * 20}, "n", "8"), ({"prompt": "x" * 101}, "prompt", "100")],
)
@pytest.mark.parametrize("stream", [False, True])
def test_request_that_never_fits_answers_400_not_429(
    fields: dict[str, Any], parameter: str, limit: str, stream: bool
) -> None:
    """A 429 would make every client retry forever without success."""
    with run_server(max_open_requests=8, max_num_waiting_tokens=100) as running, running.http() as http:
        response = http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2, "stream": stream, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, parameter)
        assert limit in response.json()["error"]["message"]
        assert "retry-after" not in response.headers


def test_prompt_tokens_count_once_for_all_n_choices() -> None:
    with run_server(max_num_waiting_tokens=100) as running, running.http() as http:
        response = http.post(COMPLETIONS, json={"prompt": "x" * 90, "n": 4, "max_tokens": 2})
    assert response.status_code == 200


def test_non_http_bytes_answer_400_with_error_object(shared: Running) -> None:
    with connect(shared) as sock:
        sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.turn(12)
@pytest.mark.parametrize("sent", [b"", b"GET /version HTT", b"GET /version HTTP/1.1\r\nHost: x\r\n"])
def test_missing_headers_close_connection_after_timeout(sent: bytes) -> None:
    with run_server(body_timeout_s=0.3) as running, connect(running) as sock:
        sock.sendall(sent)
        assert read_all(sock) == b""
        check_serves(running)


def ask(sock: socket.socket) -> bytes:
    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    return sock.recv(1 << 16)


@pytest.mark.turn(8)
def test_keep_alive_connection_may_idle_longer_than_header_timeout() -> None:
    with (
        run_server(body_timeout_s=0.3, keep_alive_timeout_s=60.0) as running,
        connect(running) as used,
        connect(running) as refused,
    ):
        assert ask(used).startswith(b"HTTP/1.1 200 ")
        refused.sendall(head(COMPLETIONS, 2 << 20))
        assert refused.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        with connect(running) as unused:
            assert read_all(unused) == b""  # returns after the time limit
        assert ask(used).startswith(b"HTTP/1.1 200 ")
        used.sendall(b"GET /health HTT")
        assert read_all(used) == b""  # a request that has begun has to continue arriving


def test_idle_connection_closes_after_keep_alive_timeout() -> None:
    with run_server(body_timeout_s=60.0, keep_alive_timeout_s=0.2) as running, connect(running) as sock:
        assert ask(sock).startswith(b"HTTP/1.1 200 ")
        assert read_all(sock) == b""


def test_default_keep_alive_exceeds_proxy_keep_alive() -> None:
    """Nginx and other proxies keep idle connections for 60 s. The side that closes first loses a request on its way."""
    assert ServerConfig().keep_alive_timeout_s > 60


def test_allow_open_files_sets_limits_of_real_process() -> None:
    code = (
        "import resource\nfrom octavo.http.listening import allow_open_files\n"
        "for soft, hard in ((300, 2000), (300, 600)):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "    num_connections = allow_open_files(1000)\n"
        "    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], num_connections)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1256", "1000", "600", "344"]
    (warning,) = done.stderr.strip().split("\n")
    assert "600 files" in warning
    assert "1256" in warning


def test_trickled_headers_close_connection() -> None:
    with (
        run_server(body_timeout_s=0.5) as running,
        connect(running) as sock,
        pytest.raises((BrokenPipeError, ConnectionResetError)),
    ):
        trickle(sock)


def test_trickled_body_after_413_closes_connection() -> None:
    """The body is larger than the limit: the answer comes immediately, and the rest is not awaited."""
    with run_server(body_timeout_s=0.5, max_body_bytes=100) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, 10_000))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(sock)


def test_s9_chunked_body_over_limit_answers_413_before_its_end() -> None:
    """The size is checked while the body arrives: the answer comes before the end of the body."""
    request = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n".encode()
    with run_server(max_body_bytes=10_000) as running, connect(running) as sock:
        sock.sendall(request + (b"3e8\r\n" + b" " * 1000 + b"\r\n") * 11)
        answer = read_until(sock, b"request_too_large")
        assert answer.startswith(b"HTTP/1.1 413 ")
        check_serves(running)


def test_s9_content_length_over_limit_answers_413_without_reading_body() -> None:
    with run_server(max_body_bytes=10_000) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, 10_001))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_s8_trickled_body_answers_408() -> None:
    with run_server(body_timeout_s=0.4) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, 1000) + b'{"prompt": ')
        answer = read_until(sock, b"request_too_slow")
        assert answer.startswith(b"HTTP/1.1 408 ")
        check_serves(running)


def test_f23_unread_stream_is_aborted_and_frees_its_blocks() -> None:
    """A request with four choices: their unread outputs are counted together."""
    executor = FakeExecutor(step_s=0.0005)
    options = {"max_model_len": 200_000, "num_blocks": 13_000}
    body = json.dumps({"prompt": "hello", "max_tokens": 50_000, "n": 4, "ignore_eos": True, "stream": True}).encode()
    with run_server(executor, engine_options=options, max_unread_outputs=200) as running:
        with connect(running, receive_bytes=4096) as sock:
            sock.sendall(head(COMPLETIONS, len(body)) + body)
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
            wait_until(lambda: running.num_unfinished == 0, "it is ended")
            assert executor.num_steps < 40_000  # it was ended before its own end
            assert running.num_blocks_in_use == 0
            check_serves(running)
            read_until(sock, b"read_too_slowly")  # the buffered outputs still arrive, and then the reason
        wait_until(lambda: running.server._service.limiter.streams.num_held == 0, "its place is given back")


@pytest.mark.skipif(sys.platform != "linux", reason="the system cannot be told to hold less")
def test_f23_unread_stream_does_not_fill_kernel_send_buffer() -> None:
    """The system would buffer 3 MB, more than this answer. The transport buffers 64 KiB, about 300 outputs."""
    executor = FakeExecutor(step_s=0.0002)
    options = {"max_model_len": 20_000, "num_blocks": 2_000}
    body = json.dumps({"prompt": "hello", "max_tokens": 15_000, "ignore_eos": True, "stream": True}).encode()
    with (
        run_server(executor, engine_options=options, max_unread_outputs=50) as running,
        connect(running, receive_bytes=4096) as sock,
    ):
        sock.sendall(head(COMPLETIONS, len(body)) + body)
        assert sock.recv(20).startswith(b"HTTP/1.1 200")
        wait_until(lambda: running.num_unfinished == 0, "it is ended")
        assert executor.num_steps < 350
        read_until(sock, b"read_too_slowly")


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_bytes_taken_excludes_bytes_in_send_buffer() -> None:
    with listening("127.0.0.1") as door, socket.create_connection(door.getsockname()) as client:
        server, _ = door.accept()
        with server:
            server.sendall(b"x" * 5000)
            wait_until(lambda: bytes_taken(server) == 5000, "it has arrived")
            server.setblocking(False)
            sent = 5000
            with contextlib.suppress(BlockingIOError):
                while sent < 1 << 28:
                    sent += server.send(b"x" * 5000)
            assert 5000 < (bytes_taken(server) or 0) < sent
            wait_until(lambda: (bytes_taken(server) or 0) + bytes_under_way(server) == sent, "both tell of one moment")
            client.settimeout(DEADLINE_S)
            while sent > 0:
                sent -= len(client.recv(1 << 16))


def listening(host: str) -> socket.socket:
    door = bind(host, 0)
    open_door(door)
    return door


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[None]:
    """Return a list that gets an entry for each later call of a method."""
    calls: list[None] = []
    method = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


@dataclass
class Transport:
    """How answers reach a client: the server's options, and the wrapper for a connected socket."""

    options: dict[str, Any]
    wrap: Callable[[socket.socket], socket.socket]


@pytest.fixture(params=["plain", "TLS"], scope="module")
def transport(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transport:
    if request.param == "plain":
        return Transport({}, lambda sock: sock)
    certificate, private_key = make_certificate(tmp_path_factory.mktemp("tls"))
    context = ssl.create_default_context(cafile=certificate)
    options = {"ssl_certfile": certificate, "ssl_keyfile": private_key}
    return Transport(options, lambda sock: context.wrap_socket(sock, server_hostname="127.0.0.1"))


def take(sock: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes, or fewer at the end of the connection. TLS returns one record at a time."""
    data = b""
    while len(data) < num_bytes and (piece := sock.recv(num_bytes - len(data))):
        data += piece
    return data


@pytest.mark.sweep(8)
def test_f23_reader_below_minimum_rate_loses_its_permit(transport: Transport) -> None:
    """The client reads 10 KB/s of an answer of 600 KB/s; the minimum is 16 KB/s.

    It never has too many unread outputs, and never a second without any read.
    """
    options = {"max_model_len": 5_000, "num_blocks": 400}
    body = json.dumps({"prompt": "hello", "max_tokens": 3_000, "ignore_eos": True, "stream": True}).encode()
    limits = {"max_unread_outputs": 10_000, "idle_timeout_s": 1.0, **transport.options}
    with (
        run_server(engine_options=options, **limits) as running,
        transport.wrap(connect(running, receive_bytes=4096)) as sock,
    ):
        sock.sendall(head(COMPLETIONS, len(body)) + body)
        streams, deadline = running.server._service.limiter.streams, time.monotonic() + DEADLINE_S
        wait_until(lambda: streams.num_held == 1, "it has a place")
        with contextlib.suppress(ConnectionResetError):
            while streams.num_held:
                assert time.monotonic() < deadline
                take(sock, 1000)
                time.sleep(0.1)
        wait_until(lambda: not streams.num_held, "its place is given back")
        wait_until(lambda: not running.num_unfinished, "nothing is computed for it")


@pytest.mark.sweep(8)
def test_steady_reader_is_not_disconnected(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the answer and its total time do not matter.

    Each interval ends after 60 KB, and 16 KB are the minimum.
    """
    looks, answer, look = list[int](), b"", connection.BoundedHttpProtocol._look_at_reader

    def look_in_its_time(protocol: connection.BoundedHttpProtocol, *arguments: Any) -> None:
        if len(answer) < sum(looks) + 60_000:
            protocol._reader_timer = protocol.loop.call_later(0.005, look_in_its_time, protocol, *arguments)
        else:
            looks.append(len(answer) - sum(looks))
            look(protocol, *arguments)

    monkeypatch.setattr(connection.BoundedHttpProtocol, "_look_at_reader", look_in_its_time)
    options = {"max_model_len": 5_000, "num_blocks": 400}
    body = json.dumps({"prompt": "hello", "max_tokens": 2_000, "ignore_eos": True, "logprobs": 5}).encode()
    with (
        run_server(engine_options=options, idle_timeout_s=0.005, **transport.options) as running,
        transport.wrap(connect(running, receive_bytes=16_384)) as sock,
    ):
        sock.sendall(head(COMPLETIONS, len(body)) + body)
        answer = sock.recv(10_000)
        size = len(answer.partition(b"\r\n\r\n")[0]) + 4 + int(answer.partition(b"content-length: ")[2].split()[0])
        assert size > 150_000
        while len(answer) < size:
            time.sleep(0.02)
            piece = take(sock, min(10_000, size - len(answer)))
            assert piece
            answer += piece
    assert len(looks) > 1  # several intervals were checked, any of which could have cut it off


@pytest.mark.sweep(8)
def test_unread_answer_keeps_connection_from_being_idle(transport: Transport) -> None:
    """Until then its connection is not idle. An idle connection is closed even if unread bytes remain."""
    options = {"max_model_len": 5_000, "num_blocks": 400}
    body = json.dumps({"prompt": "hello", "max_tokens": 4_500, "ignore_eos": True, "logprobs": 5}).encode()
    limits = {"keep_alive_timeout_s": 0.1, **transport.options}
    with (
        run_server(engine_options=options, **limits) as running,
        transport.wrap(connect(running, receive_bytes=16_384)) as sock,
    ):
        sock.sendall(head(COMPLETIONS, len(body)) + body)
        answer = sock.recv(1_000)
        size = len(answer.partition(b"\r\n\r\n")[0]) + 4 + int(answer.partition(b"content-length: ")[2].split()[0])
        [protocol] = running.server.server_state.connections
        wait_until(lambda: protocol.flow.write_paused, "it waits for its reader")
        time.sleep(0.5)
        assert not protocol._answered.response_complete
        assert not protocol.transport.is_closing()
        answer += take(sock, size - len(answer))
        assert len(answer) == size
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 4_500
        assert sock.recv(1) == b""  # idle, therefore closed


@pytest.mark.parametrize("num_bytes", [0, 1, MAX_UNSENT_BYTES, MAX_UNSENT_BYTES + 1, 3 * MAX_UNSENT_BYTES])
def test_paced_answers_split_whole_bodies_but_not_stream_events(num_bytes: int) -> None:
    """A stream's messages stay whole, since a keep-alive comment may be sent between two of them."""
    body = bytes(number % 251 for number in range(num_bytes))
    given = [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body", "body": body, "more_body": True},
        {"type": "http.response.body", "body": body},
    ]
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in given:
            await send(message)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(connection.PacedAnswers(app)({"type": "http"}, send, send))
    assert sent[:2] == given[:2]
    pieces = sent[2:]
    assert b"".join(piece["body"] for piece in pieces) == body
    assert all(len(piece["body"]) <= MAX_UNSENT_BYTES for piece in pieces)
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]


@pytest.mark.turn(12)
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_f23_closing_connection_with_unread_answer_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is complete, its rest is buffered in this process, and the client does not read."""
    cuts = list[tuple[bool, bool]]()
    abort = connection.BoundedHttpProtocol._abort

    def watched(protocol: connection.BoundedHttpProtocol) -> None:
        cuts.append((protocol.transport.is_closing(), protocol.transport.get_write_buffer_size() > 0))
        abort(protocol)

    monkeypatch.setattr(connection.BoundedHttpProtocol, "_abort", watched)
    body = json.dumps({"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "logprobs": 5}).encode()
    options = {"max_model_len": 5_000, "num_blocks": 400}
    with (
        run_server(engine_options=options, idle_timeout_s=1.0, keep_alive_timeout_s=600.0, send_bytes=4096) as running,
        connect(running, receive_bytes=4096) as sock,
    ):
        lines = head(COMPLETIONS, len(body)).replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n")
        sock.sendall(lines + body)
        wait_until(lambda: cuts, "it is cut off")
        assert cuts == [(True, True)]
        wait_until(lambda: not running.server.server_state.connections, "it is gone")
        with pytest.raises(ConnectionResetError):  # the system has dropped its buffer
            take(sock, 1 << 30)


@pytest.mark.turn(12)
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say")
def test_f23_unread_slow_stream_is_aborted_before_writes_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system buffers the stream for a long time, so writing never pauses. The place is given back all the same."""
    pauses = count_calls(monkeypatch, connection.BoundedHttpProtocol, "pause_writing")
    executor = FakeExecutor(step_s=0.05)
    body = json.dumps({"prompt": "hello", "max_tokens": 1_500, "ignore_eos": True, "stream": True}).encode()
    with (
        run_server(executor, idle_timeout_s=1.0) as running,
        connect(running, receive_bytes=2048) as sock,
    ):
        sock.sendall(head(COMPLETIONS, len(body)) + body)
        streams = running.server._service.limiter.streams
        wait_until(lambda: streams.num_held == 1, "it has a place")
        wait_until(lambda: not streams.num_held, "its place is given back")
        wait_until(lambda: running.num_unfinished == 0, "it is aborted")
    assert not pauses


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket of both families")
def test_ipv6_wildcard_socket_accepts_ipv4() -> None:
    with listening("::") as door:
        port = door.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port), timeout=DEADLINE_S):
                door.accept()[0].close()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no such limit")
def test_accepted_sockets_have_no_tcp_user_timeout() -> None:
    """Linux's timeout also runs while a slow reader reads: a reader of 10 KB/s was cut off after two timeouts."""
    with listening("127.0.0.1") as door, socket.create_connection(door.getsockname()):
        server, _ = door.accept()
        with server:
            assert server.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


@pytest.mark.turn(8)
def test_f23_connection_of_client_that_never_reads_is_closed() -> None:
    options = {"max_model_len": 200_000, "num_blocks": 13_000}
    body = json.dumps({"prompt": "hello", "max_tokens": 150_000, "ignore_eos": True, "stream": True}).encode()
    limits = {"max_unread_outputs": 50, "keep_alive_timeout_s": 1.0, "idle_timeout_s": 1.0}
    with run_server(engine_options=options, **limits) as running:
        with connect(running, receive_bytes=4096) as sock:
            sock.sendall(head(COMPLETIONS, len(body)) + body)
            wait_until(lambda: running.server.server_state.connections, "it is connected")
            wait_until(lambda: not running.server.server_state.connections, "it is cut off")
        wait_until(lambda: running.server._service.limiter.streams.num_held == 0, "its place is given back")
        assert running.num_unfinished == 0


@pytest.mark.turn(12)
def test_slow_reader_that_catches_up_gets_whole_stream() -> None:
    """A slow reader that catches up loses nothing."""
    executor = FakeExecutor(step_s=0.001)
    with run_server(executor, max_unread_outputs=1000) as running, running.http() as http:
        body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
        text = ""
        with http.stream("POST", COMPLETIONS, json=body) as stream:
            for number, line in enumerate(stream.iter_lines()):
                if number % 50 == 0:
                    time.sleep(0.1)
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
    assert text == answer_text(5, 0, 300)


@pytest.mark.parametrize("stream", [False, True])
def test_expired_request_answers_request_timeout(stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    asked: dict[str, Any] = {"json": body, "headers": {"X-Request-Timeout": "100"}}
    with run_server(FakeExecutor(step_s=0.02)) as running, running.http() as http, ThreadPoolExecutor(1) as pool:
        if stream:
            with http.stream("POST", COMPLETIONS, **asked) as response:
                events = response.iter_lines()
                assert next(events).startswith("data: {")
                let_time_pass(running, 100)
                *_, last, _, end, _ = events
            assert (response.status_code, end) == (200, "data: [DONE]")
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            asking = pool.submit(http.post, COMPLETIONS, **asked)
            wait_until(lambda: running.num_blocks_in_use, "it is computed")
            let_time_pass(running, 100)
            response = asking.result(DEADLINE_S)
            assert response.status_code == 504
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
        assert error["code"] == "request_timeout"
        assert running.num_unfinished == 0


def test_request_timeout_s_caps_timeout_header() -> None:
    executor = FakeExecutor(step_s=0.02)
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
    with run_server(executor, request_timeout_s=0.2) as running, running.http() as http:
        for headers in ({}, {"X-Request-Timeout": "100"}):
            assert http.post(COMPLETIONS, json=body, headers=headers).status_code == 504


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "", "1e400"])
def test_s11_invalid_timeout_header_answers_400(shared: Running, value: str) -> None:
    with shared.http() as http:
        response = http.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Timeout": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.turn(8)
def test_f28_requests_over_max_open_requests_answer_429() -> None:
    executor = FakeExecutor(step_s=0.005)
    statuses: list[int] = []
    lock = threading.Lock()
    with run_server(executor, max_open_requests=8, engine_options={"max_num_seqs": 4}) as running:

        def ask() -> None:
            with running.http() as http:
                response = http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 40, "ignore_eos": True})
            with lock:
                statuses.append(response.status_code)
            if response.status_code == 200:
                assert response.json()["choices"][0]["text"] == answer_text(5, 0, 40)
            else:
                assert int(response.headers["retry-after"]) >= 1

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(statuses) == 40
        assert statuses.count(200) + statuses.count(429) == 40
        assert statuses.count(200) >= 8
        assert statuses.count(429) > 0
        assert running.server._service.limiter.streams.num_held == 0


def test_f28_full_server_answers_429_without_reading_body() -> None:
    """Every route with a body refuses. Each refusal counts once, and the one place is still usable afterwards."""
    executor = FakeExecutor(step_s=0.005)
    with run_server(executor, max_open_requests=1) as running, running.http() as http:
        service = running.server._service
        endless = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=endless) as stream:
            lines = stream.iter_lines()
            next(lines)
            routes = {r.path for r in running.server.config.app.routes if "POST" in (getattr(r, "methods", None) or ())}  # type: ignore[union-attr]
            refused = {path for route in ROUTES if route.endpoint == "ollama.models:refuse" for path in route.paths}
            routes -= refused  # these routes read no body
            for path in routes:
                with contextlib.closing(connect(running)) as sock:
                    sock.sendall(head(path, 1 << 19))
                    answer = read_until(sock, b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 429 "), path
                assert b"retry-after: " in answer, path
            assert service.limiter.streams.num_held == 1

            def num_refused() -> float:
                (told,) = service.metrics._refused.collect()
                return sum(each.value for each in told.samples if each.name.endswith("_total"))

            wait_until(lambda: num_refused() >= len(routes), "each is counted, which is after its answer")
            assert num_refused() == len(routes)
        wait_until(lambda: service.limiter.streams.num_held == 0, "the place is given back")
        check_serves(running)


def test_every_request_ending_releases_its_permit() -> None:
    executor = FakeExecutor(step_s=0.005)
    with run_server(executor, max_open_requests=2) as running, running.http() as http:
        limiter = running.server._service.limiter
        for body, status in [
            ({"prompt": "hello", "max_tokens": 2}, 200),
            ({"prompt": "hello", "max_tokens": 2, "stream": True}, 200),
            ({"prompt": [300]}, 400),
            ({"prompt": "x" * 5000}, 400),
            ({"prompt": [300], "stream": True}, 400),
        ]:
            assert http.post(COMPLETIONS, json=body).status_code == status
            wait_until(lambda: limiter.streams.num_held == 0, "the place is given back")
        executor.fail_next = True
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 500
        assert limiter.streams.num_held == 0
        endless = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=endless) as stream:
            lines = stream.iter_lines()  # dropping the iterator closes the connection
            next(lines)
            assert limiter.streams.num_held == 1
        wait_until(lambda: limiter.streams.num_held == 0, "the place of who left is given back")
