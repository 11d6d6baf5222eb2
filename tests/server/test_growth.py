"""S15 of docs/reliability.md: the work before the engine gets a request is linear in its text.

CPU time is measured, so `make guard` runs these alone: other tests fill this process with objects.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import statistics
import time
from typing import TYPE_CHECKING

import pytest
from fakes import FakeChatTemplate, make_engine

from octavo.engine.stop_strings import StopSearch, StopStrings
from octavo.sampling_params import SamplingParams
from octavo.server.answers.parts import Part, ReasoningParser, joined
from octavo.server.answers.tagged_calls import Qwen3CoderFormat
from octavo.server.answers.tool_format import Function
from octavo.server.answers.tool_formats import HermesFormat
from octavo.server.api.anthropic.messages import MessagesRequest
from octavo.server.api.anthropic.messages import _read_conversation as messages_of
from octavo.server.api.conversation import read_messages
from octavo.server.api.ollama.requests import PromptRequest
from octavo.server.api.openai.requests import ChatCompletionRequest, CompletionRequest
from octavo.server.api.openai.responses import ResponsesRequest
from octavo.server.api.openai.responses import _read_conversation as items_of
from octavo.server.bodies import parse

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.performance
SIZES = [1 << power for power in range(10, 17)]  # characters, 1k to 64k
ROUNDS = 5  # at least
MOST_ROUNDS = 40
REPEATS = 2  # runs of each size in a round


@functools.cache
def work(size: int) -> dict[str, Callable[[], object]]:
    """Return the work that is done before the engine gets a request, by name, on texts of `size` characters."""
    text = ("word " * size)[:size]
    messages = [{"role": "user", "content": text[start : start + 50]} for start in range(0, size, 50)]
    completion = json.dumps({"prompt": text, "stop": ["a", "b"]}).encode()
    chat = json.dumps({"messages": messages}).encode()
    arguments = json.dumps({"a": text, "b": list(range(size // 8))})
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    engine = make_engine(max_model_len=2 * size, chat_template=FakeChatTemplate())
    inputs = engine.input_processor

    def read_call(piece: int) -> None:
        parser = HermesFormat().parser([Function("f", {})])
        for start in range(0, len(call), piece):
            parser.feed(call[start : start + piece])
        parser.finish()

    blocks = {
        "role": "user",
        "content": [{"type": "text", "text": text[start : start + 8]} for start in range(0, size, 8)],
    }
    anthropic = MessagesRequest(model="a", max_tokens=1, messages=[blocks])
    items = [{"role": "assistant", "content": text[start : start + 8]} for start in range(0, size, 8)]
    turns = ResponsesRequest(input=items)

    def read_space() -> None:
        parser = ReasoningParser(HermesFormat().parser([Function("f", {})]), is_open=True)
        parser.feed("a")
        for _ in range(0, size, 8):
            parser.feed(" " * 8)
        parser.feed("</think>b")
        for _ in range(0, size, 8):
            parser.feed(" " * 8)
        parser.finish()

    lines = "some words\n" * (size // 11)
    tagged = f"<tool_call>\n<function=f>\n<parameter=a>\nb</parameter>\n</function>{lines}</parameter>"

    def read_tags() -> None:
        """Read a value that contains its own closing tags: later text decides which of them ends the value."""
        schema = {"type": "object", "properties": {"a": {"type": "string"}}}
        parser = Qwen3CoderFormat().parser([Function("f", schema)])
        for start in range(0, len(tagged), 5):
            parser.feed(tagged[start : start + 5])
        parser.finish()

    def read_broken() -> None:
        """Repair a call that is followed by blanks and text."""
        parser = HermesFormat().parser([Function("f", {})])
        parser.feed('<tool_call>{"name": "f", "arguments": {"a": "b" c"}}' + " " * size + "x")
        parser.finish()

    return {
        "read a value with tags in pieces": read_tags,
        "read blanks after a broken call": read_broken,
        "read a keep_alive": lambda: PromptRequest(model="a", keep_alive="0" * size).is_unloading,
        "read blocks": lambda: messages_of(anthropic, None),
        "read items": lambda: items_of(turns, None),
        "read space": read_space,
        "join parts": lambda: joined([Part("content", "abc")] * (size // 8)),
        "parse a completion": lambda: parse(CompletionRequest, completion),
        "parse a chat": lambda: parse(ChatCompletionRequest, chat),
        "read messages": lambda: read_messages(messages),
        "render a chat": lambda: inputs.chat_prompt(messages),
        "process a prompt": lambda: inputs.process("a", text, SamplingParams(max_tokens=1)),
        "find stops": lambda: StopSearch(StopStrings(["zz", text[:5] + "zz"])).add(text),
        "read a call whole": lambda: read_call(len(call)),
        "read a call in pieces": lambda: read_call(5),
    }


def least_seconds(function: Callable[[], object]) -> float:
    """Return the least CPU time of this thread in `REPEATS` runs, after one run that warms the caches."""
    function()
    times = []
    for _ in range(REPEATS):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return min(times)


def exponent(times_s: dict[int, float]) -> float:
    """Return the slope of a line fitted through the logarithms of sizes and times."""
    return statistics.linear_regression(
        [math.log(size) for size in times_s], [math.log(each) for each in times_s.values()]
    ).slope


def steepest(times_s: dict[int, float]) -> float:
    """Return the larger one of two exponents: of all sizes, and of the larger sizes only."""
    return max(exponent(times_s), exponent({size: times_s[size] for size in SIZES[3:]}))


@pytest.mark.parametrize("name", work(64))
def test_s15_request_preparation_time_is_linear_in_text_length(name: str) -> None:
    """From 1k to 64k characters CPU time grows with a fitted exponent of at most 1.2.

    For small sizes the constant costs dominate (an engine's checks, for example), which flattens the line. So the
    larger sizes alone have to satisfy the same bound.

    All sizes are run equally often, and the minimum of all runs counts: other processes only add time, for example by
    evicting the processor's caches. If the bound is exceeded, more rounds are run, up to MOST_ROUNDS. The garbage
    collector is disabled during runs, because its time depends on all objects of this process.
    """
    functions = {size: work(size)[name] for size in SIZES}
    least = dict.fromkeys(SIZES, math.inf)
    gc.collect()
    gc.disable()
    try:
        for done in range(MOST_ROUNDS):
            if done >= ROUNDS and steepest(least) <= 1.2:
                break
            least = {size: min(least[size], least_seconds(each)) for size, each in functions.items()}
            gc.collect()
    finally:
        gc.enable()
    assert steepest(least) <= 1.2, least
