"""`octavo serve`."""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING

import typer

from octavo.cli.command import command
from octavo.cli.config_file import configuration, describe_configuration, describe_model, describe_settings
from octavo.cli.config_options import read_part, with_options_of
from octavo.cli.engine_options import EngineOptions
from octavo.cli.listen_options import ListenOptions, check_installed
from octavo.config import (
    DEFAULT_MAX_NUM_WAITING,
    DEFAULT_MAX_NUM_WAITING_TOKENS,
    ReplicasConfig,
    SchedulingPolicy,
    ServerConfig,
    api_key_from_environment,
    operator_key_from_environment,
)
from octavo.errors import EngineDeadError
from octavo.runtime.garbage import permanent_generation
from octavo.runtime.process_memory import returning_free_memory

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
_PANEL = "Server"
# With Python's default of 5 ms, reading a large request in a thread would delay other requests.
SWITCH_INTERVAL_S = 0.0005


@with_options_of({ServerConfig: _PANEL, ReplicasConfig: "Replicas"})
class ServerOptions:
    """Options of `ServerConfig` and `ReplicasConfig`."""

    api_key: str | None
    api_keys: Path | None
    allowed_host: list[str] | None

    def server_config(
        self, listen: ListenOptions, max_open_requests: int | None, max_num_waiting_tokens: int
    ) -> ServerConfig:
        """Build the configuration. Raises `ConfigError`."""
        listen.check()
        api_key = self.api_key or (None if self.api_keys else api_key_from_environment())
        return read_part(
            self,
            ServerConfig,
            api_key=api_key,
            operator_key=operator_key_from_environment(),
            max_open_requests=max_open_requests,
            max_num_waiting_tokens=max_num_waiting_tokens,
            allowed_hosts=listen.allowed_hosts(self.allowed_host),
        )


@command(
    "octavo serve  the built-in model at http://127.0.0.1:8000/v1",
    "octavo serve Qwen/Qwen2.5-0.5B-Instruct --served-model-name qwen --max-num-seqs 32",
    "OCTAVO_API_KEY=... octavo serve ./my-checkpoint --host 0.0.0.0",
    "octavo serve ./my-checkpoint --replicas 2",
    "octavo serve /models/m --launcher ray --ray-address 10.0.0.1:6379 --replicas 2 --max-replicas 8",
    "octavo serve ./my-checkpoint --host 0.0.0.0 --api-keys keys.toml --ssl-certfile cert.pem --ssl-keyfile key.pem",
)
def serve(context: typer.Context, engine: EngineOptions, server: ServerOptions, listen: ListenOptions) -> None:
    """Serve a model through the OpenAI API."""
    check_installed("octavo serve")
    given, engine = engine, engine.with_drawn_seed(context)
    is_drawn = engine is not given
    waiting, tokens = _limits(engine)
    max_open_requests = None if engine.max_num_seqs is None else engine.max_num_seqs + waiting
    config = server.server_config(listen, max_open_requests, tokens)
    # The server itself refuses excess requests.
    engine = replace(engine, max_num_waiting=None, max_num_waiting_tokens=None)
    if server.api_keys is not None and engine.scheduling_policy is None:
        engine = replace(engine, scheduling_policy=SchedulingPolicy.FAIR)
    if not config.served_model_names:
        config = replace(config, served_model_names=(engine.served_name,))
    say = listen.begin_logging(config.log_level)
    for line in (describe_model(engine.config(), config.served_model_names), *describe_settings(context)):
        say(line)
    for line in describe_configuration(config, engine.config()) if config.log_level == "debug" else ():
        say(line)
    replicas = read_part(server, ReplicasConfig)
    if replicas.num_replicas > 1 or replicas.launcher == "ray":
        from octavo.cli.replicas import serve_replicas

        serve_replicas(context, config, listen, say, replicas, engine.config().device)
        return
    if is_drawn:
        say(f"seed = {engine.config().model.seed}  (drawn for this process)")
    _run(engine, config, listen, say, max_num_waiting=waiting)


def _run(
    engine: EngineOptions,
    config: ServerConfig,
    listen: ListenOptions,
    say: Callable[[str], object],
    *,
    max_num_waiting: int,
) -> None:
    from octavo.engine.async_llm import AsyncEngine
    from octavo.http.listening import (
        allow_open_files,
        bind,
        check_binding,
        check_files,
        hearing_signals,
        open_door,
    )

    check_binding(listen.host, config, insecure=listen.insecure)
    check_files(config)
    max_connections = allow_open_files()
    with hearing_signals(), bind(listen.host, listen.port) as sock:
        launched = engine.launch(meanwhile=partial(importlib.import_module, "octavo.server.serving"))
        config = replace(config, max_open_requests=launched.capacity.max_num_seqs + max_num_waiting)
        llm = AsyncEngine(launched, max_unread_outputs=config.max_unread_outputs)
        try:
            from octavo.server.serving import make_server

            with permanent_generation():
                settings = configuration(config, engine.with_limits(launched.capacity).config())
                http = make_server(llm, config, max_connections=max_connections, settings=settings)
            open_door(sock)
            address = listen.address(sock, config)
            names = ", ".join(config.served_model_names)
            if config.dashboard:
                say(f"dashboard at {address}/dashboard")
            say(f"serving {names} at {address}/v1 - Ctrl-C stops")
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            with returning_free_memory():
                http.run(sockets=[sock])
            if llm.is_dead:
                raise EngineDeadError("the engine failed and cannot restart; see the log")
        finally:
            llm.shutdown()


def _limits(engine: EngineOptions) -> tuple[int, int]:
    engine.config()
    waiting, tokens = engine.max_num_waiting, engine.max_num_waiting_tokens
    return (
        DEFAULT_MAX_NUM_WAITING if waiting is None else waiting,
        DEFAULT_MAX_NUM_WAITING_TOKENS if tokens is None else tokens,
    )
