"""A request's audit line, counters and id."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.http import audit
from octavo.http.audit import AuditMiddleware, audit_bad_input
from octavo.http.errors import CLIENT_DISCONNECTED, HttpError
from octavo.http.tenants import Tenant
from octavo.runtime import logs


class Counts:
    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.refusals: list[str] = []

    def count_answer(self, *told: object) -> None:
        self.answers.append(told)

    def count_refusal(self, reason: str) -> None:
        self.refusals.append(reason)


class Audited:
    """One request through the middleware. act: function of scope and send that acts as the application."""

    def __init__(self, act: Any, *, tracing: Any = None, headers: Any = (), **scope: Any) -> None:
        self.sent: list[Any] = []
        self.counts = Counts()
        self.id_inside: str | None = None
        self.scope = {"type": "http", "method": "GET", "path": "/x", "client": ("1.2.3.4", 5), **scope}
        self.scope["headers"] = [(b"x-request-id", value) for value in headers]
        self.error: Exception | None = None

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            self.id_inside = logs.request_id.get()
            await act(scope, send)

        async def send(message: Any) -> None:
            self.sent.append(message)

        async def run() -> None:
            await AuditMiddleware(app, self.counts, tracing)(self.scope, None, send)  # type: ignore[arg-type]
            assert logs.request_id.get() is None

        try:
            asyncio.run(run())
        except RuntimeError as error:
            self.error = error

    @property
    def request_id(self) -> str:
        start = next(message for message in self.sent if message["type"] == "http.response.start")
        return dict(start["headers"])[b"x-request-id"].decode()


def answers(status: int, **state: Any) -> Any:
    async def act(scope: Any, send: Any) -> None:
        scope["state"].update(state)
        await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body"})

    return act


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the logged lines as mappings."""
    told: list[Any] = []
    logger = SimpleNamespace(isEnabledFor=lambda level: level >= logging.INFO, info=told.append)
    monkeypatch.setattr(audit, "logger", logger)
    return told


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ([b"mine-1:/+=._"], True),
        ([b"x" * 128], True),
        ([b"x" * 129], False),
        ([b"a b"], False),
        ([b""], False),
        ([], False),
        ([b"one", b"two"], False),
        ([b"a b", b"two"], False),
    ],
)
def test_plain_request_id_of_client_is_kept(lines: list[Any], given: list[bytes], is_kept: bool) -> None:
    done = Audited(answers(200), headers=given)
    assert (done.request_id.encode() in given) is is_kept
    assert done.request_id
    assert done.id_inside == done.request_id == lines[0]["request_id"]
    assert sum(name == b"x-request-id" for name, _ in done.sent[0]["headers"]) == 1
    assert (b"a", b"b") in done.sent[0]["headers"]


def test_audit_line_describes_request_and_result(lines: list[Any]) -> None:
    usage = SimpleNamespace(summary=lambda: {"prompt_tokens": 3})
    act = answers(429, tenant=Tenant(name="alice"), audit={"engine": "e", "usage": usage})
    done = Audited(act, path="/" + "p" * 300, method="POST", route=SimpleNamespace(path="/{any}"))
    (line,) = lines
    assert 0 <= line.pop("seconds") < 60
    assert dict(line) == {
        "request_id": done.request_id,
        "client": "1.2.3.4",
        "key": "alice",
        "method": "POST",
        "path": "/" + "p" * 199,
        "status": 429,
        "engine": "e",
        "error": line["error"],
        "prompt_tokens": 3,
    }
    assert done.counts.refusals == [line["error"]]
    assert done.counts.answers == [("POST", "/{any}", 429)]


def test_audit_line_of_unknown_client_has_null_client_and_key(lines: list[Any]) -> None:
    done = Audited(answers(200), client=None, method="BREW")
    (line,) = lines
    assert (line["client"], line["key"], line["method"]) == (None, None, "BREW")
    assert done.counts.answers == [("other", "none", 200)]


@pytest.mark.parametrize(
    ("path", "status", "is_line", "is_refusal"),
    [
        ("/x", 200, True, False),
        ("/x", 399, True, False),
        ("/x", 400, True, True),
        ("/x", 503, True, True),
        ("/x", CLIENT_DISCONNECTED, True, False),
        ("/health", 200, False, False),
        ("/ready", 503, False, False),
        ("/ready", 500, True, True),
        ("/metrics", 200, False, False),
        ("/metrics", 403, True, True),
        ("/model_info", 200, False, False),
    ],
)
def test_refusals_are_logged_and_successful_polls_are_not(
    lines: list[Any], path: str, status: int, is_line: bool, is_refusal: bool
) -> None:
    done = Audited(answers(status), path=path)
    assert (bool(lines), bool(done.counts.refusals)) == (is_line, is_refusal)


def test_noted_error_takes_precedence_over_status(lines: list[Any]) -> None:
    error = HttpError(503, "full", code="too_many_connections")
    done = Audited(answers(200, error=error))
    assert done.counts.refusals == [error.reason] == [lines[0]["error"]]


@pytest.mark.parametrize("is_begun", [False, True])
def test_fault_outside_routes_answers_500_unless_response_started(
    lines: list[Any], caplog: pytest.LogCaptureFixture, is_begun: bool
) -> None:
    async def act(_scope: Any, send: Any) -> None:
        if is_begun:
            await send({"type": "http.response.start", "status": 200})
        raise RuntimeError("a fault")

    done = Audited(act)
    assert (done.error is not None) is is_begun
    statuses = [message["status"] for message in done.sent if message["type"] == "http.response.start"]
    assert statuses == [200 if is_begun else 500]
    assert done.counts.answers == [("GET", "none", statuses[0])]
    assert ("a request failed" in caplog.text) is not is_begun
    assert lines[0]["status"] == statuses[0]


@pytest.mark.parametrize("fails", [False, True])
def test_each_request_records_one_span(lines: list[Any], caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    told: list[Any] = []

    def tell(scope: Any, *rest: Any) -> None:
        told.append((scope["path"], *rest))
        if fails:
            raise RuntimeError("a fault of the tracing")

    done = Audited(answers(404, audit={"a": 1}), tracing=SimpleNamespace(record_span=tell))
    ((path, request_id, status, seconds, reason, details),) = told
    assert (path, request_id, status, details) == ("/x", done.request_id, 404, {"a": 1})
    assert 0 <= seconds < 60
    assert done.counts.refusals == [reason]
    assert done.error is None
    assert ("a fault of the tracing" in caplog.text or "RuntimeError" in caplog.text) is fails
    assert len(lines) == 1


def test_non_http_scopes_are_not_audited(lines: list[Any]) -> None:
    seen: list[Any] = []

    async def act(scope: Any, _send: Any) -> None:
        seen.append(scope["type"])

    done = Audited(act, type="lifespan")
    assert (seen, done.counts.answers, lines) == (["lifespan"], [], [])


def test_disabled_audit_logger_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(audit, "logger", SimpleNamespace(isEnabledFor=lambda _: False, info=told.append))
    Audited(answers(200))
    assert told == []


def test_invalid_http_input_is_counted_and_logged(lines: list[Any]) -> None:
    counts: Any = Counts()
    error = HttpError(431, "too large")
    audit_bad_input(counts, ("1.2.3.4", 5), error)
    assert (counts.answers, counts.refusals) == ([("other", "none", 431)], [error.reason])
    (line,) = lines
    assert (line["client"], line["method"], line["path"], line["status"]) == ("1.2.3.4", None, "", 431)
    assert (line["seconds"], line["error"]) == (0.0, error.reason)
    assert line["request_id"]
