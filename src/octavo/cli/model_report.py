"""Reports on checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.models.weight_bytes import weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.models.architecture import Architecture
    from octavo.models.weight_source import WeightSource
    from octavo.startup.checkpoint import Checkpoint

_PRECISIONS = (None, "int8", "int4", "int4_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksDetails:
    """A model on several ranks. problem: Why it cannot be divided, or "".

    memory_bytes: Bytes of the largest rank's weights by precision, estimated from its number of weights.
    kv_bytes_per_token, state_bytes_per_request: Of the largest rank.
    """

    count: int
    problem: str = ""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    kv_bytes_per_token: int = 0
    state_bytes_per_request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDetails:
    """Architecture, memory and text files of a checkpoint.

    active_parameters: Number used for each token. memory_bytes: Bytes of weights by precision. window: Tokens that
    sliding-window layers see. The KV of an older token takes `kv_bytes_before_window` bytes. text: Remarks by topic.
    state_bytes_per_request: Of recurrent layers. ranks: None for one process.
    """

    parameters: int
    active_parameters: int
    layers: int
    max_context_tokens: int
    parts: list[str]
    stored_as: str
    memory_bytes: dict[str, int]
    kv_bytes_per_token: int
    window: int | None
    kv_bytes_before_window: int
    text: dict[str, str]
    state_bytes_per_request: int = 0
    ranks: RanksDetails | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A report on a checkpoint.

    problem: Why the checkpoint is refused, or "". left_out: Parts that are not served. details: None if not requested
    or refused.
    """

    name: str
    architecture: str
    is_known: bool
    problem: str
    left_out: tuple[str, ...]
    size_bytes: int
    path: str
    details: ModelDetails | None = None

    @property
    def verdict(self) -> Literal["runs", "runs in part", "refused"]:
        """Return the verdict."""
        return "refused" if self.problem else "runs in part" if self.left_out else "runs"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "verdict": self.verdict}


class _Described(Protocol):
    @property
    def weights(self) -> WeightSource: ...
    def read_config(self) -> dict[str, Any]: ...
    def read_architecture(self) -> Architecture: ...


class _Folder:
    def __init__(self, path: Path) -> None:
        from octavo.models.weight_source import FolderWeights

        self.path = path
        self.weights = FolderWeights(path)

    def read_config(self) -> dict[str, Any]:
        from octavo.models.config_file import ConfigFile

        return ConfigFile.read(self.path / "config.json").values

    def read_architecture(self) -> Architecture:
        from octavo.models.registry import read_architecture

        return read_architecture(self.path)


def report_on(path: Path, name: str) -> ModelReport:
    """Report on a checkpoint without details."""

    def opened() -> _Described:
        return _open(path) if path.is_file() else _Folder(path)

    return _report(path, name, opened)


def look_closer(model: str, num_ranks: int = 1, *, divides_by_expert: bool = False) -> ModelReport:
    """Report with details. model: Path or hub id. num_ranks, divides_by_expert: See `Share`. Raises `ModelError`."""
    path, opened = Path(model).expanduser(), cache(partial(_open, model))
    is_here = path.exists()  # otherwise the weights are neither downloaded nor checked
    report = _report(path if is_here else opened().path, model, opened)
    if is_here and report.size_bytes and not report.problem:
        report = replace(report, problem=_problem_of_weights(opened()))
    if report.problem:
        return report
    details = _details(opened())
    if num_ranks > 1:
        architecture = opened().read_architecture()
        details = replace(details, ranks=_on_ranks(architecture, details, num_ranks, divides_by_expert))
    return replace(report, details=details)


def _on_ranks(architecture: Architecture, whole: ModelDetails, count: int, divides_by_expert: bool) -> RanksDetails:
    from octavo.models.declared import Linear, in_order
    from octavo.models.share import Share

    def num_weights(of: Architecture) -> int:
        return sum(each.num_weights for each in in_order(of.tensors()) if isinstance(each, Linear))

    try:
        ranks = [architecture.split(Share(rank, count, divides_by_expert)) for rank in range(count)]
        share = max(map(num_weights, ranks)) / num_weights(architecture)
    except ConfigError as error:
        return RanksDetails(count=count, problem=str(error))
    return RanksDetails(
        count=count,
        memory_bytes={name: round(share * size) for name, size in whole.memory_bytes.items()},
        kv_bytes_per_token=max(each.kv_layout.bytes_per_token(architecture.dtype) for each in ranks),
        state_bytes_per_request=max(each.kv_layout.state_bytes(architecture.dtype) for each in ranks),
    )


