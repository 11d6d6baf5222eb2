"""A server with a real worker, tokenizer and Jinja template, used through the real `openai` package.

The answers are compared with those of `LLM` on the same checkpoint: serving and offline use give equal results.
"""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import threading
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import running
from alone_and_crowd import needs_kernels
from running import DEADLINE_S, run_server, wait_until
from sdks import anthropic, ollama, openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from octavo import LLM, CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.server.api.openai import embeddings
from octavo.structured_output.grammars import GrammarCompiler, GrammarError, Matcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_MODEL_LEN = 16_384
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Sé breve."}, {"role": "user", "content": "Where is 狐?"}]
RENDERED = "<system>Sé breve.<user>Where is 狐?<a>"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
OLLAMA: dict[str, Any] = {"model": "tiny", "stream": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_checkpoint(tmp_path_factory.mktemp("served") / "tiny", TEMPLATE)


def write_byte_checkpoint(directory: Path, template: str) -> Path:
    """Write a random model with one token per byte and an EOS (257 tokens). It generates incomplete characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    config = tiny_config(
        "Qwen2ForCausalLM", vocab_size=len(alphabet) + 1, eos_token_id=0, max_position_embeddings=MAX_MODEL_LEN
    )
    write_checkpoint(directory, config, std=0.1)
    tokenizer = Tokenizer(models.BPE({"<eos>": 0} | {token: i for i, token in enumerate(alphabet, start=1)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    return directory


@pytest.fixture(scope="module")
def offline(checkpoint: Path) -> LLM:
    return LLM(model=str(checkpoint), max_model_len=512, num_gpu_blocks_override=256)


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[running.Running]:
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint)),
        cache_config=CacheConfig(num_gpu_blocks=2 * MAX_MODEL_LEN // 16),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        # No drafts, because receipts count computed tokens, including rejected drafts. `offline` has drafts, and equal
        # tokens.
        speculative_config=SpeculativeConfig(method="none"),
    )
    with served_engine(engine) as server:
        yield server


@contextlib.contextmanager
def served_engine(engine: LLMEngine, **options: Any) -> Iterator[running.Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "make_engine", lambda executor: engine)
        with run_server(served_model_names=["tiny"], **options) as server:
            yield server


@pytest.fixture(scope="module")
def client(served: running.Running) -> Iterator[openai.OpenAI]:
    url = f"{served.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def offline_completions(offline: LLM, prompt: str, **params: Any) -> list[Any]:
    (output,) = offline.generate(prompt, SamplingParams(**params), use_tqdm=False)
    return output.outputs


@pytest.mark.turn(12)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_chat_equals_offline_output(client: openai.OpenAI, offline: LLM, options: dict[str, Any]) -> None:
    options = {"n": 2, "max_tokens": 60, **options}
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    expected = offline_completions(offline, RENDERED, **options)
    assert [choice.message.content for choice in whole.choices] == [each.text for each in expected]
    assert [choice.finish_reason for choice in whole.choices] == [each.finish_reason for each in expected]
    num_tokens = sum(len(each.token_ids) for each in expected)
    assert whole.usage.prompt_tokens == len(RENDERED.encode())
    assert whole.usage.completion_tokens == num_tokens
    assert whole.usage.total_tokens == len(RENDERED.encode()) + num_tokens

    texts = ["", ""]
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(chunk.usage, name) == getattr(whole.usage, name)
    assert texts == [each.text for each in expected]


def test_offline_text_equals_tokenizer_decode(checkpoint: Path, offline: LLM) -> None:
    """Incremental and complete detokenization agree, so the texts that other tests compare with are right."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    for each in offline_completions(offline, RENDERED, n=4, max_tokens=100, **SAMPLED):
        assert each.text == tokenizer.decode(each.token_ids, skip_special_tokens=True)


@pytest.mark.turn(8)
def test_completions_equal_offline_output(client: openai.OpenAI, offline: LLM) -> None:
    prompts = ["a door", "ein Fuchs", "狐"]
    options = {"n": 2, "max_tokens": 40, **SAMPLED}
    whole = client.completions.create(model="tiny", prompt=prompts, **options)
    expected = [each.text for prompt in prompts for each in offline_completions(offline, prompt, **options)]
    assert [choice.text for choice in whole.choices] == expected
    assert len(set(expected)) == 6
    assert whole.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in prompts)

    texts = [""] * 6
    for chunk in client.completions.create(model="tiny", prompt=prompts, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


@pytest.mark.turn(8)
def test_stop_string_ends_real_model_output(client: openai.OpenAI) -> None:
    options = {"max_tokens": 200, "extra_body": {"ignore_eos": True}, **SAMPLED}
    text = client.completions.create(model="tiny", prompt="a door", **options).choices[0].text
    pairs = [text[i : i + 2] for i in range(40, len(text) - 1)]
    stop = next(pair for pair in pairs if pair.isascii() and text.index(pair) >= 40)
    for stream in (False, True):
        options["stop"] = ["never said", stop]
        answer = client.completions.create(model="tiny", prompt="a door", stream=stream, **options)
        choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_seed_determines_sampled_output(client: openai.OpenAI) -> None:
    def say(**options: Any) -> str:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, **options)
        return answer.choices[0].message.content

    assert say(**SAMPLED) == say(**SAMPLED)
    assert len({say(temperature=1.0, seed=seed) for seed in range(4)} | {say(temperature=1.0)}) == 5
    assert say(temperature=0.0, seed=1) == say(temperature=0.0, seed=2)


