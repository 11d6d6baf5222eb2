"""The dashboard as users see it: a real Chromium uses it under load, in both themes and on a phone.

Skipped if there is no Chromium, unless OCTAVO_REQUIRE_BROWSER is set. OCTAVO_PICTURES=FOLDER keeps screenshots.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from running import run_server
from serving_process import STORY, Served, serve

from octavo.data.expert_stats import ExpertTokens
from octavo.data.state_slots import StateSlots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
IS_REQUIRED = os.environ.get("OCTAVO_REQUIRE_BROWSER", "0") not in {"", "0"}
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 30_000
SCRIPT = "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
COLOURED_CELL = """() => {  // where the map has a colour: only blocks that one request owns do
    const canvas = document.getElementById("blocks");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let i = 0; i < data.length; i += 4) {
        const [most, least] = [Math.max(...data.slice(i, i + 3)), Math.min(...data.slice(i, i + 3))];
        if (most - least > 70) return [(i / 4) % canvas.width, Math.floor(i / 4 / canvas.width)];
    }
    return [0, 0];
}"""
KEY = "a-key-that-is-long-enough"
CREDENTIALS: Any = {"username": "x", "password": KEY}  # as a user types them when the page opens
PICTURES = os.environ.get("OCTAVO_PICTURES")

pytestmark = pytest.mark.skipif(CHROMIUM is None and not IS_REQUIRED, reason="there is no Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Run a server with a key, for the tests that do not change it. Other tests use servers without a key."""
    with serve("--max-num-seqs", "6", "--api-key", KEY, key=KEY) as server:
        yield server


class Load:
    """Stories from several clients, one after the other."""

    def __init__(self, served: Served, num_clients: int = 8) -> None:
        self._url, self._is_over = str(served.http.base_url), threading.Event()
        self._headers = dict(served.http.headers)
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(num_clients)]

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=60, trust_env=False) as http:
            while not self._is_over.is_set():
                start = "There was a house by the sea, and in it lived an old man. " * (number % 3)
                body = {**STORY, "prompt": f"{start}Once upon a time {number}", "max_tokens": 60 + 20 * number}
                with contextlib.suppress(httpx.TransportError), http.stream("POST", "/v1/completions", json=body) as it:
                    for _ in it.iter_lines():
                        if self._is_over.is_set():
                            return

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def opened(
    browser: Browser, served: Served, width: int = 1440, *, num_refused: int = 0, is_known: bool = True, **options: Any
) -> Iterator[Page]:
    """Open the dashboard. Any error in the page fails the test. num_refused: scripts that the policy blocks.

    is_known: send the key if one is required.
    """
    viewport: Any = {"width": width, "height": 900}
    context = browser.new_context(viewport=viewport, http_credentials=CREDENTIALS if is_known else None, **options)
    try:
        page, wrong = context.new_page(), []
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Security Policy" in message.text else None)
        page.goto(f"{served.http.base_url}/dashboard")
        yield page
        assert len(wrong) == num_refused, wrong
    finally:
        context.close()


def picture(page: Page, name: str, *, whole: bool = False) -> None:
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=f"{PICTURES}/{name}.png", full_page=whole)


def until(page: Page, condition: str) -> None:
    """Poll from outside: the page's policy forbids the browser's own helper to run text as code."""
    end = time.monotonic() + 2 * WAIT_MS / 1000
    while time.monotonic() < end:
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise TimeoutError(f"in vain: {condition}")


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("name", "width", "options"),
    [
        ("dark", 1440, {"color_scheme": "dark"}),
        ("phone", 390, {"color_scheme": "light", "is_mobile": True, "has_touch": True}),
    ],
)
def test_dashboard_updates_all_views_under_load(
    browser: Browser, served: Served, name: str, width: int, options: dict[str, Any]
) -> None:
    with Load(served), opened(browser, served, width, **options) as page:
        until(page, "document.getElementById('state').textContent === 'ready'")
        until(page, "Number(document.getElementById('generated').textContent.replace(',', '')) > 0")
        until(page, "Number(document.getElementById('timeline').dataset.steps) > 20")
        until(page, "document.querySelectorAll('#requests tbody tr').length >= 8")
        until(page, "Number(document.getElementById('num-owned').textContent) > 0")
        blocks = page.evaluate("""() => ["free", "cached", "owned", "shared"].map((name) =>
            Number(document.getElementById(`num-${name}`).textContent.replaceAll(",", "")))""")
        assert sum(blocks) == int(page.get_attribute("#blocks", "data-blocks") or 0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if name == "dark" else "light")
        assert page.locator("#experts").is_hidden(), "the model has none"
        for chart in ("tokens", "requests", "ttft", "itl"):
            assert page.locator(f"#chart-{chart} canvas").count() == 1
        if PICTURES:
            page.wait_for_timeout(20_000)
        picture(page, f"dashboard-{name}", whole=True)
        if name == "dark":
            check_hovering_tells_whose_block_and_whose_step(page)
        check_a_click_explains_a_request(page)


