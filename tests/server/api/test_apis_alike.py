"""One answer through all APIs, whole and streamed: each shows the same reasoning, content and calls in its own form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeChatTemplate, FakeExecutor
from running import run_server

from octavo.server.answers.known_formats import FORMATS
from octavo.server.answers.reasoning_forms import find_reasoning_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    Told = tuple[str, str, list[tuple[str, Any]]]

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = [("get_weather", CITY), ("now", NOTHING)]
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", {"city": 'Röme "x" <b>\n2', "days": 2}), ("now", {})]
MESSAGES = [{"role": "user", "content": "How is Rome?"}]
THOUGHT, SAID = "Hm, 狐 <a>.\nYes", "I look.\n"
OWN_REASONING = {"apertus", "gemma4", "hy_v3", "kimi_k3", "minimax_m3", "muse_glimmer", "seed_oss", "solar_open"}
SAID_IN = {
    "openai": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant",
    "muse_glimmer": " to=user<|message|>I look.<|eom|><|start|>assistant",
}
NAMES = [*dict.fromkeys(form.name for form in FORMATS)]


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def chat(http: httpx.Client, *, tools: bool, stream: bool) -> Told:
    functions = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS]
    body = {"messages": MESSAGES, "stream": stream, **({"tools": functions} if tools else {})}
    answer = http.post("/v1/chat/completions", json=body)
    pieces = [e["choices"][0]["delta"] for e in events(answer)] if stream else [answer.json()["choices"][0]["message"]]
    calls: dict[int, list[str]] = {}
    for piece in pieces:
        for index, call in enumerate(piece.get("tool_calls") or []):
            told = calls.setdefault(call.get("index", index), ["", ""])
            told[0] += call["function"].get("name") or ""
            told[1] += call["function"].get("arguments") or ""
    texts = ["".join(piece.get(key) or "" for piece in pieces) for key in ("reasoning_content", "content")]
    return texts[0], texts[1], [(name, json.loads(arguments)) for name, arguments in calls.values()]


def responses(http: httpx.Client, *, tools: bool, stream: bool) -> Told:
    functions = [{"type": "function", "name": name, "parameters": each} for name, each in TOOLS]
    body = {"input": "How is Rome?", "stream": stream, **({"tools": functions} if tools else {})}
    answer = http.post("/v1/responses", json=body)
    told = [*events(answer)] if stream else []
    output = told[-1]["response"]["output"] if stream else answer.json()["output"]
    texts = ["".join(part["text"] for item in output if item["type"] == kind for part in item["content"])
             for kind in ("reasoning", "message")]  # fmt: skip
    calls = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    if stream:
        for kind, text in (
            ("reasoning_text", texts[0]),
            ("output_text", texts[1]),
            ("function_call_arguments", "".join(arguments for _, arguments in calls)),
        ):
            assert "".join(e["delta"] for e in told if e["type"] == f"response.{kind}.delta") == text
    return texts[0], texts[1], [(name, json.loads(arguments)) for name, arguments in calls]


def messages(http: httpx.Client, *, tools: bool, stream: bool) -> Told:
    functions = [{"name": name, "input_schema": each} for name, each in TOOLS]
    body = {"model": "fake", "max_tokens": 1500, "messages": MESSAGES, "stream": stream}
    answer = http.post("/v1/messages", json={**body, **({"tools": functions} if tools else {})})
    blocks: list[dict[str, Any]] = [] if stream else answer.json()["content"]
    for told in events(answer) if stream else ():
        if told["type"] == "content_block_start":
            blocks.append({**told["content_block"], "written": ""})
        elif told["type"] == "content_block_delta":
            for key, name in (("text", "text"), ("thinking", "thinking"), ("partial_json", "written")):
                blocks[told["index"]][name] = blocks[told["index"]].get(name, "") + told["delta"].get(key, "")
    calls = [(b["name"], json.loads(b.get("written") or "{}") if stream else b["input"]) for b in blocks
             if b["type"] == "tool_use"]  # fmt: skip
    texts = ["".join(b[kind] for b in blocks if b["type"] == kind) for kind in ("thinking", "text")]
    return texts[0], texts[1], calls


def ollama(http: httpx.Client, *, tools: bool, stream: bool) -> Told:
    functions = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS]
    body = {"model": "fake", "messages": MESSAGES, "stream": stream, **({"tools": functions} if tools else {})}
    answer = http.post("/api/chat", json=body)
    told = [json.loads(line)["message"] for line in answer.text.splitlines()]
    calls = [call["function"] for each in told for call in each.get("tool_calls") or []]
    texts = ["".join(each.get(key) or "" for each in told) for key in ("thinking", "content")]
    return texts[0], texts[1], [(call["name"], call["arguments"]) for call in calls]


APIS: list[Callable[..., Told]] = [chat, responses, messages, ollama]


@pytest.mark.sweep(80)
@pytest.mark.parametrize("name", NAMES)
def test_all_apis_return_equal_reasoning_content_and_calls(name: str) -> None:
    form = next(each for each in FORMATS if each.name == name)()
    forms = {"openai": "openai_gptoss", **{each: each for each in OWN_REASONING}}
    reasoning = find_reasoning_form(forms.get(name, "think"), [])
    assert reasoning is not None
    calls = CALLS[:1] if form.takes_one else CALLS
    turn = "<|start|>assistant" if form.reads_reasoning else ""
    thought = f"{' ' * (name == 'muse_glimmer')}{reasoning.opens}{THOUGHT}{reasoning.closes}{turn}"
    executor = FakeExecutor(answer=thought + SAID_IN.get(name, SAID) + form.write(calls))
    options = {"chat_template": FakeChatTemplate("")}
    with (
        run_server(executor, engine_options=options, tool_call_parser=name, reasoning_parser=reasoning.name) as running,
        running.http() as http,
    ):
        ways = [(api, stream) for api in APIS for stream in (False, True)]
        told = {(api.__name__, stream): api(http, tools=True, stream=stream) for api, stream in ways}
        reasoned, content, called = told["chat", False]
        assert (reasoned, content.strip(), called) == (THOUGHT, "I look.", calls)
        assert all(each == told["chat", False] for each in told.values()), told
        plain = [api(http, tools=False, stream=stream) for api, stream in ways]
        assert plain == [plain[0]] * len(plain)
        assert (plain[0][0], plain[0][2]) == (THOUGHT, [])


@pytest.mark.turn(12)
@pytest.mark.parametrize(
    ("end", "city"), [('say "}" now"}', 'say "}" now'), ('", "days": oops}', None)], ids=["repaired", "text"]
)
def test_long_malformed_call_is_repaired_or_text_in_all_apis(end: str, city: str | None) -> None:
    begun = "long " * 230
    answer = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{begun}{end}}}</tool_call>'
    options = {"chat_template": FakeChatTemplate("<tool_call>")}
    with run_server(FakeExecutor(answer=answer), engine_options=options) as running, running.http() as http:
        told = [api(http, tools=True, stream=False) for api in APIS] + [ollama(http, tools=True, stream=True)]
    expected = ("", answer, []) if city is None else ("", "", [("get_weather", {"city": begun + city})])
    assert told == [expected] * len(told)