@needs_kernels
def test_logprobs_equal_offline_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    options = {"max_tokens": 20, **SAMPLED}
    (expected,) = offline_completions(offline, RENDERED, logprobs=3, **options)
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, **options)
    entries = chat.choices[0].logprobs.content
    assert len(entries) == len(expected.token_ids) == chat.usage.completion_tokens
    completion = client.completions.create(model="tiny", prompt=RENDERED, logprobs=3, **options)
    token_logprobs = completion.choices[0].logprobs.token_logprobs
    for i, (token_id, by_id) in enumerate(zip(expected.token_ids, expected.logprobs, strict=True)):
        assert entries[i].logprob == token_logprobs[i] == by_id[token_id].logprob
        best = sorted((each.logprob for each in by_id.values()), reverse=True)[:3]
        assert [top.logprob for top in entries[i].top_logprobs] == best


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_disconnect_aborts_generation_and_frees_blocks(
    client: openai.OpenAI, served: running.Running, route: str
) -> None:
    stats = served.engine.core.metrics.stats
    num_generated = stats.generation_tokens
    endless = {"max_tokens": MAX_MODEL_LEN - 100, "stream": True, "extra_body": {"ignore_eos": True}}
    if route == "chat":
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, **endless)
    else:
        stream = client.completions.create(model="tiny", prompt="a door", **endless)
    next(iter(stream))
    assert served.num_blocks_in_use > 0
    stream.close()
    wait_until(lambda: not served.num_unfinished and not served.num_blocks_in_use, "all blocks are free")
    assert stats.generation_tokens - num_generated < endless["max_tokens"]  # it was aborted early
    assert client.completions.create(model="tiny", prompt="x", max_tokens=3).usage.prompt_tokens == 1


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def test_chat_answer_matches_json_schema(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"response_format": AS_SCHEMA, "max_tokens": 300, **SAMPLED}
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, **options)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content)
        assert set(person) == {"name", "age"}
        assert 0 <= person["age"] <= 99
    texts = ["", ""]
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, n=2, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_openai_parse_returns_pydantic_model(client: openai.OpenAI) -> None:
    """Users of the package pass a pydantic class as response_format."""
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=6)
        age: int = Field(ge=0, le=99)

    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=300, **SAMPLED
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_huggingface_hub_answer_matches_schema(served: running.Running) -> None:
    """The package has its own form of a schema."""
    client = huggingface_hub.InferenceClient(model=served.url, timeout=20)
    answer = client.chat_completion(MESSAGES, response_format=AS_SCHEMA, max_tokens=300, seed=3, temperature=1.0)  # type: ignore[arg-type]
    assert set(json.loads(answer.choices[0].message.content or "")) == {"name", "age"}


