"""The walks of docs/request_life.md: each function that the page names is called, in the order of its table.

All data is read from the page. If a walk waits (for a delayed step, or for another request), a new table begins. The
order of first calls is compared per table, so a function that every step calls may be in several tables.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
from alone_and_crowd import needs_kernels
from gguf_files import write_gguf
from running import DEADLINE_S, wait_until
from test_real_engine import TEMPLATE, served_engine, write_byte_checkpoint

from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.models.random_weights import tiny_config, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import CodeType, FrameType

    import httpx
    from running import Running

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "request_life.md").read_text(encoding="utf-8")
HOP = re.compile(r"\[[^\]]*\]\(\.\./(src/\S+\.py)\) \| `([\w.]+)` \|")
NUMBERED = re.compile(rf"^\| (\d+) \| {HOP.pattern}", re.MULTILINE)
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Hop:
    """A function that the page names, with its file."""

    path: str
    name: str

    @property
    def code(self) -> CodeType:
        """The function's code. Raises `AttributeError` if the file does not define it."""
        value: Any = importlib.import_module(self.path.removeprefix("src/").removesuffix(".py").replace("/", "."))
        for part in self.name.split("."):
            value = getattr(value, part)
        code: CodeType = inspect.unwrap(value).__code__
        if Path(code.co_filename) != ROOT / self.path:
            raise AttributeError(f"{self.name} is defined in {code.co_filename}, not in {self.path}")
        return code


def walk(title: str) -> list[list[Hop]]:
    """Return the tables of a walk. Their rows are numbered consecutively."""
    section = PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    tables = [NUMBERED.findall(part) for part in section.split("\n### ")[1:]]
    assert [int(number) for rows in tables for number, _, _ in rows] == list(range(1, sum(map(len, tables)) + 1))
    assert all(tables)
    return [[Hop(path, name) for _, path, name in rows] for rows in tables]


class Calls:
    """The calls of the named functions, in order, on every thread that is started while this is active."""

    def __init__(self, hops: Iterable[Hop], *, here: bool = False) -> None:
        """here: include this thread."""
        self._is_here = here
        self._hops = {id(hop.code): hop for hop in hops}
        self._called: list[Hop] = []

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        if self._is_here:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        if self._is_here:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call" and (hop := self._hops.get(id(frame.f_code))):
            self._called.append(hop)

    def check(self, *tables: list[Hop]) -> None:
        """Wait until all functions of the tables were called, compare the order of their first calls, and clear."""
        expected = [hop for table in tables for hop in table]
        with contextlib.suppress(TimeoutError):  # the comparison below then shows the missing ones
            wait_until(lambda: set(expected) <= set(self._called), "all are called")
        first_calls = [hop for hop in dict.fromkeys(self._called) if hop in expected]
        assert [hop.name for hop in first_calls] == [hop.name for hop in expected]
        self.clear()

    def clear(self) -> None:
        """Forget the calls so far."""
        self._called.clear()


class Steps:
    """Delays the results of an engine's steps until the test releases them."""

    def __init__(self, engine: LLMEngine, patch: pytest.MonkeyPatch) -> None:
        self._collect = engine.core.executor.collect
        self._permits = threading.Semaphore(0)
        self._num_held = 0
        patch.setattr(engine.core.executor, "collect", self._held)

    def _held(self) -> Any:
        self._num_held += 1
        if not self._permits.acquire(timeout=2 * DEADLINE_S):
            raise TimeoutError("nobody let this step pass")
        return self._collect()

    def wait_for(self, number: int) -> None:
        """Wait until this step is computed and held."""
        wait_until(lambda: self._num_held == number, f"step {number} is held")

    def let_pass(self, count: int = 100) -> None:
        """Release `count` steps."""
        self._permits.release(count)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_checkpoint(tmp_path_factory.mktemp("walks") / "tiny", TEMPLATE)


@contextlib.contextmanager
def walking(checkpoint: Path, *tables: list[Hop]) -> Iterator[tuple[Running, httpx.Client, Steps, Calls]]:
    """Serve the page's example: 8 blocks of 4 tokens, and a budget of 512 tokens."""
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint), max_model_len=32),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks=8),
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512),
    )
    with pytest.MonkeyPatch.context() as patch, Calls(hop for table in tables for hop in table) as calls:
        steps = Steps(engine, patch)
        with served_engine(engine) as server, server.http() as http:
            try:
                yield server, http, steps, calls
            finally:
                steps.let_pass()


