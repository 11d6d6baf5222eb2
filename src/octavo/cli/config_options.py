"""Options from configurations."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer

from octavo.config import Option, options_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_SIZES = {"SIZE", "TOKENS"}


def parse_size(text: str | int) -> int:
    """Read a size: 4G and 4GiB are 4 * 1024**3, 4g is 4 * 1000**3 (vLLM's rule)."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write 4G, 512M or a number of bytes")
    number, unit, binary = match.groups()
    base = 1024 if unit.isupper() or binary else 1000
    return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


@dataclass_transform(kw_only_default=True, frozen_default=True)
def with_options_of(parts: Mapping[type, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds the fields of configurations as options.

    parts: Help heading by configuration. The class declares options that its code reads, without values.
    """

    def decorate(group: type[T]) -> type[T]:
        for part, panel in parts.items():
            hints, defaults = get_type_hints(part), {each.name: each.default for each in fields(part)}
            for name, option in options_of(part).items():
                default = None if option.is_open or defaults[name] == () else defaults[name]
                option_name = option.name or name
                group.__annotations__.pop(option_name, None)
                group.__annotations__[option_name] = _annotation(option, name, hints[name], default, panel)
                setattr(group, option_name, default)
        return dataclass(frozen=True, slots=True, kw_only=True)(group)

    return decorate


def _annotation(option: Option, field: str, kind: Any, default: Any, panel: str) -> Any:
    if kind in {tuple[str, ...], tuple[str, ...] | None}:
        kind = list[str]
    is_size = option.unit in _SIZES and kind in {int, int | None}
    flags = [f"--{(option.name or field).replace('_', '-')}", option.short] if option.short else []
    is_directory = option.unit == "DIR"
    paths = {"dir_okay": is_directory, "file_okay": not is_directory}
    shown: dict[str, Any] = paths if kind in {Path, Path | None} else {}
    return Annotated[
        kind if default is not None else kind | None,
        typer.Option(
            *flags,
            metavar="|".join(option.choices) or option.unit,
            parser=parse_size if is_size else None,
            min=option.low,
            rich_help_panel=option.panel or panel,
            help=option.help,
            show_default=default is not None,
            **shown,
        ),
    ]


def read_part(options: Any, part: type[T], **resolved: Any) -> T:
    """Make a configuration from a group of options. Raises `ConfigError`.

    resolved: Values of further fields, or instead of options.
    """
    given = {name: getattr(options, option.name or name) for name, option in options_of(part).items()}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return part(**{**{name: value for name, value in values.items() if value is not None}, **resolved})
