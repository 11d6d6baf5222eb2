"""Conversations rendered with the chat templates of real models give the text that transformers gives.

APIs have forms that templates do not read: a call without text has `content: null`, arguments are JSON in a string, and
texts have parts. transformers passes messages on unchanged. So it renders each of several spellings. The prompt must
equal its rendering of the best one: the first without missing texts and printed data.
"""

from __future__ import annotations

import copy
import itertools
import json
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
import pytest
from sdks import transformers

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import RequestError
from octavo.server.api.anthropic.message_blocks import read_conversation
from octavo.server.api.conversation import read_messages
from octavo.server.api.ollama.messages import read_conversation as read_ollamas
from octavo.server.api.openai.response_items import read_items

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Messages = list[dict[str, Any]]

NOW = datetime(2026, 3, 1, 12)  # noqa: DTZ001 - local time, as templates show it
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SYSTEM = {"role": "system", "content": "Be brief, naïve & <b>kind</b>."}
USER = {"role": "user", "content": "How is Rome, and what time is it?"}
ANSWER = {"role": "assistant", "content": "Sunny. Noon."}
FURTHER = {"role": "user", "content": "And in 東京?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "First part."}, {"type": "text", "text": "Second part."}]}


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": text}


WEATHER = call(1, "get_weather", {"city": "Röme", "days": 2, "units": {"wind": "knots"}})
TIME = call(2, "get_time", {"zone": "CET"})
SUNNY, NOON = result(1, '{"sky": "sunny"}'), result(2, "noon")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {argument}'s {name[4:]}",
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string", "description": f"the {argument}"}},
                "required": [argument],
            },
        },
    }
    for name, argument in (("get_weather", "city"), ("get_time", "zone"))
]
DOCUMENTS = [{"title": "Rome", "text": "Rome is warm."}, {"title": "Tokyo", "text": "Tokyo is far."}]

CONVERSATIONS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "one turn": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([SYSTEM, USER, ANSWER, FURTHER], {}),
    "tools": ([SYSTEM, USER], {"tools": TOOLS}),
    "tool loop": (
        [USER, {**ANSWER, "content": "", "tool_calls": [WEATHER]}, SUNNY, ANSWER, FURTHER],
        {"tools": TOOLS},
    ),
    "parallel calls": ([USER, {**ANSWER, "content": "", "tool_calls": [WEATHER, TIME]}, SUNNY, NOON], {"tools": TOOLS}),
    "null content": ([SYSTEM, USER, {**ANSWER, "content": None, "tool_calls": [WEATHER]}, SUNNY], {"tools": TOOLS}),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "It is summer."}, FURTHER], {}),
    "reasoning with calls": (
        [USER, {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [WEATHER]}, SUNNY],
        {"tools": TOOLS},
    ),
    "parts": ([SYSTEM, PARTS, ANSWER, PARTS], {}),
    "documents": ([USER], {"documents": DOCUMENTS}),
    "flags": ([USER, ANSWER, FURTHER], {"enable_thinking": False, "reasoning_effort": "low", "thinking": False}),
    "text behind a result": (
        [USER, {**ANSWER, "content": None, "tool_calls": [WEATHER]}, SUNNY, FURTHER],
        {"tools": TOOLS},
    ),
}


@pytest.fixture(scope="module")
def compiled(real_templates: dict[str, str]) -> Callable[[str], ChatTemplate]:
    @cache
    def compile_once(name: str) -> ChatTemplate:
        return ChatTemplate(real_templates[name], SPECIAL, now=lambda: NOW)

    return compile_once


@pytest.fixture(autouse=True)
def _frozen_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOW.replace(tzinfo=tz)

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Clock)


def spellings(messages: Messages) -> Iterator[Messages]:
    """Yield the spellings of a conversation that transformers may accept."""
    calls = [message for message in messages if message.get("tool_calls")]
    nulls = [message["content"] for message in calls if not message["content"]]
    is_null = bool(nulls) and nulls[0] is None
    contents = (("null", "", "absent") if is_null else ("", "null", "absent")) if nulls else ("",)
    has_parts = any(isinstance(message["content"], list) for message in messages)
    for as_parts, as_text, content in itertools.product(
        (True, False) if has_parts else (True,), (False, True) if calls else (False,), contents
    ):
        yield [_spelled(copy.deepcopy(message), as_parts, as_text, content) for message in messages]


def _spelled(message: dict[str, Any], as_parts: bool, as_text: bool, content: str) -> dict[str, Any]:
    if isinstance(message["content"], list) and not as_parts:
        message["content"] = "\n".join(part["text"] for part in message["content"])
    for each in message.get("tool_calls", ()):
        if not as_text:
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None if content == "null" else ""
        if content == "absent":
            del message["content"]
    return message