def tell_tales(served: Served) -> None:
    """Generate stories in pairs with the same beginning, with more beginnings than the device has room for."""
    for number in range(8):
        tale = f"Once upon a time there were {number // 2} mice in a house by the sea, and they ate bread. " * 6
        served.http.post("/v1/completions", json={"prompt": f"{tale} {number}", "max_tokens": 8, "temperature": 0})


def check_hovering_tells_whose_block_and_whose_step(page: Page) -> None:
    until(page, "Number(document.getElementById('timeline').dataset.steps) > 100")
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + box["height"] - 10)
    until(page, "/^step \\d+: \\d+ tokens for \\d+ requests in /.test(document.getElementById('hover').textContent)")
    until(page, "Number(document.getElementById('num-owned').textContent) > 0")
    page.locator("#blocks").scroll_into_view_if_needed()
    box = page.locator("#blocks").bounding_box()
    assert box is not None
    for _ in range(20):  # a block may be released before the pointer reaches it
        x, y = page.evaluate(COLOURED_CELL)
        page.mouse.move(box["x"] + x + 1, box["y"] + y + 1)
        if "owned\ncmpl-" in page.locator("#hover").inner_text():
            break
    else:
        raise AssertionError("no block tells whose it is")


def check_a_click_explains_a_request(page: Page) -> None:
    until(page, "document.querySelectorAll('#requests tbody tr').length >= 8")
    page.locator("#requests tbody tr button").first.click()
    until(page, "document.querySelectorAll('#phases div').length > 0")
    assert page.locator("#explanation-title").inner_text().startswith("cmpl-")
    assert " in all; " in page.locator("#explanation-ending").inner_text()
    assert "waiting in the queue" in page.locator("#sums").inner_text()
    picture(page, "dashboard-explanation")
    page.keyboard.press("Escape")
    assert not page.locator("#explanation").is_visible()


@pytest.mark.turn(12)
def test_map_of_experts_shows_share_of_each_expert(browser: Browser) -> None:
    with run_server() as running, running.http() as http:
        counts = b"".join(each.to_bytes(8, sys.byteorder) for each in (1, 0, 0, 3, 2, 2, 2, 2))
        running.engine.core.metrics.stats.expert_tokens = ExpertTokens(4, bytearray(counts))
        served: Any = SimpleNamespace(http=http)
        with opened(browser, served) as page:
            until(page, "document.getElementById('expert-map').dataset.layers === '2'")
            page.locator("#expert-map").scroll_into_view_if_needed()
            box = page.locator("#expert-map").bounding_box()
            assert box is not None
            for row, column, text in ((0, 3, "expert 3: 300 %"), (0, 1, "expert 1: 0 %"), (1, 0, "expert 0: 100 %")):
                x, y = box["width"] * (column + 0.5) / 4, box["height"] * (row + 0.5) / 2
                page.mouse.move(box["x"] + x, box["y"] + y)
                shown = page.locator("#hover").inner_text()
                assert shown == f"layer {row} of those with experts, {text} of the mean of its layer"


