"""`octavo quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.command import command
from octavo.errors import ConfigError, ModelError, OctavoError

_MEASURED_S = 20.0  # for the source; the copy is measured on the same pieces

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

Text = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Measure perplexity on this text instead of Python's language reference.",
        show_default=False,
    ),
]
WantsPerplexity = Annotated[
    bool,
    typer.Option(
        "--perplexity/--no-perplexity",
        help="Measure the perplexity of source and copy; both are loaded into memory, one after the other.",
    ),
]


@command(
    "octavo quantize ./my-checkpoint ./my-checkpoint-int8",
    "octavo quantize OWNER/NAME ./name-int4 -q int4 --group-size 128 --text ./typical-text.txt",
)
def quantize(
    source: Source,
    destination: Destination,
    quantization: Quantization = "int8",
    group_size: GroupSize = 32,
    text: Text = None,
    perplexity: WantsPerplexity = True,
) -> None:
    """Write a copy of a checkpoint with its weights rounded to int8 or int4.

    Every octavo command, vLLM and transformers read the copy without an option (its format is compressed-tensors).
    Embeddings and lm_head are not rounded; serve the copy with --quantization int8 or int4_all to round them, too.
    Rounding is to nearest, without calibration data. The command then measures the perplexity of source and copy on up
    to 40 pieces of 512 tokens, which takes about half a minute.
    """
    from octavo.models.model_path import resolve_model_path
    from octavo.models.quantize_checkpoint import PRECISIONS, quantize_checkpoint
    from octavo.runtime.progress import LoadingProgress

    if quantization not in PRECISIONS:
        raise ConfigError(f"quantization must be one of {', '.join(PRECISIONS)}, got {quantization!r}")
    if Path(source).expanduser().is_file():
        raise ModelError(
            f"{source} is a GGUF file; octavo quantize copies directories in Hugging Face layout. Serve the file as it "
            "is, or with --quantization int8 or int4, which rounds the weights at load"
        )
    measured = _read(text) if text is not None and perplexity else None
    path = resolve_model_path(source)
    with LoadingProgress("rounding weights") as progress:
        num_bytes = quantize_checkpoint(path, destination, quantization, group_size=group_size, progress=progress)
    typer.echo(f"{destination}: {num_bytes / 1e6:.0f} MB of weights")
    if perplexity:
        try:
            typer.echo(_compare(path, destination, measured))
        except OctavoError as error:  # no failure, because the copy is complete
            typer.echo(f"perplexity was not measured: {error}", err=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error


def _compare(source: Path, copy: Path, text: str | None) -> str:
    from octavo.cli.perplexity import mean_losses, opened, perplexity, python_reference, text_pieces
    from octavo.runtime.progress import CountProgress

    losses = []
    with opened(source) as llm:
        pieces = text_pieces(llm, python_reference() if text is None else text)
        with CountProgress("perplexity before", len(pieces)) as on_piece:
            losses.append(mean_losses(llm, pieces, seconds=_MEASURED_S, on_piece=on_piece))
    pieces = pieces[: len(losses[0])]
    with opened(copy) as llm, CountProgress("perplexity after", len(pieces)) as on_piece:
        losses.append(mean_losses(llm, pieces, on_piece=on_piece))
    before, after = map(perplexity, losses)
    name = "Python's language reference" if text is None else "the text"
    return (
        f"perplexity on {name} ({len(pieces)} pieces of {len(pieces[0])} tokens): "
        f"{before:.3f} before, {after:.3f} after, {after / before - 1:+.2%}"
    )