@pytest.mark.parametrize("form", ["json", "schema"])
def test_ollama_answer_matches_format(served: running.Running, form: str) -> None:
    options = {"num_predict": 300, "seed": 3, "temperature": 1.0}
    asked: dict[str, Any] = {"format": "json" if form == "json" else SCHEMA, "options": options}
    with ollama.Client(served.url, timeout=DEADLINE_S) as client:
        whole = client.chat("tiny", MESSAGES, **asked).message.content
        streamed = "".join(line.message.content for line in client.chat("tiny", MESSAGES, stream=True, **asked))
        generated = client.generate("tiny", "Who?", **asked).response
    assert streamed == whole
    if form == "schema":
        for text in (whole, generated):
            assert set(json.loads(text)) == {"name", "age"}
    else:
        assert whole.startswith("{")


def test_ollama_answer_equals_offline_output(served: running.Running, offline: LLM) -> None:
    (expected,) = offline_completions(offline, RENDERED, max_tokens=24, **SAMPLED)
    with ollama.Client(served.url, timeout=DEADLINE_S) as client:
        options = {"num_predict": 24, **SAMPLED}
        assert client.chat("tiny", MESSAGES, options=options).message.content == expected.text
        assert client.generate("tiny", "Where is 狐?", system="Sé breve.", options=options).response == expected.text
        assert client.generate("tiny", RENDERED, raw=True, options=options).response == expected.text


def test_anthropic_answer_matches_schema(served: running.Running) -> None:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(
            model="tiny",
            max_tokens=300,
            messages=[{"role": "user", "content": "Who?"}],
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        )
        assert set(json.loads(message.content[0].text)) == {"name", "age"}
        assert message.stop_reason == "end_turn"
        with pytest.raises(anthropic.BadRequestError, match="json"):
            client.messages.create(
                model="tiny",
                max_tokens=3,
                messages=[{"role": "user", "content": "Who?"}],
                output_config={"format": {"type": "json_schema", "schema": {"type": "x"}}},
            )


@pytest.mark.parametrize(
    ("structure", "check"),
    [
        ({"choice": ["left", "right"]}, lambda text: text in {"left", "right"}),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdecimal()),
        ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "age"}),
        ({"grammar": 'root ::= "a" "b"+ "c"{2}'}, lambda text: text.strip("b") == "acc" or text.startswith("ab")),
        ({"grammar": 'root ::= word "a"\nword ::= [a-c]{3}'}, lambda text: len(text) == 4 and text.endswith("a")),
    ],
)
def test_completion_matches_vllm_structured_outputs(
    client: openai.OpenAI, structure: dict[str, Any], check: Any
) -> None:
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=300, extra_body={"structured_outputs": structure}, **SAMPLED
    )
    assert answer.choices[0].finish_reason == "stop"
    assert check(answer.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"json_schema": SCHEMA}, lambda text: set(json.loads(text)) == {"name", "age"}),
        ({"json_schema": {"enum": ["left"]}}, lambda text: json.loads(text) == "left"),
        ({"json_schema": json.dumps(SCHEMA)}, lambda text: set(json.loads(text)) == {"name", "age"}),
        ({"grammar": 'root ::= "\\u00e9" [0-9]{2}'}, lambda text: text[0] == "é" and text[1:].isdecimal()),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdecimal()),
    ],
)
def test_llama_cpp_and_sglang_structure_fields_are_applied(
    client: openai.OpenAI, fields: dict[str, Any], check: Any
) -> None:
    text = client.completions.create(model="tiny", prompt="a", max_tokens=300, extra_body=fields, **SAMPLED)
    assert text.choices[0].finish_reason == "stop"
    assert check(text.choices[0].text)
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=300, extra_body=fields, **SAMPLED)
    assert check(chat.choices[0].message.content)


