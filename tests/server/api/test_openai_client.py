"""The real `openai` package against a real server: the streamed answer equals the whole one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fakes import TEXT, answer_text
from running import DEADLINE_S, run_server
from sdks import openai

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

WHOLE = len(TEXT.encode())
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the fox?"}]
NUM_CHAT_TOKENS = len(b"<system>Be brief.\n<user>Where is the fox?\n<assistant>")


def make_client(running: Running, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with make_client(shared) as client:
        yield client


def read_chat(stream: Any) -> dict[int, dict[str, Any]]:
    """Join a stream's pieces by choice. Key -1 has the usage."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        if chunk.usage is not None:
            choices[-1] = {"usage": chunk.usage}
        for choice in chunk.choices:
            entry = choices.setdefault(choice.index, {"text": "", "roles": [], "finish_reason": None, "logprobs": []})
            assert entry["finish_reason"] is None, "something came behind the end"
            entry["text"] += choice.delta.content or ""
            entry["roles"].append(choice.delta.role)
            entry["finish_reason"] = choice.finish_reason
            entry["logprobs"] += choice.logprobs.content if choice.logprobs else []
    return choices


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("options", "finish_reason"),
    [
        ({}, "stop"),
        ({"max_tokens": 9}, "length"),
        ({"max_completion_tokens": 33}, "length"),
        ({"max_tokens": 1}, "length"),
        ({"stop": "Fuchs"}, "stop"),
        ({"stop": ["nothing of the kind", "狐 — j"]}, "stop"),
        ({"stop": "ö", "extra_body": {"include_stop_str_in_output": True}}, "stop"),
        ({"n": 3, "max_tokens": 20}, "length"),
        ({"n": 2, "stop": "jumps"}, "stop"),
        ({"logprobs": True, "top_logprobs": 2, "max_tokens": 12}, "length"),
        ({"logprobs": True, "max_tokens": 5}, "length"),
        ({"seed": 7, "temperature": 0.5, "top_p": 0.9, "max_tokens": 5}, "length"),
        ({"extra_body": {"ignore_eos": True, "top_k": 3, "min_p": 0.1}, "max_tokens": WHOLE + 30}, "length"),
        ({"extra_body": {"stop_token_ids": [ord(".")]}}, "stop"),
    ],
)
def test_chat_stream_equals_unstreamed_chat(client: openai.OpenAI, options: dict[str, Any], finish_reason: str) -> None:
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, **options)
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    )
    streamed = read_chat(stream)
    usage = streamed.pop(-1)["usage"]
    assert sorted(streamed) == [choice.index for choice in whole.choices] == list(range(options.get("n", 1)))
    for choice in whole.choices:
        entry = streamed[choice.index]
        assert entry["text"] == choice.message.content
        assert entry["finish_reason"] == choice.finish_reason == finish_reason
        assert entry["roles"][0] == choice.message.role == "assistant"
        assert entry["roles"][1:] == [None] * (len(entry["roles"]) - 1)
        assert entry["logprobs"] == (choice.logprobs.content if choice.logprobs else [])
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]
    assert whole.usage.prompt_tokens == NUM_CHAT_TOKENS


def test_chat_returns_model_text_and_usage_for_each_choice(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, n=2)
    assert [choice.message.content for choice in whole.choices] == [
        answer_text(NUM_CHAT_TOKENS, 0),
        answer_text(NUM_CHAT_TOKENS, 1),
    ]
    assert whole.usage.completion_tokens == 2 * (WHOLE + 1)  # EOS counts
    assert whole.model == "fake"
    assert whole.id.startswith("chatcmpl-")


def test_stop_string_truncates_text_at_its_start(client: openai.OpenAI) -> None:
    expected = answer_text(NUM_CHAT_TOKENS)
    for stop in (expected[5:9], expected[20:21], expected[30:45], expected[0]):
        whole = client.chat.completions.create(model="fake", messages=MESSAGES, stop=stop)
        assert whole.choices[0].message.content == expected[: expected.index(stop)]
        assert whole.choices[0].model_extra["stop_reason"] == stop


def test_checkpoint_max_tokens_is_chat_default() -> None:
    with (
        run_server(engine_options={"generation_defaults": {"max_tokens": 7}}) as running,
        make_client(running) as client,
    ):
        ask = client.chat.completions.create
        assert ask(model="fake", messages=MESSAGES).usage.completion_tokens == 7
        assert ask(model="fake", messages=MESSAGES, max_tokens=9).usage.completion_tokens == 9
        assert ask(model="fake", messages=MESSAGES, max_completion_tokens=3).usage.completion_tokens == 3


def test_chat_logprobs_match_content_and_are_sorted(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3)
    entries = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == whole.choices[0].message.content
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)


def test_text_parts_are_joined_with_line_feed(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    from_parts = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
    from_text = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "one\ntwo"}])
    assert from_parts.choices[0].message.content == from_text.choices[0].message.content
    assert from_parts.usage.prompt_tokens == from_text.usage.prompt_tokens


