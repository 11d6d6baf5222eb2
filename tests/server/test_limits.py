"""What a client may cost: floods, trickles, those who do not read, and those who run out of time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from fakes import FakeExecutor, answer_text
from running import DEADLINE_S, run_server, wait_until

from octavo.server.connection import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from running import Running

COMPLETIONS = "/v1/completions"


def connect(running: Running, *, receive_bytes: int | None = None) -> socket.socket:
    host, _, port = running.url.removeprefix("http://").partition(":")
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(DEADLINE_S)
    sock.connect((host, int(port)))
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    try:
        while piece := sock.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        return data
    return data


def head(path: str, num_bytes: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n".encode()


def trickle(sock: socket.socket) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        sock.sendall(b"X")
        time.sleep(0.05)


def check_serves(running: Running) -> None:
    with running.http() as http:
        answer = http.post(COMPLETIONS, json={"prompt": "hello", "max_tokens": 5}).json()
    assert answer["choices"][0]["text"] == answer_text(5, 0, 5)


def flood_in_one_header(sock: socket.socket) -> None:
    sock.sendall(b"GET /version HTTP/1.1\r\nX-Flood: ")
    for _ in range(100):
        sock.sendall(b"a" * 10_000)


def flood_in_many_headers(sock: socket.socket) -> None:
    sock.sendall(b"GET /version HTTP/1.1\r\n" + b"X-Flood: aaaaaaaaaaaaaaaaaaaa\r\n" * 5000 + b"\r\n")


def flood_in_the_path(sock: socket.socket) -> None:
    sock.sendall(b"GET /" + b"a" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize("flood", [flood_in_one_header, flood_in_many_headers, flood_in_the_path])
def test_s8_headers_without_end_are_cut_off(shared: Running, flood) -> None:
    with connect(shared) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            flood(sock)
        answer = read_all(sock)
    if answer or flood is not flood_in_one_header:  # that one sends on, and a reset may overtake the answer
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    check_serves(shared)


def test_large_but_lawful_headers_are_taken(shared: Running) -> None:
    with shared.http() as http:
        assert http.get("/version", headers={"X-Large": "a" * 30_000}).status_code == 200


def test_s8_trailers_are_not_kept(shared: Running) -> None:
    """Headers behind a chunked body: read past, and never collected."""
    body = json.dumps({"prompt": "hello", "max_tokens": 5}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    with connect(shared) as sock:
        sock.sendall(request + f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n")
        wait_until(lambda: shared.server.server_state.connections, "it is connected")
        for _ in range(20):
            sock.sendall(b"a: b\r\n" * 5000)
        kept = [len(each.headers or ()) for each in list(shared.server.server_state.connections)]
        sock.sendall(b"\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert max(kept) < 10
    check_serves(shared)


@pytest.mark.parametrize("size", [1000, 300_000])
def test_one_answer_for_a_body_that_nobody_wanted(size: int) -> None:
    """Its key is wrong: the answer comes at once, and the body that follows is no request of its own."""
    with run_server(api_key="key", body_timeout_s=5.0) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, size))
        first = sock.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 401 ")
        sock.sendall(b"x" * size)
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        rest = read_all(sock)
    assert rest.count(b"HTTP/1.1") == 1
    assert rest.startswith(b"HTTP/1.1 200 ")


def test_a_pipelined_request_has_all_its_time() -> None:
    executor = FakeExecutor(step_s=0.03)
    body = json.dumps({"prompt": "hello", "max_tokens": 40, "ignore_eos": True}).encode()
    with run_server(executor, body_timeout_s=0.4) as running, connect(running) as sock:
        close = head(COMPLETIONS, len(body)).replace(b"Host: x", b"Host: x\r\nConnection: close") + body
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + close)
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer_text(5, 0, 40).encode()[:20] in answer


def test_bodies_that_arrive_together_have_one_budget() -> None:
    with run_server(max_body_bytes=10_000) as running:
        with contextlib.ExitStack() as stack:
            for _ in range(17):
                sock = stack.enter_context(connect(running))
                sock.sendall(head(COMPLETIONS, 10_000) + b'{"prompt": "' + b"x" * 9_900)
            last = sock.recv(1 << 16)
        assert last.startswith(b"HTTP/1.1 429 ")
        check_serves(running)


def test_what_is_no_http_is_an_error_object(shared: Running) -> None:
    with connect(shared) as sock:
        sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"", b"GET /version HTT", b"GET /version HTTP/1.1\r\nHost: x\r\n"])
def test_headers_that_do_not_come_end_the_connection(sent: bytes) -> None:
    with run_server(body_timeout_s=0.3) as running, connect(running) as sock:
        sock.sendall(sent)
        assert read_all(sock) == b""
        check_serves(running)


def test_headers_that_trickle_end_the_connection() -> None:
    with (
        run_server(body_timeout_s=0.5) as running,
        connect(running) as sock,
        pytest.raises((BrokenPipeError, ConnectionResetError)),
    ):
        trickle(sock)


def test_a_trickle_behind_an_answer_ends_the_connection() -> None:
    """Its body is larger than it may be: the answer is there at once, and nobody waits for the rest."""
    with run_server(body_timeout_s=0.5, max_body_bytes=100) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, 10_000))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(sock)


def test_s9_a_body_that_trickles_is_cut_off() -> None:
    with run_server(body_timeout_s=0.4) as running, connect(running) as sock:
        sock.sendall(head(COMPLETIONS, 1000) + b'{"prompt": ')
        answer = sock.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_too_slow" in answer
        check_serves(running)


def test_f23_a_stream_that_nobody_reads_ends_and_costs_no_memory() -> None:
    executor = FakeExecutor(step_s=0.0005)
    options = {"max_model_len": 200_000, "num_blocks": 13_000}
    body = json.dumps({"prompt": "hello", "max_tokens": 150_000, "ignore_eos": True, "stream": True}).encode()
    with run_server(executor, engine_options=options, max_unread_outputs=200) as running:
        with connect(running, receive_bytes=4096) as sock:
            sock.sendall(head(COMPLETIONS, len(body)) + body)
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
            wait_until(lambda: running.num_unfinished == 0, "it is ended")
            assert executor.num_steps < 100_000  # and not by its own end
            assert running.num_blocks_in_use == 0
            check_serves(running)
            answer = read_all(sock)
        assert b"read_too_slowly" in answer  # what was held back has come in the end, with its reason
        wait_until(lambda: running.server._service.admission.num_open == 0, "its place is given back")


def test_f23_the_connection_of_who_never_reads_ends() -> None:
    options = {"max_model_len": 200_000, "num_blocks": 13_000}
    body = json.dumps({"prompt": "hello", "max_tokens": 150_000, "ignore_eos": True, "stream": True}).encode()
    with run_server(engine_options=options, max_unread_outputs=50, idle_timeout_s=1.0) as running:
        with connect(running, receive_bytes=4096) as sock:
            sock.sendall(head(COMPLETIONS, len(body)) + body)
            wait_until(lambda: running.server.server_state.connections, "it is connected")
            wait_until(lambda: not running.server.server_state.connections, "it is cut off")
        wait_until(lambda: running.server._service.admission.num_open == 0, "its place is given back")
        assert running.num_unfinished == 0


def test_slow_is_not_too_slow() -> None:
    """A reader who falls behind and comes back loses nothing."""
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
def test_a_request_whose_time_is_over_is_told_so(stream: bool) -> None:
    executor = FakeExecutor(step_s=0.02)
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    with run_server(executor) as running, running.http() as http:
        response = http.post(COMPLETIONS, json=body, headers={"X-Request-Timeout": "0.3"})
        if stream:
            assert response.status_code == 200
            events = response.text.rstrip().split("\n\n")
            assert events[-1] == "data: [DONE]"
            error = json.loads(events[-2].removeprefix("data: "))["error"]
        else:
            assert response.status_code == 504
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
        assert error["code"] == "request_timeout"
        assert running.num_unfinished == 0


def test_the_server_s_own_limit_of_time_holds() -> None:
    executor = FakeExecutor(step_s=0.02)
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
    with run_server(executor, request_timeout_s=0.2) as running, running.http() as http:
        for headers in ({}, {"X-Request-Timeout": "100"}):
            assert http.post(COMPLETIONS, json=body, headers=headers).status_code == 504


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "", "1e400"])
def test_s11_a_timeout_that_is_no_time(shared: Running, value: str) -> None:
    with shared.http() as http:
        response = http.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Timeout": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Timeout"


def test_f28_no_more_are_taken_than_there_is_room_for() -> None:
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
        assert running.server._service.admission.num_open == 0


def test_f28_a_full_server_refuses_with_the_body_unread() -> None:
    """Every route that takes a place, and no other; a refusal counts once, and the one place is still there after."""
    executor = FakeExecutor(step_s=0.005)
    bodies = {"/tokenize", "/detokenize", "/v1/messages/count_tokens"}
    with run_server(executor, max_open_requests=1) as running, running.http() as http:
        service = running.server._service
        endless = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=endless) as stream:
            lines = stream.iter_lines()
            next(lines)
            routes = {r.path for r in running.server.config.app.routes if "POST" in (getattr(r, "methods", None) or ())}  # type: ignore[union-attr]
            for path in routes:
                with contextlib.closing(connect(running)) as sock:
                    sock.settimeout(0.3 if path in bodies else DEADLINE_S)
                    sock.sendall(head(path, 1 << 19))
                    try:
                        answer = sock.recv(1 << 16)
                    except TimeoutError:
                        answer = b"waits for the body"
                if path in bodies:
                    assert answer == b"waits for the body", path
                else:
                    assert answer.startswith(b"HTTP/1.1 429 "), path
                    assert b"retry-after: " in answer, path
            assert service.admission.num_open == 1
            (told,) = service.metrics._refused.collect()
            assert sum(each.value for each in told.samples if each.name.endswith("_total")) == len(routes - bodies)
        wait_until(lambda: service.admission.num_open == 0, "the place is given back")
        check_serves(running)


def test_a_place_comes_back_however_a_request_ends() -> None:
    executor = FakeExecutor(step_s=0.005)
    with run_server(executor, max_open_requests=2) as running, running.http() as http:
        admission = running.server._service.admission
        for body, status in [
            ({"prompt": "hello", "max_tokens": 2}, 200),
            ({"prompt": "hello", "max_tokens": 2, "stream": True}, 200),
            ({"prompt": [300]}, 400),
            ({"prompt": "x" * 5000}, 400),
            ({"prompt": [300], "stream": True}, 400),
        ]:
            assert http.post(COMPLETIONS, json=body).status_code == status
            wait_until(lambda: admission.num_open == 0, "the place is given back")
        executor.fail_next = True
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 500
        assert admission.num_open == 0
        endless = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with http.stream("POST", COMPLETIONS, json=endless) as stream:
            lines = stream.iter_lines()  # to let go of it closes the connection
            next(lines)
            assert admission.num_open == 1
        wait_until(lambda: admission.num_open == 0, "the place of who left is given back")
