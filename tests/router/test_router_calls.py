"""The router's work for a request and an event, counted in Python function calls, which do not depend on the load of
the machine."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import pytest
from router.without_sockets import END, EVENT, LAST, USAGE, WholeRouter, chunk

if TYPE_CHECKING:
    from typing import Self

pytestmark = pytest.mark.performance
# The comments have the counts when the bounds were set.
MOST_OF_EVENT = 17  # 15
MOST_OF_REQUEST, MOST_OF_ENGINE = 1000, 13  # 920, 11.8
NUM_ENGINES = 64


class Calls:
    """Counts the Python functions that are entered during the context."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _watch(self, _frame: object, event: str, _argument: object) -> None:
        self.count += event == "call"


async def calls_of_requests(num_engines: int) -> int:
    """Return the fewest calls of a request, with many known prompts."""
    router = WholeRouter(num_engines)
    for number in range(200):
        answer = await router.ask(number)
    assert USAGE in answer
    counts = []
    for number in range(1000, 1010):
        with Calls() as calls:
            await router.ask(number)
        counts.append(calls.count)
    return min(counts)


def test_request_enters_few_python_functions_for_each_engine():
    few, many = (asyncio.run(calls_of_requests(count)) for count in (2, NUM_ENGINES))
    assert few < MOST_OF_REQUEST, (few, many)
    assert (many - few) / (NUM_ENGINES - 2) < MOST_OF_ENGINE, (few, many)


def test_event_enters_few_python_functions():
    async def calls_of_event() -> int:
        router = WholeRouter(NUM_ENGINES)
        router.begin(1, stream=True)
        await router.until(chunk(EVENT))
        (engine,) = [each for each in router.engines if each.is_streaming]
        piece, counts = chunk(EVENT), []
        for _ in range(10):
            before = len(router.transport.written)
            with Calls() as calls:
                engine.send(piece)
            assert router.transport.written[before:] == piece
            counts.append(calls.count)
        engine.send(chunk(LAST) + END)
        assert (await router.done()).endswith(chunk(LAST) + END)
        return min(counts)

    count = asyncio.run(calls_of_event())
    assert count < MOST_OF_EVENT, count
