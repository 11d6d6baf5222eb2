"""The set of engines: from a file that changes, and from a DNS name."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from urllib.parse import urlsplit

import pytest
from fakes import FakeExecutor
from router.routing import run_router
from running import run_server, wait_until

from octavo.router.discovery import EnginesFile, EnginesOfName

BODY = {"prompt": "hello", "max_tokens": 5}


@pytest.mark.turn(12)
def test_engines_file_change_keeps_open_streams(tmp_path):
    path = tmp_path / "engines.txt"
    with run_server(FakeExecutor(step_s=0.002)) as first, run_server() as second:
        path.write_text(f"{first.url}  # the first\n\n# none\n")
        with run_router(engines_file=path, num_ready=1) as routing, routing.http() as http:
            endless = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=endless) as stream:
                lines = stream.iter_lines()
                next(lines)
                path.write_text(f"{second.url}\n")
                wait_until(lambda: list(routing.service.pool.engines) == [second.url], "the file is read again")
                routing.wait_ready(1)
                num_steps = second.executor.num_steps
                assert http.post("/v1/completions", json=BODY).status_code == 200
                assert second.executor.num_steps > num_steps
                left = [line for line in lines if line]
            assert json.loads(left[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert left[-1] == "data: [DONE]"


def test_unusable_engines_file_is_logged_and_keeps_engines(tmp_path, caplog):
    path = tmp_path / "engines.txt"
    source = EnginesFile(path)

    async def read(text: bytes | None) -> list[str]:
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_bytes(text)
        return [await source.urls() for _ in range(3)][-1]

    async def read_all() -> None:
        with caplog.at_level(logging.ERROR):
            assert await read(None) == []
            assert await read(b"http://a:1\nhttp://b:2") == ["http://a:1", "http://b:2"]
            for number, wrong in enumerate((b"http://a:1\nno address", b"\xff\xfe", None), start=2):
                assert await read(wrong) == ["http://a:1", "http://b:2"]
                assert len(caplog.records) == number
            assert await read(b"http://c:3") == ["http://c:3"]

    asyncio.run(read_all())


def resolves(monkeypatch, answers):
    """Make name resolution return these answers in turn: addresses, or an error."""

    def look_up(host, port, **_):
        assert (host, port) == ("engines.example", 8000)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port))
            for each in answer
        ]

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *_, **more: look_up(host, port, **more))


def test_every_dns_address_becomes_engine(monkeypatch):
    unknown, silent = (socket.gaierror(number, "") for number in (socket.EAI_NONAME, socket.EAI_AGAIN))
    resolves(monkeypatch, [["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"], silent, ["10.0.0.3"], unknown])
    source = EnginesOfName("engines.example:8000")

    async def ask_all() -> list[list[str]]:
        return [await source.urls() for _ in range(4)]

    several = ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    assert asyncio.run(ask_all()) == [several, several, ["http://10.0.0.3:8000"], []]


def test_engine_found_by_dns_serves_requests():
    with run_server() as engine:
        port = urlsplit(engine.url).port
        with run_router(engines_dns=f"localhost:{port}", num_ready=1) as routing, routing.http() as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
            assert [each.url for each in routing.service.pool.ready()] == [engine.url]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_engine_url_accepts_host_name_or_address(name):
    with run_server() as engine:
        url = engine.url.replace("127.0.0.1", name)
        with run_router(url) as routing, routing.http() as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
