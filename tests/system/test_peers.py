"""smg, Dynamo and Ray Serve LLM each drive two octavo engines, and answer as `octavo serve` does."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading

import httpx
import pytest
from peers import SMALL, body, environment_of, started, wait_for
from serving_process import SUM, serve

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peers")]
TERMINAL_S = 30.0
STORIES = ["Once upon a time", "The cat", "What is 12 + 30?", "A dog and a"]
LONG = body("Once upon a time", max_tokens=2000, ignore_eos=True, temperature=1.0, n=16, stream=True)


@pytest.fixture(scope="module", params=["smg", "dynamo", "ray_serve", "ray_serve_direct"])
def front(request):
    with started(request.param) as running:
        yield running
    assert running.stage.orphans == []


@pytest.fixture(scope="module")
def direct():
    with serve(*SMALL) as running:
        yield running.http


def text_of(http: httpx.Client, request: dict) -> str:
    answer = http.post("/v1/completions", json=request)
    return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text


def events_of(http: httpx.Client, path: str, request: dict) -> list[dict]:
    with http.stream("POST", path, json={**request, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 11}, {"top_p": 0.5, "temperature": 1.0, "seed": 5}])
def test_texts_equal_those_of_a_server(front, direct, more):
    requests = [body(story, **more) for story in STORIES]
    assert [text_of(front.http, each) for each in requests] == [text_of(direct, each) for each in requests]


def test_chat_equals_that_of_a_server(front, direct):
    request = {**SUM, "model": "octavo-demo"}
    theirs, ours = (http.post("/v1/chat/completions", json=request).json() for http in (front.http, direct))
    assert theirs["choices"][0]["message"]["content"] == ours["choices"][0]["message"]["content"] == "12 + 30 = 42"
    assert theirs["usage"]["total_tokens"] == ours["usage"]["total_tokens"]


def test_stream_equals_complete_answer(front):
    pieces = events_of(front.http, "/v1/completions", body(STORIES[0]))
    text = "".join(choice["text"] for event in pieces for choice in event["choices"])
    assert text == text_of(front.http, body(STORIES[0]))
    deltas = events_of(front.http, "/v1/chat/completions", {**SUM, "model": "octavo-demo"})
    assert "".join(c["delta"].get("content") or "" for event in deltas for c in event["choices"]) == "12 + 30 = 42"


def test_answer_has_required_structure(front):
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    request = {**SUM, "model": "octavo-demo", "response_format": form}
    answer = front.http.post("/v1/chat/completions", json=request).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 7}


def test_invalid_request_gets_400_with_octavos_message(front):
    answer = front.http.post("/v1/completions", json=body("word " * 3000))
    assert answer.status_code == 400
    assert "this model's maximum context length is 2048 tokens" in answer.text


def test_load_reaches_both_engines(front):
    before = {core.pid: sum(core.cpu_times()[:2]) for core in front.cores()}
    requests = [body(f"{number} and", max_tokens=400, temperature=1.0, ignore_eos=True) for number in range(24)]
    threads = [threading.Thread(target=text_of, args=[front.http, each]) for each in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    used = [sum(core.cpu_times()[:2]) - before[core.pid] for core in front.cores()]
    assert len(used) == 2
    assert min(used) > 0.05


def test_router_sends_prompts_to_the_engine_that_has_their_prefix(front):
    """smg remembers where it has sent a prefix. Dynamo learns from the engines' KV events what they have."""
    if front.name.startswith("ray_serve"):
        pytest.skip("nothing is promised for prefixes")
    cached = []
    for _ in range(2):
        for number in range(13):  # an odd number, so that turns would miss
            prompt = f"{number} {number} " + f"the {number} cats and the dogs " * 30
            answer = front.http.post("/v1/completions", json=body(prompt, max_tokens=1)).json()
            cached.append((answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]))
    hits = [num_cached / num_tokens for num_cached, num_tokens in cached]
    assert max(hits[:13]) < 0.2
    assert sum(hits[13:]) / 13 >= 0.9, hits[13:]


def test_replicas_without_ingress_serve_all_apis(front):
    if front.name != "ray_serve_direct":
        pytest.skip("nothing is promised for Anthropic")
    request = {**SUM, "model": "octavo-demo"}
    answer = front.http.post("/v1/messages", json=request, headers={"anthropic-version": "2023-06-01"}).json()
    assert answer["content"] == [{"type": "text", "text": "12 + 30 = 42"}]


def test_smg_reads_loads_of_engines(front):
    if front.name != "smg":
        pytest.skip("nothing is promised for loads")
    wait_for(lambda: len(front.http.get("/get_loads").json()["loads"]) == 2, front, 30)


@pytest.mark.parametrize(
    ("words", "message"), [(["--block-size", "0"], "block_size must be"), (["--max-num-seqs", "x"], "--max-num-seqs")]
)
def test_dynamo_worker_explains_invalid_option(words, message):
    python = environment_of("dynamo") / "python"
    done = subprocess.run([python, "-m", "octavo.dynamo", *words], capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_disconnect_ends_request(front):
    def cpu_of(*, leaves: bool) -> float:
        before = front.cpu_seconds()
        with front.http.stream("POST", "/v1/completions", json=LONG) as answer:
            assert answer.status_code == 200
            for _ in answer.iter_lines():
                if leaves:
                    break
        wait_for(front.is_answering, front)  # the engines compute no more rows of it
        return front.cpu_seconds() - before

    complete = cpu_of(leaves=False)
    assert cpu_of(leaves=True) < complete / 2


def test_killed_engine_under_load_ends_every_request(front, direct):
    ends = []

    def ask() -> None:
        try:
            with front.http.stream("POST", "/v1/completions", json={**LONG, "n": 1}) as answer:
                ends.append((answer.status_code, answer.read()[-20:]))
        except httpx.HTTPError as error:
            ends.append((0, repr(error).encode()))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    victim = front.servers()[0]
    for each in [victim, *victim.children(recursive=True)]:
        with contextlib.suppress(Exception):
            each.kill()
    for thread in threads:
        thread.join(TERMINAL_S)
    assert len(ends) == 8
    assert any(b"[DONE]" in end for status, end in ends if status == 200), ends
    expected = text_of(direct, body(STORIES[0]))  # Dynamo answers 503 until it has forgotten the killed worker
    wait_for(lambda: [text_of(front.http, body(STORIES[0])) for _ in range(8)] == [expected] * 8, front)
