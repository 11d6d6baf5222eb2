"""A failure in the work for one request ends that request only, with an error that names it: in a server, and offline.

At each place an exception is raised on purpose, for one of 21 requests. The answers of the other 20 do not change.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import running
from starlette.applications import Starlette
from test_real_engine import served_engine, write_byte_checkpoint

from octavo import LLM, CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.stop_strings import StopSearch
from octavo.engine.tokenizer import Tokenizer
from octavo.http import audit
from octavo.http.limiter import Permit
from octavo.runtime.faults import is_fault
from octavo.sampling_params import StructuredOutputsParams
from octavo.server.answers.answer_form import AnswerReader
from octavo.server.answers.job_outputs import MergedOutputs
from octavo.server.answers.usage import UsageCounter
from octavo.server.api import tgi
from octavo.server.api.anthropic import messages
from octavo.server.api.ollama import answers as ollama_answers
from octavo.server.api.ollama import embeddings as ollama_embeddings
from octavo.server.api.openai import chat, completions, embeddings, responses
from octavo.structured_output.grammars import GrammarCompiler, Matcher
from octavo.worker import sampler
from octavo.worker.prompt_scores import PromptScorer

if TYPE_CHECKING:
    from pathlib import Path

NUM_OTHERS = 20
VICTIM = "the one that fails"  # the prompt of the request that fails
TOP, OTHERS_TOP = 3, 1  # log probabilities that the victim and the other requests ask for
STOP = "never in a text"
PENALTY, TYPICAL = 1.25, 0.9
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
FAULT = "secret/path/of/a/fault"


class PanicException(BaseException):
    """A panic as Rust libraries raise it."""


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError(FAULT)


def panics(*_: Any, **__: Any) -> Any:
    raise PanicException(FAULT)


Patch = Callable[[pytest.MonkeyPatch], None]


def break_where(owner: Any, name: str, concerns: Callable[..., bool], fault: Callable[..., Any] = fails) -> Patch:
    """Make a function fail for the calls that concern the victim."""
    real = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        return fault() if concerns(*args, **kwargs) else real(*args, **kwargs)

    return lambda patch: patch.setattr(owner, name, broken)


def is_victims(prompt_token_ids: Any) -> bool:
    return len(prompt_token_ids) == len(VICTIM)  # one token per byte, and all other prompts are shorter


def break_detokenizer(method: str, fault: Callable[..., Any]) -> Patch:
    """Make the victim's detokenizer fail."""
    real = Tokenizer.incremental_detokenizer

    class Broken:
        def __init__(self, inner: Any) -> None:
            self.add, self.finish = inner.add, inner.finish
            setattr(self, method, fault)

    def start(self: Tokenizer, prompt_token_ids: Any = (), **options: Any) -> Any:
        inner = real(self, prompt_token_ids, **options)
        return Broken(inner) if is_victims(prompt_token_ids) else inner

    return lambda patch: patch.setattr(Tokenizer, "incremental_detokenizer", start)


