"""The dashboard over HTTP: its files, its feed and its access rights. A closed feed keeps nothing."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fakes import FakeExecutor
from running import ask_as_written, run_server, wait_until

from octavo.http.tenants import Tenant, add_key
from octavo.journal.explain import PHASES
from octavo.server.telemetry.dashboard import feed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

STATIC = Path(feed.__file__).parent / "static"
BODY = {"prompt": "hello, this is a prompt of several blocks", "max_tokens": 4}


class Feed:
    """Reads `/dashboard/events`."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()  # kept, because a dropped generator closes the response

    def next(self) -> tuple[str, dict[str, Any]]:
        name = next(line for line in self._lines if line).removeprefix("event: ")
        return name, json.loads(next(self._lines).removeprefix("data: "))

    def until(self, condition: Any) -> dict[str, Any]:
        """Return the first frame that satisfies `condition`."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            name, data = self.next()
            if name == "frame" and condition(data):
                return data
        raise TimeoutError


@contextlib.contextmanager
def watching(http: httpx.Client, **options: Any) -> Iterator[Feed]:
    with http.stream("GET", "/dashboard/events", **options) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Feed(response)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, str]]]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {
        "operator": add_key(path, Tenant(name="operator", read_metrics=True)),
        "user": add_key(path, Tenant(name="user")),
    }
    with run_server(api_keys_file=path, engine_options={"policy": "fair"}) as running:
        yield running, keys


def basic(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode(), **headers}


def test_dashboard_page_uses_every_static_file_and_no_other_server(shared: Running) -> None:
    with shared.http() as http:
        page = http.get("/dashboard")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        pending, seen = set(re.findall(r'(?:src|href)="([^"]+)"', page.text)), set()
        while pending:
            name = pending.pop()
            seen.add(name)
            answer = http.get("/" + name)
            assert answer.status_code == 200, name
            imported = re.findall(r'^import .* from "\./([^"]+)";', answer.text, re.MULTILINE)
            pending |= {f"dashboard/{each}" for each in imported} - seen
        served = {f"dashboard/{path.name}" for path in STATIC.iterdir() if path.suffix != ".LICENSE"}
        assert seen | {"dashboard/index.html"} == served, "nothing lies there that no page needs"
    for path in STATIC.iterdir():
        if "uPlot" not in path.name:
            assert not re.search(r"https?://(?!www\.w3\.org)", path.read_text()), f"{path} asks another server"


def test_s21_dashboard_csp_allows_only_local_scripts(shared: Running) -> None:
    with shared.http() as http:
        for path in ("/dashboard", "/dashboard/main.js", "/dashboard/style.css"):
            answer = http.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert http.get("/dashboard", headers={"Host": "evil.example"}).status_code == 200, "no name is asked for here"
        assert http.get("/dashboard/events", headers={"Origin": "http://evil.example"}).status_code == 403
    for path in STATIC.iterdir():
        if path.suffix == ".js" and "uPlot" not in path.name:
            forbidden = re.findall(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", path.read_text()
            )
            assert not forbidden, f"{path.name} makes code or elements of text"
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", page), "everything of it is in files"


def test_s21_dashboard_answers_421_to_unknown_host() -> None:
    with run_server(allowed_hosts=("127.0.0.1",)) as running, running.http() as http:
        for path in ("/dashboard", "/dashboard/main.js", "/dashboard/events", "/dashboard/requests/x"):
            assert http.get(path, headers={"Host": "rebound.example"}).status_code == 421


@pytest.mark.parametrize(
    "name",
    [
        "../auth.py",
        "../../auth.py",
        "/../auth.py",
        "..%2fauth.py",
        "%2e%2e/auth.py",
        "..\\auth.py",
        "uPlot.LICENSE",
        "nothing.js",
        "main.js%00",
        "main.js/",
    ],
)
def test_s22_dashboard_file_names_cannot_traverse_directories(shared: Running, name: str) -> None:
    with shared.http() as http:
        answer = ask_as_written(http, f"/dashboard/{name}", follow_redirects=False)
        assert answer.status_code in {307, 404}, answer.text
        assert "import" not in answer.text


def test_every_explained_phase_has_colour() -> None:
    script = (STATIC / "requests.js").read_text()
    colours = script.partition("PHASE_COLORS = {")[2].partition("};")[0]
    named = {line.strip().partition(":")[0].strip('"') for line in colours.strip().splitlines()}
    assert named == set(PHASES)


def test_feed_reports_request_from_start_to_finish(shared: Running) -> None:
    with shared.http() as http, shared.http() as other, watching(http) as feed_:
        name, hello = feed_.next()
        assert (name, hello["model"], hello["has_chat"]) == ("hello", "fake", True)
        assert feed_.next()[1]["is_first"]
        given = other.post("/v1/completions", json=BODY).json()
        frame = feed_.until(lambda frame: any(row["id"] == given["id"] for row in frame["requests"]))
        frame = feed_.until(lambda frame: not frame["moment"]["running"])
        row = next(row for row in frame["requests"] if row["id"] == given["id"])
        assert (row["state"], row["generated"]) == ("length", 4)
        assert row["prompt"] == given["usage"]["prompt_tokens"]
        assert frame["ready"]
        assert (frame["restarts"], frame["dead"]) == (0, False)
        told = other.get(f"/dashboard/requests/{given['id']}").json()
        assert told["ending"] == "ended with 'length' after 4 tokens"
        assert {each["phase"] for each in told["sums"]} <= {
            "on its way to the queue",
            "waiting in the queue",
            "computing the prompt",
            "generating",
        }
        assert sum(each["seconds"] for each in told["sums"]) == pytest.approx(told["seconds"], abs=0.01)
        unknown = other.get("/dashboard/requests/never")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


def test_feed_requires_key_with_read_metrics(keyed: tuple[Running, dict[str, str]]) -> None:
    running, keys = keyed
    with running.http() as http:
        answer = http.get("/dashboard")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic realm=")
        assert http.get("/v1/models").headers["www-authenticate"] == "Bearer", "a client's is as it was"
        assert http.get("/dashboard", headers=basic(keys["user"])).status_code == 200
        for path in ("/dashboard/events", "/dashboard/requests/x"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers=basic("wrong")).status_code == 401
            refused = http.get(path, headers=basic(keys["user"]))
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_allowed")
        with watching(http, headers=basic(keys["operator"])) as feed_:
            assert feed_.next()[0] == "hello"


@pytest.mark.parametrize(
    "value", ["Basic", "Basic !!!", "Basic " + base64.b64encode(b"no colon").decode(), "Basic Og=="]
)
def test_malformed_basic_credentials_answer_401(keyed: tuple[Running, dict[str, str]], value: str) -> None:
    running, keys = keyed
    with running.http() as http:
        assert http.get("/dashboard", headers={"Authorization": value}).status_code == 401
        doubled = {**basic(keys["operator"]), "x-api-key": keys["user"]}
        assert http.get("/dashboard", headers=doubled).status_code == 401


def test_s21_basic_credentials_are_refused_cross_site(
    keyed: tuple[Running, dict[str, str]],
) -> None:
    running, keys = keyed
    body = {"prompt": "x", "max_tokens": 1}
    with running.http() as http:
        for site, status in (("same-origin", 200), ("none", 200), ("cross-site", 401), ("same-site", 401), ("", 401)):
            headers = basic(keys["operator"], **{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "cors"})
            assert http.get("/dashboard", headers=headers).status_code == status, site
            assert http.post("/v1/completions", json=body, headers=headers).status_code == status, site
        opened = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        for method, path, status in (
            ("GET", "/dashboard", 200),  # for example a link in a wiki
            ("GET", "/dashboard/events", 401),
            ("POST", "/v1/completions", 401),
        ):
            headers = basic(keys["operator"], **opened)
            assert http.request(method, path, json=body, headers=headers).status_code == status
        own = {"Origin": running.url}
        assert http.post("/v1/completions", json=body, headers=basic(keys["operator"], **own)).status_code == 200
        bearer = {"Authorization": f"Bearer {keys['operator']}", "Sec-Fetch-Site": "cross-site"}
        assert http.get("/v1/models", headers=bearer).status_code == 200, "a page that knows the key may ask"


def test_s21_basic_credentials_are_refused_with_foreign_origin() -> None:
    body = {"prompt": "x", "max_tokens": 1}
    with run_server(api_key="secret", allowed_origins=("*",)) as running, running.http() as http:
        for origin, status in ((running.url, 200), ("http://evil.example", 401)):
            headers = basic("secret", Origin=origin)
            assert http.post("/v1/completions", json=body, headers=headers).status_code == status
        bearer = {"Authorization": "Bearer secret", "Origin": "http://evil.example"}
        assert http.post("/v1/completions", json=body, headers=bearer).status_code == 200


def test_feed_is_detached_after_last_watcher_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LINGER_S", 0.1)
    with run_server() as running, running.http() as http:
        assert running.engine.client._feed is None
        assert http.get("/dashboard/requests/x").status_code == 404
        with watching(http) as first:
            first.next()
            with running.http() as other, watching(other) as second:
                second.next()
                assert running.engine.client._feed is not None
            time.sleep(0.3)
            assert running.engine.client._feed is not None, "one watches still"
        wait_until(lambda: running.engine.client._feed is None, "the engine tells nobody any more")
        with watching(http) as again:
            assert [again.next()[0], again.next()[1]["is_first"]] == ["hello", True]


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/main.js", "/dashboard/events", "/dashboard/requests/a"])
def test_dashboard_answers_405_to_head(shared: Running, path: str) -> None:
    """A HEAD request that opened the feed would take one of its places without reading."""
    with shared.http() as http:
        refused = http.head(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


def test_watchers_above_limit_answer_429(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_WATCHERS", 1)
    with run_server() as running, running.http() as http, running.http() as other:
        with watching(http) as feed_:
            feed_.next()
            refused = other.get("/dashboard/events")
            assert refused.status_code == 429
            assert "Retry-After" in refused.headers
        wait_until(lambda: other.get("/dashboard/requests/x").status_code == 404, "it answers")

        def has_room() -> bool:
            with other.stream("GET", "/dashboard/events") as response:
                return response.status_code == 200

        wait_until(has_room, "the place of one who left is free")


def test_concurrent_watchers_never_exceed_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_WATCHERS", 3)
    statuses = []
    with run_server() as running, contextlib.ExitStack() as stack:

        def watch() -> None:
            http = stack.enter_context(running.http())
            statuses.append(stack.enter_context(http.stream("GET", "/dashboard/events")).status_code)

        threads = [threading.Thread(target=watch) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200] * 3 + [429] * 9


def test_disconnect_before_feed_attaches_removes_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LINGER_S", 0.05)
    executor = FakeExecutor()
    executor.gate.clear()  # the engine's thread blocks in a step
    with run_server(executor) as running, running.http() as http:
        asking = threading.Thread(target=lambda: http.post("/v1/completions", json=BODY))
        asking.start()
        wait_until(lambda: running.num_unfinished, "a step is under way")
        with running.http() as other, pytest.raises(httpx.TimeoutException):
            other.get("/dashboard/events", timeout=0.3)
        executor.gate.set()
        asking.join()
        wait_until(lambda: running.engine.client._feed is None, "nobody is told any more")


def test_server_shutdown_sends_bye_event_to_watchers() -> None:
    with run_server(grace_s=5.0) as running, running.http() as http, watching(http) as feed_:
        feed_.next()
        running.server.should_exit = True
        while (name := feed_.next()[0]) == "frame":
            pass
        assert name == "bye"
        running.thread.join(10)
        assert not running.thread.is_alive(), "watchers hold up no end"


def test_disabled_dashboard_answers_404() -> None:
    with run_server(dashboard=False) as running, running.http() as http:
        for path in ("/dashboard", "/dashboard/main.js", "/dashboard/events", "/dashboard/requests/x"):
            assert http.get(path).status_code == 404
