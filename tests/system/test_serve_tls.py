"""`octavo serve` with TLS, with the one key from its environment."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import time
from pathlib import Path

import httpx
import pytest
from certificates import make_certificate
from serving_process import DEADLINE_S, STORY, Stream, serve_lasting

KEY = "a-key-that-nobody-else-may-read"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def servers(certificate):
    cert, private_key = certificate
    options = ("--ssl-certfile", cert, "--ssl-keyfile", private_key, "--body-timeout", "1")
    with serve_lasting(*options, key=KEY, certificate=cert, OCTAVO_API_KEY=KEY) as running:
        yield running


@pytest.fixture
def served(servers):
    return servers()


@pytest.mark.turn(8)
def test_tls_server_answers_and_streams(served):
    assert served.http.base_url.scheme == "https"
    assert served.answer() == "12 + 30 = 42"
    whole = served.http.post("/v1/completions", json={**STORY, "max_tokens": 50, "stream": False}).json()
    stream = Stream(served)
    stream.ended_within(DEADLINE_S)
    assert stream.events[-1] == "[DONE]"
    assert whole["choices"][0]["text"]
    with pytest.raises(httpx.ConnectError):  # the certificate is self-signed
        httpx.get(f"{served.http.base_url}/health", trust_env=False)


@pytest.mark.turn(12)
def test_sighup_loads_new_certificate_and_rejects_mismatched_one(served, certificate, tmp_path):
    """This needs no key file. Without a handler, SIGHUP would end the process."""
    files = [Path(path) for path in certificate]
    old = [path.read_text() for path in files]
    new = [Path(path).read_text() for path in make_certificate(tmp_path)]
    address = served.http.base_url.host, served.http.base_url.port

    def presented() -> str:
        return ssl.get_server_certificate(address)

    def renew(texts: list[str]) -> None:
        for path, text in zip(files, texts, strict=True):
            path.write_text(text)
        served.process.send_signal(signal.SIGHUP)

    before = presented()
    renew(new)
    served.wait_until(lambda: presented() != before, 5)
    renewed = presented()
    assert ssl.PEM_cert_to_DER_cert(new[0]) == ssl.PEM_cert_to_DER_cert(renewed)
    renew([old[0], new[1]])  # certificate and key do not match
    time.sleep(0.5)
    assert presented() == renewed
    renew(old)
    served.wait_until(lambda: presented() == before, 5)
    assert served.answer() == "12 + 30 = 42"


@pytest.mark.turn(12)
def test_incomplete_headers_close_tls_connection_after_timeout(served, certificate):
    context = ssl.create_default_context(cafile=certificate[0])
    address = (served.http.base_url.host, served.http.base_url.port)
    with socket.create_connection(address) as plain, context.wrap_socket(plain, server_hostname=address[0]) as client:
        client.settimeout(DEADLINE_S)
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        start = time.monotonic()
        with contextlib.suppress(ssl.SSLEOFError):  # the server closes without TLS's close message
            assert client.recv(1) == b""
        assert time.monotonic() - start < DEADLINE_S / 3


def test_s3_api_key_is_not_in_command_lines_engine_or_log(served):
    """Every user can read command lines. Only the process's own user can read its environment."""
    assert served.http.get("/v1/models").status_code == 200
    assert served.http.get("/v1/models", headers={"Authorization": "Bearer no"}).status_code == 401
    server = served.engine.parent()
    assert server.environ()["OCTAVO_API_KEY"] == KEY  # so the search below could find it
    for process in (served.engine, server):
        assert not any(KEY in part for part in process.cmdline())
    assert not any(KEY in value for value in served.engine.environ().values())
    assert KEY not in "".join(served.log)


@pytest.mark.turn(12)
def test_f25_engine_exits_after_server_is_killed(served):
    stream, engine = Stream(served, num_stories=16), served.engine
    served.process.kill()
    stream.ended_within(10)
    engine.wait(20)
