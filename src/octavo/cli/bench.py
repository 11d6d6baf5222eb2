"""`octavo bench`: how fast it is here."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.command import command, make_app
from octavo.cli.engine_options import EngineOptions
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Workload(StrEnum):
    """The workloads by their letters."""

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
        "Default: small ones that are made up.",
        show_default=False,
    ),
]
Only = Annotated[
    list[Workload] | None,
    typer.Option(
        help="Run only this one; may be given again. A: one stream, B: many at once, C: long prompts, "
        "D: a shared prefix with the cache off and on. Default: all of this command's.",
        show_default=False,
    ),
]
Repeat = Annotated[int, typer.Option(min=1, help="Run each this often; medians are reported.")]
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
    """Measure many requests at once, long prompts, and shared prefixes (B, C and D)."""
    _bench(engine, workload, only or [Workload.B, Workload.C, Workload.D], repeat, as_json=json_)


@command("octavo bench latency", "octavo bench latency ./my-checkpoint --workload workloads.json")
def latency(
    engine: EngineOptions, workload: File = None, only: Only = None, repeat: Repeat = 3, json_: Json = False
) -> None:
    """Measure what a single user sees: one stream, and the first token behind a long prompt (A and C)."""
    _bench(engine, workload, only or [Workload.A, Workload.C], repeat, as_json=json_)


for _command in (throughput, latency):
    _command.add_to(bench)


def _bench(options: EngineOptions, file: Path | None, names: Sequence[Workload], repeat: int, *, as_json: bool) -> None:
    from octavo.cli.workloads import Item, make_workloads, measure, read_workloads, run

    workloads = None if file is None else read_workloads(file)
    engine = options.build()
    info = engine.input_processor.model_info
    if workloads is None:
        workloads = make_workloads(info.vocab_size, info.max_model_len)
    run(engine, [Item([0, 1, 2, 3], 4)])  # the first step of a process allocates and is slow
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        rows += measure(engine, workloads, name, repeat)
        if not rows:
            raise ConfigError(f"the workload file has no requests under {name.value!r}")
    if as_json:
        typer.echo(json.dumps({"model": options.served_name, "results": rows}))
    else:
        _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
    lines = [list(_COLUMNS.values()), *([_spell(row[key]) for key in _COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    for name, *figures in lines:
        cells = [f"{figure:>{width}}" for figure, width in zip(figures, widths[1:], strict=True)]
        typer.echo("  ".join([f"{name:{widths[0]}}", *cells]))


def _spell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.{1 if value >= 10 else 3}f}"
    return str(value) if isinstance(value, str) else f"{value:.0f}"
