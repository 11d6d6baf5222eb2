"""Threats and faults with the ids of docs/reliability.md, against a real server with a fake executor."""

from __future__ import annotations

import gc
import hmac
import json
import logging
import socket
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
from fakes import TEXT, FakeChatTemplate, FakeExecutor, answer_text
from running import ask_as_written, run_server, wait_until

from octavo.config.access import AccessConfig
from octavo.errors import ModelError
from octavo.http.tenants import Keyring
from octavo.models.weight_files import find_weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from running import Running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hello"}


def test_s4_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(ModelError, match="safetensors"):
        find_weight_files(tmp_path)
    refusal = (
        "from pathlib import Path\nfrom octavo.models.weight_files import find_weight_files\n"
        "from octavo.errors import ModelError\n"
        f"try: find_weight_files(Path({str(tmp_path)!r}))\nexcept ModelError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", refusal], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused", "what guards is no assert"


def test_s7_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    keyring = Keyring.of(AccessConfig(api_key="the right key"))
    assert keyring.find(b"the right key") is not None
    num_right = len(compared)
    for wrong in (b"", b"t", b"the right kez", b"the right key ", b"x" * 5000):
        assert keyring.find(wrong) is None
    assert num_right == 1
    assert all(len(a) == len(b) for a, b in compared), "a digest is as long as any other"


@pytest.mark.parametrize(
    ("path", "fields", "parameter"),
    [
        (COMPLETIONS, {"n": 2**31}, "n"),
        (COMPLETIONS, {"n": 129}, "n"),
        (COMPLETIONS, {"best_of": 10**9}, "best_of"),
        (COMPLETIONS, {"logprobs": 10**9}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 10**9}, "prompt_logprobs"),
        (COMPLETIONS, {"stop": ["a"] * 100_000}, "stop"),
        (COMPLETIONS, {"stop": "a" * 100_000}, "stop"),
        (COMPLETIONS, {"max_tokens": 2**63}, "max_tokens"),
        (COMPLETIONS, {"prompt": ["a"] * 100_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 1000, "n": 100}, "n"),
        (CHAT, {"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]}, "tools"),
        ("/v1/embeddings", {"input": ["a"] * 100_000}, "input"),
        ("/v1/responses", {"max_output_tokens": 2**40}, "max_output_tokens"),
    ],
)
def test_s10_huge_counts_are_refused_before_any_step(
    shared: Running, path: str, fields: dict[str, Any], parameter: str
) -> None:
    own = {"input": "a"} if path in {"/v1/embeddings", "/v1/responses"} else {"prompt": "a", "max_tokens": 2}
    body = {**({} if path == "/v1/embeddings" else {"messages": [USER]}), **own, **fields}
    with shared.http() as http:
        steps = shared.executor.num_steps
        response = http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == parameter
        assert shared.executor.num_steps == steps


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"self": 1}},
    ],
)
def test_s14_request_cannot_set_chat_template(shared: Running, fields: dict[str, Any]) -> None:
    with shared.http() as http:
        for path in (CHAT, "/tokenize"):
            response = http.post(path, json={"messages": [USER], "max_tokens": 1, **fields})
            assert response.status_code == 400
            assert response.json()["error"]["param"] in fields


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1}),
        ("/v1/responses/input_tokens", {"input": "hello"}),
        ("/v1/messages", {"model": "fake", "messages": [USER], "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"model": "fake", "messages": [USER]}),
    ],
)
def test_s14_other_routes_refuse_chat_template(shared: Running, path: str, body: dict[str, Any]) -> None:
    with shared.http() as http:
        assert http.post(path, json={**body, "chat_template": None}).status_code == 200
        response = http.post(path, json={**body, "chat_template": "{{ 1 }}"})
        assert response.status_code == 400
        assert "chat_template" in response.json()["error"]["message"]