@pytest.mark.turn(12)
def test_slots_of_states_and_unusable_tokens_are_shown_if_there_are_any(browser: Browser) -> None:
    with run_server() as running, running.http() as http:
        stats, served = running.engine.core.metrics.stats, SimpleNamespace(http=http)
        with opened(browser, cast("Served", served)) as page:
            until(page, "document.getElementById('state').textContent === 'ready'")
            assert not page.locator("#states").is_visible()
            assert not page.locator("#unusable").is_visible()
            stats.state_slots, stats.num_saved_checkpoints = StateSlots(2, 1234, 3), 4321
            stats.prefix_cache_unusable["checkpoint"] = 5678
            until(page, "document.querySelector('[data-figure=checkpoint]').textContent === '5,678'")
            picture(page, "dashboard-states", whole=True)
            figures = page.locator("#states b").all_inner_texts()
            assert figures == ["2", "1,234", "3", "4,321", "0"]
            assert page.locator("#unusable b").all_inner_texts() == ["0", "5,678"]


@pytest.mark.turn(12)
def test_click_and_keyboard_open_intended_row_while_rows_move(browser: Browser, served: Served) -> None:
    with opened(browser, served) as page:
        until(page, "document.getElementById('state').textContent === 'ready'")
        page.evaluate("""async () => {
            const { RequestTable } = await import("/dashboard/requests.js");
            const made = document.createElement("table");
            document.body.prepend(made);
            const table = new RequestTable(made.createTBody(), document.createElement("p"));
            window.list = (...ids) => table.update(ids.map((id) => ({ id, number: Number(id.slice(1)), state: "x" })));
            window.listed = () => [...table.body.rows].map((row) => row.dataset.id);
        }""")
        page.evaluate("list('r1', 'r2')")
        page.locator("tr[data-id=r1] button").hover()
        page.mouse.down()
        page.evaluate("list('r3', 'r2', 'r1')")
        assert page.evaluate("listed()") == ["r1", "r2"]
        page.mouse.up()
        assert page.locator("#explanation-title").inner_text() == "r1"
        page.keyboard.press("Escape")
        moved = "list('r3', 'r2', 'r1'), listed().join() === 'r3,r2,r1'"
        until(page, moved)
        page.locator("tr[data-id=r3] button").hover()
        page.mouse.down(button="right")
        page.evaluate("list('r2', 'r3', 'r1')")
        assert page.evaluate("listed()") == ["r2", "r3", "r1"], "only what can be a click holds rows"
        page.mouse.up(button="right")
        until(page, moved)
        page.locator("tr[data-id=r2] button").focus()
        page.keyboard.down(" ")
        page.evaluate("list('r2', 'r3', 'r1')")
        assert page.evaluate("listed()") == ["r3", "r2", "r1"]
        page.keyboard.up(" ")
        assert page.locator("#explanation-title").inner_text() == "r2"
        page.keyboard.press("Escape")
        until(page, "list('r1', 'r2', 'r3'), listed().join() === 'r1,r2,r3'")  # rows are sorted again
        until(page, moved)
        page.locator("tr[data-id=r2] button").focus()
        page.evaluate("list('r2', 'r3', 'r1')")
        assert page.evaluate("listed()") == ["r2", "r3", "r1"]
        page.keyboard.press("Enter")
        assert page.locator("#explanation-title").inner_text() == "r2"


@pytest.mark.turn(12)
def test_chat_panel_sends_prompts_and_shows_answers(browser: Browser, served: Served) -> None:
    with opened(browser, served) as page:
        until(page, "document.getElementById('state').textContent === 'ready'")
        page.fill("#temperature", "0")
        page.fill("#prompt", "What is 12 + 30?")
        page.keyboard.press("Enter")
        page.wait_for_selector("#messages .assistant .facts button")
        assert page.locator("#messages .assistant .text").inner_text() == "12 + 30 = 42"
        facts = page.locator("#messages .assistant .facts")
        assert "ended: stop" in facts.inner_text()
        facts.locator("button").click()
        until(page, "document.querySelectorAll('#phases div').length > 0")
        page.keyboard.press("Escape")
        page.fill("#max-tokens", "100000")
        page.fill("#prompt", "Tell me more.")
        page.click("#send")
        page.wait_for_selector("#messages .assistant.failed, #messages li:nth-child(4) .facts button")
        page.click("#clear")
        assert page.locator("#messages li").count() == 0


