"""`octavo route`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from octavo.cli.command import command
from octavo.cli.config_file import describe_settings
from octavo.cli.config_options import read_part, with_options_of
from octavo.cli.listen_options import ListenOptions, check_installed
from octavo.config import RouterConfig, api_key_from_environment
from octavo.errors import EngineDeadError
from octavo.runtime.garbage import permanent_generation
from octavo.runtime.process_memory import returning_free_memory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo.router.launcher import Launcher


@with_options_of({RouterConfig: "Router"})
class RouterOptions:
    """Options of `RouterConfig`."""

    api_key: str | None
    api_keys: Path | None
    allowed_host: list[str] | None

    def config(self, listen: ListenOptions) -> RouterConfig:
        """Build the configuration. Raises `ConfigError`."""
        listen.check()
        api_key = self.api_key or (None if self.api_keys else api_key_from_environment())
        return read_part(self, RouterConfig, api_key=api_key, allowed_hosts=listen.allowed_hosts(self.allowed_host))


@command(
    "octavo route --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000",
    "octavo route --engines-file engines.txt --policy least_loaded --port 9000",
    "octavo route --engine http://10.0.0.1:8001 --engine http://10.0.0.2:8001  pairs --role prefill with --role decode",
    "octavo route --engines-dns octavo-engines.default.svc:8000 --host 0.0.0.0 --api-keys keys.toml",
)
def route(context: typer.Context, router: RouterOptions, listen: ListenOptions) -> None:
    """Route requests to many servers from one address."""
    check_installed("octavo route")
    config = router.config(listen)
    say = listen.begin_logging(config.log_level)
    for line in describe_settings(context):
        say(line)
    run_router(config, listen, say, _finder(config, listen))


def _finder(config: RouterConfig, listen: ListenOptions) -> Launcher | None:
    if config.engines_ray is None:
        return None
    from octavo.ray.messages import Search
    from octavo.ray.process import RayProcess, check_ray_installed

    check_ray_installed("--engines-ray")
    return RayProcess("octavo.ray.finder", Search(config.engines_ray, config.log_level, listen.log_format))


def run_router(
    config: RouterConfig, listen: ListenOptions, say: Callable[[str], object], launcher: Launcher | None = None
) -> None:
    """Run the router until a signal arrives. Raises `ConfigError` and `EngineDeadError`.

    launcher: Runs the engines.
    """
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
    max_connections = allow_open_files(files_each=3)  # for the client, a prefill and a decode engine
    with hearing_signals(), bind(listen.host, listen.port) as sock:
        from octavo.router.app import make_router
        from octavo.router.launcher import Launcher
        from octavo.router.service import RouterService

        with launcher or Launcher() as running:
            with permanent_generation():
                http = make_router(RouterService(config, running), max_connections=max_connections)
            open_door(sock)
            address = listen.address(sock, config)
            say(f"engines at {address}/router")
            say(f"routing ({config.policy}) at {address}/v1 - Ctrl-C stops")
            with returning_free_memory():
                http.run(sockets=[sock])
            if running.has_failed:
                raise EngineDeadError("the engines could not be started; see the log")
