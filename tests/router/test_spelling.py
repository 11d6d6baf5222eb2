"""How each API spells an error and the end of a stream."""

from __future__ import annotations

import json

import pytest
from octavo.router.spelling import error_event, error_response, is_last_event

from octavo.http.errors import HttpError

ERROR = HttpError(503, "gone", "server_error", param="model", code="engine_lost")


def test_error_event_is_that_of_the_path():
    event = error_event(ERROR, "/v1/completions")
    assert event == b"data: " + json.dumps(ERROR.body, separators=(",", ":")).encode() + b"\n\ndata: [DONE]\n\n"
    for path, begin, body in (
        ("/generate_stream", b"data: ", ERROR.tgi_body),
        ("/api/chat", b"", ERROR.ollama_body),
        ("/v1/messages", b"event: error\ndata: ", ERROR.anthropic_body),
    ):
        event = error_event(ERROR, path)
        assert event.startswith(begin)
        assert json.loads(event.removeprefix(begin)) == body
        assert event.endswith(b"\n" if path == "/api/chat" else b"\n\n")


@pytest.mark.parametrize(("code", "told"), [("engine_lost", "engine_lost"), (None, "server_error")])
def test_error_event_of_responses_names_a_code(code, told):
    event = error_event(HttpError(503, "gone", "server_error", param="model", code=code), "/v1/responses")
    expected = {"type": "error", "code": told, "message": "gone", "param": "model", "sequence_number": 0}
    assert json.loads(event.removeprefix(b"event: error\ndata: ")) == expected


@pytest.mark.parametrize(
    ("path", "key"), [("/generate", "error_type"), ("/v1/completions", "error"), ("/", "error_type")]
)
def test_whole_error_is_spelled_as_the_path_does(path, key):
    response = error_response(ERROR, path)
    assert response.status_code == 503
    assert key in json.loads(response.body)


@pytest.mark.parametrize(
    ("event", "path", "is_last"),
    [
        (b"data: [DONE]", "/v1/completions", True),
        (b'data: {"a":"data: [DONE]"}', "/v1/completions", False),
        (b"event: message_stop\ndata: {}", "/v1/messages", True),
        (b"event: message_stop\r\ndata: {}", "/v1/messages", True),
        (b"event: error\ndata: {}", "/v1/messages", True),
        (b"event: message_stopped\ndata: {}", "/v1/messages", False),
        (b"data: [DONE]", "/v1/messages", False),
        *((b"event: response.%b\ndata: {}" % end, "/v1/responses", True) for end in (b"completed", b"incomplete")),
        (b"event: response.failed\ndata: {}", "/v1/responses", True),
        (b"event: error\ndata: {}", "/v1/responses", True),
        (b"event: response.created\ndata: {}", "/v1/responses", False),
        (b'data:{"token":{},"details":{"a":1}}', "/generate_stream", True),
        (b'data:{"error":"x"}', "/generate_stream", True),
        (b'data:{"token":{},"details":null}', "/generate_stream", False),
        (b'{"done":true}', "/api/chat", True),
        (b'{"error":"x"}', "/api/chat", True),
        (b'{"done":false}', "/api/chat", False),
        (b"nonsense", "/api/chat", False),
    ],
)
def test_last_event_is_known(event, path, is_last):
    assert is_last_event(event, path) is is_last
