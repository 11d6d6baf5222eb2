"""`prediction` of chat completions, sent by the `openai` package: it drafts the answer, and does not change it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from alone_and_crowd import needs_kernels
from running import DEADLINE_S
from sdks import openai
from test_real_engine import served_engine
from test_speculation_http import make_engine

from octavo.config import SpeculativeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

pytestmark = needs_kernels
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Write a long story about a brave fox."}],
    "max_tokens": 60,
    "seed": 3,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Running]]:
    """A server with speculation, and one without."""
    configs = {"ngram": SpeculativeConfig(method="ngram"), "none": SpeculativeConfig(method="none")}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(served_engine(make_engine(config))) for name, config in configs.items()}


@pytest.fixture(scope="module")
def clients(servers: dict[str, Running]) -> Iterator[dict[str, openai.OpenAI]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(
                openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)
            )
            for name, server in servers.items()
        }


def ask(client: openai.OpenAI, **options: Any) -> tuple[list[str], Any]:
    """Return the texts of the choices, and the usage details with the draft counts."""
    whole = client.chat.completions.create(**ASKED, **options)
    return [choice.message.content for choice in whole.choices], whole.usage.completion_tokens_details


def predicted(content: Any) -> dict[str, Any]:
    return {"type": "content", "content": content}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prediction_drafts_tokens_without_changing_answer(
    clients: dict[str, openai.OpenAI], temperature: float
) -> None:
    client = clients["ngram"]
    without, _ = ask(clients["none"], temperature=temperature)
    (text,) = without
    parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    for content in (text, parts):
        again, details = ask(client, temperature=temperature, prediction=predicted(content))
        assert again == without
        assert details.accepted_prediction_tokens > 40
    again, details = ask(client, temperature=temperature, prediction=predicted("Nothing of the kind: 1 2 3 4 5 6"))
    assert again == without


def test_prediction_works_with_streams_and_several_choices(clients: dict[str, openai.OpenAI]) -> None:
    without, _ = ask(clients["none"], n=2)
    prediction = predicted(without[1])
    again, details = ask(clients["ngram"], n=2, prediction=prediction)
    assert again == without
    assert details.accepted_prediction_tokens > 40
    texts = ["", ""]
    streamed = clients["ngram"].chat.completions.create(
        **ASKED, n=2, prediction=prediction, stream=True, stream_options={"include_usage": True}
    )
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == without
    assert chunk.usage.completion_tokens_details.accepted_prediction_tokens > 40


@pytest.mark.parametrize("content", ["", [], "fox " * 2000])
def test_prediction_is_ignored_without_speculation(clients: dict[str, openai.OpenAI], content: Any) -> None:
    without, _ = ask(clients["none"])
    assert ask(clients["none"], prediction=predicted(content)) == (without, None)


@pytest.mark.parametrize("content", ["", [], None])
def test_empty_prediction_is_ignored(clients: dict[str, openai.OpenAI], content: Any) -> None:
    prediction = None if content is None else predicted(content)
    assert ask(clients["ngram"], prediction=prediction)[0] == ask(clients["none"])[0]


@pytest.mark.parametrize("server", ["ngram", "none"])
@pytest.mark.parametrize(
    ("prediction", "param", "message"),
    [
        ("text", "prediction", "must be an object of type content"),
        ([], "prediction", "must be an object of type content"),
        ({}, "prediction", "must be an object of type content"),
        ({"type": "text", "content": "a"}, "prediction", "of type content, got type 'text'"),
        ({"type": "content"}, "prediction.content", "must be text or a list of text parts"),
        (predicted(3), "prediction.content", "must be text or a list of text parts"),
        (predicted(["a"]), "prediction.content[0]", "must be an object of type text"),
        (predicted([{"type": "text", "text": 1}]), "prediction.content[0].text", "must be a string"),
        (predicted([{"type": "refusal", "refusal": "a"}]), "prediction.content[0]", "type text, got type 'refusal'"),
    ],
)
def test_invalid_prediction_is_refused(
    clients: dict[str, openai.OpenAI], server: str, prediction: Any, param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        ask(clients[server], prediction=prediction)
    assert error.value.param == param


@pytest.mark.parametrize(("text", "unit"), [("1 2 " * 190, "tokens"), ("a" * 1_000_000, "characters")])
def test_overlong_prediction_is_refused(clients: dict[str, openai.OpenAI], text: str, unit: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"prediction is too long: [0-9]+ {unit}") as error:
        ask(clients["ngram"], prediction=predicted(text))
    assert error.value.param == "prediction"
    assert "192" in error.value.message


def test_prediction_tokens_are_reserved_and_charged_like_prompt_tokens(
    servers: dict[str, Running], clients: dict[str, openai.OpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count as waiting tokens, and are charged to the tenant."""
    limiter = servers["ngram"].server._service.limiter
    pool, held, charged = limiter.waiting_tokens, list[int](), list[int]()
    take, charge = pool.take, limiter.charge
    monkeypatch.setattr(pool, "take", lambda tenant, count: (held.append(count), take(tenant, count)))
    monkeypatch.setattr(limiter, "charge", lambda tenant, count: (charged.append(count), charge(tenant, count)))
    text = "The fox went home, and so did the hen."
    count = len(servers["ngram"].engine.input_processor.encode(text, add_special_tokens=False))
    ask(clients["ngram"])
    ask(clients["ngram"], prediction=predicted(text))
    without, with_it = held
    assert with_it - without == count > 8
    assert sum(charged) == without + with_it + 2 * ASKED["max_tokens"]
    assert pool.num_held == 0
