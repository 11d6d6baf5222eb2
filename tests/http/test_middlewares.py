"""Each middleware around an application that answers everything, without a server."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config.access import AccessConfig
from octavo.errors import QueueFullError
from octavo.http.auth import ApiKeyMiddleware
from octavo.http.limiter import Bucket, Pool
from octavo.http.origins import OriginMiddleware
from octavo.http.overload import OverloadMiddleware
from octavo.http.routes import ROUTES
from octavo.http.tenants import EVERYBODY, Keyring, Tenant, add_key
from octavo.http.timeouts import SPACING_S, TimeoutQueue
from octavo.server.json_structure import MAX_LISTS_AND_OBJECTS, _blocks, _count_outside_strings

KEY = "secret"


def call(middleware: Any, **scope: Any) -> tuple[int, dict[str, Any]]:
    """Return the status (200 if the application answered) and the scope that it saw ({} if it was not called)."""
    seen: dict[str, Any] = {}
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope)
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    made = middleware(app)
    headers = [(name.encode(), value.encode()) for name, value in scope.pop("headers", ())]
    given = {"type": "http", "method": "GET", "path": "/x", "http_version": "1.1", "headers": headers, **scope}
    asyncio.run(made(given, None, send))
    statuses = [message["status"] for message in sent if message["type"] == "http.response.start"]
    assert len(statuses) == 1
    return statuses[0], seen


def keyed(headers: Any = (), **scope: Any) -> tuple[int, dict[str, Any]]:
    keyring = Keyring.of(AccessConfig(api_key=KEY))
    return call(lambda app: ApiKeyMiddleware(app, lambda: keyring), headers=headers, **scope)


def basic(text: str) -> tuple[str, str]:
    return "authorization", "Basic " + base64.b64encode(text.encode()).decode()


BEARER, X_API_KEY = ("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)
BROWSERS = basic(f"anybody:{KEY}")
OPENS = (("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        ([BEARER], 200),
        ([("authorization", f"bearer  {KEY} ")], 200),
        ([X_API_KEY], 200),
        ([("x-api-key", f" {KEY} ")], 200),
        ([BEARER, X_API_KEY], 200),
        ([BEARER, ("x-api-key", "other")], 401),
        ([("authorization", "Bearer other")], 401),
        ([("authorization", KEY)], 401),
        ([("authorization", f"Digest {KEY}")], 401),
        ([BEARER, BEARER], 401),  # the same header twice
        ([BROWSERS], 200),
        ([basic(f"{KEY}:")], 401),
        ([basic(KEY)], 401),
        ([("authorization", "Basic !")], 401),
        ([BROWSERS, ("host", "a:1"), ("origin", "http://a:1")], 200),
        ([BROWSERS, ("host", "a:1"), ("origin", "https://a:1")], 200),
        ([BROWSERS, ("host", "a:1"), ("origin", "http://b")], 401),
        ([BROWSERS, ("sec-fetch-site", "same-origin"), ("origin", "http://b")], 200),
        ([BROWSERS, ("sec-fetch-site", "none")], 200),
        ([BROWSERS, ("sec-fetch-site", "cross-site")], 401),
        ([BEARER, ("sec-fetch-site", "cross-site")], 200),  # a browser never adds a bearer key by itself
        ([BROWSERS, *OPENS], 401),  # the path is not a page
    ],
)
def test_request_without_valid_key_answers_401(headers: Any, status: int) -> None:
    found, seen = keyed(headers)
    assert (found, "tenant" in seen.get("state", {})) == (status, status == 200)


@pytest.mark.parametrize(("header", "status"), [("x-api-key", 200), ("authorization", 401)])
def test_only_basic_auth_is_refused_for_cross_site_requests(header: str, status: int) -> None:
    key = basic(f"any:{KEY}")[1]
    keyring = Keyring.of(AccessConfig(api_key=key if header == "x-api-key" else KEY))
    headers = [(header, key), ("sec-fetch-site", "cross-site")]
    assert call(lambda app: ApiKeyMiddleware(app, lambda: keyring), headers=headers)[0] == status


def test_cross_site_navigation_may_only_get_dashboard_page() -> None:
    assert keyed([BROWSERS, *OPENS], path="/dashboard")[0] == 200
    assert keyed([BROWSERS, *OPENS], path="/dashboard", method="POST")[0] == 401
    for index in (1, 2):
        without = [header for number, header in enumerate(OPENS) if number != index]
        assert keyed([BROWSERS, *without], path="/dashboard")[0] == 401


def test_keyring_holds_api_key_or_keys_of_file(tmp_path: Path) -> None:
    assert Keyring.of(SimpleNamespace(api_keys_file=None, api_key=None)) is None
    alone = Keyring.of(SimpleNamespace(api_keys_file=None, api_key=KEY))
    assert (alone.find(KEY.encode()), alone.find(b"other")) == (EVERYBODY, None)
    path = tmp_path / "keys.toml"
    key = add_key(path, Tenant(name="team"))
    ring = Keyring.of(SimpleNamespace(api_keys_file=path, api_key=KEY, operator_key="operator"))
    assert ring.find(b"operator").read_metrics
    assert ring.find(KEY.encode()) is None
    assert ring.find(key.encode()).name == "team"
    assert Keyring.from_file(path).find(b"operator") is None


@pytest.mark.parametrize("path", ["/health", "/live", "/ready"])
def test_health_checks_need_no_key(path: str) -> None:
    status, seen = keyed(path=path)
    assert (status, seen["state"]["tenant"]) == (200, EVERYBODY)


def test_server_without_keys_accepts_all_requests() -> None:
    status, seen = call(lambda app: ApiKeyMiddleware(app, lambda: None))
    assert (status, seen["state"]["tenant"]) == (200, EVERYBODY)


def test_lifespan_events_need_no_key() -> None:
    assert keyed(type="lifespan")[0] == 200


@pytest.mark.parametrize(
    ("headers", "options", "status"),
    [
        ([], {}, 400),
        ([], {"http_version": "1.0"}, 421),
        ([], {"http_version": "1.0", "path": "/health"}, 200),
        ([("host", "a"), ("host", "a")], {}, 400),
        ([("host", "a")], {}, 200),
        ([("host", "A:80")], {}, 200),
        ([("host", "b")], {}, 421),
        ([("host", "b")], {"path": "/ready"}, 200),
        ([("host", "a@b")], {}, 421),
        ([("host", "b#a")], {}, 421),
        ([("host", "[a")], {}, 421),
        ([("host", "a"), ("origin", "http://a")], {}, 200),
        ([("host", "a"), ("origin", "https://a")], {}, 200),
        ([("host", "a"), ("origin", "https://page.org")], {}, 200),
        ([("host", "a"), ("origin", "https://other.org")], {}, 403),
        ([("host", "a"), ("origin", "https://a"), ("origin", "https://other.org")], {}, 403),
        ([("host", "a"), ("origin", "null")], {}, 403),
        ([("origin", "http://")], {"http_version": "1.0", "path": "/health"}, 403),
    ],
)
def test_unknown_host_or_origin_is_refused(headers: Any, options: Any, status: int) -> None:
    found, _ = call(lambda app: OriginMiddleware(app, {"a"}, {"https://page.org"}), headers=headers, **options)
    assert found == status


def test_origin_wildcard_allows_any_host_and_origin() -> None:
    headers = [("host", "b"), ("origin", "https://other.org")]
    assert call(lambda app: OriginMiddleware(app, None, {"*"}), headers=headers)[0] == 200
    assert call(lambda app: OriginMiddleware(app, None, ()), headers=headers)[0] == 403
    assert call(lambda app: OriginMiddleware(app, {"a"}, ()), type="lifespan")[0] == 200


def test_overload_middleware_admits_request_before_reading_body() -> None:
    begun: list[Tenant] = []

    def overloaded(app: Any) -> OverloadMiddleware:
        def begin(tenant: Tenant) -> None:
            begun.append(tenant)
            if len(begun) == 3:
                raise QueueFullError("too many")

        return OverloadMiddleware(app, begin, ROUTES)

    state = {"tenant": EVERYBODY}
    path = "/v1/completions"
    assert call(overloaded, method="POST", path=path, state=state)[0] == 200
    assert call(overloaded, method="GET", path=path, state=state)[0] == 200
    assert call(overloaded, method="POST", path="/other", state=state)[0] == 200
    assert call(overloaded, type="websocket", method="POST", path=path, state=state)[0] == 200
    assert begun == [EVERYBODY]
    assert call(overloaded, method="POST", path=path, state=state)[0] == 200
    status, seen = call(overloaded, method="POST", path=path, state=state)
    assert (status, seen) == (429, {})


def test_simultaneous_timeouts_run_in_separate_loop_turns() -> None:
    async def ended() -> list[str]:
        limits, acted = TimeoutQueue(), asyncio.Queue[str]()
        cuts = {name: limits.call_later(0.0, partial(acted.put_nowait, name)) for name in "abcd"}
        limits.call_later(0.0, partial(acted.put_nowait, "late")).cancel()
        names = [await acted.get()]
        if not acted.empty():
            raise AssertionError("two were acted on in one turn")
        cuts["c"].cancel()
        names += [await acted.get(), await acted.get()]
        limits.call_later(0.0, partial(acted.put_nowait, "e"))
        names.append(await acted.get())
        await asyncio.sleep(2 * SPACING_S)  # the pause ends, so the next limit begins a new turn
        limits.call_later(0.0, partial(acted.put_nowait, "f"))
        return [*names, await acted.get()]

    assert asyncio.run(ended()) == ["a", "b", "d", "e", "f"]


def test_timeout_queue_raises_timeout_error() -> None:
    async def wait() -> None:
        queue = TimeoutQueue()
        async with queue.timeout(60.0):
            pass
        async with queue.timeout(0.001):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(wait())


@pytest.mark.parametrize("num_backslashes", [0, 1, 2, 3])
def test_json_structure_ignores_strings_across_block_boundaries(
    num_backslashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quote after an odd number of backslashes belongs to the string, even if a block of bytes ends between them."""
    string = b'"[,' + b"\\" * num_backslashes + (b'"' if num_backslashes % 2 else b"") + b':"'
    body = b"[" + b",".join([string, b'{"a":1}', string]) + b"]"
    for block_bytes in range(4, len(body) + 2):
        monkeypatch.setattr("octavo.server.json_structure._BLOCK_BYTES", block_bytes)
        assert _count_outside_strings(body) == [2, 1, 2], block_bytes
        assert sum(map(len, _blocks(body))) <= len(body)


