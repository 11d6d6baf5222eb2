"""Kernels that write into tensors of the caller: one file for each backend."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Generic, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.kernels.interface import Kernels

Arguments = TypeVarTuple("Arguments")


class Operation(Generic[*Arguments]):
    """A kernel as a function: `soft_cap(kernels, logits, 30.0)`. Use it as the decorator of the plain version.

    The plain version computes in torch. Its signature defines the arguments; it changes tensors among them in place and
    returns nothing. The law of `octavo.kernels.interface` holds: the result of a row depends on that row alone.

    A backend computes an operation by the kernel that has its name: a line of the list in `csrc/kernels.h`, or the
    function of that name in the module of that name in `octavo.kernels.triton`. If there is none, the plain version
    computes it.
    """

    def __init__(self, reference: Callable[[*Arguments], None]) -> None:
        self.name = reference.__name__
        self.reference = reference
        functools.update_wrapper(self, reference)

    def __call__(self, kernels: Kernels, *args: *Arguments) -> None:
        """Compute the operation by a backend."""
        kernels.compute(self, *args)
