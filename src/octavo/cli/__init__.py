"""The command line: one module per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli import bench, chat, doctor, generate, journal, models, serve
from octavo.cli.command import GroupedCommand, show_examples

EPILOG = show_examples(
    "octavo chat                                     talk to the built-in model; nothing is downloaded",
    'octavo generate OWNER/NAME --prompt "Why is the sky blue?"',
    "octavo serve ./my-checkpoint --port 8000        the OpenAI API at http://127.0.0.1:8000/v1",
    "octavo COMMAND --help                           all options of a command",
)

app = typer.Typer(
    name="octavo",
    help="Run and serve large language models: many requests at once, the same tokens whatever the schedule.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help cuts option names on narrow terminals, and takes 0.2 s to import
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from octavo import __version__  # only when asked for

        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


_COMMANDS = (
    generate.generate,
    chat.chat,
    serve.serve,
    models.models,
    doctor.doctor,
    journal.replay,
    journal.explain,
    journal.trace,
)
for _command in _COMMANDS:
    app.command(cls=GroupedCommand, epilog=_command.epilog)(_command.run)
app.add_typer(bench.app)


def main() -> None:
    """Run the command line; the process ends with 0, 1 for an error of octavo's, 2 for wrong usage."""
    app()
