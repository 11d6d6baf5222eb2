"""`octavo replay`, `octavo explain` and `octavo trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.command import command

if TYPE_CHECKING:
    from octavo.journal.replay import Replay

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", exists=True, dir_okay=False, help="Journal that --record wrote.", show_default=False
    ),
]
Request = Annotated[
    str | None,
    typer.Argument(metavar="REQUEST", help="Id of a request. Default: list the slowest requests.", show_default=False),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="File to write the timeline to.", dir_okay=False)
]
_SLOWEST = 10


@command("octavo replay run.journal")
def replay(file: File) -> None:
    """Repeat a recorded run and compare every decision of the scheduler."""
    done = _replay(file)
    typer.echo(f"{done.num_requests} requests, {done.num_steps} steps, {len(done.mismatches)} with other decisions")
    if done.num_unchecked:
        typer.echo(f"{done.num_unchecked} steps were not compared, because a converted journal has no checksums")
    for mismatch in done.mismatches[:5]:
        typer.echo(f"  step {mismatch.step}: now {mismatch.decided}")
    if done.mismatches:
        raise typer.Exit(1)


@command("octavo explain run.journal", "octavo explain run.journal cmpl-4f2a")
def explain(file: File, request: Request = None) -> None:
    """Explain how long a request spent in each state, and why."""
    from octavo.journal.explain import explain as explain_request
    from octavo.journal.explain import intervals

    done = _replay(file)
    if request is not None:
        typer.echo(explain_request(done.log.events, request, done.end_time).text())
        return
    lives = intervals(done.log.events, done.end_time)
    slowest = sorted(lives, key=lambda name: lives[name][0].start - lives[name][-1].end if lives[name] else 0.0)
    typer.echo(f"{len(lives)} requests; the slowest:")
    for name in slowest[:_SLOWEST]:
        seconds = lives[name][-1].end - lives[name][0].start if lives[name] else 0.0
        typer.echo(f"  {seconds:9.3f} s  {name}")


@command("octavo trace run.journal -o trace.json")
def trace(file: File, output: Output = Path("trace.json")) -> None:
    """Write a timeline that opens in Perfetto (https://ui.perfetto.dev) or chrome://tracing."""
    from octavo.journal.trace import chrome_trace

    output.write_text(json.dumps(chrome_trace(_replay(file))), encoding="utf-8")
    typer.echo(f"{output}: open it at https://ui.perfetto.dev")


def _replay(file: Path) -> Replay:
    from octavo.journal.replay import replay as run

    return run(file)
