"""Options for listening."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path  # noqa: TC003
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.config_file import read_defaults
from octavo.config import LOG_FORMATS, PORT_VARIABLE, forget_service_link
from octavo.errors import ConfigError
from octavo.runtime import logs

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from octavo.config import AccessConfig

logger = logging.getLogger(__name__)
_PANEL = "Server"
PACKAGES = ("zmq", "msgspec", "starlette", "uvicorn", "httptools", "prometheus_client")


def _read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Discard Kubernetes' port variable before --port is read. Read the configuration file."""
    if link := forget_service_link():
        typer.secho(
            f"{PORT_VARIABLE}={link} is ignored: Kubernetes set it for a Service, and it is not a port", err=True
        )
    return read_defaults(context, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Configuration, address, logs."""

    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            is_eager=True,
            callback=_read_settings,
            rich_help_panel=_PANEL,
            help="TOML file with options by name, like max-num-seqs = 32; the command line and the environment "
            "(OCTAVO_SERVE_MAX_NUM_SEQS=32) take precedence. Default: none.",
            show_default=False,
        ),
    ] = None
    host: Annotated[str, typer.Option(rich_help_panel=_PANEL, help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, rich_help_panel=_PANEL, help="Port; 0 chooses a free one.")] = (
        8000
    )
    log_format: Annotated[
        str,
        typer.Option(
            metavar="|".join(LOG_FORMATS),
            rich_help_panel=_PANEL,
            help="Format of the log: text, or one JSON object per line.",
        ),
    ] = "text"
    audit_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            rich_help_panel=_PANEL,
            help="File for one line of JSON per request, regardless of the log level. Default: the log, at level info.",
            show_default=False,
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", rich_help_panel="Access", help="Allow requests from other machines without an API key."
        ),
    ] = False

    def check(self) -> None:
        """Raise `ConfigError` for invalid options."""
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log format must be one of {', '.join(LOG_FORMATS)}, got {self.log_format!r}")

    def allowed_hosts(self, requested: Sequence[str] | None) -> tuple[str, ...] | None:
        """Return the Host names to accept, or None for any.

        Every result except None has the loopback names. If `host` is a loopback address, `host` is added.
        """
        from octavo.http.listening import LOOPBACK_NAMES, is_loopback

        hosts = tuple(requested or ())
        if hosts or is_loopback(self.host):
            hosts += tuple(LOOPBACK_NAMES)
        if is_loopback(self.host):
            hosts += (self.host,)
        return hosts or None

    def begin_logging(self, level: str) -> Callable[[str], object]:
        """Configure logging. Return a function that prints or logs a line."""
        logs.configure(level.upper(), self.log_format, audit_file=self.audit_log)
        return logger.info if self.log_format == "json" else partial(typer.secho, err=True)

    def address(self, sock: socket.socket, config: AccessConfig) -> str:
        """The socket's URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "http" if config.ssl_certfile is None else "https"
        return f"{scheme}://{host}:{sock.getsockname()[1]}"


def check_installed(command: str) -> None:
    """Raise `ConfigError` if a package for servers is missing. No package is imported."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{command} needs {name}: pip install 'octavo[server]'")