def prepare_badly(patch: pytest.MonkeyPatch) -> None:
    def prepare(*_: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(RuntimeError(FAULT))
        return future

    patch.setattr(GrammarCompiler, "prepare", prepare)


ENGINE: dict[str, tuple[Patch, dict[str, Any]]] = {
    "a detokenizer is made": (
        break_where(Tokenizer, "incremental_detokenizer", lambda _self, ids=(), **_: is_victims(ids)),
        {},
    ),
    "text": (break_detokenizer("add", fails), {}),
    "text, by a panic": (break_detokenizer("add", panics), {}),
    "the end of the text": (break_detokenizer("finish", fails), {}),
    "stop strings": (break_where(StopSearch, "add", lambda *_, **__: True), {"stop": [STOP]}),
    "logprobs": (
        break_where(OutputProcessor, "_logprob_dict", lambda _self, entry: len(entry.token_ids) > TOP),
        {"logprobs": TOP},
    ),
    "usage": (
        break_where(OutputProcessor, "_emit", lambda _self, state, _now: is_victims(state.prompt_token_ids)),
        {},
    ),
    "penalties": (
        break_where(
            sampler, "_adjust", lambda _row, task, _to_device: task.sampling_params.repetition_penalty == PENALTY
        ),
        {"repetition_penalty": PENALTY},
    ),
    "typical sampling": (
        break_where(sampler, "keep_typical", lambda _row, params, _kernels: params.typical_p == TYPICAL),
        {"typical_p": TYPICAL},
    ),
    "the worker's logprobs": (
        break_where(sampler.Sampler, "token_logprobs", lambda _self, _logprobs, _ids, counts: TOP in counts),
        {"logprobs": TOP},
    ),
    "the prompt's logprobs": (
        break_where(PromptScorer, "_score", lambda *_: True),
        {"prompt_logprobs": 0},
    ),
    "a grammar": (break_where(Matcher, "allowed", lambda _self: True), {"structured": True}),
    "a grammar's state": (break_where(Matcher, "advance", lambda *_: True, panics), {"structured": True}),
}
ADDING: dict[str, tuple[Patch, dict[str, Any]]] = {"a grammar is prepared": (prepare_badly, {"structured": True})}
CHAT: dict[str, tuple[Patch, dict[str, Any]]] = {
    "reasoning and calls": (break_where(AnswerReader, "read", lambda *_: True), {}),
    "logprobs as the API has them": (
        break_where(chat, "chat_logprobs", lambda _positions, num_top, _piece, **_: num_top == TOP),
        {"logprobs": True, "top_logprobs": TOP},
    ),
}
COMPLETIONS: dict[str, tuple[Patch, dict[str, Any]]] = {
    "a choice": (
        break_where(
            completions.CompletionReply,
            "_choice",
            lambda _self, _i, _c, output, **_: is_victims(output.prompt_token_ids),
        ),
        {},
    ),
    "usage is counted": (
        break_where(UsageCounter, "add", lambda _self, output, _c: is_victims(output.prompt_token_ids)),
        {},
    ),
    "tokens are charged": (break_where(Permit, "charge", lambda _self, count: count == len(VICTIM)), {}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_checkpoint(tmp_path_factory.mktemp("faults") / "tiny", TEMPLATE)


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[running.Running]:
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint), max_model_len=256),
        cache_config=CacheConfig(num_gpu_blocks=1024, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(max_num_seqs=NUM_OTHERS + 1, max_num_batched_tokens=256),
    )
    with served_engine(engine) as server:
        yield server


@pytest.fixture(scope="module")
def offline(checkpoint: Path) -> LLM:
    return LLM(model=str(checkpoint), max_model_len=256, num_gpu_blocks_override=1024, enable_prefix_caching=False)


OPTIONS: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0}
NOT_CHANGING = {"logprobs": OTHERS_TOP}


def bystander(number: int) -> dict[str, Any]:
    return {"prompt": f"other {number}", "seed": number, **NOT_CHANGING, **OPTIONS}


def ask_others(served: running.Running) -> list[Any]:
    with served.http() as http, ThreadPoolExecutor(NUM_OTHERS) as pool:
        answers = pool.map(lambda n: http.post("/v1/completions", json=bystander(n)).json(), range(NUM_OTHERS))
        return [answer["choices"] for answer in answers]


@pytest.fixture(scope="module")
def others(served: running.Running) -> list[Any]:
    return ask_others(served)


def body(options: dict[str, Any], *, stream: bool, is_chat: bool) -> dict[str, Any]:
    asked: dict[str, Any] = {**OPTIONS, "stream": stream, **options}
    if asked.pop("structured", False):
        asked["structured_outputs"] = {"regex": "[a-z]*"}
    asked["messages" if is_chat else "prompt"] = [{"role": "user", "content": VICTIM}] if is_chat else VICTIM
    return asked


def error_of(text: str) -> dict[str, Any]:
    """Return the error of a whole answer, or the one at the end of a stream."""
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return json.loads(events[-1] if events else text)["error"]  # type: ignore[no-any-return]


SERVER = ENGINE | ADDING | CHAT | COMPLETIONS
WHOLE = [name for index, name in enumerate(SERVER) if index % 2 or name == "the prompt's logprobs"]
STREAMED = [name for name in SERVER if name not in WHOLE or name in CHAT | COMPLETIONS]


