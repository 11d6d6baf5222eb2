"""Kernels with in-place results."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Generic, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.kernels.interface import Kernels

Arguments = TypeVarTuple("Arguments")


class Operation(Generic[*Arguments]):
    """A kernel called as `soft_cap(kernels, logits, 30.0)`. Decorates its torch version.

    Changes tensors in place. A row's result depends only on the row and, with a `StateBatch`, on the earlier rows of
    its sequence. Kernels have the same name in `csrc/kernels.h`, and as module and function in `octavo.kernels.triton`.
    """

    def __init__(self, reference: Callable[[*Arguments], None]) -> None:
        self.name = reference.__name__
        self.reference = reference
        functools.update_wrapper(self, reference)

    def __call__(self, kernels: Kernels, *args: *Arguments) -> None:
        """See `Kernels.compute`."""
        kernels.compute(self, *args)