def said(messages: Messages) -> list[str]:
    """Return the texts that the prompt must contain."""
    texts = []
    for message in messages:
        content = message["content"] or ""
        texts += [part["text"] for part in content] if isinstance(content, list) else [content]
        texts += [name for each in message.get("tool_calls", ()) for name in (each["function"]["name"], "city")]
        texts += [zone for zone in ("CET",) for each in message.get("tool_calls", ()) if zone in str(each)]
    return texts


def one_call_at_a_time(messages: Messages) -> Messages:
    """Return the same history with each call followed by its result. The message's text stays with the first call."""
    results = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    told: Messages = []
    for message in messages:
        for index, each in enumerate(message.get("tool_calls", ())):
            said_first = message if not index else {"role": "assistant", "content": None}
            told += [{**said_first, "tool_calls": [each]}, results[each["id"]]]
        if message["role"] != "tool" and "tool_calls" not in message:
            told.append(message)
    return told


def of_transformers(source: str, messages: Messages, options: dict[str, Any]) -> str | None:
    """Return the rendering of the first of the best spellings, or None if all are refused.

    A history that is refused or not shown is also spelled with one call at a time.
    """
    best, best_faults = None, None
    for spelled in itertools.chain(spellings(messages), spellings(one_call_at_a_time(messages))):
        try:
            ((text,), _) = transformers.utils.chat_template_utils.render_jinja_template(
                [spelled], chat_template=source, add_generation_prompt=True, **SPECIAL, **options
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
            continue
        missing = sum(part not in text for part in said(messages))
        faults = (missing, sum(text.count(fault) for fault in ("None", "null", "{'", '"type"')))
        if best_faults is None or faults < best_faults:
            best, best_faults = text, faults
    return best


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_chat_prompts_equal_transformers(
    kind: str,
    real_templates: dict[str, str],
    compiled: Callable[[str], ChatTemplate],
    sampled: Callable[[list[str]], list[str]],
) -> None:
    messages, options = CONVERSATIONS[kind]
    wrong = {}
    for name in sampled([*real_templates]):
        expected = of_transformers(real_templates[name], messages, options)
        try:
            text = compiled(name).render(read_messages(messages), **options)
        except RequestError as error:
            text = None
            if expected is not None:
                wrong[name] = str(error)
        if expected is None and text is not None and any(part not in text for part in said(messages)):
            wrong[name] = f"refused by transformers, and something is missing here:\n{text}"
        elif expected is not None and text is not None and text != expected:
            wrong[name] = f"{text}\n--- but transformers\n{expected}"
    assert not wrong, "\n\n".join(f"=== {name}\n{what}" for name, what in wrong.items())


def test_templates_refusing_null_tools_get_empty_list(
    real_templates: dict[str, str], compiled: Callable[[str], ChatTemplate]
) -> None:
    loops = [name for name in real_templates if of_transformers(real_templates[name], [USER], {"tools": None}) is None]
    prompts = {name: of_transformers(real_templates[name], [USER], {"tools": []}) for name in loops}
    assert sum(prompt is not None for prompt in prompts.values()) == 3
    for name, prompt in prompts.items():
        if prompt is not None:
            assert compiled(name).render([USER]) == prompt


def as_blocks(messages: Messages) -> tuple[str | None, Messages]:
    """Convert a conversation to Anthropic's API: its system prompt, and turns of blocks."""
    system, turns = None, list[dict[str, Any]]()
    for message in messages:
        content = message["content"] or []
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
        if message["role"] == "system":
            system = content
            continue
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}]
        if reasoning := message.get("reasoning_content"):
            blocks.insert(0, {"type": "thinking", "thinking": reasoning, "signature": ""})
        for each in message.get("tool_calls", ()):
            name, arguments = each["function"]["name"], json.loads(each["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": each["id"], "name": name, "input": arguments})
        turns.append({"role": "assistant" if message["role"] == "assistant" else "user", "content": blocks})
    return system, turns


def as_items(messages: Messages) -> Messages:
    """Convert a conversation to OpenAI's Responses API."""
    items = []
    for message in messages:
        content, role = message["content"], message["role"]
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
            continue
        if reasoning := message.get("reasoning_content"):
            items.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": reasoning}]})
        if isinstance(content, list):
            content = [{"type": "input_text", "text": part["text"]} for part in content]
        if content:
            items.append({"role": role, "content": content})
        items += [
            {"type": "function_call", "call_id": each["id"], **each["function"]}
            for each in message.get("tool_calls", ())
        ]
    return items


def as_ollama(messages: Messages) -> Messages:
    """Convert a conversation to Ollama's API: arguments are objects, and calls and results have no ids."""
    spelled = []
    for message in messages:
        own = {name: value for name, value in message.items() if name not in {"tool_call_id", "reasoning_content"}}
        if reasoning := message.get("reasoning_content"):
            own["thinking"] = reasoning
        functions = [each["function"] for each in message.get("tool_calls", ())]
        if functions:
            own["tool_calls"] = [
                {"function": {**each, "arguments": json.loads(each["arguments"])}} for each in functions
            ]
        spelled.append(own)
    return spelled