@pytest.mark.sweep(24)
@pytest.mark.parametrize(("name", "stream"), [*((name, False) for name in WHOLE), *((name, True) for name in STREAMED)])
def test_server_failure_ends_only_affected_request(
    name: str, stream: bool, served: running.Running, others: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    is_chat = name in CHAT
    fault, options = SERVER[name]
    asked = body(options, stream=stream, is_chat=is_chat)
    with pytest.MonkeyPatch.context() as patch, served.http() as http, ThreadPoolExecutor(2) as pool:
        fault(patch)
        victim = pool.submit(http.post, "/v1/chat/completions" if is_chat else "/v1/completions", json=asked)
        assert ask_others(served) == others
        answer = victim.result()
    error = error_of(answer.text)
    assert (error["type"], error["code"]) == ("server_error", "request_failed")
    assert ("chatcmpl-" if is_chat else "cmpl-") in error["message"]
    assert FAULT not in answer.text
    request_id = error["message"].split()[1].strip(":")
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [request_id in record.getMessage() and bool(record.exc_info) for record in logged] == [True]
    with served.http() as http:
        assert http.post("/v1/completions", json=bystander(0)).json()["choices"] == others[0]
    served.engine.client.check_when_idle()
    assert served.num_unfinished == served.num_blocks_in_use == 0


VICTIMS_MESSAGES = [{"role": "user", "content": VICTIM}]
REPLIES: dict[str, tuple[type, dict[str, Any], str]] = {  # path -> its reply class, a request, the prefix of its ids
    "/v1/chat/completions": (chat.ChatReply, {"messages": VICTIMS_MESSAGES, "max_tokens": 8}, "chatcmpl-"),
    "/v1/messages": (messages.MessageReply, {"model": "tiny", "messages": VICTIMS_MESSAGES, "max_tokens": 8}, "msg_"),
    "/v1/responses": (responses.ResponseReply, {"input": VICTIM, "max_output_tokens": 8}, "resp_"),
    "/generate": (tgi.GenerateReply, {"inputs": VICTIM, "parameters": {"max_new_tokens": 8}}, "gen-"),
    "/generate_stream": (tgi.GenerateReply, {"inputs": VICTIM, "parameters": {"max_new_tokens": 8}}, "gen-"),
    "/v1/embeddings": (embeddings.EmbeddingReply, {"input": VICTIM}, "embd-"),
    "/api/chat": (
        ollama_answers.OllamaReply,
        {"model": "tiny", "messages": VICTIMS_MESSAGES, "num_predict": 8, "stream": False},
        "chat-",
    ),
    "/api/generate": (ollama_answers.OllamaReply, {"model": "tiny", "prompt": VICTIM, "num_predict": 8}, "gen-"),
    "/api/embed": (ollama_embeddings.EmbedReply, {"model": "tiny", "input": VICTIM}, "embd-"),
}
WHOLE = {"/generate", "/v1/embeddings", "/api/chat", "/api/embed"}
WHOLE_REPLIES = [(path, "whole") for path in REPLIES if path not in {"/generate_stream", "/api/generate"}]
STREAMED_REPLIES = product([path for path in REPLIES if path not in WHOLE], ["update", "end"])


def told_last(text: str) -> str:
    """Return the error message of an answer, or of the end of a stream, of any API."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    last = json.loads([line for line in lines if line.startswith("{")][-1])
    error = last.get("response", last)["error"]
    return error if isinstance(error, str) else error["message"]  # type: ignore[no-any-return]


@pytest.mark.sweep(36)
@pytest.mark.parametrize("fault", [fails, panics])
@pytest.mark.parametrize(("path", "method"), [*WHOLE_REPLIES, *STREAMED_REPLIES])
def test_reply_encoding_failure_ends_only_affected_request(
    path: str,
    method: str,
    fault: Callable[..., Any],
    served: running.Running,
    others: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For each API: a whole answer, a piece in mid-stream, and a stream's end."""
    reply, asked, prefix = REPLIES[path]
    if method != "whole" and path.startswith("/v1/"):
        asked = {**asked, "stream": True}
    with pytest.MonkeyPatch.context() as patch, served.http() as http, ThreadPoolExecutor(1) as pool:
        patch.setattr(reply, method, fault)
        victim = pool.submit(http.post, path, json=asked)
        assert ask_others(served) == others
        answer = victim.result()
    message = told_last(answer.text)
    assert message.startswith(f"request {prefix}"), answer.text
    assert FAULT not in answer.text
    assert answer.status_code == (500 if method == "whole" else 200)
    (logged,) = faults_in(caplog)
    assert message.split()[1].strip(":") in logged.getMessage()
    assert logged.exc_info
    with served.http() as http:
        again = http.post(path, json=asked)
        assert again.status_code == 200
        assert "request_failed" not in again.text
    served.engine.client.check_when_idle()
    assert served.num_unfinished == served.num_blocks_in_use == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError(), True), (PanicException(), True), (KeyboardInterrupt(), False), (asyncio.CancelledError(), False)],
)
def test_interrupt_and_cancellation_are_not_faults(error: BaseException, expected: bool) -> None:
    assert is_fault(error) is expected