def read_completions(stream: Any) -> dict[int, dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        if chunk.usage is not None:
            choices[-1] = {"usage": chunk.usage}
        for choice in chunk.choices:
            entry = choices.setdefault(choice.index, {"text": "", "finish_reason": None, "logprobs": None})
            assert entry["finish_reason"] is None, "something came behind the end"
            entry["text"] += choice.text
            entry["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                news = choice.logprobs.model_dump()
                entry["logprobs"] = (
                    news if entry["logprobs"] is None else {name: entry["logprobs"][name] + news[name] for name in news}
                )
    return choices


@pytest.mark.sweep(16)
@pytest.mark.parametrize("prompt", ["short", ["one", "three", "five!"], [70, 71, 72], [[65] * 3, [66] * 40]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": WHOLE + 1, "n": 2},
        {"echo": True, "max_tokens": 7},
        {"echo": True, "max_tokens": 7, "logprobs": 2, "n": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"logprobs": 3},
        {"stop": ["dog", "s ö"], "max_tokens": 60},
    ],
)
def test_completion_stream_equals_unstreamed_completion(
    client: openai.OpenAI, prompt: Any, options: dict[str, Any]
) -> None:
    whole = client.completions.create(model="fake", prompt=prompt, **options)
    stream = client.completions.create(
        model="fake", prompt=prompt, stream=True, stream_options={"include_usage": True}, **options
    )
    streamed = read_completions(stream)
    usage = streamed.pop(-1)["usage"]
    assert sorted(streamed) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        entry = streamed[choice.index]
        assert entry["text"] == choice.text
        assert entry["finish_reason"] == choice.finish_reason
        assert entry["logprobs"] == (choice.logprobs.model_dump() if choice.logprobs else None)
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]


def test_completions_default_to_16_tokens(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="hello")
    assert whole.usage.completion_tokens == 16
    assert whole.choices[0].text == answer_text(5, 0, 16)


def test_choices_follow_prompt_order(client: openai.OpenAI) -> None:
    prompts = ["a", "bb", "ccc"]
    whole = client.completions.create(model="fake", prompt=prompts, n=2, max_tokens=30)
    expected = [answer_text(len(prompt), index, 30) for prompt in prompts for index in range(2)]
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert whole.usage.prompt_tokens == 6


def test_echo_with_logprobs_scores_prompt(client: openai.OpenAI) -> None:
    """Evaluation harnesses use this: the prompt's tokens come first, and the very first token has no logprob."""
    for prompt in ("score me", list(b"score me")):
        whole = client.completions.create(model="fake", prompt=prompt, echo=True, max_tokens=1, logprobs=1)
        logprobs = whole.choices[0].logprobs
        assert whole.choices[0].text == "score me" + answer_text(8, 0, 1)
        assert "".join(logprobs.tokens) == whole.choices[0].text
        assert logprobs.token_logprobs == [None] + [-0.25] * 8
        assert logprobs.top_logprobs[0] is None
        assert logprobs.top_logprobs[1] == {"c": -0.25}
        assert logprobs.text_offset == list(range(9))


def test_prompt_logprobs_cover_prompt_except_first_token(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake", prompt="abc", extra_body={"prompt_logprobs": 0}, max_tokens=1)
    entries = whole.choices[0].model_extra["prompt_logprobs"]
    assert entries[0] is None
    assert entries[1:] == [{str(ord(char)): {"logprob": -0.25, "rank": 1, "decoded_token": char}} for char in "bc"]


def test_continuous_usage_stats_count_tokens_in_every_chunk(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == [1, 2, 3, 4, 4, 4]  # the end of a choice has its own chunk


def test_models_are_listed_and_retrieved_by_alias(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "alias/of-fake"]
    assert client.models.retrieve("alias/of-fake").model_extra["max_model_len"] == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    answer = client.completions.create(model="alias/of-fake", prompt="x", max_tokens=1)
    assert answer.model == "alias/of-fake"


def test_unknown_model_raises_not_found_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"


def test_invalid_requests_raise_bad_request_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="fake", prompt="x" * 2048, stream=True)
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 2048}])
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")
    assert client.completions.create(model="fake", prompt="x").usage.completion_tokens == 16


def test_wrong_api_key_raises_authentication_error() -> None:
    with run_server(api_key="the right one") as running:
        with make_client(running, "the wrong one") as client, pytest.raises(openai.AuthenticationError) as error:
            client.models.list()
        assert error.value.code == "invalid_api_key"
        with make_client(running, "the right one") as client:
            assert client.completions.create(model="fake", prompt="x", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.turn(8)
def test_async_client_streams_equal_unstreamed_answers(shared: Running) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> tuple[str, str]:
        messages = [{"role": "user", "content": "?" * number}]
        whole = await client.chat.completions.create(model="fake", messages=messages, max_tokens=40)
        stream = await client.chat.completions.create(model="fake", messages=messages, max_tokens=40, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return whole.choices[0].message.content, text

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            results = await asyncio.gather(*(ask(client, number) for number in range(20)))
        overhead = len("<user>\n<assistant>")
        for number, (whole, streamed) in enumerate(results):
            assert whole == streamed == answer_text(overhead + number, 0, 40)

    asyncio.run(main())
    assert shared.num_unfinished == 0
