"""Text to token ids and back over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeChatTemplate
from running import run_server

from octavo.server.api import tokenizing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from running import Running

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "look"}}
REFUSED = [
    *(("/tokenize", name, off) for name, off in tokenizing._UNSUPPORTED.items()),
    *(("/detokenize", name, off) for name, off in tokenizing._UNSUPPORTED_BACK.items()),
]
BODIES = {"/tokenize": [{"prompt": "hi"}, {"content": "hi"}, HELLO], "/detokenize": [{"tokens": [104, 105]}]}


@pytest.fixture
def http(shared: Running) -> Iterator[httpx.Client]:
    with shared.http() as client:
        yield client


def test_tokenize_and_detokenize_text(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"model": "fake", "prompt": "狐!"}).json()
    assert answer == {"count": 4, "max_model_len": 2048, "tokens": [231, 139, 144, 33]}
    assert "token_strs" not in http.post("/tokenize", json={"prompt": "a", "return_token_strs": None}).json()
    answer = http.post("/tokenize", json={"prompt": "a", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["<97>"]
    assert http.post("/detokenize", json={"tokens": [231, 139, 144, 33, 256]}).json() == {
        "prompt": "狐!<eos>",
        "content": "狐!<eos>",
    }
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": "", "content": ""}


def test_tokenized_messages_equal_chat_prompt(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json=HELLO).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "<user>hi\n<assistant>"
    chat = http.post("/v1/chat/completions", json={**HELLO, "max_tokens": 1}).json()
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    tokens = http.post("/tokenize", json={**HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "<user>hi\n"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {**HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {**HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [257]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_invalid_tokenize_fields_are_refused_by_parameter(
    http: httpx.Client, route: str, body: dict[str, Any], param: str
) -> None:
    import json

    response = http.post(route, content=json.dumps(body))
    assert response.status_code == 400, response.text
    if "\\ud800" not in json.dumps(body):
        assert response.json()["error"]["param"] == param
    assert http.post(route, json={"model": "other", "prompt": "a", "tokens": []}).status_code == 404


def test_with_pieces_returns_llama_cpp_pieces(http: httpx.Client) -> None:
    """A piece is `{"id": ..., "piece": text}`, or has a list of bytes if it is not text by itself."""
    answer = http.post("/tokenize", json={"content": "é!", "with_pieces": True}).json()
    assert answer == {
        "tokens": [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}, {"id": 33, "piece": "!"}],
    }
    for off in (False, None):
        assert http.post("/tokenize", json={"content": "é!", "with_pieces": off}).json() == {"tokens": [195, 169, 33]}
    for body in ({"prompt": "a"}, HELLO):
        response = http.post("/tokenize", json={**body, "with_pieces": True})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "with_pieces")


def test_skip_special_tokens_omits_special_tokens(http: httpx.Client) -> None:
    body = {"tokens": [97, 256, 98]}
    assert http.post("/detokenize", json={**body, "skip_special_tokens": True}).json()["prompt"] == "ab"
    for shown in (False, None):
        assert http.post("/detokenize", json={**body, "skip_special_tokens": shown}).json()["prompt"] == "a<eos>b"


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("route", "name", "off"), REFUSED)
def test_unsupported_tokenize_fields_are_refused_by_name(
    http: httpx.Client, route: str, name: str, off: tuple[Any, ...]
) -> None:
    for body in BODIES[route]:
        plain = http.post(route, json=body).json()
        for value in (None, *off):
            assert http.post(route, json={**body, name: value}).json() == plain
        response = http.post(route, json={**body, name: {"switched": "on"}})
        assert (response.status_code, response.json()["error"].get("param")) == (400, name)


def test_chat_template_fields_change_tokenize_as_chat(http: httpx.Client) -> None:
    template = FakeChatTemplate("<tool_call>")
    asked: list[dict[str, Any]] = [
        {"reasoning_effort": "low"},
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"enable_thinking": True, "chat_template_kwargs": {"a": 1}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    ]
    with run_server(engine_options={"chat_template": template}) as running, running.http() as client:
        for more in asked:
            tokens = client.post("/tokenize", json={**HELLO, **more}).json()["tokens"]
            told = template.options
            body = {**HELLO, **more, "max_tokens": 1, "return_token_ids": True}
            assert client.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == tokens
            assert template.options == told
        different = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
        for wrong, param in (({"tool_choice": "required"}, "tool_choice"), (different, "enable_thinking")):
            response = client.post("/tokenize", json={**HELLO, **wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_sampling_fields_leave_tokenize_unchanged(http: httpx.Client) -> None:
    """Gateways send whole requests to count their tokens."""
    more = {"max_tokens": 5, "temperature": 0, "guided_json": {}, "n_predict": 5, "mirostat": 2, "stop": "x"}
    assert http.post("/tokenize", json={**HELLO, **more}).json() == http.post("/tokenize", json=HELLO).json()
