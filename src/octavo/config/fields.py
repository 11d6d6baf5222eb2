"""Declares and checks the options of configurations."""

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
    """A configuration's field as a command-line option.

    unit: Placeholder in the help.
    choices: Allowed values, or () for any.
    name: None means the field's name.
    panel: Heading in the help.
    is_open: True if other options decide the default.
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
    """Return a dataclass field that is also an option. shows_value: False hides the value in the repr."""
    return field(default=default, repr=shows_value, metadata={"option": Option(text, **more)})


def options_of(part: type) -> dict[str, Option]:
    """Return options by field."""
    return {each.name: each.metadata["option"] for each in fields(part) if "option" in each.metadata}


def at_least(name: str, value: object, low: int, *, may_be_none: bool = False) -> None:
    """Raise `ConfigError` unless the value is an integer >= `low`, or a permitted None."""
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of {low} or more, got {value!r}")


def not_negative(name: str, value: object) -> None:
    """Raise `ConfigError` unless the value is finite and >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number of 0 or more, got {value!r}")


def choice(name: str, kind: type[StrEnum], value: str) -> StrEnum:
    """Parse a value. Raises `ConfigError`."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None


def check_choices(config: Any) -> None:
    """Raise `ConfigError` for values outside of `choices`."""
    for name, each in options_of(type(config)).items():
        value = getattr(config, name)
        if each.choices and value is not None and value not in each.choices:
            raise ConfigError(f"{name} must be one of {', '.join(each.choices)}, got {value!r}")


def within(name: str, value: object, low: int, high: int) -> None:
    """Raise `ConfigError` unless the value is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise `ConfigError` unless the value is allowed."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
