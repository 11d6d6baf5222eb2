"""Chooses the number of engines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

UP_AFTER_S = 2.0
DOWN_AFTER_S = 30.0
_MAX_FACTOR = 2.0  # of one change
_BUSY = 0.7  # share of the sequences that fewer engines would run


@dataclass(frozen=True, slots=True)
class Load:
    """The load of all engines at a time.

    queue_time_s: Time that a request waits for its first step.
    num_running: Requests in steps.
    max_num_running_each: Their mean limit per engine. None if an engine is silent, or does not tell its limit.
    """

    at: float
    queue_time_s: float
    num_running: float
    max_num_running_each: float | None


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Bounds on the number of engines, and the queue time above which engines are added."""

    min_replicas: int
    max_replicas: int
    target_queue_time_s: float


def choose_size(loads: Sequence[Load], size: int, since: float | None, limits: ScalingLimits) -> int:
    """Return the wanted number of engines.

    Engines are added if the queue time has been too long for `UP_AFTER_S` while all engines were ready: in proportion
    to the queue time, but at most as many as there are. One engine is removed if the queue time has been below half of
    the target for `DOWN_AFTER_S`, and one engine less would have run the same requests. Some engines may be missing.

    loads: Since the number has changed, the oldest first. size: Current number. since: Time when all of these were
    ready. None if some are missing.
    """
    if not loads:
        return size
    now, wanted = loads[-1].at, limits.target_queue_time_s
    recent = [load for load in loads if load.at >= now - UP_AFTER_S]
    is_settled = since is not None and any(since <= load.at <= now - UP_AFTER_S for load in loads)
    if is_settled and all(load.queue_time_s > wanted for load in recent):
        factor = min(recent[-1].queue_time_s / wanted, _MAX_FACTOR)
        return min(math.ceil(size * factor), limits.max_replicas)
    recent = [load for load in loads if load.at >= now - DOWN_AFTER_S]
    if (
        size > limits.min_replicas
        and now - loads[0].at >= DOWN_AFTER_S
        and all(_fits(each, size, wanted) for each in recent)
    ):
        return size - 1
    return size


def _fits(load: Load, size: int, wanted_s: float) -> bool:
    if load.queue_time_s > wanted_s / 2 or load.max_num_running_each is None:
        return False
    return load.num_running <= _BUSY * load.max_num_running_each * (size - 1)