def test_panic_in_merged_stream_is_raised_to_reader() -> None:
    async def stream(*, panic: bool) -> AsyncIterator[int]:
        yield 1
        if panic:
            panics()

    async def read() -> None:
        streams = [stream(panic=False), stream(panic=True)]
        async with asyncio.timeout(5), aclosing(MergedOutputs(streams, at_once=2)) as merged:
            async for _ in merged:
                pass

    with pytest.raises(PanicException):
        asyncio.run(read())


@pytest.mark.sweep(16)
@pytest.mark.parametrize("name", ENGINE)
def test_offline_failure_ends_only_affected_request(name: str, offline: LLM, caplog: pytest.LogCaptureFixture) -> None:
    fault, options = ENGINE[name]
    given = {**OPTIONS, **options}
    if given.pop("structured", False):
        given["structured_outputs"] = StructuredOutputsParams(regex="[a-z]*")
    prompts = [VICTIM, *(bystander(number)["prompt"] for number in range(NUM_OTHERS))]
    params = [SamplingParams(**given)]
    params += [SamplingParams(seed=number, **NOT_CHANGING, **OPTIONS) for number in range(NUM_OTHERS)]
    _, *alone = offline.generate(prompts, params, use_tqdm=False)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        failed, *answers = offline.generate(prompts, params, use_tqdm=False)
    assert failed.finished
    assert failed.error is not None
    assert f"request {failed.request_id}:" in failed.error
    assert FAULT not in failed.error
    assert [each.finish_reason for each in failed.outputs] == ["error"]
    assert [each.outputs for each in answers] == [each.outputs for each in alone]
    assert [each.error for each in answers] == [None] * NUM_OTHERS
    (logged,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert failed.request_id in logged.getMessage()
    assert [each.outputs for each in offline.generate(prompts, params, use_tqdm=False)[1:]] == [
        each.outputs for each in alone
    ]
    pool = offline.llm_engine.core.scheduler.kv_cache_manager.pool  # type: ignore[attr-defined]
    assert pool.num_free_blocks == pool.num_blocks


def faults_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("place", ["a line of log", "a trace"])
def test_audit_or_trace_failure_after_answer_is_logged(
    place: str, served: running.Running, others: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is complete, and the connection serves the next request."""

    class BrokenTracing:
        tell = staticmethod(fails)

    caplog.set_level(logging.INFO, "octavo.audit")
    middleware = served.server.config.loaded_app
    while not isinstance(middleware, audit.AuditMiddleware):
        middleware = middleware.middleware_stack if isinstance(middleware, Starlette) else middleware.app
    with pytest.MonkeyPatch.context() as patch, served.http() as http:
        if place == "a trace":
            patch.setattr(middleware, "_tracing", BrokenTracing())
        else:
            patch.setattr(UsageCounter, "summary", fails)
        asked = [http.post("/v1/completions", json=bystander(number)) for number in range(2)]
        running.wait_until(lambda: len(faults_in(caplog)) == 2, "both are logged, behind their answers")
    assert [answer.json()["choices"] for answer in asked] == others[:2]
    logged = faults_in(caplog)
    ids = [answer.headers["x-request-id"] for answer in asked]
    assert [request_id in record.getMessage() for request_id, record in zip(ids, logged, strict=True)] == [True, True]
