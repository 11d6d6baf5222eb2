"""Kernels with in-place results."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Generic, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.kernels.interface import Kernels

Arguments = TypeVarTuple("Arguments")


class Operation(Generic[*Arguments]):
    """A kernel as a function: `soft_cap(kernels, logits, 30.0)`. Decorates the reference in torch.

    The kernel changes tensors in place, and a row's result depends only on that row. Backends' kernels have the same
    name, in the list of `csrc/kernels.h`, or as a function and module of `octavo.kernels.triton`.
    """

    def __init__(self, reference: Callable[[*Arguments], None]) -> None:
        self.name = reference.__name__
        self.reference = reference
        functools.update_wrapper(self, reference)

    def __call__(self, kernels: Kernels, *args: *Arguments) -> None:
        """See `Kernels.compute`."""
        kernels.compute(self, *args)