def _problem_of_weights(checkpoint: Checkpoint) -> str:
    try:
        checkpoint.weights.open().check(checkpoint.read_architecture().stored_tensors())
    except ModelError as error:
        return str(error).removeprefix(f"{checkpoint.path}: ")
    return ""


def _open(model: str | Path) -> Checkpoint:
    from octavo.startup.checkpoint import open_checkpoint

    return open_checkpoint(model, weights=False)


def _report(path: Path, name: str, opened: Callable[[], _Described]) -> ModelReport:
    from octavo.models.registry import FAMILIES
    from octavo.models.text_part import TEXT_PARTS

    names, problem = None, ""
    left_out: tuple[str, ...] = ()
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    try:
        described = opened()
        if path.is_file():
            files = described.weights.weight_files()
        names = described.read_config().get("architectures")
        left_out = _left_out(described.read_architecture())
    except ModelError as error:
        problem = str(error).removeprefix(f"{path / 'config.json'}: ").removeprefix(f"{path}: ")
    known = [each for each in names if each in FAMILIES or each in TEXT_PARTS] if isinstance(names, list) else []
    return ModelReport(
        name=name,
        architecture=str((known or names or ["unknown"])[0]) if isinstance(names, list) else "unknown",
        is_known=bool(known),
        problem=problem,
        left_out=left_out,
        size_bytes=sum(file.stat().st_size for file in files),
        path=str(path),
    )


def _left_out(architecture: Architecture) -> tuple[str, ...]:
    left_out = [] if architecture.has_head else ["tokens: it has no lm_head and computes embeddings only"]
    if architecture.text_part_of is not None:
        left_out.append(f"images: {architecture.text_part_of} reads them, but octavo serves its text part only")
    return tuple(left_out)


def _details(checkpoint: Checkpoint) -> ModelDetails:
    from octavo.models.family_parts import parts_of

    architecture = checkpoint.read_architecture()
    dtype, num_layers, layout = architecture.dtype, len(architecture.layers), architecture.kv_layout
    stored = architecture.stored or architecture.stored_floats
    as_it_is = "as stored" if architecture.block_bytes else dtype
    return ModelDetails(
        parameters=architecture.num_parameters,
        active_parameters=architecture.num_active_parameters,
        layers=num_layers,
        max_context_tokens=architecture.max_context_tokens,
        parts=[part.describe(num_layers) for part in parts_of(architecture)],
        stored_as=(", ".join(checkpoint.weights.types) or dtype) if stored is None else stored.summary,
        memory_bytes={each or as_it_is: weight_bytes(architecture, dtype, None, each) for each in _PRECISIONS},
        kv_bytes_per_token=layout.bytes_per_token(dtype),
        state_bytes_per_request=layout.state_bytes(dtype),
        window=layout.window,
        kv_bytes_before_window=layout.bytes_before_window(dtype),
        text=_look_at_text(checkpoint, architecture),
    )


def _look_at_text(checkpoint: Checkpoint, architecture: Architecture) -> dict[str, str]:
    from octavo.server.answers.answer_form import template_remark
    from octavo.server.answers.known_formats import find_tool_format
    from octavo.server.answers.reasoning_forms import find_reasoning_form
    from octavo.server.answers.template_probe import TemplateProbe

    try:
        tokenizer = checkpoint.read_tokenizer()
        template = checkpoint.read_chat_template(tokenizer.special_tokens)
    except OctavoError as error:
        return {"tokenizer": f"none: {error}"}
    found = {"tokenizer": f"{tokenizer.vocab_size:,} tokens"}
    if tokenizer.vocab_size > architecture.vocab_size:
        found["tokenizer"] += f", more than the {architecture.vocab_size:,} rows of the embedding"
    if template is None:
        return found | {"chat template": "none; use --raw or /v1/completions"}
    probe, sources = TemplateProbe.of(template.render), [*template.templates.values()]
    tools = find_tool_format("auto", sources, probe.call, lambda _: None)
    reasoning = find_reasoning_form("auto", [*sources, *probe.texts])
    return found | {
        "chat template": ", ".join(sorted(template.templates)),
        "tool calls": "in an unknown format: they are not parsed"
        if tools is None
        else tools.name + template_remark(tools, shows_tools=probe.shows_tools),
        "reasoning": "none: it is not separated" if reasoning is None else reasoning.name,
    }
