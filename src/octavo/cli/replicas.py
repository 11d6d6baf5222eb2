"""Serves with replicas."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from octavo.cli.route import run_router
from octavo.config import (
    AccessConfig,
    RouterConfig,
    environment_for_nodes,
    environment_of_replicas,
    ray_address_from_environment,
)
from octavo.config.router import REQUEST_TIMEOUT_MARGIN_S
from octavo.errors import ConfigError
from octavo.kernels.machine import default_num_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.cli.listen_options import ListenOptions
    from octavo.config import DeviceConfig, ReplicasConfig, ServerConfig
    from octavo.router.launcher import Launcher

# Options that the router uses, or that differ between replicas.
_NOT_PASSED = {
    *("config", "host", "port", "insecure", "audit_log", "api_key", "debug", "help", "num_threads"),
    "kv_events_config",
    *("ssl_certfile", "ssl_keyfile", "allowed_host", "allowed_origin", "forwarded_allow_ips"),
    *("replicas", "launcher", "ray_address", "ray_timeout", "ray_start_timeout"),
    *("min_replicas", "max_replicas", "target_queue_time"),
}
_NOT_PASSED_TO_NODES = _NOT_PASSED | {"shutdown_timeout"}
_PATHS = {"model", "model_argument", "tokenizer", "chat_template"}
_RAY_HEALTH_INTERVAL_S = 0.5


def serve_replicas(
    context: typer.Context,
    config: ServerConfig,
    listen: ListenOptions,
    say: Callable[[str], object],
    replicas: ReplicasConfig,
    device: DeviceConfig,
) -> None:
    """Run replicas and a router until a signal arrives. Raises `ConfigError` and `EngineDeadError`."""
    if context.params.get("record") is not None:
        raise ConfigError("--record and --replicas exclude each other: every replica would write the same file")
    if replicas.launcher == "ray":
        router, launcher = _on_ray(context, config, listen, replicas, device)
        say(f"{replicas.num_replicas} replicas on a Ray cluster")
    else:
        router, launcher = _on_this_machine(context, config, listen, say, replicas, device)
    run_router(router, listen, say, launcher)


def _on_this_machine(
    context: typer.Context,
    config: ServerConfig,
    listen: ListenOptions,
    say: Callable[[str], object],
    replicas: ReplicasConfig,
    device: DeviceConfig,
) -> tuple[RouterConfig, Launcher]:
    from octavo.router.launcher import LocalReplicas, free_ports

    num_threads = device.num_threads
    if num_threads is None:  # divide the machine's threads
        num_threads = max(default_num_threads() // replicas.num_replicas, 1)
    given = _given(context, _NOT_PASSED)
    shared = ["--host", "127.0.0.1", "--num-threads", str(num_threads), "--log-format", listen.log_format]
    serve = [sys.executable, "-m", "octavo.cli.replica", "serve"]
    ports = free_ports(replicas.num_replicas)
    commands = {
        f"http://127.0.0.1:{port}": [*serve, *given, *shared, *events, "--port", str(port)]
        for port, events in zip(ports, _kv_events(context, replicas.num_replicas), strict=True)
    }
    operator_key = _operator_key(config)
    router = RouterConfig(
        **_access_fields(config), engines=tuple(commands), engine_api_key=operator_key or config.api_key
    )
    say(f"{replicas.num_replicas} replicas with {num_threads} threads each at {', '.join(commands)}")
    return router, LocalReplicas(commands, environment_of_replicas(config.api_key, operator_key))


def _on_ray(
    context: typer.Context, config: ServerConfig, listen: ListenOptions, replicas: ReplicasConfig, device: DeviceConfig
) -> tuple[RouterConfig, Launcher]:
    from octavo.ray.messages import Settings
    from octavo.ray.process import check_ray_installed
    from octavo.ray.replicas import RayReplicas

    check_ray_installed("--launcher ray")
    if context.params.get("kv_events_config") is not None:
        raise ConfigError(
            "--kv-events-config does not work with --launcher ray: engines of one node would share a port"
        )
    # Other machines can reach the engines, so that they need a key even if the router needs none.
    client_key = None if config.requires_key else secrets.token_urlsafe(32)
    operator_key = _operator_key(config)
    engine_key = config.api_key or client_key
    address = replicas.ray_address or ray_address_from_environment()
    settings = Settings(
        address=address,
        words=_words_for_nodes(context, config),
        environment=environment_for_nodes(engine_key, operator_key),
        num_replicas=replicas.num_replicas,
        min_replicas=replicas.bounds[0],
        max_replicas=replicas.bounds[1],
        target_queue_time_s=replicas.target_queue_time_s,
        num_threads=device.num_threads,
        num_ranks=device.tensor_parallel_size,
        uses_gpu=None if device.device is None else device.device == "cuda",
        operator_key=operator_key or engine_key,
        timeout_s=replicas.ray_timeout_s,
        start_s=replicas.ray_start_timeout_s,
        stop_s=config.grace_s,
        drain_s=config.request_timeout_s,
        log_level=config.log_level,
        log_format=listen.log_format,
    )
    router = RouterConfig(
        **_access_fields(config),
        engines_ray=address or "local",
        engine_api_key=operator_key or engine_key,
        client_key=client_key,
        health_interval_s=_RAY_HEALTH_INTERVAL_S,
    )
    return router, RayReplicas(settings, partial(_words_again, context, config))


def _access_fields(config: ServerConfig) -> dict[str, Any]:
    access_fields = {each.name: getattr(config, each.name) for each in fields(AccessConfig)}
    return access_fields | {
        "max_open_requests": None,
        "request_timeout_s": config.request_timeout_s + REQUEST_TIMEOUT_MARGIN_S,
    }


def _kv_events(context: typer.Context, num_replicas: int) -> list[list[str]]:
    config = context.params.get("kv_events_config")
    if config is None:
        return [[]] * num_replicas
    return [["--kv-events-config", _written(each)] for each in config.of_replicas(num_replicas)]


def _operator_key(config: ServerConfig) -> str | None:
    """Return a key for the replicas' metrics if clients' keys may not read them."""
    return None if config.api_keys_file is None else secrets.token_urlsafe(32)


def _words_for_nodes(context: typer.Context, config: ServerConfig) -> tuple[str, ...]:
    """Return the options of engines on other machines. A drained engine finishes all requests."""
    words = _given(context, _NOT_PASSED_TO_NODES, are_paths_absolute=True)
    return (*words, "--shutdown-timeout", str(config.request_timeout_s))


def _words_again(context: typer.Context, config: ServerConfig) -> tuple[str, ...]:
    """Read the command line and the configuration file again. Raises `ConfigError`."""
    arguments = sys.argv[sys.argv.index(context.info_name or "") + 1 :]
    try:
        again = context.command.make_context(context.info_name, arguments, parent=context.parent)
    except typer.Exit as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        if hasattr(error, "format_message"):  # an error of usage
            raise ConfigError(error.format_message()) from None
        raise
    return _words_for_nodes(again, config)  # type: ignore[arg-type]


def _given(context: typer.Context, not_passed: set[str], *, are_paths_absolute: bool = False) -> list[str]:
    words: list[str] = []
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        source = context.get_parameter_source(name)
        if name in not_passed or value is None or source is None or source.name == "DEFAULT":
            continue
        is_path = isinstance(value, Path) or (name in _PATHS and Path(value).exists())
        if are_paths_absolute and is_path:
            value = Path(value).absolute()
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
        else:
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [parameter.opts[0], _written(each)]
    return words


def _written(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return json.dumps(asdict(value))
    return str(value)
