"""Arguments of vLLM that octavo lacks.

Values that have no effect in octavo are accepted with a warning. Other values are refused.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted values of an argument. values: None for all. reason: Why they have no effect."""

    values: tuple[Any, ...] | None
    reason: str


ACCEPTED_ARGUMENTS: dict[str, Accepted] = {
    "gpu_memory_utilization": Accepted(None, "the KV cache is sized by kv_cache_memory_bytes or from free memory"),
    "pipeline_parallel_size": Accepted((1,), "one process computes"),
    "data_parallel_size": Accepted((1,), "one engine"),
    "trust_remote_code": Accepted((False,), "no code of a checkpoint is ever run"),
    "swap_space": Accepted((0, 4), "host memory is asked for with swap_space_bytes"),
    "cpu_offload_gb": Accepted((0,), "weights stay on the device"),
    "disable_log_stats": Accepted((True, False), "statistics are read from the event stream"),
    "disable_custom_all_reduce": Accepted((True, False), "one process computes"),
    "distributed_executor_backend": Accepted((None, "uni"), "one process computes"),
    "enable_lora": Accepted((False,), "there are no adapters yet"),
    "max_logprobs": Accepted((20,), "the limit is fixed"),
    "tokenizer_mode": Accepted(("auto",), "tokenizer.json is read"),
    "revision": Accepted((None,), "the hub's default revision is read"),
    "logits_processors": Accepted((None,), "there are no custom processors"),
    "max_seq_len_to_capture": Accepted(None, "CUDA graphs serve sequences of any length"),
    "disable_sliding_window": Accepted((False,), "a checkpoint's window is kept"),
    "hf_overrides": Accepted((None,), "config.json is read as it is"),
    "compilation_config": Accepted((None,), "nothing is compiled at run time"),
}


def accept_arguments(arguments: Mapping[str, Any]) -> None:
    """Warn that the arguments have no effect. Raises `ConfigError` for unknown arguments and refused values."""
    for name, value in arguments.items():
        accepted = ACCEPTED_ARGUMENTS.get(name)
        if accepted is None:
            raise ConfigError(f"unknown argument {name!r}")
        if accepted.values is not None and value not in accepted.values:
            allowed = " or ".join(repr(allowed) for allowed in accepted.values)
            raise ConfigError(f"{name}={value!r} cannot be served: {accepted.reason}; only {allowed} is accepted")
    if arguments:
        warnings.warn(f"arguments without effect in octavo: {', '.join(arguments)}", UserWarning, stacklevel=3)
