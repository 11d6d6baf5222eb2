"""Order asynchronous copies before the tensor-core products that read them.

On sm_90 and later, products read shared memory through the async proxy, but `cp.async` writes through the generic
proxy. After waiting for a copy, each thread must issue `fence.proxy.async` (PTX ISA, "Async proxy"). Triton before
3.7.1 omits this in loops that load ahead, so products may read old values. This module adds missing fences to PTX.
"""

from __future__ import annotations

import re
from typing import Any

from triton.backends import backends

FENCE = "fence.proxy.async.shared::cta;"
_WAIT = re.compile(r"\s*cp\.async\.wait_(group|all)\b")
_PRODUCT = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma)\b")


def add_fences(ptx: str) -> str:
    """Unless `is_fenced`, add a fence after each wait for copies."""
    if is_fenced(ptx):
        return ptx
    lines = ptx.split("\n")
    return "\n".join(f"{line}\n\t{FENCE}" if _WAIT.match(line) else line for line in lines)


def is_fenced(ptx: str) -> bool:
    """Return False if no fence is between a wait for copies and a later product."""
    needs_fence = False
    for line in ptx.split("\n"):
        if _WAIT.match(line):
            needs_fence = True
        elif "fence.proxy.async" in line:
            needs_fence = False
        elif needs_fence and _PRODUCT.search(line):
            return False
    return True


def install() -> None:
    """Make Triton's NVIDIA compiler add missing fences, with separate entries in its cache."""
    compiler: Any = backends["nvidia"].compiler if "nvidia" in backends else None
    if compiler is None or hasattr(compiler, "adds_fences"):
        return
    make_ptx, identity = compiler.make_ptx, compiler.hash

    def make_fenced_ptx(self: Any, *args: Any) -> str:
        return add_fences(make_ptx(self, *args))

    def fenced_identity(self: Any) -> str:
        return f"{identity(self)}-fenced"

    compiler.make_ptx, compiler.hash, compiler.adds_fences = make_fenced_ptx, fenced_identity, True
