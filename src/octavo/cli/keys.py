"""`octavo keys`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.command import command, make_app
from octavo.http.tenants import Keyring, Tenant, add_key, remove_key, retire_key, rotate_key

File = Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="A TOML file.", show_default=False)]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's owner.", show_default=False)]
Weight = Annotated[float, typer.Option(help="Its share compared with other keys, under the fair policy.")]
Concurrency = Annotated[
    int | None, typer.Option(metavar="N", help="Maximum number of open output streams.", show_default="no limit")
]
Requests = Annotated[
    float | None, typer.Option(metavar="N", help="Maximum number of requests per minute.", show_default="no limit")
]
Tokens = Annotated[
    float | None,
    typer.Option(metavar="N", help="Maximum number of prompt and output tokens per minute.", show_default="no limit"),
]
Share = Annotated[
    bool,
    typer.Option(
        "--share-prefix-cache",
        help="Share cached prompts with other keys that have this option. Faster, but response times can reveal "
        "their prompts.",
    ),
]

Metrics = Annotated[bool, typer.Option("--read-metrics", help="Allow reading /metrics, which has figures of all keys.")]

keys = make_app(
    name="keys",
    help="Create, change and list API keys for `octavo serve --api-keys FILE`.",
    no_args_is_help=True,
)


@command("octavo keys add keys.toml alice --weight 2 --requests-per-minute 600")
def add(
    file: File,
    name: Name,
    weight: Weight = 1.0,
    max_concurrency: Concurrency = None,
    requests_per_minute: Requests = None,
    tokens_per_minute: Tokens = None,
    share_prefix_cache: Share = False,
    read_metrics: Metrics = False,
) -> None:
    """Create a key and print it. The file stores only its digest, so the key cannot be shown again.

    A running server reloads the file on SIGHUP.
    """
    tenant = Tenant(
        name=name,
        weight=weight,
        max_concurrency=max_concurrency,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        share_prefix_cache=share_prefix_cache,
        read_metrics=read_metrics,
    )
    typer.echo(add_key(file, tenant))


@command("octavo keys list keys.toml")
def list_(file: File) -> None:
    """List the owners of a file's keys, and their limits."""
    for tenant in Keyring.from_file(file).tenants:
        limits = [
            f"weight {tenant.weight:g}",
            _limit(tenant.max_concurrency, "at once"),
            _limit(tenant.requests_per_minute, "requests/min"),
            _limit(tenant.tokens_per_minute, "tokens/min"),
            "shared prefix cache" if tenant.share_prefix_cache else "",
            "metrics" if tenant.read_metrics else "",
        ]
        typer.echo(f"{tenant.name}: {', '.join(filter(None, limits))}")


@command("octavo keys remove keys.toml alice")
def remove(file: File, name: Name) -> None:
    """Remove the keys of an owner.

    A running server reloads the file on SIGHUP, and then aborts the owner's open requests.
    """
    remove_key(file, name)


@command("octavo keys rotate keys.toml alice")
def rotate(file: File, name: Name) -> None:
    """Create a new key for an owner and print it. The old key stays valid until you retire it."""
    typer.echo(rotate_key(file, name))


@command("octavo keys retire keys.toml alice")
def retire(file: File, name: Name) -> None:
    """Remove the key that an owner had before the last rotation."""
    retire_key(file, name)


def _limit(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:g} {unit}"


add.add_to(keys)
list_.add_to(keys, name="list")
remove.add_to(keys)
rotate.add_to(keys)
retire.add_to(keys)
