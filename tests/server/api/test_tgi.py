"""TGI's routes, used through the real `huggingface_hub` package."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import huggingface_hub
import pytest
from fakes import EOS, FakeExecutor, answer_text, answer_token
from huggingface_hub.errors import GenerationError, OverloadedError, ValidationError
from running import run_server

from octavo.errors import RequestError
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.server.answers.jobs import ChoiceUpdate
from octavo.server.api.tgi import GenerateParameters, GenerateReply, Grammar, _params
from octavo.server.api.tgi_tokens import Token, TokenTexts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

    from octavo.server.service import Service

WHOLE = answer_text(5)


@pytest.fixture
def client(shared: Running) -> huggingface_hub.InferenceClient:
    return huggingface_hub.InferenceClient(model=shared.url, timeout=20)


def test_text_generation_returns_generated_text(client: huggingface_hub.InferenceClient) -> None:
    assert client.text_generation("hello", max_new_tokens=20) == answer_text(5, 0, 20)
    assert client.text_generation("hello", max_new_tokens=2000) == WHOLE
    assert client.text_generation("hello", max_new_tokens=5, return_full_text=True) == "hello" + answer_text(5, 0, 5)


def test_details_report_tokens_prefill_and_top_tokens(client: huggingface_hub.InferenceClient) -> None:
    answer = client.text_generation("hello", max_new_tokens=6, details=True, decoder_input_details=True, top_n_tokens=2)
    details = answer.details
    assert answer.generated_text == answer_text(5, 0, 6)
    assert (details.finish_reason, details.generated_tokens) == ("length", 6)
    expected = [answer_token(5, 0, index) for index in range(6)]
    assert [token["id"] for token in details.tokens] == expected
    assert all(token["logprob"] == -0.25 and not token["special"] for token in details.tokens)
    assert [token["id"] for token in details.prefill] == list(b"hello")
    assert details.prefill[0]["logprob"] is None
    assert [len(best) for best in details.top_tokens] == [2] * 6
    assert details.top_tokens[0][0]["id"] == details.tokens[0]["id"]


def test_token_texts_concatenate_to_generated_text(shared: Running) -> None:
    """This also holds if a character has several tokens. A hidden token has its own spelling, outside the text."""
    body = {"inputs": "h\u00e9llo", "parameters": {"max_new_tokens": 2000, "details": True}}
    with shared.http() as http:
        answer = http.post("/generate", json=body).json()
    tokens = answer["details"]["tokens"]
    assert "".join(token["text"] for token in tokens if not token["special"]) == answer["generated_text"]
    assert any(token["text"] == "" for token in tokens), "a part of a character"
    assert (tokens[-1]["text"], tokens[-1]["special"]) == ("<eos>", True)


class Pieces:
    """A detokenizer that adds given texts, one per token."""

    held, num_prompt_bytes = b"", 0

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = iter(pieces)

    def add(self, token_ids: list[int]) -> str:
        return "".join(next(self._pieces) for _ in token_ids)

    def finish(self) -> str:
        raise AssertionError("the whole text says what the end adds")


def answer_tokens() -> list[Token]:
    return [Token(1, "x", None, False), Token(2, "y", None, False), Token(3, "</s>", None, True)]


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("ab", ["a", "b", ""], ["a", "b", "</s>"]),
        ("a\ufffd", ["a", "", ""], ["a", "\ufffd", "</s>"]),
        ("a\ufffd", ["a", "", "\ufffd"], ["a", "\ufffd", "</s>"]),
        ("ab fo", ["ab", " fox", ""], ["ab", " fo", "</s>"]),
        ("a", ["ab", " fox", ""], ["a", "", "</s>"]),
    ],
    ids=["plain", "held until the end", "released by a special token", "cut in the last", "cut before the last"],
)
def test_token_texts_assign_each_character_to_one_token(text: str, pieces: list[str], expected: list[str]) -> None:
    tokens = answer_tokens()
    TokenTexts(Pieces(pieces)).share(tokens, text)
    assert [token.text for token in tokens] == expected


@pytest.mark.parametrize(("pieces", "rest"), [(["a", "b", ""], ""), (["a", "", "b"], "b")])
def test_special_token_update_keeps_buffered_text(pieces: list[str], rest: str) -> None:
    texts, tokens = TokenTexts(Pieces(pieces)), answer_tokens()
    for token in tokens[:2]:
        assert texts.share([token], None) == ""
    assert texts.share(tokens[2:], "ab") == rest
    assert "".join(token.text for token in tokens[:2]) + rest == "ab"


def test_decoder_input_details_returns_prompt_tokens(shared: Running) -> None:
    """The prompt's tokens can be requested without `details`."""
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 2, "decoder_input_details": True}}
    with shared.http() as http:
        prefill = http.post("/generate", json=body).json()["details"]["prefill"]
    assert [(token["id"], token["text"]) for token in prefill] == [(ord("h"), "h"), (ord("i"), "i")]


