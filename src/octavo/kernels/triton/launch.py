"""Launches of kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo.kernels.triton.rounding import INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Callable

_INT32_END = 1 << 31


def kernel(fn: Callable[..., None] | None = None, **options: Any) -> Any:
    """Decorate a kernel that the host launches. options: those of `triton.jit`.

    Repeated launches find the compiled kernel by types, alignments and constants. Constants and options must be
    keywords, other arguments positional.
    """
    if INTERPRETED:
        return triton.jit(fn, **options)
    return functools.partial(Kernel, **options) if fn is None else Kernel(fn, **options)


def cdiv(numerator: int, denominator: int) -> int:
    """Divide, rounding up, faster than `triton.cdiv`."""
    return -(-numerator // denominator)


def power_of_2_from(least: int) -> int:
    """Return the smallest power of two that is at least `least` (positive)."""
    return 1 << (least - 1).bit_length()


class Kernel(JITFunction):  # type: ignore[misc]
    """See `kernel`."""

    def __init__(self, fn: Callable[..., None], **options: Any) -> None:
        super().__init__(fn, **options)
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._is_specialized = [not each.do_not_specialize for each in self.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel. grid: up to three numbers of programs."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        key = (driver.active.get_current_device(), *self.specialization(args), *constants.values(), *constants)
        known = self._compiled.get(key)
        if known is None:
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            if compiled is not None and driver.active.get_current_target().backend == "cuda":
                names = self.arg_names[len(args) :]
                self._compiled[key] = compiled, tuple(constants[name] for name in names)
            return
        compiled, values = known
        compiled[*grid, 1, 1](*args, *values)

    def specialization(self, args: tuple[Any, ...]) -> list[Any]:
        """Return a key of Triton's specialization. On NVIDIA's GPUs, equal keys mean equal code.

        - A tensor: type, and whether the address is divisible by 16.
        - An integer: width, and if specialized, whether it is 1 or divisible by 16.
        """
        found: list[Any] = []
        for arg, is_specialized in zip(args, self._is_specialized, strict=False):
            kind = type(arg)
            if kind is int:
                is_wide = not -_INT32_END <= arg < _INT32_END
                if is_specialized and not is_wide:
                    found.append(kind if arg == 1 else arg & 15 == 0)
                else:
                    found.append((is_wide, is_specialized and arg & 15 == 0))
            elif isinstance(arg, torch.Tensor):
                found.append(arg.dtype)
                found.append(arg.data_ptr() & 15 == 0)
            else:
                found.append(kind)
        return found