def test_s16_client_urls_are_never_fetched(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **more: Any) -> Any:
        if "127.0.0.1" not in str(host):
            asked.append(host)
        return real("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    image = {"type": "image_url", "image_url": {"url": "http://metadata.internal/latest"}}
    source = {"type": "image", "source": {"type": "url", "url": "http://metadata.internal/latest"}}
    with shared.http() as http:
        for path, part in ((CHAT, image), ("/v1/messages", source), ("/v1/messages", {**source, "type": "document"})):
            body = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": [part]}]}
            assert http.post(path, json=body).status_code == 400
        item = {"role": "user", "content": [{"type": "input_image", "image_url": "http://metadata.internal/latest"}]}
        assert http.post("/v1/responses", json={"input": [item]}).status_code == 400
    assert asked == []


def test_s19_tool_call_text_is_never_executed(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    wicked = f"__import__('pathlib').Path({str(owned)!r}).touch()"
    answers = [
        f'<tool_call>{{"name": "now", "arguments": {{"a": {json.dumps(wicked)}}}}}</tool_call>',
        f'<tool_call>{{"name": "now", "arguments": {wicked}}}</tool_call>',
        f'<tool_call>{{"name": {json.dumps(wicked)}, "arguments": {{}}}}</tool_call>',
        f"<tool_call>{wicked}</tool_call>",
    ]
    tool = {"type": "function", "function": {"name": "now"}}
    for answer in answers:
        engine = {"chat_template": FakeChatTemplate("<tool_call>")}
        with run_server(FakeExecutor(answer=answer), engine_options=engine) as running, running.http() as http:
            message = http.post(CHAT, json={"messages": [USER], "tools": [tool]}).json()["choices"][0]["message"]
            told = (message["content"] or "") + "".join(
                call["function"]["arguments"] for call in message.get("tool_calls", [])
            )
            assert "__import__" in told
    assert not owned.exists()


def test_s20_errors_reveal_no_path_or_memory_address() -> None:
    executor = FakeExecutor()
    with run_server(executor) as running, running.http() as http:
        executor.fail_next = True
        replies = [
            http.post(COMPLETIONS, json={"prompt": "a"}),
            http.post("/nothing/at/all"),
            http.post(COMPLETIONS, content=b"{"),
            http.get("/v1/models/..%2f..%2fetc%2fpasswd"),
            http.request("PUT", COMPLETIONS),
        ]
        executor.die = True
        replies.append(http.post(COMPLETIONS, json={"prompt": "a"}))
    assert [reply.status_code for reply in replies] == [500, 404, 400, 404, 405, 503]
    for reply in replies:
        for forbidden in ("secret", "site-packages", "Traceback", ".py", "0x7f", "/work", "/home", "/usr"):
            assert forbidden not in reply.text, reply.text


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "fake/../../x", "\0", "fake\0", "%2e%2e%2f", "file:///etc/passwd"]
)
def test_s22_model_name_is_never_used_as_path(shared: Running, name: str) -> None:
    with shared.http() as http:
        for path, body in (
            (COMPLETIONS, {"prompt": "a"}),
            (CHAT, {"messages": [USER]}),
            ("/v1/embeddings", {"input": "a"}),
            ("/v1/messages", {"messages": [USER], "max_tokens": 1}),
            ("/tokenize", {"prompt": "a"}),
        ):
            response = http.post(path, json={"model": name, **body})
            assert response.status_code == 404
            assert "root:" not in response.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../../etc/passwd",
        "/v1/models/../../../../../../../../../../etc/passwd",
        "/v1/models/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/models//etc/passwd",
        "/v1/models/fake%00",
        "/../../../etc/passwd",
        "//etc/passwd",
    ],
)
def test_s22_url_paths_cannot_traverse_directories(
    shared: Running, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.audit")
    with shared.http() as http:
        response = ask_as_written(http, path)
    assert response.status_code == 404
    assert list(response.json()) == ["error"]
    assert "root:" not in response.text
    wait_until(lambda: caplog.records, "it is written down")
    assert [json.loads(record.message)["path"] for record in caplog.records] == [unquote(path)]


@pytest.mark.turn(12)
def test_f27_overload_answers_every_request_with_200_or_429() -> None:
    executor = FakeExecutor(step_s=0.001)
    options = {"max_num_seqs": 4}
    with run_server(executor, engine_options=options, max_open_requests=12) as running, running.http() as http:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(40) as pool:
            body = {"prompt": "hello", "max_tokens": 20}
            replies = list(pool.map(lambda _: http.post(COMPLETIONS, json=body), range(120)))
        statuses = {reply.status_code for reply in replies}
        assert statuses == {200, 429}
        for reply in replies:
            if reply.status_code == 200:
                assert reply.json()["choices"][0]["text"] == answer_text(5, 0, 20)
            else:
                assert int(reply.headers["retry-after"]) >= 1
        wait_until(lambda: running.num_blocks_in_use == 0, "all blocks are free")


def streamed_text(running: Running, body: dict[str, Any]) -> str:
    with running.http() as http:
        lines = http.post(COMPLETIONS, json={**body, "stream": True}).text.split("\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.sweep(12)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_f29_stream_never_splits_character(shared: Running, first: int) -> None:
    size = len(TEXT.encode())
    with shared.http() as http:
        for limit in range(first, size + 1, 3):
            body = {"prompt": "hello", "max_tokens": limit}
            whole = http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
            assert streamed_text(shared, body) == whole == answer_text(5, 0, limit)
            assert "\ufffd" not in whole[:-1]


@pytest.mark.sweep(12)
@pytest.mark.parametrize("first", [0, 3, 6])
def test_f30_text_after_stop_string_is_never_sent(shared: Running, first: int) -> None:
    full = answer_text(5)
    with shared.http() as http:
        for start in range(first, len(full) - 4, 9):
            for length in (1, 2, 4):
                stop = full[start : start + length]
                for include in (False, True):
                    body = {"prompt": "hello", "max_tokens": 200, "stop": stop, "include_stop_str_in_output": include}
                    whole = http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
                    place = full.index(stop)
                    assert whole == full[: place + (length if include else 0)]
                    assert streamed_text(shared, body) == whole


@pytest.mark.turn(12)
def test_f31_finished_requests_are_garbage_collected() -> None:
    def count() -> int:
        gc.collect()
        return len(gc.get_objects())

    with run_server() as running, running.http() as http:

        def some(number: int) -> None:
            for index in range(number):
                body = {"prompt": f"hello {index % 7}", "max_tokens": 5}
                http.post(COMPLETIONS, json=body)
                http.post(COMPLETIONS, json={**body, "stream": True})
                http.post(COMPLETIONS, json={**body, "n": 0})

        some(40)
        counts = [count()]
        for _ in range(3):
            some(20)
            counts.append(count())
        growth = [after - before for before, after in pairwise(counts)]
        assert min(growth) < 40, "less than one object a request; other threads of this process add some at times"