def test_huggingface_hub_chat_completion_works_without_model_name(
    client: huggingface_hub.InferenceClient, shared: Running
) -> None:
    """Given an address, the package names no model."""
    messages = [{"role": "user", "content": "hello"}]
    answer = client.chat_completion(messages, max_tokens=8)
    assert answer.model == "fake"
    assert client.chat_completion(messages, model="tgi", max_tokens=8).choices == answer.choices
    with shared.http() as http:
        assert [http.get(f"/v1/models/{name}").status_code for name in ("fake", "tgi", "dummy")] == [200, 404, 404]
    streamed = client.chat_completion(messages, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == answer.choices[0].message.content


def test_root_route_answers_list(shared: Running) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 4}}
    with shared.http() as http:
        assert http.post("/", json=body).json() == [http.post("/generate", json=body).json()]


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ({}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "top_p": 1.0, "do_sample": False}, False),
        ({"temperature": 0.7}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"do_sample": True}, True),
        ({"typical_p": 0.95, "do_sample": False}, True),
        ({"do_sample": True, "temperature": 0.5}, True),
    ],
)
def test_sampling_is_enabled_by_do_sample_or_distribution_fields(parameters: dict[str, Any], samples: bool) -> None:
    """TGI samples if `do_sample` is set, or a field that changes the distribution."""
    params = _params(GenerateParameters(**parameters), stream=False)
    assert params.temperature == (parameters.get("temperature", 1.0) if samples else 0.0)


def test_tgi_finish_reasons_are_reported(client: huggingface_hub.InferenceClient) -> None:
    assert client.text_generation("hello", max_new_tokens=2000, details=True).details.finish_reason == "eos_token"
    stopped = client.text_generation("hello", max_new_tokens=2000, details=True, stop=["fox"])
    assert stopped.details.finish_reason == "stop_sequence"
    assert stopped.generated_text == WHOLE[: WHOLE.index("fox") + 3]


@pytest.mark.parametrize("max_new_tokens", [1, 30, 2000])
def test_tgi_stream_equals_unstreamed_answer(client: huggingface_hub.InferenceClient, max_new_tokens: int) -> None:
    whole = client.text_generation("hello", max_new_tokens=max_new_tokens, details=True)
    events = list(client.text_generation("hello", max_new_tokens=max_new_tokens, stream=True, details=True))
    assert "".join(event.token.text for event in events) == events[-1].generated_text == whole.generated_text
    assert [event.token.id for event in events] == [token["id"] for token in whole.details.tokens]
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert all(event.details is None and event.generated_text is None for event in events[:-1])
    last = events[-1].details
    assert (last.finish_reason, last.generated_tokens) == (whole.details.finish_reason, len(events))
    assert last.input_length == 5
    assert events[-1].token.special == (events[-1].token.id == EOS)
    plain = client.text_generation("hello", max_new_tokens=max_new_tokens, stream=True)
    assert "".join(plain) == whole.generated_text


