"""Texts of real vocabularies: streams equal whole answers, and log probabilities have the tokens' texts and places."""

import json
import random
import sys
from pathlib import Path

import httpx
import pytest
from text_behind import text_behind

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import running
from real_tokenizers import some_tokens

from octavo import CacheConfig, LLMEngine, ModelConfig, SchedulerConfig

MODELS = ["qwen3", "qwen3-coder", "deepseek-r1-distill", "hermes3", "llama31", "phi35", "mistral", "gemma3", "smollm2"]
SERVED = ["phi35", "qwen3", "mistral", "llama31", "hermes3", "smollm2"]
PROMPTS = ["hello\n", "Once upon a time", "狐 is 🦊", " two  spaces", "true true", "<s>typed"]
NUM_STREAMS, NUM_ANSWERS = 2000, 40


def bytes_of(tokenizer):
    """Return the tokens that are parts of characters."""
    return [i for i in range(tokenizer.vocab_size) if isinstance(tokenizer.piece(i), bytes)]


@pytest.fixture(params=MODELS)
def tokenizer(request, real_tokenizer):
    return real_tokenizer(request.param)


def test_streamed_text_of_random_tokens_equals_whole_decoding(tokenizer, real_scale):
    """A stream with any cuts equals the library's decoding of the whole."""
    draw = random.Random(1)
    added = sorted(tokenizer.backend.get_added_tokens_decoder())
    parts = bytes_of(tokenizer)
    assert len(parts) > 100
    for _ in range(max(50, int(NUM_STREAMS * real_scale))):
        prompt, ids = (some_tokens(tokenizer, added, parts, draw) for _ in range(2))
        skip = draw.random() < 0.5
        detokenizer = tokenizer.incremental_detokenizer(prompt, skip_special_tokens=skip)
        cut = draw.choice([1, 2, 7])
        streamed = "".join(detokenizer.add(ids[start : start + cut]) for start in range(0, len(ids), cut))
        assert streamed + detokenizer.finish() == text_behind(tokenizer.backend, prompt, ids, skip=skip), (prompt, ids)


def test_token_bytes_join_to_encoded_text(tokenizer):
    for text in ("Zwölf Boxkämpfer 🦜\n\n狐 don't   3.14 naïve\u00a0x", "def f(x):\n\treturn x ** 2  # 中文 ▁ Ġ"):
        pieces = [tokenizer.piece(token_id) for token_id in tokenizer.encode(text, add_special_tokens=False)]
        data = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in pieces).decode()
        assert data.removeprefix(" ") in {text, text.replace("▁", " ")}  # sentencepiece cannot distinguish these


@pytest.fixture(scope="module", params=SERVED)
def served(request, real_model):
    engine = LLMEngine(
        ModelConfig(model=str(real_model(request.param)), max_model_len=512),
        cache_config=CacheConfig(num_gpu_blocks=512),
        scheduler_config=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "make_engine", lambda executor: engine)
        with running.run_server(served_model_names=["real"]) as server, server.http() as http:
            tokenizer = engine.input_processor.tokenizer
            yield tokenizer, http, [*bytes_of(tokenizer)[:300], *range(1000, 1100)]


def ask(http: httpx.Client, path: str, **body):
    answer = http.post(path, json={"temperature": 1.0, **body})
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]


def test_stream_continues_after_invalid_utf8_byte(served):
    """This answer of the Phi-3 and Llama 2 vocabularies once ended the whole server."""
    tokenizer, http, _ = served
    letter = tokenizer.token_id("H")
    byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.piece(i) == b"\xf0")
    for prompt in ("hello\n", [letter, byte]):
        bias = {str(byte): 0, str(letter): 0}
        body = {
            "prompt": prompt,
            "max_tokens": 30,
            "allowed_token_ids": [byte, letter],
            "logit_bias": bias,
            "logprobs": 1,
            "frequency_penalty": 2.0,  # so that both tokens come, even from a trained model
        }
        whole = ask(http, "/v1/completions", **body, seed=3)["choices"][0]
        chunks = ask(http, "/v1/completions", **body, seed=3, stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
        assert set(whole["logprobs"]["tokens"]) == {r"bytes:\xf0", "H"}
        assert whole["text"].count("H") == whole["logprobs"]["tokens"].count("H")
        assert set(whole["text"]) == {"\ufffd", "H"}


def check_places(text, scored, num_asked, hidden):
    """Check that `text[offset:]` begins with each token's text, and that all alternatives are present."""
    assert len({len(each) for each in scored.values()}) == 1
    assert scored["text_offset"] == sorted(scored["text_offset"])
    for token, offset, top in zip(*(scored[name] for name in ("tokens", "text_offset", "top_logprobs")), strict=True):
        if token.startswith("bytes:"):
            assert offset < len(text)
        elif token not in hidden:
            assert text[offset:].startswith(token), (token, offset, text)
        assert top is None or len(top) - (token in top) in {num_asked - 1, num_asked}


@pytest.mark.parametrize("options", [{}, {"echo": True}, {"skip_special_tokens": False}, {"n": 2}], ids=str)
def test_logprob_tokens_and_offsets_match_text(served, real_scale, options):
    tokenizer, http, many_bytes = served
    hidden = {""} | {
        tokenizer.token(i) for i in tokenizer._special_ids if options.get("skip_special_tokens") is not False
    }
    draw = random.Random(2)
    for number in range(max(4, int(NUM_ANSWERS * real_scale))):
        prompt = draw.choice(PROMPTS)
        if number % 3 == 2:
            prompt = [draw.randrange(tokenizer.vocab_size) for _ in range(9)]
        body = {"prompt": prompt, "max_tokens": 24, "logprobs": 20, "seed": number, "ignore_eos": True, **options}
        if number % 2:  # with many byte tokens, which a random model rarely draws
            body["allowed_token_ids"] = many_bytes
        whole = ask(http, "/v1/completions", **body)
        chunks = ask(http, "/v1/completions", **body, stream=True)
        for choice in whole["choices"]:
            check_places(choice["text"], choice["logprobs"], 20, hidden)
            mine = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
            assert "".join(each["text"] for each in mine) == choice["text"]
            for name, values in choice["logprobs"].items():
                assert [value for each in mine for value in each["logprobs"][name]] == values


def test_chat_logprob_bytes_join_to_content(served, real_scale):
    tokenizer, http, many_bytes = served
    for number in range(max(4, int(NUM_ANSWERS * real_scale))):
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "logprobs": True, "top_logprobs": 20}
        body |= {"seed": number, "allowed_token_ids": many_bytes, "ignore_eos": True}
        choice = ask(http, "/v1/chat/completions", **body)["choices"][0]
        data = b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"])
        content = choice["message"]["content"]
        assert data.decode(errors="replace").replace("\ufffd", "") == content.replace("\ufffd", "") or (
            tokenizer.has_byte_runs and "\ufffd" in content
        )
        for each in choice["logprobs"]["content"]:
            assert len(each["top_logprobs"]) == 20
            assert not each["bytes"] or "\ufffd" not in each["token"] or "\ufffd".encode() in bytes(each["bytes"])


def test_scored_prompt_has_no_completion_tokens(served):
    tokenizer, http, _ = served
    prompt = " true true 🙂 true"
    answer = ask(http, "/v1/completions", prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["text"] == prompt
    check_places(prompt, answer["choices"][0]["logprobs"], 1, {tokenizer.token(tokenizer.bos_token_id or 0)})