def test_top_p_zero_is_greedy(client: openai.OpenAI) -> None:
    greedy = client.completions.create(model="tiny", prompt="a", max_tokens=40, temperature=0)
    for typical_p in (1.0, 0.9):
        extra = {"typical_p": typical_p}
        alone = client.completions.create(
            model="tiny", prompt="a", max_tokens=40, top_p=0, extra_body=extra, **{**SAMPLED, "temperature": 2.0}
        )
        assert alone.choices[0].text == greedy.choices[0].text
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20}
    alone = client.chat.completions.create(top_p=0, **chat, **SAMPLED)
    assert alone.choices[0].message == client.chat.completions.create(temperature=0, **chat).choices[0].message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"json_schema": {"type": "x"}}, "json_schema"),
        ({"regex": "(a"}, "regex"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
    ],
)
def test_invalid_structure_error_names_field(served: running.Running, fields: dict[str, Any], param: str) -> None:
    with served.http() as http:
        for stream in (False, True):
            body = {"messages": MESSAGES, "stream": stream, **fields}
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param


def test_s13_slow_grammar_compilation_blocks_no_other_request(
    served: running.Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_grammar, begun, gate = GrammarCompiler._prepare, threading.Event(), threading.Event()

    def slow(self: GrammarCompiler, wanted: Any) -> None:
        if wanted.regex == "slow":
            begun.set()
            assert gate.wait(DEADLINE_S)
        compile_grammar(self, wanted)

    monkeypatch.setattr(GrammarCompiler, "_prepare", slow)
    body = {"prompt": "a", "max_tokens": 20, "structured_outputs": {"regex": "slow"}}
    answers: list[Any] = []

    def ask() -> None:
        with served.http() as http:
            answers.append(http.post("/v1/completions", json=body).json())

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(DEADLINE_S)
    with served.http() as http:
        for route in ("/v1/completions", "/tokenize"):
            assert http.post(route, json={"prompt": "a", "max_tokens": 4}).status_code == 200
    assert not answers
    gate.set()
    thread.join(DEADLINE_S)
    assert answers[0]["choices"][0]["text"] == "slow"


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "((((a{1,500}){1,500}){1,500}){1,500})"},
        {"regex": "(.*a){30}.{200}|" + "|".join(f"b{i}.*" for i in range(300))},
        {"json": {"enum": [f"{'x' * 20}{i}" for i in range(1500)]}},
        {"json": {"properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}},
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "x"'},
        {"grammar": "start: A0\n" + "\n".join(f'A{i}: A{i + 1} "y"' for i in range(3500)) + '\nA3500: "x"'},
        {"json_object": 1},
        {"choice": [f"choice {i}" for i in range(1000)]},
        {"grammar": 'start: a\na: a a a | /.*/ a | "x"'},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}},
    ],
)
def test_s13_hostile_grammar_is_refused_or_bounded(served: running.Running, structure: dict[str, Any]) -> None:
    with served.http() as http:
        response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "structured_outputs": structure})
        assert response.status_code in {200, 400}, response.text
        if response.status_code == 400:
            assert response.json()["error"]["param"] == "structured_outputs"
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_grammar_error_during_generation_answers_400(served: running.Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def exceed(_self: Matcher) -> Any:
        raise GrammarError("too many states")

    monkeypatch.setattr(Matcher, "allowed", exceed)
    with served.http() as http:
        body = {"prompt": "a", "max_tokens": 5, "structured_outputs": {"regex": "a"}}
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs"


# --- embeddings


def test_embeddings_equal_offline_embeddings(client: openai.OpenAI, offline: LLM) -> None:
    texts = ["Where is 狐?", "a", "Where is 狐? " * 20]
    expected = [output.outputs.embedding for output in offline.embed(texts, use_tqdm=False)]
    for options in ({"encoding_format": "float"}, {"encoding_format": "base64"}, {}):
        result = client.embeddings.create(model="tiny", input=texts, **options)  # type: ignore[arg-type]
        got = [each.embedding for each in result.data]
        if options.get("encoding_format") == "base64":  # the client does not decode it if asked for
            got = [struct.unpack(f"<{len(expected[0])}f", base64.b64decode(each)) for each in got]  # type: ignore[arg-type, misc]
        assert [list(each) for each in got] == expected
        assert [each.index for each in result.data] == [0, 1, 2]
        assert result.usage.prompt_tokens == result.usage.total_tokens == sum(len(text.encode()) for text in texts)
    raw = client.post("/embeddings", body={"input": texts, "encoding_format": None}, cast_to=object)
    assert [each["embedding"] for each in raw["data"]] == expected  # type: ignore[index]
    off = {name: values[0] if values else None for name, values in embeddings._UNSUPPORTED.items()}
    same = client.embeddings.create(model="tiny", input=texts, extra_body=off)
    assert [each.embedding for each in same.data] == expected
    one = client.embeddings.create(model="tiny", input=list(b"a"), dimensions=5)
    assert len(one.data[0].embedding) == 5
    assert abs(sum(value * value for value in one.data[0].embedding) - 1) < 1e-5


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [999]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "int"}, "encoding_format"),
        ({"input": "a" * MAX_MODEL_LEN * 2}, "input"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"input": ["a"] * 3000}, "input"),
    ],
)
def test_invalid_embedding_fields_are_refused_by_parameter(
    served: running.Running, body: dict[str, Any], parameter: str
) -> None:
    with served.http() as http:
        response = http.post("/v1/embeddings", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == parameter


def test_ollama_embeddings_equal_openai_embeddings(client: openai.OpenAI, served: running.Running) -> None:
    texts = ["Where is 狐?", "a"]
    expected = [each.embedding for each in client.embeddings.create(model="tiny", input=texts).data]
    with ollama.Client(served.url, timeout=DEADLINE_S) as asking:
        got = asking.embed("tiny:latest", texts, options={"num_ctx": 512}, keep_alive="5m")
        assert ([list(each) for each in got.embeddings], got.model) == (expected, "tiny:latest")
        assert got.prompt_eval_count == sum(len(text.encode()) for text in texts)
        assert got.total_duration is not None
        assert got.total_duration > 0
        assert list(asking.embed("tiny", "a").embeddings[0]) == expected[1]
        assert list(asking.embeddings("tiny", "a").embedding) == expected[1]
        assert len(asking.embed("tiny", "a", dimensions=5).embeddings[0]) == 5
        assert asking.show("tiny").details.family == "qwen2"
        assert asking.show("tiny").details.parameter_size.endswith("K")


@pytest.mark.turn(12)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embedding_input_may_fill_context_or_be_truncated(checkpoint: Path, pooling: str) -> None:
    """It may also fill the whole KV cache. A request that generates has room for one token less."""
    engine = LLMEngine(ModelConfig(model=str(checkpoint), max_model_len=64), cache_config=CacheConfig(num_gpu_blocks=4))
    offline = LLM(model=str(checkpoint), max_model_len=128, num_gpu_blocks_override=8)
    text = "abcd" * 16
    ids, [first], [other] = map(engine.input_processor.encode, (text, "a", "x"))

    def vectors(inputs: list[Any]) -> list[list[float]]:
        prompts = [each if isinstance(each, str) else {"prompt_token_ids": each} for each in inputs]
        return [each.outputs.embedding for each in offline.embed(prompts, pooling=pooling, use_tqdm=False)]

    with served_engine(engine, pooling=pooling) as server, server.http() as http:

        def embedded(inputs: Any, **more: Any) -> list[list[float]]:
            told = http.post("/v1/embeddings", json={"input": inputs, **more})
            assert told.status_code == 200, told.text
            return [each["embedding"] for each in told.json()["data"]]

        assert embedded([text, text]) == vectors([text, text])
        assert embedded(ids) == vectors([text])
        for given in ("x" + text, [other, *ids]):
            refused = http.post("/v1/embeddings", json={"input": given})
            assert refused.status_code == 400
            assert "65 tokens > 64 maximum" in refused.json()["error"]["message"]
            assert "output" not in refused.json()["error"]["message"]
            assert embedded(given, truncate_prompt_tokens=-1) == vectors([text])
        assert embedded(text, truncate_prompt_tokens=5) == vectors(["dabcd"])
        assert embedded([ids, [first]], truncate_prompt_tokens=5) == vectors(["dabcd", "a"])
        assert embedded(text, truncate_prompt_tokens=5, truncation_side="right") == vectors(["abcda"])
        answered = http.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
        assert "64 tokens > 63 maximum" in answered.json()["error"]["message"]


def test_ollama_embed_truncates_long_input_to_beginning(checkpoint: Path) -> None:
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint), max_model_len=64), cache_config=CacheConfig(num_gpu_blocks=16)
    )
    beginning = "abcd" * 16  # 64 tokens
    with served_engine(engine) as server, ollama.Client(server.url, timeout=DEADLINE_S) as client:
        cut, kept = (client.embed("tiny", text).embeddings for text in (beginning + "b" * 9, beginning))
        assert cut == kept
        assert client.embed("tiny", beginning[:-1]).embeddings != kept
        with pytest.raises(ollama.ResponseError, match="too long"):
            client.embed("tiny", beginning + "b", truncate=False)