def test_each_token_of_multi_token_update_has_separate_event() -> None:
    """With speculation, or an engine ahead of the server, one update has the tokens of several steps."""
    texts = {7: "ab", 8: "c", 9: "", 10: "de", 11: "f", EOS: ""}
    detokenizer = SimpleNamespace(add=lambda token_ids: "".join(texts[each] for each in token_ids))
    tokenizer = SimpleNamespace(
        token=str,
        is_special=lambda token_id: token_id == EOS,
        incremental_detokenizer=lambda _prompt, skip_special_tokens: detokenizer,
    )
    engine = SimpleNamespace(
        input_processor=SimpleNamespace(tokenizer=tokenizer), output_processor=SimpleNamespace(tokenizer=tokenizer)
    )
    service = SimpleNamespace(engine=engine)
    reply = GenerateReply(cast("Service", service), GenerateParameters(top_n_tokens=1), "")

    def told(text: str, token_ids: list[int], finish_reason: str | None = None) -> list[dict[str, Any]]:
        logprobs = [{token_id: Logprob(-token_id, 1, f"<{token_id}>")} for token_id in token_ids]
        completion = CompletionOutput(0, text, token_ids, logprobs=logprobs, finish_reason=finish_reason)
        output = RequestOutput("0", None, [1, 2], [completion], finished=completion.finished)
        events = reply.update(ChoiceUpdate(0, is_first=False, completion=completion, output=output), None).decode()
        return [json.loads(line.removeprefix("data: ")) for line in events.split("\n\n") if line]

    events = [*told("ab", [7]), *told("cde", [8, 9, 10]), *told("f", [11, EOS], "stop")]
    assert [event["index"] for event in events] == [1, 2, 3, 4, 5, 6]
    assert [event["token"]["id"] for event in events] == [7, 8, 9, 10, 11, EOS]
    assert [event["token"]["logprob"] for event in events] == [-7, -8, -9, -10, -11, -EOS]
    assert [event["top_tokens"][0]["id"] for event in events] == [7, 8, 9, 10, 11, EOS]
    assert [event["token"]["text"] for event in events] == ["ab", "c", "", "de", "f", ""]
    assert [event["generated_text"] for event in events] == [None] * 5 + ["abcdef"]
    assert events[-1]["details"]["generated_tokens"] == 6
    assert told("", [], "abort")[0]["index"] == 6


@pytest.mark.parametrize("stop", [[], ["fox"], ["lazy cat", "jumps"]], ids=str)
def test_streamed_token_texts_equal_unstreamed_with_speculation(stop: list[str]) -> None:
    """This also holds while the start of a stop string is buffered."""
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 2000, "details": True, "stop": stop}}
    with run_server(FakeExecutor(guesses=(True, True, False))) as running, running.http() as http:
        whole = http.post("/generate", json=body).json()
        streamed = http.post("/generate_stream", json=body).text
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line]
    tokens = whole["details"]["tokens"]
    assert [event["token"]["text"] for event in events] == ["" if each["special"] else each["text"] for each in tokens]
    assert "".join(event["token"]["text"] for event in events) == whole["generated_text"]
    assert max(len(event["token"]["text"]) for event in events) == 1, "a token is a byte here"


@pytest.mark.parametrize("kind", ["json", "json_schema"])
def test_grammar_schema_may_be_json_string(kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    value = schema if kind == "json" else {"name": "n", "schema": schema}
    params = [
        _params(GenerateParameters(grammar=Grammar(type=kind, value=each)), stream=False)
        for each in (value, json.dumps(value))
    ]
    assert params[0].structured_outputs == params[1].structured_outputs != None  # noqa: E711 - of both
    for broken in ("{", "[1]", '"a"', "\ud800"):
        with pytest.raises(RequestError, match="grammar"):
            _params(GenerateParameters(grammar=Grammar(type=kind, value=broken)), stream=False)


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
def test_excessive_max_new_tokens_error_has_tgi_wording(shared: Running, route: str) -> None:
    """The limit of this server is 2,048 tokens."""
    told = "`inputs` tokens + `max_new_tokens` must be <= 2048. Given: 5 `inputs` tokens and 2044 `max_new_tokens`"
    with shared.http() as http:
        refused = http.post(route, json={"inputs": "hello", "parameters": {"max_new_tokens": 2044}})
        assert http.post(route, json={"inputs": "hello", "parameters": {"max_new_tokens": 2043}}).status_code == 200
        assert http.post(route, json={"inputs": "x" * 2040}).status_code == 200, "the default limit is no demand"
    assert refused.status_code == 422
    assert refused.json() == {"error": f"Input validation error: {told}", "error_type": "validation"}


def test_truncate_keeps_last_prompt_tokens(shared: Running) -> None:
    with shared.http() as http:
        body = {"inputs": "a long prompt: hello", "parameters": {"truncate": 5, "max_new_tokens": 8, "details": True}}
        answer = http.post("/generate", json=body).json()
    assert answer["generated_text"] == answer_text(5, 0, 8)


def test_info_reports_model_limits_and_kv_capacity(shared: Running) -> None:
    with shared.http() as http:
        info = http.get("/info").json()
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("fake", 2048, 2047)
    capacity = shared.engine.client.capacity
    assert info["max_batch_prefill_tokens"] == capacity.max_batch_prefill_tokens > 0
    assert info["max_batch_total_tokens"] == info["kv_cache_tokens"] == capacity.num_gpu_blocks * capacity.block_size


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"top_p": 2.0},
        {"top_k": -5},
        {"max_new_tokens": 0},
        {"best_of": 2},
        {"typical_p": 0.0},
        {"watermark": True},
        {"adapter_id": "x"},
        {"truncate": 0},
        {"top_n_tokens": 100},
        {"stop": ["a"] * 1000},
        {"grammar": {"type": "xml", "value": "a"}},
        {"grammar": {"type": "json", "value": "a"}},
        {"repetition_penalty": -1.0},
        {"seed": "x"},
        {"mirostat": 2},
        {"json_schema": {}},
        {"num_beams": 4},
    ],
)
@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
def test_unsupported_parameters_answer_422_validation_error(
    shared: Running, route: str, parameters: dict[str, Any]
) -> None:
    with shared.http() as http:
        response = http.post(route, json={"inputs": "hello", "parameters": parameters})
    assert response.status_code == 422, response.text
    assert response.json()["error_type"] == "validation"
    assert next(iter(parameters)) in response.json()["error"]