def test_s21_script_in_prompt_or_answer_is_inert(browser: Browser, served: Served) -> None:
    with opened(browser, served, num_refused=1) as page:
        until(page, "document.getElementById('state').textContent === 'ready'")
        page.fill("#prompt", SCRIPT)
        page.click("#send")
        page.wait_for_selector("#messages .assistant .facts button")
        assert page.locator("#messages .user .text").inner_text() == SCRIPT
        assert page.locator("#messages script, #messages img").count() == 0
        assert page.title() == "octavo"
        ran = page.evaluate("""() => new Promise((resolve) => {
            const script = document.createElement("script");
            script.textContent = "document.title = 'taken over'";
            document.body.append(script);
            setTimeout(() => resolve(document.title), 100);
        })""")
        assert ran == "octavo", "the policy keeps what got in from running"


@pytest.mark.turn(12)
def test_chosen_theme_survives_reload(browser: Browser, served: Served) -> None:
    with opened(browser, served, color_scheme="light") as page:
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.evaluate("localStorage.removeItem('octavo-theme')")


@pytest.mark.turn(16)
@pytest.mark.sweep(8)
@pytest.mark.parametrize("width", [1440, 390])
def test_dashboard_reports_lost_server_and_recovers(
    browser: Browser, served: Served, tmp_path: Path, width: int
) -> None:
    """The tiers of the cache are listed and drawn, with the blocks that the first server saved on its disk."""
    with opened(browser, served, width) as page:
        until(page, "document.getElementById('state').textContent === 'ready'")
        assert page.locator("#tiers").is_hidden(), "there is the device alone"
    tiers = ["--kv-disk-dir", str(tmp_path), "--swap-space-bytes", "2M", "--num-gpu-blocks-override", "40"]
    tiers += ["--kv-lookup-timeout-s", "20"]
    with serve(*tiers) as first, opened(browser, first, width) as page:
        until(page, "document.getElementById('state').textContent === 'ready'")
        tell_tales(first)
        port = first.http.base_url.port
        killed = first.engine
        killed.kill()
        new = first.wait_for_engine(other_than=killed)
        new.suspend()  # the page must see that it is not ready before it is ready
        until(page, "document.getElementById('state').dataset.state === 'restarting'")
        new.resume()
        until(page, "document.getElementById('state').textContent === 'ready'")
        first.process.terminate()
        first.process.wait(20)
        until(page, "document.getElementById('state').dataset.state === 'gone'")
        assert "cannot be reached" in page.locator("#state").inner_text()
        picture(page, "dashboard-gone")
        with serve("--port", str(port), *tiers) as second:
            until(page, "document.getElementById('state').textContent === 'ready'")
            assert second.answer() == "12 + 30 = 42"
            until(page, "document.querySelectorAll('#requests tbody tr').length === 1")
            check_tiers(page, second, width)


def check_tiers(page: Page, served: Served, width: int) -> None:
    """There are three tiers. Each answers some lookups; the disk has another engine's blocks."""
    for _ in range(3):
        tell_tales(served)
    until(
        page,
        "document.querySelector('#tiers .scroll tbody tr:nth-child(3) td:nth-child(4)').textContent.includes('iB')",
    )
    names = page.locator("#tiers .scroll tbody tr td:first-child").all_inner_texts()
    assert names == ["device", "host", "disk"]
    rates = [float(text.split()[0]) for text in page.locator("#tiers .scroll tbody td:nth-child(2)").all_inner_texts()]
    assert sum(rates) <= 101
    assert rates[2] > 0
    assert page.locator("#chart-tiers canvas").count() == 1
    until(page, "document.getElementById('chart-tiers').querySelector('.u-over').clientWidth > 200")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    page.locator("#tiers").scroll_into_view_if_needed()
    if PICTURES:
        page.wait_for_timeout(3000)
    picture(page, f"dashboard-tiers-{width}", whole=True)


def test_dashboard_requires_api_key_credentials(browser: Browser, served: Served) -> None:
    from playwright.sync_api import Error

    with opened(browser, served) as page:
        until(page, "document.getElementById('state').textContent === 'ready'")
        page.fill("#prompt", "What is 12 + 30?")
        page.click("#send")
        page.wait_for_selector("#messages .assistant .facts button")
        assert not page.locator("#messages .failed").count()
    with pytest.raises(Error, match="INVALID_AUTH_CREDENTIALS"), opened(browser, served, is_known=False):
        pass
