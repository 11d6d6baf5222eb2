"""Reads `engine_kwargs` of Ray Serve LLM, which have the names of `octavo serve`'s options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from octavo.compatibility import accept_arguments
from octavo.config import (
    AccessConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    SpeculativeConfig,
    options_of,
)
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

# Options of listening, which the ingress of Ray does, and of access.
_OF_LISTENING = {each.name for each in fields(AccessConfig)} - {"api_keys_file", "max_body_bytes"} | {"dashboard"}


def read_arguments(arguments: Mapping[str, Any], *, model: str | None, name: str) -> tuple[EngineConfig, ServerConfig]:
    """Return the configurations of an engine and of its APIs.

    arguments: Options of `octavo serve` with underscores, except those for listening and access. vLLM's arguments in
    `octavo.compatibility` are accepted, too. model: path or hub id. name: the model's name for clients.

    Raises `ConfigError` for an unknown argument or an invalid value.
    """
    rest = dict(arguments)
    engine = EngineConfig(
        model=ModelConfig(model=model, served_model_name=name, **_taken(rest, ModelConfig)),
        cache=CacheConfig(**_taken(rest, CacheConfig)),
        scheduler=SchedulerConfig(**_taken(rest, SchedulerConfig)),
        device=DeviceConfig(**_taken(rest, DeviceConfig)),
        speculative=_speculative(rest.pop("speculative_config", None), _taken(rest, SpeculativeConfig)),
        kv_transfer=KVTransferConfig.parse(rest.pop("kv_transfer_config", None), **_taken(rest, KVTransferConfig)),
        kv_events=KVEventsConfig.parse(rest.pop("kv_events_config", None)),
        **_taken(rest, EngineConfig),
    )
    server = ServerConfig(served_model_names=(name,), **_taken(rest, ServerConfig, without=_OF_LISTENING))
    accept_arguments(rest)
    return engine, server


def _speculative(given: Any, given_fields: dict[str, Any]) -> SpeculativeConfig:
    if given is None:
        return SpeculativeConfig(**given_fields)
    if given_fields:
        raise ConfigError(f"speculative_config and {min(given_fields)} exclude each other: give one of them")
    return SpeculativeConfig.parse(given)


def _taken(rest: dict[str, Any], part: type, without: Container[str] = ()) -> dict[str, Any]:
    """Remove the options of a configuration from `rest`. Return its fields."""
    hints, taken = get_type_hints(part), {}
    for field, option in options_of(part).items():
        name = option.name or field
        if name in rest and field not in without:
            value = rest.pop(name)
            is_path = isinstance(value, str) and hints[field] in {Path, Path | None}
            taken[field] = Path(value) if is_path else tuple(value) if isinstance(value, list) else value
    return taken
