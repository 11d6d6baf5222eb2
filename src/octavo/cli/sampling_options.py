"""Sampling options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.engine.input_processor import InputProcessor
    from octavo.sampling_params import RequestOutputKind, SamplingParams

_PANEL = "Sampling"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of `SamplingParams`."""

    max_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="Maximum number of tokens of the answer. Default: the model's, else the rest of the context.",
            show_default=False,
        ),
    ] = None
    min_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_PANEL, help="Minimum number of tokens of the answer. Default: 0.", show_default=False
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="0 always takes the likeliest token; more is more varied. Default: the model's, else 1.",
            show_default=False,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="Sample from the likeliest tokens that hold this much probability. Default: the model's, else 1.",
            show_default=False,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="Sample from this many of the likeliest tokens; 0 for all. Default: the model's, else 0.",
            show_default=False,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="Leave out tokens less likely than this share of the likeliest one. Default: 0.",
            show_default=False,
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="Sample from tokens about as surprising as is expected, which hold this much probability. Default: 1.",
            show_default=False,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="Above 1: tokens of the prompt and of the answer become less likely. Default: the model's, else 1.",
            show_default=False,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="Above 0: tokens that occur in the answer become less likely. Default: 0.",
            show_default=False,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="The same for each time that a token occurs. Default: 0.",
            show_default=False,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=_PANEL,
            help="End the answer before this text; may be repeated. Default: none.",
            show_default=False,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", rich_help_panel=_PANEL, help="Continue after the end-of-text token."),
    ] = False

    def params(
        self,
        processor: InputProcessor,
        output_kind: RequestOutputKind,
        *,
        n: int = 1,
        unnamed: Mapping[str, float] | None = None,
    ) -> SamplingParams:
        """Build the parameters. Raises `RequestError`.

        unnamed: Default values by field, used only if the checkpoint sets none of these fields.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value not in (None, [])}
        named = processor.model_info.generation_defaults
        own_defaults = unnamed if unnamed is not None and not unnamed.keys() & named.keys() else {}
        return processor.default_sampling_params(
            **{"max_tokens": named.get("max_tokens"), **own_defaults, **given, "n": n, "output_kind": output_kind}
        )
