"""`octavo models`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.assets import BUILT_IN_MODEL, built_in_model_path
from octavo.cli.command import command
from octavo.cli.model_report import ModelDetails, ModelReport, look_closer, report_on
from octavo.config.engine import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterator

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|DIR",
        help="A checkpoint (path or hub id) to describe, or a directory to search for checkpoints.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="List the parts of each architecture.")]
Ranks = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", "-tp", metavar="RANKS", min=1, max=MOST_RANKS,
        help="Describe a checkpoint on so many ranks, which are processes that compute it together.",
    ),
]  # fmt: skip
ByExpert = Annotated[bool, typer.Option("--enable-expert-parallel", "-ep", help="Each expert belongs to one rank.")]
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_MAX_DEPTH = 3


@command(
    "octavo models",
    "octavo models ./my-checkpoint",
    "octavo models ./my-checkpoint --tensor-parallel-size 2",
    "octavo models ~/checkpoints --json",
)
def models(
    names: Models = None,
    json_: Json = False,
    verbose: Verbose = False,
    num_ranks: Ranks = 1,
    divides_by_expert: ByExpert = False,
) -> None:
    """List the models that octavo serves and the local checkpoints, or describe one checkpoint.

    A checkpoint runs, runs in part, or is refused with the reason. With --verbose each architecture is listed with the
    parts that a plain decoder does not have; parts in brackets are used only if config.json asks for them.
    """
    searched = [Path(name).expanduser() for name in names or [] if _is_searched(name)]
    described = [name for name in names or [] if not _is_searched(name)]
    if num_ranks > 1 and not described:
        raise typer.BadParameter("name a checkpoint to describe", param_hint="--tensor-parallel-size")
    if divides_by_expert and num_ranks == 1:
        raise typer.BadParameter("it needs --tensor-parallel-size above 1", param_hint="--enable-expert-parallel")
    closer = [look_closer(name, num_ranks, divides_by_expert=divides_by_expert) for name in described]
    listed: list[ModelReport] = []
    families = {}
    if searched or not closer:
        families = _families()
        listed = [*_built_in(), *_in_hub_cache(), *(each for directory in searched for each in _below(directory))]
    if json_:
        typer.echo(json.dumps(families | {"checkpoints": [each.as_json() for each in (*closer, *listed)]}))
        return
    for report in closer:
        _show_closer(report)
    if families:
        _show_families(families, verbose=verbose)
        _show(listed)


def _is_searched(name: str) -> bool:
    path = Path(name).expanduser()
    return path.is_dir() and not (path / "config.json").is_file()


def _families() -> dict[str, Any]:
    from octavo.models.family_parts import family_parts
    from octavo.models.registry import FAMILIES, find_family
    from octavo.models.text_part import TEXT_PARTS

    parts = {name: family_parts(name) for name in sorted(FAMILIES)}
    return {
        "architectures": list(parts),
        "models": {name: find_family(name).MODELS[name] for name in parts},
        "parts": {name: {"always": always, "optional": optional} for name, (always, optional) in parts.items()},
        "text_parts": {name: sorted(kinds.values()) for name, kinds in sorted(TEXT_PARTS.items())},
    }


def _show_families(families: dict[str, Any], *, verbose: bool) -> None:
    typer.secho("models", bold=True)
    width = max(map(len, families["architectures"]))
    for name, models_ in sorted(families["models"].items(), key=lambda each: each[1].lower()):
        typer.echo(f"  {name:{width}}  {models_}")
        if verbose:
            parts = families["parts"][name]
            optional = f" ({', '.join(parts['optional'])})" if parts["optional"] else ""
            typer.echo(f"  {'':{width}}    {', '.join(parts['always'])}{optional}")
    typer.secho("text part of models that also read images", bold=True)
    for name, served in families["text_parts"].items():
        typer.echo(f"  {name}, as {' or '.join(served)}")


def _show(found: list[ModelReport]) -> None:
    typer.secho("checkpoints", bold=True)
    if not found:
        typer.echo("  none: name a directory to search, or give any command a hub id")
    width = max((len(each.name) for each in found), default=0)
    for each in found:
        size = show_size(each.size_bytes)
        typer.echo(f"  {each.name:{width}}  {size:>8}  {each.architecture}  ({each.verdict})  {each.path}")
        for line in [each.problem] if each.problem else [f"without {part}" for part in each.left_out]:
            typer.echo(f"  {'':{width}}  {line}")


def _active(details: ModelDetails) -> str:
    if details.active_parameters == details.parameters:
        return ""
    return f" ({details.active_parameters:,} active per token)"


def _show_closer(report: ModelReport) -> None:
    typer.secho(f"{report.name}: {report.verdict}", bold=True)
    lines = {"because": report.problem, "left out": "; ".join(report.left_out), "architecture": report.architecture}
    if (details := report.details) is not None:
        lines |= {
            "size": f"{details.parameters:,} parameters{_active(details)} in {details.layers} layers, "
            f"up to {details.max_context_tokens:,} tokens",
            "parts": ", ".join(details.parts),
            "stored as": details.stored_as,
            "memory": ", ".join(f"{name} {show_size(size)}" for name, size in details.memory_bytes.items()),
            "KV of a token": show_size(details.kv_bytes_per_token) + _before_window(details),
            "state": _state(details.state_bytes_per_request),
            **details.text,
            **_on_ranks(details),
        }
    for key, text in lines.items():
        if text:
            typer.echo(f"  {key:14}{text}")


def _state(size: int) -> str:
    return f"{show_size(size)} for each running request" if size else ""


def _on_ranks(details: ModelDetails) -> dict[str, str]:
    if (ranks := details.ranks) is None:
        return {}
    if ranks.problem:
        return {f"{ranks.count} ranks": f"refused: {ranks.problem}"}
    memory = ", ".join(f"{name} {show_size(size)}" for name, size in ranks.memory_bytes.items())
    shown = f"each about {memory}; KV of a token {show_size(ranks.kv_bytes_per_token)}"
    state = _state(ranks.state_bytes_per_request)
    return {f"{ranks.count} ranks": f"{shown}; state {state}" if state else shown}


def _before_window(details: ModelDetails) -> str:
    if details.window is None:
        return ""
    return f", {show_size(details.kv_bytes_before_window)} for tokens before the last {details.window:,}"


def _built_in() -> Iterator[ModelReport]:
    directory = built_in_model_path()
    if (directory / "config.json").is_file():
        yield report_on(directory, f"{BUILT_IN_MODEL} (built in)")


def _in_hub_cache() -> Iterator[ModelReport]:
    try:
        from huggingface_hub import scan_cache_dir
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
            yield report_on(newest.snapshot_path, repository.repo_id)
        for path in _gguf_files(newest.snapshot_path):
            yield report_on(path, f"{repository.repo_id} {path.relative_to(newest.snapshot_path)}")


def _below(directory: Path) -> Iterator[ModelReport]:
    for path in _find(directory, "config.json"):
        if any(path.parent.glob("*.safetensors")):
            yield report_on(path.parent, path.parent.resolve().name)
    for path in _gguf_files(directory):
        yield report_on(path, path.name)


def _gguf_files(directory: Path) -> list[Path]:
    parts = {path: _PART.search(path.name) for path in _find(directory, "*.gguf")}
    return [path for path, part in parts.items() if part is None or int(part[1]) == 1]


def _find(directory: Path, name: str) -> list[Path]:
    return sorted(path for depth in range(_MAX_DEPTH + 1) for path in directory.glob("*/" * depth + name))


def show_size(num_bytes: int) -> str:
    """Format bytes."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
