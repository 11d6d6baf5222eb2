"""A request's body: its limits, its room in the pool, and the field that an error names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.datastructures import Headers

from octavo.errors import QueueFullError, RequestError
from octavo.server.access import body as bodies
from octavo.server.access.body import FREE_BYTES, body_of, field_name, parse, read_timeout, received
from octavo.server.access.limiter import Pool
from octavo.server.access.tenants import EVERYBODY, Tenant
from octavo.server.access.timeouts import TimeoutQueue
from octavo.server.errors import BodyTooLargeError, MediaTypeError, SlowBodyError


class Inner(BaseModel):
    b: int = 0


class Fields(BaseModel):
    a: int | str = 0
    inner: list[Inner] = []


class Request:
    """A request with a body in pieces. The last one comes after `pause_s`."""

    def __init__(self, *pieces: bytes, headers: Any = (), tenant: Tenant = EVERYBODY, pause_s: float = 0.0) -> None:
        self._pieces, self._pause_s = pieces, pause_s
        self.headers = Headers({"content-type": "application/json", **dict(headers)})
        self.state = SimpleNamespace(tenant=tenant)

    async def stream(self) -> Any:
        for piece in self._pieces:
            if piece is self._pieces[-1]:
                await asyncio.sleep(self._pause_s)
            yield piece


def read(request: Request, pool: Pool, max_bytes: int = 1 << 20, timeout_s: float = 60.0) -> tuple[bytes, int]:
    """Return the body, and how much of the pool it took."""

    async def work() -> tuple[bytes, int]:
        config: Any = SimpleNamespace(max_body_bytes=max_bytes, body_timeout_s=timeout_s)
        given: Any = request
        async with received(given, config, pool, TimeoutQueue()) as chunks:
            return b"".join(chunks), pool.num_held

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("sizes", "num_held"),
    [
        ([FREE_BYTES], 0),
        ([FREE_BYTES + 1], 1),
        ([FREE_BYTES, 1], 1),
        ([FREE_BYTES + 5, 7, 9], 21),
        ([1000, FREE_BYTES], 1000),
        ([], 0),
    ],
)
def test_body_takes_room_for_all_but_its_first_bytes_and_gives_it_back(sizes: list[int], num_held: int) -> None:
    pool = Pool(1 << 20)
    assert read(Request(*(b"x" * size for size in sizes)), pool) == (b"x" * sum(sizes), num_held)
    assert pool.num_held == 0


@pytest.mark.parametrize(("limit", "fits"), [(100, True), (99, False)])
def test_body_needs_room_in_the_pool(limit: int, fits: bool) -> None:
    pool = Pool(limit)
    request = Request(b"x" * (FREE_BYTES + 60), b"x" * 40)
    if fits:
        assert read(request, pool)[1] == 100
    else:
        with pytest.raises(QueueFullError, match="too many large requests"):
            read(request, pool)
    assert pool.num_held == 0


def test_bodys_own_room_is_not_held_against_it() -> None:
    pool = Pool(1000)
    pool.is_shared = True
    request = Request(b"x" * (FREE_BYTES + 600), b"x" * 300, tenant=Tenant(name="a"))
    assert read(request, pool)[1] == 900


@pytest.mark.parametrize(("sizes", "fits"), [([10], True), ([11], False), ([5, 5], True), ([5, 6], False)])
@pytest.mark.parametrize("says_length", [False, True])
def test_body_may_be_as_large_as_the_limit(sizes: list[int], fits: bool, says_length: bool) -> None:
    headers = {"content-length": str(sum(sizes))} if says_length else {}
    request = Request(*(b"x" * size for size in sizes), headers=headers)
    if fits:
        assert read(request, Pool(None), 10)[0] == b"x" * 10
    else:
        with pytest.raises(BodyTooLargeError, match="limit of 10 bytes"):
            read(request, Pool(None), 10)


@pytest.mark.parametrize("length", ["11", "9" * 30])
def test_body_that_is_announced_too_large_is_not_read(length: str) -> None:
    with pytest.raises(BodyTooLargeError):
        read(Request(b"x", headers={"content-length": length}), Pool(None), 10)
    assert read(Request(b"x", headers={"content-length": "nonsense"}), Pool(None), 10)[0] == b"x"


def test_slow_body_ends_with_its_time() -> None:
    with pytest.raises(SlowBodyError, match=r"within 0\.001 s"):
        read(Request(b"x", pause_s=30.0), Pool(None), timeout_s=0.001)


@pytest.mark.parametrize(
    ("given", "seconds"), [(None, 60.0), ("7", 7.0), ("0.5", 0.5), ("61", 60.0), ("1e3", 60.0), ("60", 60.0)]
)
def test_time_of_a_request_is_what_it_asks_for_up_to_the_limit(given: str | None, seconds: float) -> None:
    headers = {} if given is None else {"x-request-timeout": given}
    request: Any = Request(headers=headers)
    assert read_timeout(request, 60.0) == seconds


@pytest.mark.parametrize("given", ["", "x", "0", "-1", "inf", "nan", "-inf"])
def test_time_that_is_none_is_refused_by_its_name(given: str) -> None:
    request: Any = Request(headers={"x-request-timeout": given})
    with pytest.raises(RequestError, match="X-Request-Timeout must be a number of seconds above 0") as error:
        read_timeout(request, 60.0)
    assert error.value.parameter == "X-Request-Timeout"


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
def test_place_in_a_body_is_spelled_as_a_program_would(location: Any, name: str) -> None:
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
def test_fault_names_its_field(text: bytes, name: str | None, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        parse(Fields, text)
    assert error.value.parameter == name


def test_body_is_checked_against_its_schema() -> None:
    assert parse(Fields, b'{"a": "x", "inner": [{"b": 5}], "more": 18446744073709551615}') == Fields(
        a="x", inner=[Inner(b=5)]
    )


@pytest.mark.parametrize("given", ["application/json", "Application/JSON ; charset=utf-8"])
def test_json_is_taken(given: str) -> None:
    bodies._check_media_type(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "got no Content-Type$"), ("text/plain", "got Content-Type 'text/plain'$"), ("x" * 99, f"'{'x' * 60}'$")],
)
def test_other_types_are_refused_and_named(given: str | None, said: str) -> None:
    with pytest.raises(MediaTypeError, match=said):
        bodies._check_media_type(given)


@pytest.mark.parametrize("options", [{}, {"is_count": True}, {"any_type": True}])
@pytest.mark.parametrize("is_browser", [False, True])
@pytest.mark.parametrize("says_type", [False, True])
def test_route_gets_its_checked_body(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], is_browser: bool, says_type: bool
) -> None:
    async def at_once(_text: Any, _entries: Any, work: Any, **told: Any) -> Any:
        works.append(told)
        return work()

    works: list[Any] = []
    monkeypatch.setattr(bodies, "beside", at_once)
    state = SimpleNamespace(
        config=SimpleNamespace(max_body_bytes=1 << 20, body_timeout_s=60.0, request_timeout_s=50.0),
        role="prefill",
        limiter=SimpleNamespace(body_bytes=Pool(None)),
        timeouts=None,
        text=None,
    )
    headers = {"x-kv-transfer-id": "a", "x-kv-transfer-role": "prefill"} | (
        {"origin": "http://a"} if is_browser else {}
    )
    request: Any = Request(b'{"a": ', b"7}", headers=headers)
    if not says_type:
        request.headers = Headers(headers)
    request.app = SimpleNamespace(state=state)

    async def work() -> tuple[Any, float]:
        state.timeouts = TimeoutQueue()
        return await body_of(Fields, **options)(request), asyncio.get_running_loop().time()

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
