"""`octavo serve`: the OpenAI API on an address."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from octavo.cli.command import command
from octavo.cli.engine_options import EngineOptions, parse_size
from octavo.config import api_key_from_environment
from octavo.errors import ConfigError

_PANEL = "Server"

Host = Annotated[str, typer.Option(rich_help_panel=_PANEL, help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, rich_help_panel=_PANEL, help="Port; 0 takes a free one.")]
Names = Annotated[
    list[str] | None,
    typer.Option(
        rich_help_panel=_PANEL,
        help="Name that clients use for the model; may be given again. Default: the directory's name or the hub id.",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=_PANEL,
        help="Key that clients must send. OCTAVO_API_KEY does the same and does not show in process lists. "
        "Default: none.",
        show_default=False,
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", rich_help_panel=_PANEL, help="Let other machines in without an API key.")
]
BodyLimit = Annotated[
    int, typer.Option(metavar="SIZE", parser=parse_size, rich_help_panel=_PANEL, help="Largest request body.")
]
Grace = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        rich_help_panel=_PANEL,
        help="When told to stop, how long open requests may go on before they are ended.",
    ),
]
LogLevel = Annotated[
    str, typer.Option(metavar="debug|info|warning|error", rich_help_panel=_PANEL, help="How much is logged.")
]
_LEVELS = ("debug", "info", "warning", "error", "critical")


@command(
    "octavo serve  the built-in model at http://127.0.0.1:8000/v1",
    "octavo serve Qwen/Qwen2.5-0.5B-Instruct --served-model-name qwen --max-num-seqs 32",
    "OCTAVO_API_KEY=... octavo serve ./my-checkpoint --host 0.0.0.0",
)
def serve(
    engine: EngineOptions,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: Names = None,
    api_key: ApiKey = None,
    insecure: Insecure = False,
    max_body_bytes: BodyLimit = "32M",  # type: ignore[assignment]  # typer parses it
    shutdown_timeout: Grace = 5.0,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model through the OpenAI API."""
    if log_level not in _LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(_LEVELS)}, got {log_level!r}")
    try:
        import octavo.engine.remote_engine  # noqa: F401 - imports zmq and msgspec
        from octavo.server.serving import check_binding, listen, make_server  # imports fastapi
    except ImportError as error:
        raise ConfigError(f"octavo serve needs {error.name}: pip install 'octavo[server]'") from error
    from octavo.engine.async_llm import AsyncLLM

    logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(name)s: %(message)s")
    api_key = api_key or api_key_from_environment()
    # What can go wrong without the model is found before it is loaded.
    check_binding(host, api_key, insecure=insecure)
    with listen(host, port) as sock:
        llm = AsyncLLM(engine.launch())
        try:
            names = served_model_name or [engine.served_name]
            server = make_server(
                llm,
                served_model_names=names,
                api_key=api_key,
                max_body_bytes=max_body_bytes,
                grace_s=shutdown_timeout,
                log_level=log_level,
            )
            shown = f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{sock.getsockname()[1]}/v1"
            typer.secho(f"serving {', '.join(names)} at {address} - Ctrl-C stops", bold=True, err=True)
            server.run(sockets=[sock])
        finally:
            llm.shutdown()
