"""The workloads of `octavo bench`.

- A: Requests run one after the other.
- B: All requests run concurrently.
- C: Long prompts, each with one output token, run one after the other.
- D: Sets of requests that share a prefix run without and with the prefix cache.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, ExecutionError
from octavo.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from octavo.engine.llm_engine import Engine


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and its number of output tokens."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workloads:
    """Requests by workload. gaps: Random seconds between requests, for a rate of one per second."""

    a: list[Item]
    b: list[Item]
    c: list[Item]
    d: list[list[Item]]
    gaps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timing:
    """Measurements of one run. Times count from its start."""

    wall_s: float
    first_token_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int


def read_workloads(path: Path) -> Workloads:
    """Read {"A": [{"prompt": [ids], "out": n}, ...], "B": ..., "C": ..., "D": [[...]], "E_gaps": [...]}.

    Raises `ConfigError`.
    """
    try:
        data = json.loads(path.read_bytes())
        sets = [[_read_item(item) for item in each] for each in data.get("D", [])]
        a, b, c = ([_read_item(item) for item in data.get(name, [])] for name in "ABC")
        gaps = [float(gap) for gap in data.get("E_gaps", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'{path} is not a workload file like {{"A": [{{"prompt": [ids], "out": n}}], ...}}: {error!r}'
        ) from None
    return Workloads(a, b, c, sets, gaps)


def _read_item(item: Any) -> Item:
    return Item([int(token_id) for token_id in item["prompt"]], int(item["out"]))


def make_workloads(vocab_size: int, max_model_len: int, seed: int = 0) -> Workloads:
    """Make small workloads that fit `max_model_len`."""
    rng = random.Random(seed)  # noqa: S311

    def item(num_prompt: int, num_output: int, prefix: Sequence[int] = ()) -> Item:
        scale = min(1.0, (max_model_len - 1) / (len(prefix) + num_prompt + num_output))
        num_suffix = max(int(num_prompt * scale), 1)
        suffix = [rng.randrange(vocab_size) for _ in range(num_suffix)]
        return Item([*prefix[: int(len(prefix) * scale)], *suffix], max(int(num_output * scale), 1))

    prefix = [rng.randrange(vocab_size) for _ in range(128)]
    return Workloads(
        a=[item(32, 32) for _ in range(2)],
        b=[item(rng.randint(8, 96), rng.randint(8, 48)) for _ in range(16)],
        c=[item(512, 1) for _ in range(2)],
        d=[[item(16, 16, prefix) for _ in range(8)]],
    )


def run(engine: Engine, items: Sequence[Item], *, share_prefixes: bool = True) -> Timing:
    """Measure requests that run together, after emptying the prefix cache.

    share_prefixes: False gives each request a separate cache salt.
    """
    engine.core.scheduler.reset_prefix_cache()
    start = time.perf_counter()
    for index, item in enumerate(items):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=item.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        salt = None if share_prefixes else f"alone-{index}"
        engine.add_request(f"bench-{index}", {"prompt_token_ids": item.prompt_token_ids}, params, cache_salt=salt)
    first_token_s = None
    num_output_tokens = num_steps = 0
    num_open = len(items)
    while num_open:
        num_steps += 1
        for output in engine.step():
            if output.error is not None:
                raise ExecutionError(output.error)
            num_output_tokens += len(output.outputs[0].token_ids)
            num_open -= output.finished
        if num_output_tokens and first_token_s is None:
            first_token_s = time.perf_counter() - start
    wall_s = time.perf_counter() - start
    engine.step()
    num_prompt_tokens = sum(len(item.prompt_token_ids) for item in items)
    return Timing(wall_s, first_token_s or wall_s, num_prompt_tokens, num_output_tokens, num_steps)


def measure(engine: Engine, workloads: Workloads, name: str, repeat: int) -> list[dict[str, Any]]:
    """Run one workload `repeat` times. Return table rows with medians."""
    if name == "A":
        return _rows("A one stream", [run(engine, [item]) for _ in range(repeat) for item in workloads.a])
    if name == "B":
        title = f"B {len(workloads.b)} together"
        return _rows(title, [run(engine, workloads.b) for _ in range(repeat)] if workloads.b else [])
    if name == "C":
        return _rows("C long prompt", [run(engine, [item]) for _ in range(repeat) for item in workloads.c])
    return [
        row
        for title, share in (("D shared prefix, cache off", False), ("D shared prefix, cache on", True))
        for row in _rows(
            title, [run(engine, items, share_prefixes=share) for _ in range(repeat) for items in workloads.d]
        )
    ]


def _rows(title: str, timings: Sequence[Timing]) -> list[dict[str, Any]]:
    if not timings:
        return []

    def median(figure: Any) -> float | None:
        values = [value for timing in timings if (value := figure(timing)) is not None]
        return round(statistics.median(values), 4) if values else None

    return [
        {
            "workload": title,
            "runs": len(timings),
            "wall_s": median(lambda t: t.wall_s),
            "output_tok_per_s": median(lambda t: t.num_output_tokens / t.wall_s),
            "prefill_tok_per_s": median(lambda t: t.num_prompt_tokens / t.first_token_s) if _is_alone(title) else None,
            "decode_tok_per_s": median(_decode_rate) if _is_alone(title) else None,
            "first_token_ms": median(lambda t: 1000 * t.first_token_s),
            "steps": median(lambda t: t.num_steps),
        }
    ]


def _is_alone(title: str) -> bool:
    return title[0] in "AC"


def _decode_rate(timing: Timing) -> float | None:
    if timing.num_output_tokens < 2 or timing.wall_s <= timing.first_token_s:
        return None
    return (timing.num_output_tokens - 1) / (timing.wall_s - timing.first_token_s)