def say(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text * 3}]}


def asked(text: str) -> dict[str, Any]:
    return {**say(text), "max_tokens": 9}


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("path", "streamed", "body"),
    [
        ("/v1/chat/completions", None, {**asked("What does a chat cost? "), "ignore_eos": True}),
        ("/v1/responses", None, {"input": "And a response? " * 4, "max_output_tokens": 9, "ignore_eos": True}),
        ("/v1/messages", None, {**asked("And what does a message? "), "model": "tiny", "temperature": 0}),
        (
            "/generate",
            "/generate_stream",
            {"inputs": "Is anything free? " * 4, "parameters": {"max_new_tokens": 9, "details": True}},
        ),
        ("/v1/embeddings", None, {"input": ["Not even a vector? " * 4, "No."]}),
        (
            "/api/chat",
            None,
            {
                **OLLAMA,
                **say("How much is a line? "),
                "options": {"num_predict": 9, "top_k": 1},
            },
        ),
        ("/api/embed", None, {"model": "tiny", "input": ["Are lines of numbers free? " * 4, "No."]}),
    ],
)
def test_every_api_reports_receipt_in_usage(
    served: running.Running, path: str, streamed: str | None, body: dict[str, Any]
) -> None:
    """The second request hits the first one's prompt, and its stream has the same receipt."""
    receipts = []
    with served.http() as http:
        for is_second in (False, True):
            told = http.post(path, json=body).json()
            usage = told.get("usage") or told.get("details") or told
            receipts.append(usage["receipt"])
            assert receipts[-1].keys() == {"computed_tokens", "recomputed_tokens", "wasted_tokens"}
            num_cached = cached_tokens(usage)
            if num_cached is not None:
                assert (num_cached > 0) is is_second
                num_prompt = usage.get("prompt_tokens", usage.get("input_tokens", usage.get("prompt_eval_count")))
                num_prompt += num_cached if "cache_read_input_tokens" in usage else 0
                num_output = usage.get("completion_tokens", usage.get("output_tokens", usage.get("eval_count", 1)))
                assert receipts[-1]["computed_tokens"] == num_prompt - num_cached + num_output - 1
        assert 0 < receipts[1]["computed_tokens"] < receipts[0]["computed_tokens"]
        if "embed" not in path:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            events = http.post(streamed or path, json={**body, **options}).text
            assert f'"receipt":{json.dumps(receipts[1], separators=(",", ":"))}' in events
            assert events.count('"receipt"') == 1