def with_ids_of(messages: Messages, others: Messages) -> Messages:
    """Return a copy of `messages` with the call ids of `others`."""
    result = copy.deepcopy(messages)
    for message, other in zip(result, others, strict=True):
        if "tool_call_id" in message:
            message["tool_call_id"] = other["tool_call_id"]
        for each, named in zip(message.get("tool_calls", ()), other.get("tool_calls", ()), strict=True):
            each["id"] = named["id"]
    return result


def prompt_of(template: ChatTemplate, messages: Messages, options: dict[str, Any]) -> str:
    """Return the prompt, or the error's text if it is refused."""
    try:
        return template.render(messages, **options)
    except RequestError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_every_api_renders_same_prompt(
    kind: str,
    real_templates: dict[str, str],
    compiled: Callable[[str], ChatTemplate],
    sampled: Callable[[list[str]], list[str]],
) -> None:
    messages, options = CONVERSATIONS[kind]
    # Blocks and items cannot express an empty text.
    messages = [{**message, "content": message["content"] or None} for message in messages]
    names = sampled([*real_templates])
    prompts = [prompt_of(compiled(name), read_messages(messages), options) for name in names]
    assert [prompt_of(compiled(name), read_conversation(*as_blocks(messages)), options) for name in names] == prompts
    assert [prompt_of(compiled(name), read_items(None, as_items(messages)), options) for name in names] == prompts
    of_ollama = read_ollamas(as_ollama(messages))
    prompts = [prompt_of(compiled(name), read_messages(with_ids_of(messages, of_ollama)), options) for name in names]
    assert [prompt_of(compiled(name), of_ollama, options) for name in names] == prompts


LONG = {"call00001": "call_abcdefghijklmnop01", "call00002": "toolu_01ABCDEFGH"}
LATE = {"role": "system", "content": "Speak up."}
DEMANDING: dict[str, Messages] = {
    "ids of other servers": [
        USER,
        {**ANSWER, "content": None, "tool_calls": [{**WEATHER, "id": LONG["call00001"]}]},
        {**SUNNY, "tool_call_id": LONG["call00001"]},
        ANSWER,
        FURTHER,
    ],
    "parallel calls with such ids": [
        USER,
        {**ANSWER, "content": None, "tool_calls": [{**each, "id": LONG[each["id"]]} for each in (WEATHER, TIME)]},
        {**SUNNY, "tool_call_id": LONG["call00001"]},
        {**NOON, "tool_call_id": LONG["call00002"]},
    ],
    "a late system message": [SYSTEM, USER, ANSWER, LATE, FURTHER],
    "a last system message": [USER, ANSWER, FURTHER, LATE],
    "two system messages": [SYSTEM, LATE, USER],
    "a system message after a result": [
        USER,
        {**ANSWER, "content": None, "tool_calls": [WEATHER]},
        SUNNY,
        LATE,
        FURTHER,
    ],
    "two users' turns": [USER, FURTHER],
    "an assistant's greeting": [SYSTEM, ANSWER, USER],
    "two assistants' turns": [USER, ANSWER, {**ANSWER, "content": "Indeed."}, FURTHER],
}
# These templates refuse or lose every call of a history, the greeting, or everything. For some of them the server
# writes calls as text.
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",  # changes a list, which this sandbox and transformers' sandbox forbid
    "Kimi-K2-Thinking",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
REFUSE_ALL = {"fireworks-ai-llama-3-firefunction-v2", "llama-cpp-deepseek-r1"}


@pytest.mark.parametrize("kind", DEMANDING)
def test_foreign_chat_histories_are_rendered_completely(
    kind: str,
    real_templates: dict[str, str],
    compiled: Callable[[str], ChatTemplate],
    sampled: Callable[[list[str]], list[str]],
) -> None:
    messages = DEMANDING[kind]
    has_calls = any("tool_calls" in message for message in messages)
    wrong = {}
    for name in sampled(
        [name for name in real_templates if name not in REFUSE_ALL | (NO_CALLS if has_calls else set())]
    ):
        try:
            text = compiled(name).render(read_messages(messages), tools=TOOLS)
        except RequestError as error:
            wrong[name] = str(error)
            continue
        texts = [str(message["content"]) for message in messages if message["role"] != "tool" and message["content"]]
        texts += [city for city in ("knots", "CET") if any(city in str(message) for message in messages)]
        if missing := [each for each in texts if each not in text]:
            wrong[name] = f"{missing} of {text}"
    assert not wrong, "\n\n".join(f"=== {name}\n{what}" for name, what in wrong.items())
