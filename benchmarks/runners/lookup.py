"""Shared code of the runners of prompt lookup: engines with and without it, measured in turns.

The job on standard input has for each name {"turns": [prompts of each turn, in the engine's form], "max_tokens",
"num_drafts"}. The output has "figures", for each name {"none": [...], "lookup": [...]}: the mean seconds per output
token after the first in each turn; and the number of answers that were equal both times.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EngineT = TypeVar("EngineT")


def run(
    open_engine: Callable[[int], EngineT],
    answer: Callable[[EngineT, list[int], int], tuple[float, Sequence[int]]],
) -> None:
    """Measure and print.

    open_engine: open_engine(num_drafts) returns an engine, 0 for no drafts. answer: answer(engine, prompt, max_tokens)
    returns the figure and the tokens.
    """
    jobs = json.load(sys.stdin)
    engines = {"none": open_engine(0), "lookup": open_engine(next(iter(jobs.values()))["num_drafts"])}
    result: dict[str, dict[str, list[float]]] = {name: {method: [] for method in engines} for name in jobs}
    num_same = num_answers = 0
    for name, job in jobs.items():
        for prompts in job["turns"]:
            answers = []
            for method, engine in engines.items():
                told = [answer(engine, prompt, job["max_tokens"]) for prompt in prompts]
                result[name][method].append(statistics.mean(figure for figure, _ in told))
                answers.append([tokens for _, tokens in told])
            num_same += sum(one == other for one, other in zip(*answers, strict=True))
            num_answers += len(prompts)
    print(json.dumps({"figures": result, "num_same": num_same, "num_answers": num_answers}))
