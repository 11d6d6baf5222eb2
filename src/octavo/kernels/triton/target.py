"""The compilation target."""

from __future__ import annotations

import functools
from typing import Any

from triton.runtime import driver

from octavo.kernels.triton.rounding import INTERPRETED

_FIRST_WITH_WARP_GROUPS = 90  # sm_90, Hopper
_WITH_TENSOR_MEMORY = range(100, 120)  # sm_100, Blackwell for data centers


def is_amd() -> bool:
    """Return True if Triton compiles for AMD, which has less shared memory."""
    return not INTERPRETED and target().backend == "hip"


def has_warp_groups() -> bool:
    """Return True if four warps together multiply tiles of 64 rows, as on Hopper."""
    return not INTERPRETED and target().backend == "cuda" and target().arch >= _FIRST_WITH_WARP_GROUPS


def has_tensor_memory() -> bool:
    """Return True if Triton multiplies by `tcgen05.mma`, an instruction of as many rows as a tile has."""
    return not INTERPRETED and target().backend == "cuda" and target().arch in _WITH_TENSOR_MEMORY


def target() -> Any:
    """Return Triton's target: backend, architecture, warp size."""
    return _target_of(driver.active.get_current_device())


@functools.cache
def _target_of(_device: int) -> Any:
    return driver.active.get_current_target()
