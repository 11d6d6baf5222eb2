"""Draft models' checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """A checkpoint for drafting. shares_kv: True if it is the quantized target, which reads the target's KV."""

    name: str
    weights: WeightSource
    architecture: Architecture
    quantization: str | None
    max_model_len: int
    shares_kv: bool
