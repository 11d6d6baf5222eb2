"""Kernels with in-place results."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Generic, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.kernels.interface import Kernels

Arguments = TypeVarTuple("Arguments")


class Operation(Generic[*Arguments]):
    """A kernel called as `soft_cap(kernels, logits, 30.0)`. Decorates the kernel's torch version.

    The kernel changes tensors in place. A row's result depends only on the row. A backend's kernel has the same name in
    the list of `csrc/kernels.h`, or as module and function of `octavo.kernels.triton`.
    """

    def __init__(self, reference: Callable[[*Arguments], None]) -> None:
        self.name = reference.__name__
        self.reference = reference
        functools.update_wrapper(self, reference)

    def __call__(self, kernels: Kernels, *args: *Arguments) -> None:
        """See `Kernels.compute`."""
        kernels.compute(self, *args)
