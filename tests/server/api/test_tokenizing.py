"""Text to token ids and back over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from running import Running

HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def http(shared: Running) -> Iterator[httpx.Client]:
    with shared.http() as client:
        yield client


def test_a_text(http: httpx.Client) -> None:
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


def test_a_conversation_is_what_a_chat_would_send(http: httpx.Client) -> None:
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
def test_what_cannot_be_read(http: httpx.Client, route: str, body: dict[str, Any], param: str) -> None:
    import json

    response = http.post(route, content=json.dumps(body))
    assert response.status_code == 400, response.text
    if "\\ud800" not in json.dumps(body):
        assert response.json()["error"]["param"] == param
    assert http.post(route, json={"model": "other", "prompt": "a", "tokens": []}).status_code == 404