@pytest.mark.parametrize(
    "fields",
    [{"grammar": 'root ::= "a"'}, {"grammar": {"type": "regex", "value": "a"}}, {"max_new_tokens": 5}, {"mirostat": 2}],
    ids=str,
)
@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
def test_generation_fields_outside_parameters_are_refused(shared: Running, route: str, fields: dict[str, Any]) -> None:
    with shared.http() as http:
        response = http.post(route, json={"inputs": "hello", **fields})
    assert response.status_code == 422, response.text
    assert next(iter(fields)) in response.json()["error"]


def test_hub_options_are_accepted_and_unknown_fields_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    options = {"use_cache": False, "wait_for_model": True}  # fields for Hugging Face's own service
    parameters = {"max_new_tokens": 4, "mirostat": 0, "num_beams": 1, "user": "x", "nor_this": 1}
    body = {"inputs": "hello", "options": options, "nobody_knows": 1, "parameters": parameters}
    with run_server() as running, running.http() as http:
        answers = [http.post("/generate", json=body).json() for _ in range(2)]
    assert answers == [{"generated_text": answer_text(5, 0, 4)}] * 2
    named = [message for message in caplog.messages if "unknown fields" in message]
    assert len(named) == 2
    assert "'nobody_knows'" in named[0]
    assert "'nor_this'" in named[1]


def test_errors_raise_huggingface_hub_exceptions(client: huggingface_hub.InferenceClient) -> None:
    with pytest.raises(ValidationError, match="temperature"):
        client.text_generation("hello", temperature=-1.0)
    with pytest.raises(ValidationError, match="max_model_len"):
        client.text_generation("x" * 3000)
    executor = FakeExecutor()
    with run_server(executor) as running:
        client = huggingface_hub.InferenceClient(model=running.url, timeout=20)
        executor.fail_next = True
        with pytest.raises(GenerationError):
            client.text_generation("hello", details=True)
        assert client.text_generation("hello", max_new_tokens=3) == answer_text(5, 0, 3)
    with run_server(FakeExecutor(step_s=0.05), max_open_requests=1) as running, running.http() as http:
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 2000}}
        with http.stream("POST", "/generate_stream", json=body) as response:
            lines = response.iter_lines()  # dropping the iterator closes the connection
            next(lines)
            with pytest.raises(OverloadedError):
                huggingface_hub.InferenceClient(model=running.url, timeout=20).text_generation("hello")


def test_failed_tgi_stream_ends_with_error_event(shared: Running) -> None:
    executor = FakeExecutor(step_s=0.02)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 500}}
    with (
        run_server(executor) as running,
        running.http() as http,
        http.stream("POST", "/generate_stream", json=body) as stream,
    ):
        lines: Iterator[str] = stream.iter_lines()
        next(lines)
        executor.fail_next = True
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert events[-1]["error_type"] == "generation"
    assert "secret" not in events[-1]["error"]
