"""Calls and structured answers of tiny random models with real tokenizers and templates: valid, or cut off by a limit.

A random model writes anything: only the grammar enforces the requested form, at each temperature. Biases make it end
its reasoning and begin calls; without them it would do so once in 150,000 tokens. "Eager" biases make it finish, so
that some answers of each kind are complete. A grammar that allows no end fails here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import jsonschema
import pytest
import running
from answer_reading import read_answer

from octavo import CacheConfig, LLMEngine, ModelConfig, SchedulerConfig
from octavo.server.answers.answer_form import AnswerForm, AnswerStyle
from octavo.server.answers.named_calls import DeepSeekV3Format
from octavo.server.answers.tools import read_chat_tools
from octavo.startup.launch import ServedModel, make_processors

logger = logging.getLogger(__name__)
SHORT = {"type": "string", "maxLength": 12}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "São Paulo", "東京"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": SHORT,
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
MARKED = {  # texts like the markers of real vocabularies, in a user's schema
    "type": "object",
    "properties": {"<think>": {"enum": ["<tool_call>", "</s>"]}, "b": {"type": "boolean"}},
    "required": ["<think>", "b"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "mark": MARKED, "now": NOTHING}
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
MAX_TOKENS = 160
MAX_MODEL_LEN = 1024
NUM_THREADS = 8
TIMEOUT_S = 300


def tool(name, *, strict=False):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], "strict": strict}}


TOOLS = [tool(name) for name in SCHEMAS]
STRICT = [tool(name, strict=True) for name in SCHEMAS]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
JSON = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
MARKED_JSON = {"type": "json_schema", "json_schema": {"name": "marked", "schema": MARKED}}
ASKED = {
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
    "strict": {"tools": STRICT},
    "json": {"response_format": JSON},
    "json or calls": {"response_format": JSON, "tools": TOOLS},
    "json with markers": {"response_format": MARKED_JSON},
    "any json": {"response_format": {"type": "json_object"}},
    "a schema": {"structured_outputs": {"json": WEATHER}},
    "a list": {"structured_outputs": {"json": LIST}},
}
JSON_SCHEMAS = {
    "json": WEATHER,
    "json with markers": MARKED,
    "any json": {"type": "object"},
    "a schema": WEATHER,
    "a list": LIST,
}
THINKING = {
    "unsaid": {},
    "on": {"chat_template_kwargs": {"enable_thinking": True}},
    "off": {"chat_template_kwargs": {"enable_thinking": False}},
}


@dataclass
class Answer:
    """The answer that a client gets, whole or streamed."""

    content: str = ""
    reasoning: str = ""
    calls: list = field(default_factory=list)
    finish_reason: str | None = None


def whole(http, body):
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    reasoning = message.get("reasoning_content") or ""
    return Answer(message["content"] or "", reasoning, calls, choice["finish_reason"])


def streamed(http, body):
    answer = Answer()
    response = http.post("/v1/chat/completions", json={**body, "stream": True})
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", response.text
    for choice in (choice for line in lines[:-1] for choice in json.loads(line)["choices"]):
        delta = choice["delta"]
        answer.content += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(answer.calls):
                answer.calls.append([call["function"]["name"], ""])
            answer.calls[call["index"]][1] += call["function"]["arguments"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    return answer


def fits(text, schema):
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def is_valid(kind, answer):
    """Return True if an answer that the model ended has the requested form."""
    names = [name for name, _ in answer.calls]
    has_json = not names and fits(answer.content, JSON_SCHEMAS.get(kind, WEATHER))
    has_calls = bool(names) and all(fits(arguments, SCHEMAS[name]) for name, arguments in answer.calls)
    match kind:
        case "required":
            return has_calls and not answer.content
        case "named":
            return has_calls and names == ["get_weather"] and not answer.content
        case "json or calls":
            return has_json or (has_calls and not answer.content)
        case "strict":
            return has_calls or not names
        case _:
            return has_json


def fault(kind, answer, *, is_short=False):
    """Return the fault of an answer, or None. is_short: it may end before it has any value."""
    if kind != "json with markers" and any(marker in answer.content for marker in MARKERS):
        return "a marker in the content"
    if answer.finish_reason != "length":
        return None if is_valid(kind, answer) else "not what was asked for"
    has_value = (answer.content + answer.reasoning).strip() or answer.calls or is_short
    return None if has_value else "nothing but blanks"


def copied(source, directory, *, renamed=None, special=(), template=None):
    """Copy a checkpoint. renamed, special: changes of tokens, as in other models of its family."""
    shutil.copytree(source, directory)
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in (renamed or {}).items():
        text = text.replace(json.dumps(old), json.dumps(new))
    fields = json.loads(text)
    for token in fields["added_tokens"]:
        token["special"] = token["special"] or token["content"] in special
    (directory / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@pytest.fixture
def checkpoint(real_model, real_templates, tmp_path):
    """Return a function: name -> a checkpoint with a real tokenizer, as published or changed as in other models."""

    def find(name):
        directory = tmp_path / "copy"
        match name:
            case "qwen3, markers special":  # as in fine-tuned models
                return copied(real_model("qwen3"), directory, special=MARKERS)
            case "llama31 with its tag":  # the available vocabulary is that of Llama 3.0
                tag = {"<|reserved_special_token_5|>": "<|python_tag|>"}
                return copied(real_model("llama31"), directory, renamed=tag)
            case "mistral, markers special":
                marks = {"<|placeholder1|>": "[TOOL_CALLS]"}
                return copied(real_model("mistral"), directory, renamed=marks)
            case "mistral with names":
                marks = {"<|placeholder1|>": "[TOOL_CALLS]", "<|placeholder2|>": "[ARGS]"}
                template = real_templates["Mistral-Small-3.2-24B-Instruct-2506"]
                return copied(real_model("mistral"), directory, renamed=marks, template=template)
        return real_model(name)

    return find


@contextlib.contextmanager
def served(path):
    engine = LLMEngine(
        ModelConfig(model=str(path), max_model_len=MAX_MODEL_LEN),
        cache_config=CacheConfig(num_gpu_blocks=NUM_THREADS * MAX_MODEL_LEN // 16),
        scheduler_config=SchedulerConfig(max_num_seqs=NUM_THREADS),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "make_engine", lambda _: engine)
        with running.run_server(served_model_names=["real"]) as server, server.http() as http:
            http.timeout = TIMEOUT_S
            yield http, engine.input_processor.tokenizer


# Biases that make a random model sometimes end its reasoning or begin a call.
LIKELY = {"</think>": 6.0, "<tool_call>": 4.0, "[TOOL_CALLS]": 4.0}
# Biases that make it finish: they close a string, an object, a call or a list of calls.
CLOSERS = ('"', "}", '"}', "}}", "]", "}]")
BEGINNINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"', "[{")
EAGER = dict.fromkeys(CLOSERS, 10.0) | dict.fromkeys(BEGINNINGS, 14.0) | {"</think>": 20.0, "</tool_call>": 12.0}
EAGER_SEEDS = 8
MARKED_CALLS = {"hermes3": "<tool_call>", "mistral": "[TOOL_CALLS]"}  # their markers have several tokens


def biases(tokenizer, likely):
    """Return the logit_bias of some tokens; those missing in the vocabulary are ignored."""
    ids = {tokenizer.token_id(text): bias for text, bias in likely.items()}
    return {str(token_id): bias for token_id, bias in ids.items() if token_id is not None}


def eagerness(name, tokenizer):
    """Return parameters that make a model begin calls or values, and finish."""
    wanted = {"logit_bias": biases(tokenizer, EAGER) | {str(tokenizer.eos_token_id): 12.0}}
    wanted |= {"presence_penalty": 2.0, "frequency_penalty": 2.0}  # one call rather than many
    if name in MARKED_CALLS:  # each token of the marker is the most likely one until it is written, then the EOS is
        ids = [*tokenizer.encode(MARKED_CALLS[name], add_special_tokens=False), tokenizer.eos_token_id]
        wanted["logit_bias"] |= {str(token_id): 50 - 0.4 * place for place, token_id in enumerate(ids)}
        wanted["temperature"] = 0.05
    return wanted


def is_whole(kind, answer):
    """Return True if a valid answer is complete and has a value: a call or JSON, as requested."""
    return answer.finish_reason != "length" and bool(answer.calls or kind in WITH_JSON)


WITH_TOOLS = ("required", "named", "strict", "json or calls")
WITH_JSON = ("json or calls", *JSON_SCHEMAS)
MODELS = {
    "qwen3": ("json", *WITH_TOOLS),
    "qwen3, markers special": ("json", *WITH_TOOLS),
    "qwen3-coder": WITH_TOOLS,
    "hermes3": ("json", *WITH_TOOLS),
    "llama31": ("json", *WITH_TOOLS),
    "llama31 with its tag": WITH_TOOLS,
    "mistral": ("json", *WITH_TOOLS),
    "mistral, markers special": WITH_TOOLS,
    "mistral with names": WITH_TOOLS,
    "phi35": (*JSON_SCHEMAS, *WITH_TOOLS),  # this template shows no tools, nor does the next one
    "deepseek-r1-distill": ("json",),
    "smollm2": (*JSON_SCHEMAS, *WITH_TOOLS),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_model_answers_match_requested_structure(name, checkpoint, sampled, real_scale):
    with served(checkpoint(name)) as (http, tokenizer):
        likely = {"logit_bias": biases(tokenizer, LIKELY)}
        modes = {"likely": likely, "short, likely": likely, "eager": eagerness(name, tokenizer)}

        def ask(case):
            kind, thinking, temperature, seed, mode = case
            is_short = mode.startswith("short")
            max_tokens = 1 + 5 * seed if is_short else MAX_TOKENS
            body = {"messages": MESSAGES, "temperature": temperature, "seed": seed, "max_tokens": max_tokens}
            body |= ASKED[kind] | THINKING[thinking] | modes.get(mode, {})
            try:
                answer = whole(http, body)
            except AssertionError as error:
                return "refused", str(error)
            if streamed(http, body) != answer:
                return "streamed otherwise", answer
            return fault(kind, answer, is_short=is_short) or answer.finish_reason, answer

        kinds = MODELS[name]
        seeds = (0, 1), range(-(-32 // len(kinds)))  # temperatures, and enough seeds for 500 answers per model
        chosen = sampled(
            [
                *product(kinds, THINKING, *seeds, ("plain", "likely")),
                *product(kinds, ["unsaid"], *seeds, ["short", "short, likely"]),
            ]
        )

        def ask_eagerly(kind):
            """Yield the results of eager requests. At a smaller scale, stop when an answer is complete."""
            for seed in range(EAGER_SEEDS):
                case = kind, "off", 1, seed, "eager"
                told = *case, *ask(case)
                yield told
                if real_scale < 1 and (told[-2] == "refused" or is_whole(kind, told[-1])):
                    return

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            answers = pool.map(lambda case: [(*case, *ask(case))], chosen)
            eager = pool.map(lambda kind: list(ask_eagerly(kind)), kinds)
            told = list(itertools.chain(*answers, *eager))
    logger.info("%s, %d answers twice: %s", name, len(told), Counter(answer[-2] for answer in told))
    wrong = [answer for answer in told if answer[-2] not in {"stop", "tool_calls", "length"}]
    assert not wrong, f"{len(wrong)} of {len(told)}, such as {wrong[0]}"
    ended = Counter(kind for kind, *_, answer in told if is_whole(kind, answer))
    logger.info("%s, whole ones: %s", name, ended)
    missing = set(kinds) - set(ended)
    assert not missing, [answer for answer in told if answer[0] in missing]


THOUGHT = "<think>\nI could write <tool_call>, or not.\n</think>\n\n"
CITY = '{"city": "Rome", "days": 3, "note": "a < b, ü🙂 </tool_call>"}'
HERMES = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
LLAMA = f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "now", "parameters": {{}}}}'
MISTRAL = f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "now", "arguments": {{}}}}]'
NAMED_CALLS = f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}"
TAGS = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "<parameter=note>\na < b, ü🙂 </tool_call>\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>"
)
MARKS = DeepSeekV3Format().write([("get_weather", json.loads(CITY)), ("now", {})])
WRITTEN = {  # texts as models of these families write them
    "qwen3": f"{THOUGHT}I look.\n{HERMES}",
    "qwen3, markers special": f"{THOUGHT}I look.\n{HERMES}",
    "qwen3-coder": f"I look.\n{TAGS}",
    "deepseek-r1-distill": f"I look.\n{MARKS}",
    "hermes3": f"I look.\n{HERMES}",
    "llama31": LLAMA,
    "llama31 with its tag": f"<|python_tag|>{LLAMA}",
    "mistral": f"I look.{MISTRAL}",
    "mistral, markers special": f"I look.{MISTRAL}",
    "mistral with names": f"I look.{NAMED_CALLS}",
}


def reader_of(path):
    """Return a tokenizer, and a function: (pieces of tokens, finish reason) -> the answer's parts."""
    config = ModelConfig(model=str(path))
    inputs, _ = make_processors(config, ServedModel.find(config))
    style = AnswerStyle.find("auto", "auto", inputs)
    toolbox = read_chat_tools(TOOLS, None, True, style.tools)
    prompt = inputs.chat_prompt(MESSAGES, tools=list(toolbox.given))
    form = AnswerForm.of(style, toolbox, prompt["prompt"])
    return inputs.tokenizer, partial(read_answer, inputs.tokenizer, form, prompt["prompt_token_ids"])


