"""`octavo models`: what can be run here. Reads config files, and no more of weights than their headers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.assets import BUILT_IN_MODEL, built_in_model_path
from octavo.cli.command import command

if TYPE_CHECKING:
    from collections.abc import Iterator

Directories = Annotated[
    list[Path] | None,
    typer.Argument(metavar="DIR", help="Look for checkpoints in these directories, too.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_MAX_DEPTH = 3  # folders below a given directory that are searched


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was found. `architecture` is what its config.json says; `size_bytes` counts its weights.

    is_known: whether octavo has the architecture. problem: why it is not served all the same; empty where it is.
    """

    name: str
    architecture: str
    is_known: bool
    problem: str
    size_bytes: int
    path: str


@command("octavo models", "octavo models ~/checkpoints --json")
def models(directories: Directories = None, json_: Json = False) -> None:
    """List the architectures octavo knows, and checkpoints found here."""
    from octavo.models.registry import FAMILIES  # only this command

    found = [*_built_in(), *_in_hub_cache()]
    for directory in directories or []:
        found += _below(directory.expanduser())
    if json_:
        typer.echo(json.dumps({"architectures": sorted(FAMILIES), "checkpoints": [asdict(each) for each in found]}))
        return
    typer.secho("architectures", bold=True)
    for name in sorted(FAMILIES):
        typer.echo(f"  {name}")
    typer.secho("checkpoints", bold=True)
    if not found:
        typer.echo("  none; give a directory to look in, or a hub id to any command")
    width = max((len(each.name) for each in found), default=0)
    for each in found:
        state = "  (not served)" if each.problem else ""
        typer.echo(f"  {each.name:{width}}  {show_size(each.size_bytes):>8}  {each.architecture}{state}  {each.path}")
        if each.problem:
            typer.echo(f"  {'':{width}}  {each.problem}")


def _built_in() -> Iterator[Checkpoint]:
    directory = built_in_model_path()
    if (directory / "config.json").is_file():
        yield _read(directory, f"{BUILT_IN_MODEL} (built in)")


def _in_hub_cache() -> Iterator[Checkpoint]:
    """Snapshots that huggingface_hub keeps; none where it is not installed."""
    try:
        from huggingface_hub import scan_cache_dir  # optional
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        if (newest.snapshot_path / "config.json").is_file():
            yield _read(newest.snapshot_path, repository.repo_id)


def _below(directory: Path) -> Iterator[Checkpoint]:
    """Checkpoints in a directory, itself included."""
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory} is no directory")
    patterns = ["/".join(["*"] * depth + ["config.json"]) for depth in range(_MAX_DEPTH + 1)]
    for path in sorted(path for pattern in patterns for path in directory.glob(pattern)):
        if any(path.parent.glob("*.safetensors")):
            yield _read(path.parent, path.parent.resolve().name)


def _read(directory: Path, name: str) -> Checkpoint:
    from octavo.errors import ModelError
    from octavo.models.config_file import ConfigFile
    from octavo.models.registry import FAMILIES, read_architecture

    try:
        names = ConfigFile.read(directory / "config.json").values.get("architectures")
    except ModelError:
        names = None
    known = [each for each in names if each in FAMILIES] if isinstance(names, list) else []
    architecture = str((known or names or ["unknown"])[0]) if isinstance(names, list) else "unknown"
    problem = ""
    try:
        read_architecture(directory)
    except ModelError as error:
        problem = str(error).removeprefix(f"{directory / 'config.json'}: ")
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return Checkpoint(name, architecture, bool(known), problem, size, str(directory))


def show_size(num_bytes: int) -> str:
    """Spell a size with the unit that suits it."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
