"""`octavo bench serve`: the requests of its clients, their measurements, and the summary."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fakes import FakeExecutor
from running import run_server
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.load_test import (
    Seen,
    Target,
    _read,
    arrival_times,
    find_model,
    load,
    medians,
    percentile,
    shuffled,
    summarize,
)
from octavo.cli.workloads import Item
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from running import Running

ITEMS = [Item(list(range(65, 65 + 3 * number)), number) for number in range(1, 9)]


def run_load(running: Running, items: list[Item] = ITEMS, **options: Any) -> list[Seen]:
    target = Target(url=running.url, model=options.pop("model", "fake"))
    return asyncio.run(load(target, items, [0.0] * len(items), **options))


def test_arrival_times_follow_trace_or_poisson_rate() -> None:
    assert arrival_times(3, None, [1.0, 2.0], 0) == [0.0, 0.0, 0.0]
    assert arrival_times(3, 2.0, [1.0, 3.0, 0.5], 0) == [0.5, 2.0, 2.25]
    drawn = arrival_times(20_000, 5.0, [], 1)
    gaps = np.diff(drawn)
    assert np.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.2, rel=0.05), "of a Poisson process"
    assert arrival_times(100, 5.0, [], 1) == drawn[:100]
    assert arrival_times(100, 5.0, [], 2) != drawn[:100]


def test_shuffled_prompts_are_permutations_of_equal_length() -> None:
    items = [Item(list(range(50)), 3), Item(list(range(7, 30)), 5)]
    first, second = shuffled(items), shuffled(items)
    assert first != second
    for item, one in zip(items, first, strict=True):
        assert sorted(one.prompt_token_ids) == item.prompt_token_ids
        assert one.num_output_tokens == item.num_output_tokens


def test_bench_percentiles_equal_numpy() -> None:
    rng = random.Random(3)
    for count in (1, 2, 3, 10, 101):
        values = [rng.random() for _ in range(count)]
        for share in (0, 1, 50, 99, 100):
            assert percentile(values, share) == pytest.approx(np.percentile(values, share))


def test_bench_reads_streams_to_end_and_counts_tokens(shared: Running) -> None:
    ended: list[Seen] = []
    seen = run_load(shared, on_end=ended.append)
    assert [each.error for each in seen] == [None] * len(ITEMS)
    assert [each.num_prompt_tokens for each in seen] == [len(item.prompt_token_ids) for item in ITEMS]
    assert [each.num_output_tokens for each in seen] == [item.num_output_tokens for item in ITEMS]
    assert sorted(map(id, ended)) == sorted(map(id, seen))
    for each in seen:
        assert each.sent <= each.token_times[0] <= each.token_times[-1] <= each.ended
    row = summarize(seen)
    assert (row["requests"], row["failed"]) == (8, 0)
    wall_s = max(each.ended for each in seen) - min(each.sent for each in seen)
    assert row["output_tok_per_s"] == pytest.approx(sum(range(1, 9)) / wall_s, abs=0.05)


def test_failed_requests_are_counted_with_error(shared: Running) -> None:
    seen = run_load(shared, [ITEMS[3], Item([10**6], 3)])
    assert seen[0].error is None
    assert (seen[1].error or "").startswith("status 400: ")
    assert (summarize(seen)["requests"], summarize(seen)["failed"]) == (2, 1)
    nobody = run_load(shared, model="nobody")
    assert all("model_not_found" in (each.error or "") for each in nobody)
    assert summarize(nobody) == {"requests": 8, "failed": 8}


def test_answer_shorter_than_requested_is_failure() -> None:
    with run_server(engine_options={"max_model_len": 20}) as running:
        (seen,) = run_load(running, [Item([65] * 10, 15)])
    assert "10 tokens were generated, but 15 were asked for" in (seen.error or "") or (seen.error or "").startswith(
        "status 400"
    )


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_event_parser_accepts_other_line_ends_and_comments(end: bytes) -> None:
    class Response:
        @property
        def content(self) -> Any:
            return self

        async def iter_any(self) -> Any:
            chunk = json.dumps({"choices": [{"text": "x", "finish_reason": None}]}).encode()
            last = json.dumps({"choices": [{"text": "", "finish_reason": "stop"}]}).encode()
            usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}).encode()
            text = b": a comment" + end * 2
            text += b"".join(b"data:" + each + end * 2 for each in (chunk, b" " + chunk, last, usage, b" [DONE]"))
            for byte in range(len(text)):
                yield text[byte : byte + 1]

    seen = Seen(0.0)
    asyncio.run(_read(Response(), seen))  # type: ignore[arg-type]
    assert (len(seen.token_times), seen.num_prompt_tokens, seen.num_output_tokens) == (2, 4, 2)


def test_max_concurrency_limits_open_requests() -> None:
    executor = FakeExecutor(step_s=0.002)
    with run_server(executor) as running:
        most = 0

        def look(_seen: Seen) -> None:
            nonlocal most
            most = max(most, running.num_unfinished)

        seen = run_load(running, [Item([65, 66], 10)] * 12, max_concurrency=3, on_end=look)
    assert [each.error for each in seen] == [None] * 12
    assert most <= 3


def test_summary_of_known_run_has_expected_figures() -> None:
    seen = [
        Seen(0.0, [0.1, 0.2, 0.4], num_prompt_tokens=5, num_output_tokens=3, ended=0.5),
        Seen(0.5, [0.8], num_prompt_tokens=7, num_output_tokens=1, ended=1.0),
        Seen(0.6, [], error="status 500"),
    ]
    row = summarize(seen)
    assert (row["requests"], row["failed"], row["wall_s"]) == (3, 1, 1.0)
    assert (row["output_tok_per_s"], row["total_tok_per_s"], row["requests_per_s"]) == (4.0, 16.0, 2.0)
    assert (row["ttft_p50_ms"], row["itl_p50_ms"], row["tpot_p50_ms"], row["e2e_p50_ms"]) == (
        200.0,
        150.0,
        150.0,
        500.0,
    )
    assert medians([{"a": 1, "b": None}, {"a": 3, "b": None}, {"a": 2, "b": None}]) == {"a": 2, "b": None}


def test_find_model_error_explains_unreachable_server(shared: Running) -> None:
    assert asyncio.run(find_model(shared.url, None)) == "fake"
    with pytest.raises(ConfigError, match="no OpenAI API answers"):
        asyncio.run(find_model("http://127.0.0.1:1", None))
    with pytest.raises(ConfigError, match="answers 404"):
        asyncio.run(find_model(f"{shared.url}/tokenize", None))
    with run_server(api_key="secret") as keyed:
        with pytest.raises(ConfigError, match="answers 401"):
            asyncio.run(find_model(keyed.url, "wrong"))
        assert asyncio.run(find_model(keyed.url, "secret")) == "fake"


@pytest.mark.turn(12)
def test_bench_serve_command_prints_summary(shared: Running) -> None:
    run = CliRunner().invoke
    told = json.loads(run(app, ["bench", "serve", shared.url + "/v1/", "--rate", "200", "--json"]).stdout)
    assert (told["model"], told["rate"], told["results"][0]["failed"]) == ("fake", 200.0, 0)
    shown = run(app, ["bench", "serve", shared.url, "--num-prompts", "3", "--repeat", "2"])
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0].split() == ["run", "1", "2", "median"]
    assert shown.stdout.splitlines()[1].split() == ["requests", "3", "3", "3"]
    failed = run(app, ["bench", "serve", shared.url, "--model", "nobody"])
    assert failed.exit_code == 1
    assert "a request failed: status 404" in failed.stderr
