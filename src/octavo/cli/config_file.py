"""Reads options from a TOML file, and describes the resulting configuration.

Precedence: command line, environment, file, defaults.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from octavo import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.config import EngineConfig, ServerConfig

_SECRET = {"api_key"}
_CREDENTIALS = re.compile(r"//[^/\s]*@")
_FILES = {"model", "tokenizer", "chat_template"}
_NO_SETTINGS = {"config", "help", "debug"}
_SOURCES = {
    "COMMANDLINE": "command line",
    "ENVIRONMENT": "environment",
    "DEFAULT_MAP": "file",
}


def read_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Read options' defaults from a file. Keys may have dashes or underscores. Raises `typer.BadParameter`."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"the configuration {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is not valid TOML: {error}") from None
    values = {name.replace("-", "_"): value for name, value in values.items()}
    options = (each for each in context.command.params if each.param_type_name == "option")
    known = {option.name for option in options} - _NO_SETTINGS
    if unknown := values.keys() - known:
        raise typer.BadParameter(f"{path}: {min(unknown)!r} is not an option of {context.command.name}; see --help")
    for name, value in values.items():
        if isinstance(value, dict):
            raise typer.BadParameter(f"{path}: {name} must be a value, not a table")
    context.default_map = {**(context.default_map or {}), **values}
    return path


def describe_settings(context: typer.Context) -> list[str]:
    """Return a line for each given option, without secrets."""
    lines = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or name in _NO_SETTINGS or context.params[name] is None:
            continue
        if source.name in _SOURCES:
            lines.append(f"{name} = {_shown(name, context.params[name])}  ({_SOURCES[source.name]})")
    return lines


def describe_model(engine: EngineConfig, names: Sequence[str]) -> str:
    """Describe model and cache."""
    model, cache = engine.model, engine.cache
    if cache.num_gpu_blocks is not None:
        size = f"{cache.num_gpu_blocks * cache.block_size} tokens"
    elif cache.kv_cache_memory_bytes is not None:
        size = f"{cache.kv_cache_memory_bytes / 2**30:.3g} GiB"
    else:
        size = "as much as memory allows"
    weights = f"dtype {model.dtype}, quantization {model.quantization or 'none'}"
    return f"octavo {__version__}: {', '.join(names)} ({weights}); KV cache: {size}, dtype {cache.kv_cache_dtype}"


def configuration(server: ServerConfig, engine: EngineConfig) -> dict[str, dict[str, Any]]:
    """All fields' values by part, without secrets."""
    return {name: _shown_part(part) for name, part in _parts(server, engine).items()}


def _shown_part(part: Any) -> dict[str, Any]:
    return {each.name: _plain(each.name, getattr(part, each.name)) for each in fields(part)}


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple):
        return [str(each) for each in value]
    if isinstance(value, Path) or (name in _FILES and _is_path(value)):
        return Path(value).name
    return _without_secrets(name, str(value))


def _is_path(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _without_secrets(name: str, text: str) -> str:
    return "..." if name in _SECRET else _CREDENTIALS.sub("//...@", text)


def describe_configuration(server: ServerConfig, engine: EngineConfig) -> list[str]:
    """Return a line for each part of the configuration, without secrets."""
    return [f"{name}: " + ", ".join(_values(part)) for name, part in _parts(server, engine).items()]


def _parts(server: ServerConfig, engine: EngineConfig) -> dict[str, Any]:
    return {
        "server": server,
        "model": engine.model,
        "cache": engine.cache,
        "scheduler": engine.scheduler,
        "device": engine.device,
        "speculative": engine.speculative,
        "kv_transfer": engine.kv_transfer,
        "kv_events": engine.kv_events,
    }


def _values(part: Any) -> list[str]:
    return [f"{each.name}={_shown(each.name, getattr(part, each.name))}" for each in fields(part)]


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "None"
    text = "[" + " ".join(map(str, value)) + "]" if isinstance(value, tuple) else str(value)
    return _without_secrets(name, text)
