"""Defaults by device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDefaults:
    """Defaults of `SchedulerConfig` on a device. num_offline_tokens: `max_num_batched_tokens` if `is_offline`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_offline_tokens: int
    async_scheduling: bool


CPU_DEFAULTS = StepDefaults(
    max_num_seqs=64, max_num_batched_tokens=512, num_offline_tokens=1024, async_scheduling=False
)
GPU_DEFAULTS = StepDefaults(
    max_num_seqs=256, max_num_batched_tokens=8192, num_offline_tokens=8192, async_scheduling=True
)
STEP_DEFAULTS = {"cpu": CPU_DEFAULTS, "cuda": GPU_DEFAULTS}