def body(content: str = "?", **options: Any) -> dict[str, Any]:
    """Return a request for two tokens. Its prompt has 9 tokens and one per byte of `content`."""
    message = {"role": "user", "content": content}
    return {"messages": [message], "max_tokens": 2, "ignore_eos": True, **options}


def test_every_documented_function_exists_in_its_file() -> None:
    """This includes the functions that no other test covers, because they run in two processes."""
    hops = [Hop(*row) for row in HOP.findall(PAGE)]
    assert len(hops) > len(NUMBERED.findall(PAGE))
    for hop in hops:
        assert hop.code


def test_prompt_walk_matches_call_order(checkpoint: Path) -> None:
    """The second step is held until the first step's event has been read, because another thread sends it."""
    *first, last = walk("A prompt, from HTTP to its last token")
    with walking(checkpoint, *first, last) as (_, http, steps, calls):
        steps.let_pass(1)
        with http.stream("POST", CHAT, json=body(stream=True)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            steps.wait_for(2)
            calls.check(*first)
            steps.let_pass()
            assert [line for line in lines if line][-1] == "data: [DONE]"
            calls.check(last)


def test_block_walk_matches_call_order(checkpoint: Path) -> None:
    taken, shared, evicted = walk("A block, from free to freed")
    with walking(checkpoint, taken, shared, evicted) as (_, http, steps, calls):
        steps.let_pass()
        for table, content in ((taken, "?"), (shared, "?"), (evicted, "!" * 20)):
            assert http.post(CHAT, json=body(content)).json()["usage"]["completion_tokens"] == 2
            calls.check(table)


def test_disconnect_walk_matches_call_order(checkpoint: Path) -> None:
    """The engine is in a step until the server has aborted the request."""
    server_side, engine_side = walk("A client that leaves")
    with walking(checkpoint, server_side, engine_side) as (server, http, steps, calls):
        steps.let_pass(1)
        with http.stream("POST", CHAT, json=body(max_tokens=20, stream=True)) as answer:
            lines = answer.iter_lines()  # dropping it closes the connection
            assert next(lines).startswith("data: ")
            steps.wait_for(2)
            calls.clear()
        calls.check(server_side)
        steps.let_pass()
        calls.check(engine_side)
        assert server.num_blocks_in_use == 0


def offline_engine(path: Path, **speculation: Any) -> LLMEngine:
    """Return an engine for this thread, with 64 blocks of 4 tokens in the first group and fewer window blocks."""
    return LLMEngine(
        ModelConfig(model=str(path), max_model_len=64, skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=4, num_gpu_blocks=64),
        scheduler_config=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64),
        speculative_config=SpeculativeConfig(**speculation),
    )


def test_window_block_walk_matches_call_order(tmp_path: Path) -> None:
    taken, found, evicted = walk("A window block, from free to freed")
    engine = offline_engine(
        write_checkpoint(tmp_path, tiny_config("MistralForCausalLM", sliding_window=8)), method="none"
    )
    first, others = list(range(10, 20)), [list(range(start, start + 50)) for start in (100, 200, 300, 400)]
    with Calls([*taken, *found, *evicted], here=True) as calls:
        for prompts, count, table in (([first], 8, taken), ([first], 2, found), (others, 2, evicted)):
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
            engine.generate_batch([{"prompt_token_ids": prompt} for prompt in prompts], params)
            calls.check(table)


def test_draft_token_walk_matches_call_order(tmp_path: Path) -> None:
    """A logit bias makes the model repeat one token on every processor."""
    guessed, verified = walk("A drafted token, from guess to output")
    engine = offline_engine(write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM")), method="ngram")
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, detokenize=False, logit_bias={7: 100.0})
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7, 8]}, params)
    [request] = engine.core.scheduler.requests.values()
    with Calls([*guessed, *verified], here=True) as calls:
        while not request.spec_token_ids:
            calls.clear()
            engine.step()
        calls.check(guessed)
        engine.step()
        calls.check(verified)
    assert engine.core.metrics.stats.drafts.num_drafts == 1


@needs_kernels
def test_gguf_walk_matches_call_order(tmp_path: Path) -> None:
    described, loaded = walk("A GGUF file, from disk to packed weights")
    folder = write_checkpoint(tmp_path / "folder", tiny_config("LlamaForCausalLM"))
    path = write_gguf(folder, tmp_path / "model.gguf", kind="Q8_0")
    with Calls([*described, *loaded], here=True) as calls:
        offline_engine(path, method="none")
        calls.check(described, loaded)