def told(parts):
    """Return content, reasoning, and calls with their arguments."""
    kinds = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    calls = [[part.text, ""] for part in parts if part.kind == "call"]
    for part in parts:
        if part.kind == "arguments":
            calls[part.call][1] += part.text
    return kinds["content"].removeprefix(" "), kinds["reasoning"], calls  # sentencepiece begins a word with a space


@pytest.mark.parametrize("name", WRITTEN)
def test_tool_calls_are_parsed_at_every_token_cut(name, checkpoint, sampled):
    """Token by token, in one piece, letter by letter, and with a role's tag between, which is not part of the text."""
    text = WRITTEN[name]
    tokenizer, read = reader_of(checkpoint(name))
    content = "I look." if "I look." in text else ""
    reasoning = "I could write <tool_call>, or not." if THOUGHT in text else ""
    expected = (content, reasoning, [["get_weather", CITY], ["now", "{}"]])
    tokens = tokenizer.encode(text, add_special_tokens=False)
    role = next(each for each in sorted(tokenizer.added_ids) if tokenizer.is_special(each))
    written = [tokens, [*tokens[: len(tokens) // 4], role, *tokens[len(tokens) // 4 :]]]
    if "mistral" not in name:  # there, a single letter begins with a space
        written.append([each for letter in text for each in tokenizer.encode(letter, add_special_tokens=False)])
    for ids in written:
        whole = [*ids, tokenizer.eos_token_id]
        assert told(read([whole], "stop")) == expected
        assert told(read([[each] for each in whole], "stop")) == expected
        for cut in sampled(range(1, len(ids) + 1)):
            parts = read([ids[:cut]], "length")
            assert read([[each] for each in ids[:cut]], "length") == parts, cut
            begun, thought, calls = told(parts)
            assert f"{content}\n".startswith(begun), cut
            assert reasoning.startswith(thought), cut
            for (name_, arguments), (called, whole_arguments) in zip(calls, expected[2], strict=False):
                assert name_ == called, cut
                assert whole_arguments.startswith(arguments.rstrip("\ufffd")), cut  # a character may be cut


def test_template_without_tools_accepts_required_tool_choice(real_model):
    with served(real_model("phi35")) as (http, _):
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 1}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
