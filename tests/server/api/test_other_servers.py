"""Fields that clients of llama.cpp, vLLM, SGLang and other servers send: served, refused by name, or harmless."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fakes import FakeChatTemplate, FakeExecutor, answer_text
from running import DEADLINE_S, run_server
from sdks import anthropic, openai

from octavo.server.api import extra_fields
from octavo.server.api.extra_fields import ALIASES, HARMLESS, PENALTY_RANGE, As, ExtraFields, Off
from octavo.server.api.openai.requests import ChatCompletionRequest, CompletionRequest, OtherNames

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.sampling_params import SamplingParams

API = Path(__file__).parents[3] / "docs" / "api.md"
MESSAGES: Any = [{"role": "user", "content": "Where is the fox?"}]
PROMPT = "Where is the fox?"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": PROMPT}}
TABLES = [
    extra_fields.VLLM,
    extra_fields.LLAMA_CPP,
    extra_fields.SGLANG,
    extra_fields.TGI,
    extra_fields.OLLAMA,
    extra_fields.GATEWAYS,
    extra_fields.SAMPLERS,
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Keeper(FakeExecutor):
    """Keeps the parameters of the last request."""

    params: SamplingParams

    def submit(self, scheduled: SchedulerOutput) -> None:
        for data in scheduled.scheduled_new_reqs:
            self.params = data.sampling_params
        super().submit(scheduled)


@pytest.fixture(scope="module")
def keeper() -> Iterator[Running]:
    with run_server(Keeper()) as running:
        yield running


@pytest.fixture(scope="module")
def client(keeper: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keeper.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def create(client: openai.OpenAI, route: str, /, **extra: Any) -> Any:
    if route == CHAT:
        return client.chat.completions.create(model="fake", messages=MESSAGES, extra_body=extra)
    return client.completions.create(model="fake", prompt=PROMPT, extra_body=extra)


def params_of(running: Running, client: openai.OpenAI, route: str, /, **extra: Any) -> SamplingParams:
    create(client, route, **extra)
    assert isinstance(running.executor, Keeper)
    return running.executor.params


# --- the tables


def test_each_extra_field_is_in_exactly_one_table() -> None:
    names = [name for table in TABLES for name in table]
    assert len(names) == len({*names})
    typed = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    refused = {name for table in TABLES for name, told in table.items() if isinstance(told, Off)}
    assert refused & typed == set()
    assert HARMLESS.keys() & (typed | refused) == set()
    assert {*OtherNames.model_fields, "enable_thinking"} == ALIASES.keys() | PENALTY_RANGE.keys()


def test_all_extra_fields_are_documented() -> None:
    text = API.read_text(encoding="utf-8")
    names = [name for table in [*TABLES, PENALTY_RANGE] for name in table]
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.turn(12)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_unsupported_field_is_accepted_if_off_and_refused_if_on(
    keeper: Running, client: openai.OpenAI, route: str
) -> None:
    refused = {name: told for table in TABLES for name, told in table.items() if isinstance(told, Off)}
    plain = params_of(keeper, client, route, max_tokens=3)
    off = {name: told[0] if told else None for name, told in refused.items()}
    assert params_of(keeper, client, route, max_tokens=3, **off) == plain
    assert params_of(keeper, client, route, max_tokens=3, **dict.fromkeys(refused)) == plain
    for name in refused:
        with pytest.raises(openai.BadRequestError) as error:
            create(client, route, max_tokens=3, **{name: {"switched": "on"}})
        assert error.value.param == name
        assert name in error.value.message


def test_harmless_fields_leave_sampling_params_unchanged(keeper: Running, client: openai.OpenAI) -> None:
    plain = params_of(keeper, client, COMPLETIONS, max_tokens=3)
    assert params_of(keeper, client, COMPLETIONS, max_tokens=3, **dict.fromkeys(HARMLESS, 7)) == plain


def test_llama_cpp_web_ui_fields_are_accepted(keeper: Running, client: openai.OpenAI) -> None:
    sent = {
        "stream": False, "cache_prompt": True, "samplers": [], "temperature": 0.8, "dynatemp_range": 0,
        "dynatemp_exponent": 1, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1, "xtc_probability": 0,
        "xtc_threshold": 0.1, "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "max_tokens": -1,
        "timings_per_token": True, "reasoning_format": "auto", "mirostat": 0, "mirostat_tau": 5, "penalize_nl": False,
        "n_probs": 0, "grammar": "", "id_slot": -1, "n_keep": 0, "min_keep": 0, "top_n_sigma": -1, "lora": [],
    }  # fmt: skip
    for route in (CHAT, COMPLETIONS):
        params = params_of(keeper, client, route, **sent)
        assert (params.top_k, params.min_p, params.repetition_penalty, params.logprobs) == (40, 0.05, 1.0, None)
        assert params.max_tokens is None
        assert params.structured_outputs is None


DEFAULTS: dict[str, dict[str, Any]] = {
    "OpenAI's chat": {
        "route": "/v1/chat/completions", "messages": [{"role": "user", "content": "Hi"}], "logit_bias": {}, "n": 1,
        "logprobs": False, "metadata": {}, "modalities": ["text"], "presence_penalty": 0, "frequency_penalty": 0,
        "reasoning_effort": "medium", "response_format": {"type": "text"}, "service_tier": "auto", "store": False,
        "stream": False, "temperature": 1, "top_p": 1, "top_logprobs": 0, "verbosity": "medium", "tools": [],
        "functions": [], "function_call": "none", "parallel_tool_calls": True, "tool_choice": "none",
    },
    "vLLM's chat": {
        "route": "/v1/chat/completions", "messages": [{"role": "user", "content": "Hi"}], "echo": False, "top_k": 0,
        "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "priority": 0,
        "return_tokens_as_token_ids": False, "return_token_ids": False, "use_beam_search": False, "min_p": 0.0,
        "repetition_penalty": 1.0, "length_penalty": 1.0, "stop_token_ids": [], "ignore_eos": False, "min_tokens": 0,
        "include_stop_str_in_output": False, "skip_special_tokens": True, "spaces_between_special_tokens": True,
        "bad_words": [], "include_reasoning": True, "seed": -1, "request_id": "", "truncation_side": "left",
    },
    "llama.cpp's completion": {
        "route": "/v1/completions", "prompt": "Hi", "logit_bias": [], "seed": -1, "n_predict": -1, "typical_p": 1,
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        "repeat_last_n": 64, "repeat_penalty": 1.0, "stop": [], "response_fields": [], "return_progress": False,
    },
    "OpenAI's responses": {
        "route": "/v1/responses", "input": "Hi", "background": False, "include": [], "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": None}, "service_tier": "auto", "store": True, "stream": False,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "top_logprobs": 0,
        "top_p": 1, "truncation": "disabled", "metadata": {}, "temperature": 1,
    },
    "Anthropic's messages": {
        "route": "/v1/messages", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 1,
        "top_k": 0, "top_p": 1, "stop_sequences": [], "stream": False, "system": "", "tools": [], "metadata": {},
        "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "service_tier": "auto", "mcp_servers": [],
    },
    "TGI's generate": {
        "route": "/generate", "inputs": "Hi", "parameters": {
            "best_of": 1, "temperature": 1.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "top_k": 0,
            "top_p": 1.0, "typical_p": 1.0, "do_sample": False, "return_full_text": False, "stop": [], "details": False,
            "watermark": False, "decoder_input_details": False, "top_n_tokens": 0,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("whose", DEFAULTS)
def test_api_default_values_are_accepted(keeper: Running, whose: str) -> None:
    fields = dict(DEFAULTS[whose])
    with keeper.http() as http:
        answer = http.post(fields.pop("route"), json={"model": "fake", **fields})
        assert answer.status_code == 200, answer.text


# --- fields of llama.cpp, vLLM and SGLang that have an equivalent here


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("sent", "own"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {"max_tokens": -1}),
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"n_predict": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"n_cmpl": 2}, {"n": 2}),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.0}, {"repetition_penalty": 1.0}),
        ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"json_schema": {}}, {"structured_outputs": {"json": {}}}),
        ({"json_schema": '{"type": "object"}'}, {"structured_outputs": {"json": '{"type": "object"}'}}),
        ({"grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_field_alias_sets_same_sampling_params(
    keeper: Running, client: openai.OpenAI, route: str, sent: dict[str, Any], own: dict[str, Any]
) -> None:
    taken, plain = params_of(keeper, client, route, **sent), params_of(keeper, client, route)
    assert taken == params_of(keeper, client, route, **own)
    assert taken != plain or sent in ({"repeat_penalty": 1.0}, {"n_predict": -1})


def test_n_probs_returns_logprobs(client: openai.OpenAI) -> None:
    chat = create(client, CHAT, n_probs=3, max_tokens=2).choices[0].logprobs
    assert chat == create(client, CHAT, logprobs=True, top_logprobs=3, max_tokens=2).choices[0].logprobs
    assert [len(entry.top_logprobs) for entry in chat.content] == [3, 3]
    text = create(client, COMPLETIONS, n_probs=3, max_tokens=2).choices[0].logprobs
    assert text == create(client, COMPLETIONS, logprobs=3, max_tokens=2).choices[0].logprobs
    assert create(client, COMPLETIONS, n_probs=0, max_tokens=2).choices[0].logprobs is None


def test_enable_thinking_is_added_to_chat_template_kwargs() -> None:
    request = ChatCompletionRequest(messages=MESSAGES, enable_thinking=False, chat_template_kwargs={"a": 1})
    request.settle(ExtraFields())
    assert request.chat_template_kwargs == {"a": 1, "enable_thinking": False}


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"n_predict": "x"}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 5, "max_tokens": 6}, "n_predict"),
        ({"n_predict": 5, "min_tokens": 6}, "min_tokens"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"n_probs": 21}, "n_probs"),
        ({"n_probs": -1}, "n_probs"),
        ({"repeat_penalty": 0.0, "repeat_last_n": -1}, "repeat_penalty"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),  # llama.cpp penalizes the last 64 tokens by default
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_penalty"),
        ({"repeat_last_n": 64, "presence_penalty": 0.5}, "repeat_last_n"),
        ({"repeat_last_n": 64, "repetition_penalty": 1.1}, "repeat_last_n"),
        ({"penalize_nl": False, "frequency_penalty": 0.5}, "penalize_nl"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": SCHEMA, "grammar": 'root ::= "a"'}, "json_schema"),
        ({"regex": "a", "structured_outputs": {"regex": "b"}}, "regex"),
        ({"json_schema": SCHEMA, "response_format": {"type": "json_object"}}, "response_format"),
        ({"grammar": "a" * 70_000}, "grammar"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"t_max_predict_ms": 100}, "t_max_predict_ms"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_error_names_field_alias_that_client_sent(
    client: openai.OpenAI, route: str, sent: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        create(client, route, **sent)
    assert error.value.param == param
    assert param in error.value.message


@pytest.mark.parametrize("name", ["n_predict", "grammar", "json_schema", "mirostat", "truncate_prompt_tokens", "regex"])
@pytest.mark.parametrize("route", ["/v1/responses", "/v1/messages", "/generate", "/generate_stream", "/"])
def test_other_routes_refuse_extra_fields_by_name(keeper: Running, route: str, name: str) -> None:
    with (
        openai.OpenAI(base_url=f"{keeper.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
        anthropic.Anthropic(base_url=keeper.url, api_key="none", max_retries=0, timeout=DEADLINE_S) as claude,
    ):
        if not route.startswith("/v1"):
            with keeper.http() as http:
                for extra in ({name: 5}, {"parameters": {name: 5}}):
                    response = http.post(route, json={"inputs": PROMPT, **extra})
                    assert response.status_code == 422, response.text
                    assert name in response.json()["error"]
        elif route == "/v1/responses":
            with pytest.raises(openai.BadRequestError, match=name):
                client.responses.create(model="fake", input=PROMPT, extra_body={name: 5})
        else:
            with pytest.raises(anthropic.BadRequestError, match=name):
                claude.messages.create(model="fake", messages=MESSAGES, max_tokens=3, extra_body={name: 5})


# --- unknown fields


def test_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = ExtraFields()
    fields.check({"nobody_knows": 1, "user": "x"}, {}, HARMLESS)
    fields.check({"nobody_knows": 2, "nor_this": 1}, {}, HARMLESS)
    fields.check({"nobody_knows": 3}, {}, HARMLESS)
    first, second = caplog.messages
    assert "nobody_knows" in first
    assert "user" not in first
    assert "nor_this" in second
    assert "nobody_knows" not in second


def test_unknown_fields_log_at_most_100_short_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fields = ExtraFields()
    for number in range(1000):
        fields.check({f"{number}\n" + "x" * 100_000: 1}, {})
    assert len(caplog.messages) == 100
    assert max(map(len, caplog.messages)) < 200
    assert "further ones are not logged" in caplog.messages[-1]
    assert not any("\n" in message for message in caplog.messages)
    assert sum(map(len, fields._named)) <= 100 * 40


# --- limits


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_max_tokens_minus_one_is_unlimited(client: openai.OpenAI, route: str) -> None:
    assert create(client, route, max_tokens=-1).choices[0].finish_reason == "stop"
    assert create(client, route, max_tokens=-1, ignore_eos=True).usage.total_tokens == 2048  # the whole context


def test_max_tokens_minus_one_overrides_checkpoint_default() -> None:
    with run_server(engine_options={"generation_defaults": {"max_tokens": 7}}) as running, running.http() as http:
        for route, body in BODIES.items():
            answer = http.post(route, json={**body, "max_tokens": -1}).json()
            assert answer["choices"][0]["finish_reason"] == "stop"
        answer = http.post(CHAT, json={**BODIES[CHAT], "max_completion_tokens": -1}).json()
        assert answer["choices"][0]["finish_reason"] == "stop"


# --- token ids


def test_return_token_ids_adds_prompt_and_output_ids(client: openai.OpenAI) -> None:
    text = create(client, COMPLETIONS, return_token_ids=True, max_tokens=5).choices[0]
    assert text.prompt_token_ids == list(PROMPT.encode())
    assert text.token_ids == list(answer_text(len(PROMPT)).encode())[:5]
    chat = create(client, CHAT, return_token_ids=True, max_tokens=5, n=2)
    prompt = f"<user>{PROMPT}\n<assistant>"
    assert chat.prompt_token_ids == list(prompt.encode())
    assert [bytes(each.token_ids).decode(errors="replace") for each in chat.choices] == [
        each.message.content for each in chat.choices
    ]


@pytest.mark.parametrize("options", [{"max_tokens": 5}, {}, {"n": 2, "max_tokens": 9}, {"stop": "fox"}], ids=str)
def test_streamed_token_ids_equal_unstreamed(client: openai.OpenAI, options: dict[str, Any]) -> None:
    extra = {"return_token_ids": True, **options}
    whole = create(client, COMPLETIONS, **extra)
    ids: dict[int, list[int]] = {choice.index: [] for choice in whole.choices}
    for chunk in client.completions.create(model="fake", prompt=PROMPT, stream=True, extra_body=extra):
        (choice,) = chunk.choices
        assert (choice.prompt_token_ids is not None) == (not ids[choice.index])  # in a choice's first piece only
        assert choice.prompt_token_ids in (None, whole.choices[choice.index].prompt_token_ids)
        ids[choice.index] += choice.token_ids
    assert ids == {choice.index: choice.token_ids for choice in whole.choices}

    whole = create(client, CHAT, **extra)
    ids = {choice.index: [] for choice in whole.choices}
    for chunk in client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, extra_body=extra):
        (choice,) = chunk.choices
        if ids[choice.index]:
            assert "prompt_token_ids" not in chunk.model_dump()
        else:
            assert chunk.prompt_token_ids == whole.prompt_token_ids
        ids[choice.index] += choice.token_ids
    assert ids == {choice.index: choice.token_ids for choice in whole.choices}


def test_return_tokens_as_token_ids_replaces_token_text(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True, "max_tokens": 3}
    text = create(client, COMPLETIONS, logprobs=2, echo=True, **extra).choices[0]
    expected = [f"token_id:{token_id}" for token_id in text.prompt_token_ids + text.token_ids]
    assert text.logprobs.tokens == expected
    assert [next(iter(top)) for top in text.logprobs.top_logprobs[1:]] == expected[1:]
    plain = create(client, COMPLETIONS, logprobs=2, echo=True, max_tokens=3).choices[0]
    assert text.logprobs.text_offset == plain.logprobs.text_offset
    chat = create(client, CHAT, logprobs=True, top_logprobs=1, **extra).choices[0]
    names = [f"token_id:{token_id}" for token_id in chat.token_ids]
    assert [entry.token for entry in chat.logprobs.content] == names
    assert [entry.top_logprobs[0].token for entry in chat.logprobs.content] == names
    assert bytes(chat.logprobs.content[0].bytes) == chat.message.content[0].encode()


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ({"truncate_prompt_tokens": 4}, "fox?"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, "fox?"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, "Where"),
        ({"truncate_prompt_tokens": 400}, PROMPT),
        ({"truncate_prompt_tokens": -1}, PROMPT),
        ({"truncation_side": "right"}, PROMPT),
    ],
)
def test_truncate_prompt_tokens_keeps_requested_side(client: openai.OpenAI, extra: dict[str, Any], kept: str) -> None:
    for prompt in (PROMPT, list(PROMPT.encode()), [PROMPT, "x"]):
        answer = client.completions.create(
            model="fake", prompt=prompt, max_tokens=3, echo=True, extra_body={**extra, "return_token_ids": True}
        )
        assert answer.choices[0].text == kept + answer_text(len(kept), 0, 3)
        assert answer.choices[0].prompt_token_ids == list(kept.encode())
    chat = create(client, CHAT, max_tokens=3, return_token_ids=True, **extra)
    prompt = f"<user>{PROMPT}\n<assistant>"
    number = extra.get("truncate_prompt_tokens", -1)
    expected = prompt if number == -1 else prompt[:5] if "right" in extra.values() else prompt[-number:]
    assert bytes(chat.prompt_token_ids).decode() == expected
    assert chat.usage.prompt_tokens == len(expected)


def test_truncate_prompt_tokens_minus_one_keeps_maximum_that_fits(client: openai.OpenAI) -> None:
    long = "abcdefgh" * 400  # 3,200 tokens, and the model has 2,048
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="fake", prompt=long, max_tokens=48)
    answer = client.completions.create(
        model="fake", prompt=long, max_tokens=48, extra_body={"truncate_prompt_tokens": -1}
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2000, 48)
    chat = client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": long}],
        extra_body={"truncate_prompt_tokens": -1, "max_tokens": -1},
    )
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (2047, 1)


# --- nulls


def test_vllm_fields_are_present_as_null(client: openai.OpenAI) -> None:
    chat = create(client, CHAT, max_tokens=2)
    for name in ("service_tier", "system_fingerprint", "prompt_logprobs", "prompt_token_ids", "kv_transfer_params"):
        assert getattr(chat, name) is None
        assert name in chat.model_fields_set | chat.model_extra.keys()
    message = chat.choices[0].message
    for name in ("refusal", "annotations", "audio", "function_call", "reasoning_content"):
        assert name in message.model_fields_set | message.model_extra.keys()
        assert getattr(message, name) is None
    assert message.model_extra.get("reasoning") is None
    text = create(client, COMPLETIONS, max_tokens=2)
    for name in ("service_tier", "system_fingerprint", "kv_transfer_params"):
        assert name in text.model_fields_set | text.model_extra.keys()
        assert getattr(text, name) is None
    for choice, names in (
        (chat.choices[0], ("logprobs", "stop_reason", "token_ids")),
        (text.choices[0], ("logprobs", "stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids")),
    ):
        for name in names:
            assert name in choice.model_fields_set | choice.model_extra.keys()
            assert getattr(choice, name) is None


# --- the end of a stream


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"max_tokens": 9},
        {},
        {"stop": "fox"},
        {"n": 3, "max_tokens": 4},
        {"max_tokens": 4, "logprobs": True},
        {"max_tokens": 4, "return_token_ids": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "counts", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
def test_finish_reason_arrives_in_separate_chunk(
    client: openai.OpenAI, options: dict[str, Any], counts: dict[str, bool] | None
) -> None:
    """A client may stop reading at the first finish_reason: it then has the whole answer of that choice."""
    for route in (CHAT, COMPLETIONS):
        extra = {**options, "stream_options": counts}
        if route == COMPLETIONS and "logprobs" in options:
            extra["logprobs"] = 1
        whole = create(client, route, **{**extra, "stream_options": None})
        chunks = stream(client, route, extra)
        texts = dict.fromkeys(range(len(whole.choices)), "")
        ended: dict[int, str] = {}
        usages = [chunk for chunk in chunks if not chunk.choices]
        assert len(usages) == (counts is not None)
        assert all(chunk is chunks[-1] for chunk in usages)  # the usage comes last
        for chunk in chunks[: len(chunks) - len(usages)]:
            (choice,) = chunk.choices
            assert choice.index not in ended
            assert (chunk.usage is not None) == bool(counts and counts.get("continuous_usage_stats"))
            if choice.finish_reason is None:
                texts[choice.index] += (choice.delta.content or "") if route == CHAT else choice.text
                continue
            ended[choice.index] = choice.finish_reason
            if route == CHAT:
                assert choice.delta.model_dump(exclude_unset=True) == {}
                assert choice.logprobs is None or choice.logprobs.content == []
            else:
                assert choice.text == ""
                assert choice.logprobs is None or choice.logprobs.tokens == []
            assert (choice.logprobs is not None) == ("logprobs" in options)
            assert choice.token_ids == ([] if "return_token_ids" in options else None)
            assert "stop_reason" in choice.model_extra
        for choice in whole.choices:
            assert texts[choice.index] == (choice.message.content if route == CHAT else choice.text)
            assert ended[choice.index] == choice.finish_reason


def stream(client: openai.OpenAI, route: str, extra: dict[str, Any]) -> list[Any]:
    if route == CHAT:
        return list(client.chat.completions.create(model="fake", messages=MESSAGES, stream=True, extra_body=extra))
    return list(client.completions.create(model="fake", prompt=PROMPT, stream=True, extra_body=extra))


def test_empty_answer_streams_role_and_finish_reason() -> None:
    with run_server(FakeExecutor(answer="")) as running, running.http() as http:
        lines = http.post(CHAT, json={**BODIES[CHAT], "stream": True}).text.split("\n\n")
        assert ['"delta":{"role":"assistant","content":""}' in line for line in lines] == [True, False, False, False]
        assert '"delta":{}' in lines[1]
        assert lines[2:] == ["data: [DONE]", ""]
        lines = http.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True}).text.split("\n\n")
        assert '"finish_reason":"stop"' in lines[0]
        assert lines[1:] == ["data: [DONE]", ""]
        lines = http.post(
            COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True, "echo": True, "max_tokens": 0}
        ).text.split("\n\n")
        assert PROMPT in lines[0]
        assert '"finish_reason":null' in lines[0]
        assert '"finish_reason":"stop"' in lines[1]


def test_streamed_tool_call_precedes_finish_chunk() -> None:
    answer = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    options = {"chat_template": FakeChatTemplate("<tool_call>")}
    with (
        run_server(FakeExecutor(answer=answer), engine_options=options) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as client,
    ):
        chunks = stream(client, CHAT, {"tools": [tool]})
    *before, last = [chunk.choices[0] for chunk in chunks]
    assert [choice.finish_reason for choice in before] == [None] * len(before)
    assert last.finish_reason == "tool_calls"
    assert last.delta.model_dump(exclude_unset=True) == {}
    calls = [call for choice in before for call in choice.delta.tool_calls or ()]
    assert calls[0].function.name == "now"
    assert "".join(call.function.arguments for call in calls) == "{}"


def test_field_aliases_map_to_other_known_fields() -> None:
    for name, told in ALIASES.items():
        assert isinstance(told, As)
        assert told.name.partition(".")[0] in ChatCompletionRequest.model_fields
        assert name != told.name