def test_json_structure_ignores_non_ascii_bytes() -> None:
    assert _count_outside_strings(bytes(range(0x80, 0x100)) + b"[") == [1, 0, 0]
    assert MAX_LISTS_AND_OBJECTS == 1 << 17


def test_bucket_refills_within_one_minute() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait_s(1, 100.0) == 1.0
    assert bucket.wait_s(30, 110.0) == 20.0
    assert bucket.wait_s(99, 110.0) == 50.0  # an amount above the capacity needs a full bucket
    bucket.take(30, 110.0)  # now 20 in debt
    assert bucket.wait_s(1, 110.0) == 21.0
    assert bucket.wait_s(60, 500.0) == 0.0
    bucket.take(10, 500.0)
    assert bucket.wait_s(60, 500.0) == 10.0


def test_pool_share_of_tenant_follows_its_weight() -> None:
    pool = Pool(100)
    heavy, light = Tenant(name="heavy", weight=3.0), Tenant(name="light", weight=1.0)
    assert (pool.share(light), pool.share(heavy)) == (50.0, 75.0)
    pool.take(light, 20)
    assert pool.share(light) == 40.0  # not shared yet: its own tokens do not count
    pool.is_shared = True
    assert (pool.share(light), pool.share(heavy)) == (30.0, 60.0)
    assert (pool.available(light), pool.available(heavy)) == (60, 80)
    pool.give_back(light, 20)
    assert (pool.held_by(light), len(pool._held), pool.num_free) == (0, 0, 100)
