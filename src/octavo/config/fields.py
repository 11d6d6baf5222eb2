"""Fields of configurations: those that commands offer as options, and what values they take."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from enum import StrEnum

QUANTIZATIONS = ("int8", "int4", "int4_all", "fp8")
WEIGHT_BITS = {None: 16, "int8": 8, "int4": 4, "int4_all": 4, "fp8": 8}  # of the layers' weights


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line offers a field: what its help says, and what does not follow from the field's own type.

    unit: what a value is written in; choices: those there are, the only ones that the configuration takes.
    name: the option's, where that is not the field's; short: its letter. panel: its heading, where that is not the one
    of the whole configuration. low: the least that is taken. is_open: not given, it is None, and follows from others.
    """

    help: str
    unit: str | None = None
    choices: tuple[str, ...] = ()
    name: str | None = None
    short: str | None = None
    panel: str | None = None
    low: float | None = None
    is_open: bool = False


def option(default: Any, text: str, *, shows_value: bool = True, **more: Any) -> Any:
    """Return a field of a configuration that is an option of commands, too; more: see `Option`."""
    return field(default=default, repr=shows_value, metadata={"option": Option(text, **more)})


def options_of(part: type) -> dict[str, Option]:
    """Return the fields of a configuration that are options, by the fields' names."""
    return {each.name: each.metadata["option"] for each in fields(part) if "option" in each.metadata}


def at_least(name: str, value: object, low: int, *, may_be_none: bool = False) -> None:
    """Raise `ConfigError` for what is no integer of `low` or more."""
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of {low} or more, got {value!r}")


def not_negative(name: str, value: object) -> None:
    """Raise `ConfigError` for what is no number of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number of 0 or more, got {value!r}")


def choice(name: str, kind: type[StrEnum], value: str) -> StrEnum:
    """Return the member of that value. Raises `ConfigError`."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None


def check_choices(config: Any) -> None:
    """Raise `ConfigError` for a field whose value is none of its choices."""
    for name, each in options_of(type(config)).items():
        value = getattr(config, name)
        if each.choices and value is not None and value not in each.choices:
            raise ConfigError(f"{name} must be one of {', '.join(each.choices)}, got {value!r}")


def within(name: str, value: object, low: int, high: int) -> None:
    """Raise `ConfigError` for anything but an integer of that range."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise `ConfigError` for what is not among these."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
