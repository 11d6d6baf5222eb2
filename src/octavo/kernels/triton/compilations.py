"""Compilations of kernels. Each delays a launch by seconds (docs/gpu.md)."""

from __future__ import annotations

import functools
from typing import Any

import triton


class Compilations:
    """Reports kernels compiled by any engine of this process."""

    def __init__(self) -> None:
        self._compiled = compiled_kernels()
        self._num_taken = len(self._compiled)

    def take(self) -> list[str]:
        """Return kernels compiled since the last call, with properties."""
        new = self._compiled[self._num_taken :]
        self._num_taken += len(new)
        return new


@functools.cache
def compiled_kernels() -> list[str]:
    """Return a list that gets each kernel that Triton compiles, or loads from its disk cache, from now on."""
    compiled: list[str] = []
    earlier = triton.knobs.runtime.jit_post_compile_hook

    def note(**compilation: Any) -> bool | None:
        compiled.append(f"{compilation['fn'].name} for {compilation['key']}")
        return None if earlier is None else earlier(**compilation)

    triton.knobs.runtime.jit_post_compile_hook = note
    return compiled
