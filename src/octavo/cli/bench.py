"""`octavo bench`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.command import command, make_app
from octavo.cli.engine_options import EngineOptions
from octavo.config import api_key_from_environment
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Workload(StrEnum):
    """See `octavo.cli.workloads`."""

    A = "A"
    B = "B"
    C = "C"
    D = "D"


File = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help='Requests as JSON: {"A": [{"prompt": [ids], "out": n}], "B": ..., "C": ..., "D": [[...]]}. '
        "Default: small generated workloads.",
        show_default=False,
    ),
]
Only = Annotated[
    list[Workload] | None,
    typer.Option(
        help="Run only this workload; may be repeated. A: one stream, B: many requests together, C: long prompts, "
        "D: a shared prefix with the cache off and on. Default: all workloads of this command.",
        show_default=False,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="PER_SECOND",
        help="Requests sent per second, at random times. Default: all are sent immediately.",
        show_default=False,
    ),
]
NumPrompts = Annotated[
    int | None, typer.Option(min=1, help="Number of requests. Default: workload B once.", show_default=False)
]
MaxConcurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum number of concurrent requests. Default: no limit.", show_default=False),
]
ServedModel = Annotated[
    str | None, typer.Option(help="Name of the model. Default: the first one served.", show_default=False)
]
ApiKey = Annotated[
    str | None, typer.Option(help="Key to send; OCTAVO_API_KEY does the same. Default: none.", show_default=False)
]
Shuffle = Annotated[
    bool,
    typer.Option(help="Shuffle each prompt's tokens in each run; otherwise they are in the server's prefix cache."),
]
Repeat = Annotated[int, typer.Option(min=1, help="Number of runs of each workload; medians are reported.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

bench = make_app(name="bench", help="Measure speed on this machine.", no_args_is_help=True)
_COLUMNS = {
    "workload": "workload",
    "runs": "runs",
    "wall_s": "wall s",
    "output_tok_per_s": "out tok/s",
    "prefill_tok_per_s": "prefill tok/s",
    "decode_tok_per_s": "decode tok/s",
    "first_token_ms": "first token ms",
    "steps": "steps",
}


@command(
    "octavo bench throughput",
    "octavo bench throughput ./my-checkpoint --workload workloads.json --only B --repeat 5 --json",
)
def throughput(
    engine: EngineOptions, workload: File = None, only: Only = None, repeat: Repeat = 3, json_: Json = False
) -> None:
    """Measure many simultaneous requests, long prompts, and shared prefixes (workloads B, C and D)."""
    _bench(engine, workload, only or [Workload.B, Workload.C, Workload.D], repeat, as_json=json_)


@command("octavo bench latency", "octavo bench latency ./my-checkpoint --workload workloads.json")
def latency(
    engine: EngineOptions, workload: File = None, only: Only = None, repeat: Repeat = 3, json_: Json = False
) -> None:
    """Measure latency for a single user: one stream, and the first token after a long prompt (workloads A and C)."""
    _bench(engine, workload, only or [Workload.A, Workload.C], repeat, as_json=json_)


@command(
    "octavo bench serve http://127.0.0.1:8000 --rate 2",
    "octavo bench serve http://127.0.0.1:8000 --workload workloads.json --rate 1.4 --repeat 3 --json",
)
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of a server with OpenAI's API, such as vLLM.")],
    workload: File = None,
    rate: Rate = None,
    num_prompts: NumPrompts = None,
    max_concurrency: MaxConcurrency = None,
    model: ServedModel = None,
    api_key: ApiKey = None,
    shuffle: Shuffle = True,
    seed: Annotated[int, typer.Option(help="Seed of random arrival times.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Time limit of one request.")] = 600.0,
    repeat: Repeat = 1,
    json_: Json = False,
) -> None:
    """Measure a running server: workload B as streams, all sent together or over time (workload E)."""
    try:
        from octavo.cli import load_test
    except ImportError as error:
        raise ConfigError(f"octavo bench serve needs {error.name}: pip install 'octavo[bench]'") from error
    from octavo.cli.workloads import make_workloads, read_workloads
    from octavo.runtime.progress import CountProgress

    url, api_key = url.rstrip("/").removesuffix("/v1"), api_key or api_key_from_environment()
    known = make_workloads(vocab_size=256, max_model_len=256) if workload is None else read_workloads(workload)
    if not known.b:
        raise ConfigError("the workload file has no requests under 'B'")
    name = model or asyncio.run(load_test.find_model(url, api_key))
    target = load_test.Target(url=url, model=name, api_key=api_key)
    items = [known.b[index % len(known.b)] for index in range(num_prompts or len(known.b))]
    times = load_test.arrival_times(len(items), rate, known.gaps, seed)
    rows: list[dict[str, Any]] = []
    for _ in range(repeat):
        sent = load_test.shuffled(items) if shuffle else items
        with CountProgress("requests", len(items)) as on_end:
            run = load_test.load(target, sent, times, max_concurrency=max_concurrency, timeout_s=timeout, on_end=on_end)
            seen = asyncio.run(run)
        rows.append(load_test.summarize(seen))
        for what in sorted({each.error for each in seen if each.error is not None})[:3]:
            typer.secho(f"a request failed: {what}", fg="red", err=True)
    if json_:
        typer.echo(json.dumps({"url": url, "model": name, "rate": rate, "results": rows}))
    else:
        _show_runs(rows if repeat == 1 else [*rows, load_test.medians(rows)])
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def _show_runs(columns: list[dict[str, Any]]) -> None:
    heads = ["", *(str(number + 1) for number in range(len(columns)))]
    if len(columns) > 1:
        heads[-1] = "median"
        typer.echo(f"{'run':18}" + "".join(f"{head:>12}" for head in heads[1:]))
    for key in max(columns, key=len):
        typer.echo(f"{key:18}" + "".join(f"{_format(column.get(key)):>12}" for column in columns))


for _command in (throughput, latency, serve):
    _command.add_to(bench)


def _bench(options: EngineOptions, file: Path | None, names: Sequence[Workload], repeat: int, *, as_json: bool) -> None:
    from octavo.cli.workloads import Item, make_workloads, measure, read_workloads, run

    workloads = None if file is None else read_workloads(file)
    if options.mixed_step_ms is None:
        options = replace(options, mixed_step_ms=0.0)
    engine = options.build(is_offline=True)
    info = engine.input_processor.model_info
    if workloads is None:
        workloads = make_workloads(info.vocab_size, info.max_model_len)
    run(engine, [Item([0, 1, 2, 3], 4)])  # the first step is slow
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    for name in dict.fromkeys(names):
        measured = measure(engine, workloads, name, repeat)
        rows += measured
        if not measured:
            missing.append(name.value)
    if missing:
        problem = f"the workload file has no requests under {', '.join(missing)}"
        if not rows:
            raise ConfigError(problem)
        typer.echo(problem, err=True)
    if as_json:
        typer.echo(json.dumps({"model": options.served_name, "results": rows}))
    else:
        _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
    lines = [list(_COLUMNS.values()), *([_format(row[key]) for key in _COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    for name, *figures in lines:
        cells = [f"{figure:>{width}}" for figure, width in zip(figures, widths[1:], strict=True)]
        typer.echo("  ".join([f"{name:{widths[0]}}", *cells]))


def _format(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.{1 if value >= 10 else 3}f}"
    return str(value) if isinstance(value, str) else f"{value:.0f}"
