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
        self._compiled: dict[tuple[Any, ...], tuple[Any, Callable[..., None] | None, tuple[Any, ...]]] = {}
        self._keys: dict[tuple[type, ...], Callable[..., tuple[Any, ...]]] = {}
        self._is_specialized = [not each.do_not_specialize for each in self.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return a function that launches the kernel. grid: up to three numbers of programs."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        active = driver.active
        device = active.get_current_device()
        key = (device, self.specialization(args), *constants.values(), *constants)
        known = self._compiled.get(key)
        if known is None:
            compiled = self.run(*args, grid=grid, warmup=False, **constants)
            if compiled is not None and active.get_current_target().backend == "cuda":
                values = tuple(constants[name] for name in self.arg_names[len(args) :])
                self._compiled[key] = compiled, _run_of(compiled), values
            return
        compiled, run, values = known
        hooks = triton.knobs.runtime
        if run is None or _is_called(hooks.launch_enter_hook) or _is_called(hooks.launch_exit_hook):
            compiled[*grid, 1, 1](*args, *values)
            return
        run(
            *(*grid, 1, 1)[:3], active.get_current_stream(device), compiled.function, compiled.packed_metadata,
            None, None, None, *args, *values,
        )  # fmt: skip

    def specialization(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a key of Triton's specialization. On NVIDIA's GPUs, equal keys mean equal code.

        - A tensor: type, and whether the address is divisible by 16.
        - An integer: width, and if specialized, whether it is 1 or divisible by 16.
        """
        types = (*map(type, args),)
        key = self._keys.get(types)
        if key is None:
            key = self._keys[types] = _key_of(types, self._is_specialized)
        return key(*args)


def _run_of(compiled: Any) -> Callable[..., None] | None:
    """Return what `compiled[grid]` calls in Triton 3.6 to 3.9, or None in another version."""
    return compiled.run if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")) else None


def _is_called(hook: Any) -> bool:
    """Return True if a hook of Triton does something. By default it is a list of no functions."""
    return bool(getattr(hook, "calls", hook))


def _key_of(types: tuple[type, ...], is_specialized: list[bool]) -> Callable[..., tuple[Any, ...]]:
    """Return the function that computes the key of arguments of these types.

    It looks at all addresses together, and at all integers together. If one is unusual, all of them are in the key.
    """
    tensors = [index for index, kind in enumerate(types) if issubclass(kind, torch.Tensor)]
    numbers = [index for index, kind in enumerate(types) if kind is int]
    specialized = [index for index in numbers if is_specialized[index]]

    def key(*args: Any) -> tuple[Any, ...]:
        addresses = all_numbers = 0
        parts: list[Any] = [types]
        for index in tensors:
            tensor = args[index]
            parts.append(tensor.dtype)
            addresses |= tensor.data_ptr()
        for index in specialized:
            number = args[index]
            parts.append(number & 15 and 1 + (number == 1))
        for index in numbers:
            all_numbers |= args[index]
        parts.append(addresses & 15 and tuple(_is_aligned(args[index]) for index in tensors))
        if not 0 <= all_numbers < _INT32_END:
            are_narrow = tuple(_is_narrow(args[index]) for index in numbers)
            parts += [] if all(are_narrow) else [are_narrow]
        return tuple(parts)

    return key


def _is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() & 15 == 0


def _is_narrow(number: int) -> bool:
    return -_INT32_END <= number < _INT32_END
