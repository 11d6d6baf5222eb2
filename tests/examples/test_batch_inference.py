"""The example works as its text says, on the built-in model."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from octavo import LLM, LLMEngine, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"


WAYS = ("sequential", "one pass each", "static", "continuous")


def output(name, *arguments):
    """Run an example in this process, which has its imports already. Return its output."""
    path, told = str(EXAMPLES / name), io.StringIO()
    with patch.object(sys, "argv", [path, *arguments]), contextlib.redirect_stdout(told):
        runpy.run_path(path, run_name="__main__")
    return told.getvalue()


def run(*arguments):
    """Run the example. Return its rows by name, as numbers by column, and its other lines."""
    header, *lines = output("batch_inference.py", *arguments).splitlines()
    rows = {}
    for name in WAYS:
        for line in [line for line in lines if line.startswith(f"{name} ")]:
            numbers = [float(number.strip("%x")) for number in line.removeprefix(name).split()]
            rows[name] = dict(zip(header.split(), numbers, strict=True))
            lines.remove(line)
    return rows, lines


@pytest.mark.turn(8)
def test_compare_sequential_prints_all_modes():
    rows, _ = run("--num-prompts", "4", "--max-tokens", "8", "--max-num-seqs", "2", "--compare-sequential")
    assert tuple(rows) == WAYS
    assert len({row["tokens"] for row in rows.values()}) == 1
    passes = {name: row["passes"] for name, row in rows.items()}
    assert min(passes["one pass each"], passes["sequential"]) > passes["static"] >= passes["continuous"]
    for name in ("sequential", "static", "continuous"):
        assert rows[name]["passes"] == rows[name]["steps"], name
    assert rows["one pass each"]["steps"] == rows["continuous"]["steps"]
    assert rows["sequential"]["busy"] == 100 > rows["static"]["busy"]


@pytest.mark.turn(8)
def test_each_mode_is_measured_after_warmup_run(monkeypatch):
    """No row includes the engine's first forward passes, or anything that speculation learned."""
    engines, begin = [], LLMEngine.__init__

    def remember(self, *args, **options):
        begin(self, *args, **options)
        engines.append(self)
        self.num_answers = 0
        add = self.add_request

        def counted(*request):
            self.num_answers += 1
            return add(*request)

        self.add_request = counted

    monkeypatch.setattr(LLMEngine, "__init__", remember)
    options = (
        "--num-prompts",
        "3",
        "--max-tokens",
        "4",
        "--max-num-seqs",
        "2",
        "--compare-sequential",
        "--rounds",
        "2",
    )
    rows, _ = run(*options)
    (engine,) = engines
    assert engine.num_answers == 3 * (1 + 2 * len(WAYS))
    assert engine.capacity.speculative_method == "none"
    assert rows["one pass each"]["steps"] == rows["continuous"]["steps"] < engine.stats.num_steps / 8


def test_example_prints_answers_and_kv_slots():
    prompts = ["Once upon a time", "The sun"]
    rows, lines = run("--prompts", *prompts, "--max-tokens", "8")
    assert tuple(rows) == ("continuous",)
    llm = LLM(enable_prefix_caching=False)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    answers = [f"req-{number}: {output.prompt} -> {output.outputs[0].text}" for number, output in enumerate(outputs)]
    assert "\n".join(lines).endswith("\n".join(answers))
    told = re.search(r"\((\d) requests\): (\d+) used, (\d+) held in blocks of 16, (\d+) if each", "\n".join(lines))
    num_requests, used, held, reserved = map(int, told.groups())
    # The last token of an answer is never computed, so its keys and values take no slot.
    lengths = [len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1 for output in outputs]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 8]
    assert (num_requests, used) == (2, sum(lengths))
    assert held == sum(-(-length // 16) * 16 for length in lengths)
    assert reserved == 2 * (max(lengths) + 1)


def test_step_by_step_prints_all_seven_stages():
    told = output("step_by_step.py")
    for stage in ("schedule", "inputs", "execute", "sample", "update", "detokenize", "free"):
        assert stage in told
