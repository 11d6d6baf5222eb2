"""octavo runs and serves large language models, with the same tokens under any schedule.

Public names are imported at first use, so `import octavo` and `octavo --help` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    )
    from octavo.errors import (
        ConfigError,
        EngineDeadError,
        EngineError,
        ExecutionError,
        ModelError,
        OctavoError,
        RequestError,
    )
    from octavo.llm import LLM, AsyncLLM, LLMEngine
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__version__ = "0.3.0"

_HOMES = {
    "octavo.config": (
        "CacheConfig",
        "DeviceConfig",
        "EngineConfig",
        "KVEventsConfig",
        "KVTransferConfig",
        "ModelConfig",
        "SchedulerConfig",
        "SchedulingPolicy",
        "SpeculativeConfig",
    ),
    "octavo.errors": (
        "ConfigError",
        "EngineDeadError",
        "EngineError",
        "ExecutionError",
        "ModelError",
        "OctavoError",
        "RequestError",
    ),
    "octavo.llm": ("LLM", "AsyncLLM", "LLMEngine"),
    "octavo.outputs": ("CompletionOutput", "Logprob", "RequestOutput"),
    "octavo.sampling_params": ("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "CompletionOutput",
    "ConfigError",
    "DeviceConfig",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "ExecutionError",
    "KVEventsConfig",
    "KVTransferConfig",
    "LLMEngine",
    "Logprob",
    "ModelConfig",
    "ModelError",
    "OctavoError",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingPolicy",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
