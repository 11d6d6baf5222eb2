"""Serves with replicas."""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from octavo.cli.route import run_router
from octavo.config import AccessConfig, RouterConfig, environment_of_replicas
from octavo.config.router import REQUEST_TIMEOUT_MARGIN_S
from octavo.errors import ConfigError
from octavo.kernels.machine import default_num_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from octavo.cli.listen_options import ListenOptions
    from octavo.config import ServerConfig

# Options that the router uses, or that differ between replicas.
_NOT_PASSED = {
    *("config", "host", "port", "replicas", "insecure", "audit_log", "api_key", "debug", "help", "num_threads"),
    "kv_events_config",
    *("ssl_certfile", "ssl_keyfile", "allowed_host", "allowed_origin", "forwarded_allow_ips"),
}


def serve_replicas(
    context: typer.Context,
    config: ServerConfig,
    listen: ListenOptions,
    say: Callable[[str], object],
    *,
    num_replicas: int,
    num_threads: int | None,
) -> None:
    """Run replicas and a router until a signal arrives. Raises `ConfigError`.

    num_threads: Threads per replica. None divides the machine's threads.
    """
    from octavo.router.launcher import LocalReplicas, free_ports

    if context.params.get("record") is not None:
        raise ConfigError("--record and --replicas exclude each other: every replica would write the same file")
    if num_threads is None:
        num_threads = max(default_num_threads() // num_replicas, 1)
    ports = free_ports(num_replicas)
    given = _given(context)
    shared = ["--host", "127.0.0.1", "--num-threads", str(num_threads), "--log-format", listen.log_format]
    serve = [sys.executable, "-m", "octavo.cli.replica", "serve"]
    commands = {
        f"http://127.0.0.1:{port}": [*serve, *given, *shared, *events, "--port", str(port)]
        for port, events in zip(ports, _kv_events(context, num_replicas), strict=True)
    }
    access_fields = {each.name: getattr(config, each.name) for each in fields(AccessConfig)}
    access_fields |= {
        "max_open_requests": None,
        "request_timeout_s": config.request_timeout_s + REQUEST_TIMEOUT_MARGIN_S,
    }
    # The router cannot read the replicas' metrics with a client's key.
    operator_key = None if config.api_keys_file is None else secrets.token_urlsafe(32)
    router = RouterConfig(**access_fields, engines=tuple(commands), engine_api_key=operator_key or config.api_key)
    say(f"{num_replicas} replicas with {num_threads} threads each at {', '.join(commands)}")
    run_router(router, listen, say, LocalReplicas(commands, environment_of_replicas(config.api_key, operator_key)))


def _kv_events(context: typer.Context, num_replicas: int) -> list[list[str]]:
    config = context.params.get("kv_events_config")
    if config is None:
        return [[]] * num_replicas
    return [["--kv-events-config", _written(each)] for each in config.of_replicas(num_replicas)]


def _given(context: typer.Context) -> list[str]:
    words: list[str] = []
    for parameter in context.command.params:
        name, value = parameter.name or "", context.params.get(parameter.name or "")
        source = context.get_parameter_source(name)
        if name in _NOT_PASSED or value is None or source is None or source.name == "DEFAULT":
            continue
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
