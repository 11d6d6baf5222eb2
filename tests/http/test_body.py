"""Reading a request's body: its limits, and its reservation in the pool."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from octavo.errors import QueueFullError, RequestError
from octavo.http.body import FREE_BYTES, read_timeout, received
from octavo.http.errors import BodyTooLargeError, SlowBodyError
from octavo.http.limiter import Pool
from octavo.http.tenants import EVERYBODY, Tenant
from octavo.http.timeouts import TimeoutQueue


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
    """Return the body, and the number of bytes reserved in the pool."""

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
def test_body_reserves_pool_bytes_beyond_FREE_BYTES_and_releases_them(sizes: list[int], num_held: int) -> None:
    pool = Pool(1 << 20)
    assert read(Request(*(b"x" * size for size in sizes)), pool) == (b"x" * sum(sizes), num_held)
    assert pool.num_held == 0


@pytest.mark.parametrize(("limit", "fits"), [(100, True), (99, False)])
def test_body_that_exceeds_pool_is_refused(limit: int, fits: bool) -> None:
    pool = Pool(limit)
    request = Request(b"x" * (FREE_BYTES + 60), b"x" * 40)
    if fits:
        assert read(request, pool)[1] == 100
    else:
        with pytest.raises(QueueFullError, match="too many large requests"):
            read(request, pool)
    assert pool.num_held == 0


def test_reserved_bytes_of_body_do_not_count_against_it() -> None:
    pool = Pool(1000)
    pool.is_shared = True
    request = Request(b"x" * (FREE_BYTES + 600), b"x" * 300, tenant=Tenant(name="a"))
    assert read(request, pool)[1] == 900


@pytest.mark.parametrize(("sizes", "fits"), [([10], True), ([11], False), ([5, 5], True), ([5, 6], False)])
@pytest.mark.parametrize("says_length", [False, True])
def test_body_may_be_as_large_as_limit(sizes: list[int], fits: bool, says_length: bool) -> None:
    headers = {"content-length": str(sum(sizes))} if says_length else {}
    request = Request(*(b"x" * size for size in sizes), headers=headers)
    if fits:
        assert read(request, Pool(None), 10)[0] == b"x" * 10
    else:
        with pytest.raises(BodyTooLargeError, match="limit of 10 bytes"):
            read(request, Pool(None), 10)


@pytest.mark.parametrize("length", ["11", "9" * 30])
def test_body_with_too_large_content_length_is_not_read(length: str) -> None:
    with pytest.raises(BodyTooLargeError):
        read(Request(b"x", headers={"content-length": length}), Pool(None), 10)
    assert read(Request(b"x", headers={"content-length": "nonsense"}), Pool(None), 10)[0] == b"x"


def test_slow_body_times_out() -> None:
    with pytest.raises(SlowBodyError, match=r"within 0\.001 s"):
        read(Request(b"x", pause_s=30.0), Pool(None), timeout_s=0.001)


@pytest.mark.parametrize(
    ("given", "seconds"), [(None, 60.0), ("7", 7.0), ("0.5", 0.5), ("61", 60.0), ("1e3", 60.0), ("60", 60.0)]
)
def test_request_timeout_header_is_capped_at_limit(given: str | None, seconds: float) -> None:
    headers = {} if given is None else {"x-request-timeout": given}
    request: Any = Request(headers=headers)
    assert read_timeout(request, 60.0) == seconds


@pytest.mark.parametrize("given", ["", "x", "0", "-1", "inf", "nan", "-inf"])
def test_invalid_request_timeout_header_is_refused_by_name(given: str) -> None:
    request: Any = Request(headers={"x-request-timeout": given})
    with pytest.raises(RequestError, match="X-Request-Timeout must be a number of seconds above 0") as error:
        read_timeout(request, 60.0)
    assert error.value.parameter == "X-Request-Timeout"
