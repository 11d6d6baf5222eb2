"""The command line."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.command import LazyCommand, LazyGroup, make_app, show_examples

EPILOG = show_examples(
    "octavo chat                                     talk to the built-in model; nothing is downloaded",
    'octavo generate OWNER/NAME --prompt "Why is the sky blue?"',
    "octavo serve ./my-checkpoint --port 8000        the OpenAI API at http://127.0.0.1:8000/v1",
    "octavo COMMAND --help                           all options of a command",
)


class Octavo(LazyGroup):
    """Commands in help order."""

    lazy_commands = (
        LazyCommand("generate", "octavo.cli.generate", "Answer one prompt, or many prompts in one batch."),
        LazyCommand("chat", "octavo.cli.chat", "Chat with a model in the terminal."),
        LazyCommand("serve", "octavo.cli.serve", "Serve a model through the OpenAI API."),
        LazyCommand("route", "octavo.cli.route", "Route requests to many servers from one address."),
        LazyCommand("keys", "octavo.cli.keys", "Create, change and list API keys for `octavo serve --api-keys FILE`."),
        LazyCommand(
            "models",
            "octavo.cli.models",
            "List the models that octavo serves and the local checkpoints, or describe one checkpoint.",
        ),
        LazyCommand(
            "doctor",
            "octavo.cli.doctor",
            "Measure this machine's limits and the kernels' share of them, and check that every row is exact.",
        ),
        LazyCommand(
            "quantize", "octavo.cli.quantize", "Write a copy of a checkpoint with its weights rounded to int8 or int4."
        ),
        LazyCommand("bench", "octavo.cli.bench", "Measure speed on this machine."),
        LazyCommand(
            "replay", "octavo.cli.journal", "Repeat a recorded run and compare every decision of the scheduler."
        ),
        LazyCommand("explain", "octavo.cli.journal", "Explain how long a request spent in each state, and why."),
        LazyCommand(
            "trace",
            "octavo.cli.journal",
            "Write a timeline that opens in Perfetto (https://ui.perfetto.dev) or chrome://tracing.",
        ),
    )


app = make_app(
    name="octavo",
    cls=Octavo,
    help="Run and serve large language models. A request gets the same tokens for every schedule.",
    epilog=EPILOG,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "OCTAVO"},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from octavo import __version__

        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept common options."""


def main() -> None:
    """Run the command line. The exit status is 0, 1 after an `OctavoError`, or 2 after wrong usage."""
    app()
