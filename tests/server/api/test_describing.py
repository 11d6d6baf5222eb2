"""The routes by which the server describes itself, and fields that it ignores."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from running import connect, read_all, run_server

from octavo.cli.config_file import configuration, describe_configuration
from octavo.config import EngineConfig, ModelConfig, ServerConfig, SpeculativeConfig
from octavo.http.tenants import Tenant, add_key

if TYPE_CHECKING:
    from pathlib import Path

    from running import Running


def test_front_page_links_answer_200(shared: Running) -> None:
    with shared.http() as http:
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        links = [part.partition('"')[0] for part in page.text.split('href="')[1:]]
        assert "/dashboard" in links
        assert {link: http.get(link).status_code for link in links} == dict.fromkeys(links, 200)
        whole = http.post("/", json={"inputs": "hello", "parameters": {"max_new_tokens": 2}})
        assert whole.json()[0]["generated_text"]


def test_front_page_escapes_model_names() -> None:
    with run_server(served_model_names=("<script>",), dashboard=False) as running, running.http() as http:
        page = http.get("/").text
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "/dashboard" not in page


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_reports_model_path_and_max_model_len(shared: Running, path: str) -> None:
    with shared.http() as http:
        told = http.get(path).json()
    assert (told["model_path"], told["is_generation"], told["max_model_len"]) == ("fake", True, 2048)


def test_server_info_requires_key_with_read_metrics(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    may, may_not = add_key(path, Tenant(name="a", read_metrics=True)), add_key(path, Tenant(name="b"))
    with run_server(api_keys_file=path) as running, running.http() as http:
        for route in ("/server_info", "/get_server_info"):
            told = http.get(route, headers={"Authorization": f"Bearer {may}"}).json()
            assert (told["served_model_name"], told["tp_size"]) == ("fake", 1)
            capacity = running.server._service.engine.client.capacity
            assert told["max_total_tokens"] == capacity.num_gpu_blocks * capacity.block_size
            assert told["max_running_requests"] == capacity.max_num_seqs
            assert http.get(route, headers={"Authorization": f"Bearer {may_not}"}).status_code == 403
            assert http.get(route).status_code == 401


def test_configuration_hides_secrets_and_directories(tmp_path: Path) -> None:
    server = ServerConfig(api_key="hush", ssl_certfile=tmp_path / "c.pem", ssl_keyfile=tmp_path / "k.pem")
    told = configuration(server, EngineConfig(model=ModelConfig(model=str(tmp_path))))
    text = json.dumps(told)
    assert "hush" not in text
    assert str(tmp_path.parent) not in text
    assert told["server"]["ssl_keyfile"] == "k.pem"
    assert told["model"]["model"] == tmp_path.name
    assert told["scheduler"]["max_num_seqs"] is None, "the device's default"
    speculative = SpeculativeConfig(method="ngram", verification="rejection")
    assert configuration(server, EngineConfig(speculative=speculative))["speculative"]["verification"] == "rejection"


def test_configuration_shows_template_text_and_hides_url_password() -> None:
    server = ServerConfig(otlp_traces_endpoint="http://user:hush@127.0.0.1:9/v1/traces")
    template = "{{ messages }}" * 500  # longer than the longest file name
    told = configuration(server, EngineConfig(model=ModelConfig(chat_template=template)))
    assert told["model"]["chat_template"] == template
    assert told["server"]["otlp_traces_endpoint"] == "http://...@127.0.0.1:9/v1/traces"
    assert not any("hush" in line for line in describe_configuration(server, EngineConfig()))


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("HTTP/1.1\r\n", 400),
        ("HTTP/1.1\r\nHost: x\r\nHost: x\r\n", 400),
        ("HTTP/1.0\r\nHost: x\r\nHost: y\r\n", 400),
        ("HTTP/1.1\r\nHost: x\r\n", 200),
        ("HTTP/1.0\r\n", 200),
    ],
)
@pytest.mark.parametrize("path", ["/version", "/health"])
def test_missing_or_duplicate_host_header_answers_400(shared: Running, lines: str, status: int, path: str) -> None:
    with connect(shared) as sock:
        sock.sendall(f"GET {path} {lines}Connection: close\r\n\r\n".encode())
        assert read_all(sock).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    "kind", ["application/x-www-form-urlencoded", "text/plain", "text/plain; application/json", "application/jsonx", ""]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/generate", "/tokenize"])
def test_non_json_content_type_answers_415(shared: Running, kind: str, path: str) -> None:
    body = json.dumps({"prompt": "hello", "inputs": "hello", "max_tokens": 1})
    with shared.http() as http:
        response = http.post(path, content=body, headers={"Content-Type": kind})
        assert response.status_code == 415, response.text
        assert "application/json" in response.text
        fine = http.post("/tokenize", content=body, headers={"Content-Type": "Application/JSON; charset=utf-8"})
        assert fine.status_code == 200


def test_body_without_content_type_answers_415(shared: Running) -> None:
    """A page can send a Blob without a type, and the browser does not ask for permission first."""
    with connect(shared) as sock:
        sock.sendall(b'POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}')
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 415 ")


def test_tokenize_accepts_llama_cpp_fields(shared: Running) -> None:
    with shared.http() as http:
        assert http.post("/tokenize", json={"content": "hi"}).json() == {"tokens": [104, 105]}
        assert http.post("/tokenize", json={"content": "", "add_special": True}).json() == {"tokens": []}
        assert http.post("/detokenize", json={"tokens": [104, 105]}).json()["content"] == "hi"
        for refused in ({"parse_special": False}, {"prompt": "hi"}):
            assert http.post("/tokenize", json={"content": "hi", **refused}).status_code == 400
