"""Options of every command that runs a model, named as in `vllm serve`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from octavo.assets import BUILT_IN_MODEL
from octavo.cli.config_options import read_part, with_options_of
from octavo.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
    random_seed,
)
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.data.capacity import EngineCapacity
    from octavo.engine.llm_engine import Engine

_PANELS = {
    ModelConfig: "Model",
    SchedulerConfig: "Scheduler",
    CacheConfig: "KV cache",
    EngineConfig: "Scheduler",
    DeviceConfig: "Device",
    SpeculativeConfig: "Speculation",
    KVTransferConfig: "KV stores",
}


def parse_speculative(text: str | SpeculativeConfig) -> SpeculativeConfig:
    """Parse JSON. Raises `typer.BadParameter`."""
    if isinstance(text, SpeculativeConfig):
        return text
    try:
        return SpeculativeConfig.parse(json.loads(text))
    except (ValueError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None


def parse_kv_events(text: str | KVEventsConfig) -> KVEventsConfig:
    """Parse JSON. Raises `typer.BadParameter`."""
    if isinstance(text, KVEventsConfig):
        return text
    try:
        return KVEventsConfig.parse(json.loads(text))
    except (ValueError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None


def _unless_named_before(context: typer.Context, model: str | None) -> str | None:
    """Ignore --model from the environment or a file if MODEL is on the command line."""
    source = context.get_parameter_source("model")
    is_weaker = source is not None and source.name != "COMMANDLINE"
    return None if is_weaker and context.params.get("model_argument") is not None else model


@with_options_of(_PANELS)
class EngineOptions:
    """Options of `EngineConfig`."""

    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A directory in Hugging Face layout, a GGUF file or a hub id (owner/name). Default: the built-in "
            "model.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID",
            rich_help_panel=_PANELS[ModelConfig],
            help="The same as MODEL, as an option. Default: the built-in model.",
            show_default=False,
            callback=_unless_named_before,
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        typer.Option(
            metavar="JSON",
            parser=parse_speculative,
            rich_help_panel=_PANELS[SpeculativeConfig],
            help="How to draft tokens, as vLLM's JSON object: method, num_speculative_tokens and fields of the "
            "method (docs/speculation.md). Default: speculative-method and num-speculative-tokens.",
            show_default=False,
        ),
    ] = None
    kv_events_config: Annotated[
        KVEventsConfig | None,
        typer.Option(
            metavar="JSON",
            parser=parse_kv_events,
            rich_help_panel=_PANELS[CacheConfig],
            help="Publish changes of the prefix cache over ZMQ, for routers, as vLLM's JSON object: "
            "enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, hwm, max_queue_size. Use it in "
            "private networks only: any client that can reach the endpoint can read the token ids of prompts. "
            "Default: no events.",
            show_default=False,
        ),
    ] = None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    async_scheduling: bool | None
    mixed_step_ms: float | None
    max_num_waiting: int | None
    max_num_waiting_tokens: int | None
    generation_config: str
    scheduling_policy: SchedulingPolicy | None
    seed: int
    speculative_method: str | None
    num_speculative_tokens: int | None
    speculative_model: str | None

    @property
    def chosen_model(self) -> str | None:
        """The value of MODEL or --model. Raises `typer.BadParameter` if MODEL and --model differ."""
        if self.model_argument is not None and self.model is not None and self.model_argument != self.model:
            raise typer.BadParameter(f"two models are given: {self.model_argument} and --model {self.model}")
        return self.model_argument if self.model is None else self.model

    @property
    def served_name(self) -> str:
        """Public model name."""
        model = self.chosen_model
        if model is None:
            return BUILT_IN_MODEL
        path = Path(model).expanduser()
        if path.is_file():
            return path.resolve().stem
        return path.resolve().name if path.is_dir() else model

    def config(self, *, is_offline: bool = False) -> EngineConfig:
        """Build the configuration. is_offline: see `SchedulerConfig`. Raises `ConfigError`."""
        return read_part(
            self,
            EngineConfig,
            model=read_part(self, ModelConfig, model=self.chosen_model, served_model_name=self.served_name),
            cache=read_part(self, CacheConfig),
            scheduler=read_part(self, SchedulerConfig, is_offline=is_offline),
            device=read_part(self, DeviceConfig),
            speculative=self._speculative(),
            kv_transfer=read_part(self, KVTransferConfig),
            kv_events=KVEventsConfig.parse(self.kv_events_config),
        )

    def with_drawn_seed(self, context: typer.Context) -> Self:
        """Return a copy with a random seed, or the same object if the user has given a seed."""
        source = context.get_parameter_source("seed")
        return replace(self, seed=random_seed()) if source is None or source.name == "DEFAULT" else self

    def with_limits(self, capacity: EngineCapacity) -> Self:
        """Return a copy with the limits of a started engine."""
        names = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling")
        return replace(self, **{name: getattr(capacity, name) for name in names})

    def _speculative(self) -> SpeculativeConfig:
        if self.speculative_config is None:
            return read_part(self, SpeculativeConfig)
        for name in ("speculative_method", "num_speculative_tokens", "speculative_model"):
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter(f"{option} is also a field of --speculative-config: give it only once")
        return self.speculative_config

    def launch(self, meanwhile: Callable[[], object] | None = None) -> Engine:
        """Load the model in a separate process. Raises `ConfigError` and `ModelError`.

        meanwhile: Called during the load.
        """
        from octavo.runtime.progress import LoadingProgress
        from octavo.startup.launch import launch_engine

        config = self.config()
        with LoadingProgress() as progress:
            return launch_engine(config, progress=progress, meanwhile=meanwhile)

    def build(self, *, is_offline: bool = False) -> Engine:
        """Load the model in this process. Raises `ConfigError` and `ModelError`."""
        config = self.config(is_offline=is_offline)  # reports errors before torch is imported
        from octavo.build import build_engine
        from octavo.runtime.progress import LoadingProgress

        with LoadingProgress() as progress:
            return build_engine(config, progress=progress)
