"""Makes commands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from octavo.config.environment import explain_undecodable
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Callable

Debug = Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.", show_default=False)]


class GroupedCommand(TyperCommand):
    """Writes help sections."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write all sections."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            default = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class LazyCommand(NamedTuple):
    """A command, imported later."""

    name: str
    module: str
    summary: str

    def load(self) -> Any:
        """Import the command."""
        found: Command | typer.Typer = getattr(import_module(self.module), self.name)
        return typer.main.get_command(found if isinstance(found, typer.Typer) else found.add_to(make_app()))


class LazyGroup(TyperGroup):
    """A group that imports a command only to run it or to show its help."""

    lazy_commands: ClassVar[tuple[LazyCommand, ...]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Loaded(self.lazy_commands)  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse arguments that the locale cannot decode."""
        for argument in args if sys.getfilesystemencoding() != "utf-8" else ():
            if problem := explain_undecodable(argument):
                raise typer.BadParameter(problem)
        return super().parse_args(ctx, args)

    def list_commands(self, _ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the names."""
        return list(self.commands)

    def format_commands(self, _ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.summary) for command in self.lazy_commands])


class _Loaded(Mapping[str, Any]):
    def __init__(self, commands: tuple[LazyCommand, ...]) -> None:
        self._lazy = {command.name: command for command in commands}
        self._load = functools.cache(lambda name: self._lazy[name].load())

    def __getitem__(self, name: str) -> Any:
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lazy)

    def __len__(self) -> int:
        return len(self._lazy)


def show_examples(*examples: str) -> str:
    """Format help examples."""
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])


def make_app(**settings: Any) -> typer.Typer:
    """Make an app."""
    # rich cuts option names on narrow terminals, and takes 0.2 s to import
    return typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, **settings)


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A function that typer runs. epilog: text after the help."""

    run: Callable[..., None]
    epilog: str

    def add_to(self, app: typer.Typer, name: str | None = None) -> typer.Typer:
        """Add the command to `app`, by default under the function's name. Return `app`."""
        app.command(name, cls=GroupedCommand, epilog=self.epilog)(self.run)
        return app


def command(*examples: str) -> Callable[[Callable[..., None]], Command]:
    """Return a decorator that makes a function a command.

    A dataclass parameter becomes one option per field. An `OctavoError` ends the command with one red line and exit
    status 1.
    """
    epilog = show_examples(*examples)

    def decorate(function: Callable[..., None]) -> Command:
        return Command(_reporting_errors(_spread_groups(function)), epilog)

    return decorate


def _spread_groups(function: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _parameters_of(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def spread(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        function(**values)

    return _with_parameters(spread, function, parameters)


def _parameters_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]


def _reporting_errors(function: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(function)
    def reporting(*, debug: bool = False, **values: Any) -> None:
        try:
            function(**values)
        except OctavoError as error:
            if debug:
                raise
            typer.secho(f"error: {error}", fg="red", bold=True, err=True)
            raise typer.Exit(1) from None

    debug_option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    parameters = [*inspect.signature(function).parameters.values(), debug_option]
    return _with_parameters(reporting, function, parameters)


def _with_parameters(
    wrapper: Callable[..., None], wrapped: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    wrapper.__name__, wrapper.__doc__ = wrapped.__name__, wrapped.__doc__
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapper
