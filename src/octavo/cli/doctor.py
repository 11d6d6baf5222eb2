"""`octavo doctor`."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.command import command
from octavo.cli.doctor_of_ranks import show_progress, show_ranks
from octavo.config import INSTRUCTION_SETS
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.kernels.limits import Limits
    from octavo.worker.attention_report import Attention
    from octavo.worker.machine_report import Report

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A directory in Hugging Face layout, a GGUF file or a hub id: its shapes. Default: the built-in model.",
        show_default=False,
    ),
]
Isa = Annotated[
    str,
    typer.Option(
        "--isa",
        metavar="|".join(INSTRUCTION_SETS),
        help="Examine this instruction set instead of the best one, and show how much speed it loses.",
    ),
]
Threads = Annotated[
    int | None, typer.Option("--num-threads", min=1, help="Number of threads. Default: the same as a server.")
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        metavar="float32|bfloat16|float16|int8|int4|int4_all|Q4_K|...",
        help="Examine these weights (Q4_K: blocks of GGUF); may be repeated. Default: the checkpoint's, and int8.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        "-tp",
        metavar="RANKS",
        help="Above 1: measure what so many ranks get on this machine, instead of matrix products. With MODEL, ranks "
        "exchange rows of its size.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_IMPLAUSIBLE_SHARE = 1.25
_PRECISIONS = ("float32", "bfloat16", "float16", "int8", "int4", "int4_all")


@command(
    "octavo doctor                                the built-in model's shapes on this machine",
    "octavo doctor ./my-checkpoint --isa avx2     the speed that is lost without AVX-512",
    "octavo doctor --tensor-parallel-size 2       the cores and the memory of two ranks, and their exchanges",
)
def doctor(
    model: Model = None,
    isa: Isa = "auto",
    num_threads: Threads = None,
    precision: Precisions = None,
    num_ranks: Ranks = 1,
    json_: Json = False,
) -> None:
    """Measure this machine's limits and the kernels' share of them, and check that every row is exact.

    Takes 15 to 20 seconds with the shapes of a small model on two cores. The exit status is 1 if a row of a product
    depends on the other rows of its batch. With --tensor-parallel-size, what each rank gets is measured instead.
    """
    if isa not in INSTRUCTION_SETS:
        raise ConfigError(f"isa must be one of {', '.join(INSTRUCTION_SETS)}, got {isa!r}")
    if num_ranks != 1:
        if precision:
            raise typer.BadParameter("ranks are measured without weights", param_hint="--precision")
        show_ranks(num_ranks, model, isa=isa, num_threads=num_threads, as_json=json_)
        return
    from octavo.assets import BUILT_IN_MODEL
    from octavo.models.gguf_config import BLOCK_KINDS
    from octavo.startup.checkpoint import open_checkpoint
    from octavo.worker.machine_report import examine

    blocks = tuple(kind.name for kind in BLOCK_KINDS)
    for each in precision or ():
        if each not in (*_PRECISIONS, *blocks):
            raise ConfigError(f"precision must be one of {', '.join((*_PRECISIONS, *blocks))}, got {each!r}")
    found = open_checkpoint(model or BUILT_IN_MODEL, weights=False)
    architecture = found.read_architecture()
    stored_types = [each for each in found.weights.types if each in blocks] or [architecture.dtype]
    report = examine(
        architecture,
        isa=isa,  # type: ignore[arg-type]
        num_threads=num_threads,
        precisions=tuple(dict.fromkeys(precision or (*stored_types, "int8"))),
        progress=show_progress,
    )
    if json_:
        typer.echo(json.dumps(report.to_json()))
    else:
        show_progress("")
        show(report)
    if not report.is_exact:
        raise typer.Exit(1)


def show(report: Report) -> None:
    """Print a report."""
    others = [each for each in report.instruction_sets if each != report.isa]
    typer.echo(
        f"processor  {report.processor}, {report.num_cores} usable cores, {report.free_bytes / 2**30:.1f} GiB free"
    )
    typer.echo(f"versions   Python {report.versions['python']}, torch {report.versions['torch']}")
    typer.echo(f"kernels    {report.isa} on {report.num_threads} threads", nl=False)
    typer.echo(f" (also here: {', '.join(others)})" if others else "")
    typer.echo(f"limits     {describe(report.limits)}")
    before, after = report.limits_each
    if before.is_far_from(after):
        typer.echo(f"           the machine's speed changed: {describe(before)} before the products,")
        typer.echo(f"           {describe(after)} after them; shares are of the faster")
    if report.isa != report.instruction_sets[0]:
        best, stored_types = report.best_limits, report.limits
        typer.echo(f"lost       {report.instruction_sets[0]} would give {describe(best)}:")
        typer.echo(
            f"           {1 - stored_types.flops / best.flops:.0%} of the float32, "
            f"{1 - stored_types.bfloat16_flops / best.bfloat16_flops:.0%} of the bfloat16 and "
            f"{1 - stored_types.byte_ops / best.byte_ops:.0%} of the int8 arithmetic are lost"
        )
    typer.echo("")
    rows = sorted({product.rows for product in report.products})
    typer.echo(f"{'product':26}{'weights':9}" + "".join(f"{f'{count} rows':>26}" for count in rows))
    for check in report.checks:
        found = [each for each in report.products if (each.name, each.precision) == (check.name, check.precision)]
        shape = f"{check.name} {found[0].in_features} x {found[0].out_features}"
        cells = (
            f"{each.ops_per_s / 1e9:.0f} G/s {each.bytes_per_s / 1e9:.1f} GB/s {each.of_limit:4.0%}" for each in found
        )
        typer.echo(f"{shape:26}{check.precision:9}" + "".join(f"{cell:>26}" for cell in cells))
    for attention_shape, timed in itertools.groupby(
        report.attention, lambda each: (each.num_heads, each.num_kv_heads, each.head_dim, each.kv)
    ):
        show_attention(attention_shape, list(timed))
    typer.echo("G/s: operations; %: of the nearer limit, arithmetic or memory")
    if any(product.of_limit > _IMPLAUSIBLE_SHARE for product in report.products):
        typer.echo(
            "shares above 100 %: other programs slowed this machine down while its limits were measured; measure again"
        )
    typer.echo("")
    for check in report.checks:
        if not check.rows_are_independent:
            typer.echo(f"NOT EXACT  {check.name} {check.precision}: a row depends on the other rows of its batch")
        if not check.threads_are_equal:
            typer.echo(f"NOT EXACT  {check.name} {check.precision}: the number of threads changes the result")
    if report.is_exact:
        typer.echo("exact      every row has the same bits alone and in a batch, on one thread and on all threads")
    for precision in dict.fromkeys(check.precision for check in report.checks):
        worst = max(check.error for check in report.checks if check.precision == precision)
        note = "" if "float" in precision else " (activations are rounded)"
        typer.echo(f"error      {precision}: at most {worst:.1e} of the result{note}")


def show_attention(shape: tuple[int, int, int, str], found: list[Attention]) -> None:
    """Print the figures of one shape: (num_heads, num_kv_heads, head_dim, kv)."""
    num_heads, num_kv_heads, head_dim, kv = shape
    typer.echo(f"attention of {num_heads} heads of {head_dim} over {num_kv_heads} KV heads, KV in {kv}")
    for rows, of_rows in itertools.groupby(sorted(found, key=lambda each: each.rows), lambda each: each.rows):
        cells = (
            f"{each.positions} positions: {each.ops_per_s / 1e9:.0f} G/s {each.bytes_per_s / 1e9:.1f} GB/s "
            f"{each.of_limit:4.0%}"
            for each in of_rows
        )
        typer.echo(
            f"  {f'last {rows} tokens' if rows > 1 else 'last token':17}" + "".join(f"{cell:>44}" for cell in cells)
        )


def describe(limits: Limits) -> str:
    """Format measured rates."""
    return (
        f"{limits.flops / 1e9:.0f} GFLOP/s float32, {limits.bfloat16_flops / 1e9:.0f} bfloat16, "
        f"{limits.byte_ops / 1e9:.0f} GOP/s int8, "
        f"{limits.bytes_read / 1e9:.1f} GB/s read"
    )
