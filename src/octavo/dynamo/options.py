"""The command line of a worker: the options of Dynamo, and the engine's options of `octavo serve`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig

from octavo.cli.command import command, make_app
from octavo.cli.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.config import EngineConfig

_NAME = "python -m octavo.dynamo"


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a command line asks for. name: the model's name for clients. dynamo: `DynamoRuntimeConfig`."""

    engine: EngineConfig
    name: str
    dynamo: Any


def read_options(words: Sequence[str]) -> WorkerOptions:
    """Read a command line without its program name.

    --help prints all options and exits. An invalid option prints its error and exits with status 1 or 2.
    """
    parser = argparse.ArgumentParser(_NAME, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    DynamoRuntimeArgGroup().add_arguments(parser)
    parser.add_argument("--served-model-name", help="Name that clients use for the model. Default: as octavo serve's.")
    given, rest = parser.parse_known_args(words)
    dynamo = DynamoRuntimeConfig.from_cli_args(given)
    dynamo.validate()
    found: list[EngineOptions] = []

    @command(f"{_NAME} ./my-checkpoint --namespace dynamo --discovery-backend file --max-num-seqs 32")
    def worker(context: typer.Context, engine: EngineOptions) -> None:
        """Serve a model as a worker of Dynamo."""
        engine.config()  # prints the error of an invalid value
        found.append(engine.with_drawn_seed(context))

    app = typer.main.get_command(worker.add_to(make_app()))
    if {"--help", "-h"} & set(rest):
        typer.echo(parser.format_help())
    try:
        app.main(rest, prog_name=_NAME)
    except SystemExit:
        if not found:  # --help, or an error that is printed already
            raise
    (options,) = found
    return WorkerOptions(options.config(), given.served_model_name or options.served_name, dynamo)
