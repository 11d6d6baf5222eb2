"""Parsing and checking a request's body: the field that an error names, and the accepted types."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.datastructures import Headers

from octavo.errors import RequestError
from octavo.http.errors import MediaTypeError
from octavo.http.limiter import Pool
from octavo.http.tenants import EVERYBODY
from octavo.http.timeouts import TimeoutQueue
from octavo.server import bodies
from octavo.server.bodies import field_name, parse, read_body


class Inner(BaseModel):
    b: int = 0


class Fields(BaseModel):
    a: int | str = 0
    inner: list[Inner] = []


class Request:
    """A request with a body in pieces."""

    def __init__(self, *pieces: bytes, headers: Any) -> None:
        self._pieces = pieces
        self.headers = Headers({"content-type": "application/json", **headers})
        self.state = SimpleNamespace(tenant=EVERYBODY)

    async def stream(self) -> Any:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize(
    ("location", "name"),
    [
        (("a",), "a"),
        (("messages", 0, "content"), "messages[0].content"),
        (("a", "str"), "a"),
        (("a", 1, 2, "float"), "a[1][2]"),
        (("a", "int", "b"), "a.b"),
        (("a", "bool"), "a"),
        (("a", "list[union[str,int]]", "b"), "a.b"),
        ((0, "a"), "0.a"),
        (("str", "a"), "str.a"),
    ],
)
def test_field_name_formats_error_location_as_path(location: Any, name: str) -> None:
    assert field_name(location) == name


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (b'{"a": "x", "inner": [{"b": "x"}]}', "inner[0].b", r"^inner\[0\]\.b: Input should be"),
        (b'{"a": NaN}', "a", "^a: the body is not valid JSON: "),
        (b'{"x": [1, {"y": [[-Infinity]]}], "a": 1}', "x", "^x: the body is not valid JSON: "),
        (b'{"x": [1.5], "y": {"z": 1e999}}', "y", "^y: the body is not valid JSON: "),
        (b'{"a": 1', None, "^the body is not valid JSON: "),
        (b"[NaN]", None, "^the body is not valid JSON: "),
        (b'{"a": 1, "\xff": 2}', None, "^the body is not valid JSON: "),
        (b"[1]", None, "^the body must be a JSON object, got list$"),
        (b"5", None, "got int$"),
        (b'{"x": 18446744073709551616}', "x", "^x is out of range$"),
        (b'{"x": -18446744073709551616}', "x", "^x is out of range$"),
        (b'{"x": 1e30}', "x", "^x is out of range$"),
    ],
)
def test_body_error_names_invalid_field(text: bytes, name: str | None, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        parse(Fields, text)
    assert error.value.parameter == name


def test_body_with_too_many_containers_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^the body holds 262145 lists and objects; the limit is 131072$"):
        parse(Fields, b"[" * 262_145)


def test_joining_body_releases_its_chunks() -> None:
    chunks = [b'{"a": ', b"7}"]
    assert bodies._joined(chunks) == b'{"a": 7}'
    assert chunks == []


def test_body_is_checked_against_its_schema() -> None:
    assert parse(Fields, b'{"a": "x", "inner": [{"b": 5}], "more": 18446744073709551615}') == Fields(
        a="x", inner=[Inner(b=5)]
    )


@pytest.mark.parametrize("given", ["application/json", "Application/JSON ; charset=utf-8"])
def test_json_media_type_is_accepted(given: str) -> None:
    bodies._check_media_type(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "got no Content-Type$"), ("text/plain", "got Content-Type 'text/plain'$"), ("x" * 99, f"'{'x' * 60}'$")],
)
def test_other_media_types_are_refused_by_name(given: str | None, said: str) -> None:
    with pytest.raises(MediaTypeError, match=said):
        bodies._check_media_type(given)


@pytest.mark.parametrize("options", [{}, {"is_count": True}, {"any_type": True}])
@pytest.mark.parametrize("is_browser", [False, True])
@pytest.mark.parametrize("says_type", [False, True])
def test_read_body_returns_validated_fields_and_sets_request_state(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], is_browser: bool, says_type: bool
) -> None:
    async def at_once(_text: Any, _entries: Any, work: Any, **told: Any) -> Any:
        works.append(told)
        return work()

    works: list[Any] = []
    monkeypatch.setattr(bodies, "run_text_work", at_once)
    service = SimpleNamespace(
        config=SimpleNamespace(max_body_bytes=1 << 20, body_timeout_s=60.0, request_timeout_s=50.0),
        engine=SimpleNamespace(client=SimpleNamespace(capacity=SimpleNamespace(role="prefill")), text=None),
        limiter=SimpleNamespace(body_bytes=Pool(None)),
        timeouts=None,
    )
    headers = {"x-kv-transfer-id": "a", "x-kv-transfer-role": "prefill"} | (
        {"origin": "http://a"} if is_browser else {}
    )
    request: Any = Request(b'{"a": ', b"7}", headers=headers)
    if not says_type:
        request.headers = Headers(headers)
    request.app = SimpleNamespace(state=SimpleNamespace(service=service))

    async def work() -> tuple[Any, float]:
        service.timeouts = TimeoutQueue()
        return await read_body(request, Fields, **options), asyncio.get_running_loop().time()

    if not says_type and (is_browser or not options.get("any_type")):
        with pytest.raises(MediaTypeError):
            asyncio.run(work())
        return
    found, now = asyncio.run(work())
    assert found == Fields(a=7)
    assert (request.state.is_count, request.state.num_body_bytes) == (options.get("is_count", False), 8)
    assert now <= request.state.deadline <= now + 50.0
    assert request.state.kv_transfer.transfer_id == "a"
    expected = {"tenant": "", "deadline": request.state.deadline, "is_count": options.get("is_count", False)}
    assert works == [expected]
