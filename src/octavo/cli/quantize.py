"""`octavo quantize`: a checkpoint with rounded weights from one without."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.command import command
from octavo.errors import ConfigError

Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A directory in Hugging Face layout or a hub id.", show_default=False)
]
Destination = Annotated[
    Path, typer.Argument(metavar="DESTINATION", help="A new directory.", file_okay=False, show_default=False)
]
Quantization = Annotated[
    str,
    typer.Option(
        "--quantization",
        "-q",
        metavar="int8|int4",
        help="int8: one scale per output feature. int4: one per group of input features.",
    ),
]
GroupSize = Annotated[
    int, typer.Option(metavar="N", min=32, help="Input features that share a scale in int4: a multiple of 32.")
]


@command(
    "octavo quantize ./my-checkpoint ./my-checkpoint-int8",
    "octavo quantize OWNER/NAME ./name-int4 -q int4 --group-size 128",
)
def quantize(
    source: Source, destination: Destination, quantization: Quantization = "int8", group_size: GroupSize = 32
) -> None:
    """Write a copy of a checkpoint with its weights rounded to int8 or int4.

    Every octavo command then takes it without an option, and so do other programs that read compressed-tensors (vLLM,
    transformers). Embeddings and lm_head stay as they are; add --quantization int8, or int4_all, when it is served to
    round them, too. Values are rounded to the nearest, with no calibration data.
    """
    from octavo.models.model_path import resolve_model_path  # what a command needs, when it runs
    from octavo.models.quantize_checkpoint import PRECISIONS, quantize_checkpoint
    from octavo.progress import LoadingProgress

    if quantization not in PRECISIONS:
        raise ConfigError(f"quantization must be one of {', '.join(PRECISIONS)}, got {quantization!r}")
    with LoadingProgress("rounding weights") as progress:
        num_bytes = quantize_checkpoint(
            resolve_model_path(source), destination, quantization, group_size=group_size, progress=progress
        )
    typer.echo(f"{destination}: {num_bytes / 1e6:.0f} MB of weights")