def cached_tokens(usage: dict[str, Any]) -> int | None:
    """Return the prefix-cache tokens that an API reports; the field's name differs by API."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    others = usage.get("cache_read_input_tokens", usage.get("cached_tokens"))
    return others if details is None else details["cached_tokens"]


def test_receipt_counts_computed_tokens(served: running.Running) -> None:
    body = {"prompt": "What does it cost? " * 3, "max_tokens": 9, "ignore_eos": True}
    with served.http() as http:
        for _ in range(2):
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            computed = usage["prompt_tokens"] - cached + usage["completion_tokens"] - 1
            assert usage["receipt"] == {"computed_tokens": computed, "recomputed_tokens": 0, "wasted_tokens": 0}
        assert cached > 0
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        last = http.post("/v1/completions", json=streamed).text.strip().split("\n\n")[-2]
        assert json.loads(last.removeprefix("data: "))["usage"]["receipt"] == usage["receipt"]


# --- requests that allow no token


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [0], "min_tokens": 3},
        {"allowed_token_ids": [5], "structured_outputs": {"choice": ["狐"]}},
        {"allowed_token_ids": [0], "min_tokens": 3, "repetition_penalty": 1e-320},
    ],
)
def test_request_without_allowed_token_answers_400(served: running.Running, fields: dict[str, Any]) -> None:
    with served.http() as http:
        body = {"prompt": "abc", "max_tokens": 5, **fields}
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "allowed_token_ids"
        streamed = http.post("/v1/completions", json={**body, "stream": True})
        assert streamed.status_code == 400
        assert http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5}).status_code == 200


# --- tool calls: the grammar makes a model of random weights write their form


TOOL_TEMPLATES = {
    "hermes": "{{ tools | tojson if tools else '' }}<tool_call>",
    "llama3_json": "{{ tools | tojson if tools else '' }}<|python_tag|>",
    "mistral": "{{ tools | tojson if tools else '' }}[TOOL_CALLS]",
}
PLACES = ["Rome", "Röme", "狐"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"enum": PLACES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["place", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module", params=TOOL_TEMPLATES)
def tool_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    template = TOOL_TEMPLATES[request.param] + TEMPLATE
    checkpoint = write_byte_checkpoint(tmp_path_factory.mktemp("tools") / "tiny", template)
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint)),
        cache_config=CacheConfig(num_gpu_blocks=256),
        scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )
    with served_engine(engine) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            yield client


def check_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    if name == "weather":
        assert values["place"] in PLACES
        assert 1 <= values["days"] <= 9
    else:
        assert (name, values) == ("now", {})


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
def test_forced_tool_calls_of_random_model_match_schema(
    tool_client: openai.OpenAI, choice: Any, finish_reason: str
) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {
            "model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": seed,
            "parallel_tool_calls": False, "max_tokens": 300,
        }  # fmt: skip
        whole = tool_client.chat.completions.create(**asked).choices[0]
        assert whole.finish_reason == finish_reason
        assert whole.message.content is None
        (call,) = whole.message.tool_calls or []
        check_call(call.function.name, call.function.arguments)
        name, arguments = "", ""
        for chunk in tool_client.chat.completions.create(**asked, stream=True):
            for piece in chunk.choices[0].delta.tool_calls or []:
                name, arguments = piece.function.name or name, arguments + (piece.function.arguments or "")
        assert (name, arguments) == (call.function.name, call.function.arguments)


def test_response_format_with_tools_produces_json_or_calls(tool_client: openai.OpenAI) -> None:
    """With response_format and tools, an answer is either JSON or calls."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for seed in range(4):
        choice = tool_client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, response_format=wanted, seed=seed, max_tokens=300,  # type: ignore[call-overload]
            parallel_tool_calls=False,
        ).choices[0]  # fmt: skip
        if choice.message.tool_calls:
            check_call(choice.message.tool_calls[0].function.name, choice.message.tool_calls[0].function.arguments)
        else:
            assert json.loads(choice.message.content) in ({"a": 1}, {"a": 2})
