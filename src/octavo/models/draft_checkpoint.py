"""The checkpoint of a model that drafts for another one, as its files describe it. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.models.architecture import Architecture
    from octavo.models.weight_source import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheckpoint:
    """What is loaded to draft.

    name: as the user calls it. quantization: how its weights are rounded, as in `octavo.config.ModelConfig`.
    max_model_len: the longest sequence that it can go on with. shares_kv: it is the target itself, rounded, which reads
    the target's own keys and values.
    """

    name: str
    weights: WeightSource
    architecture: Architecture
    quantization: str | None
    max_model_len: int
    shares_kv: bool
