"""Imitate CUDA graphs in Triton's interpreter: record launches and operations of torch, and replay them.

It is as strict as a device. A replay uses the addresses of the capture. Intermediate tensors are in one memory that all
graphs share and reuse; its content is undefined when a replay begins. Other memory is known by its address alone: if it
has been freed, a replay is an error. Reading a tensor's value on the host, or copying one from the host, is refused,
because a graph would keep the value of the capture.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from triton.runtime.interpreter import InterpretedFunction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

_ALIGNMENT = 512  # bytes, for each piece of memory, as in torch's allocator
_NOTHING = 0xFF  # bytes of NaN
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# Operations that wait for the device, or copy values from the host.
_REFUSED_CALLS = frozenset({
    "__array__", "__bool__", "__contains__", "__float__", "__index__", "__int__", "as_tensor", "cpu", "equal",
    "from_numpy", "item", "masked_select", "nonzero", "numpy", "tensor", "tolist", "unique",
})  # fmt: skip
_REFUSED_OPERATIONS = frozenset({"_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"})


class InterpretedGraphPool:
    """A pool of graphs of interpreted kernels on the CPU."""

    def __init__(self) -> None:
        self._memory = _SharedMemory()

    @property
    def num_bytes(self) -> int:
        """Bytes of the shared memory for intermediate tensors."""
        return self._memory.num_bytes

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Call `run` and record its launches and operations of torch. Returns a function that replays them."""
        recording = _Recording(self._memory)
        with _launches_go_to(recording), _CallsWithoutHost(recording), recording:
            run()
        return recording.replay


class _SharedMemory:
    """Pieces of memory. A piece is reused after its tensors have been freed."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._pieces: list[np.ndarray[Any, Any]] = []
        self._free: defaultdict[int, list[np.ndarray[Any, Any]]] = defaultdict(list)

    def like(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same shape, dtype and strides; its content is undefined."""
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        num_bytes = -(-max(extent, 1) * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
        free = self._free[num_bytes]
        if free:
            piece = free.pop()
        else:
            piece = np.empty(num_bytes, dtype=np.uint8)
            self._pieces.append(piece)
            self.num_bytes += num_bytes
        held = piece[:]  # lives as long as a view of the tensor does
        weakref.finalize(held, free.append, piece).atexit = False
        return torch.from_numpy(held).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def forget(self) -> None:
        """Overwrite all memory with NaN."""
        for piece in self._pieces:
            piece.fill(_NOTHING)

    def __contains__(self, address: int) -> bool:
        return any(0 <= address - piece.ctypes.data < piece.nbytes for piece in self._pieces)


class _Place:
    """The place of a tensor: its address, without a reference to its memory. `is_gone`: the memory has been freed."""

    def __init__(self, tensor: Tensor, memory: _SharedMemory) -> None:
        storage = tensor.untyped_storage()
        is_shared = storage.data_ptr() in memory
        self._storage = None if is_shared or not storage.nbytes() else StorageWeakRef(storage)
        raw = (ctypes.c_uint8 * max(storage.nbytes(), 1)).from_address(storage.data_ptr() or ctypes.addressof(_BYTE))
        whole = torch.frombuffer(raw, dtype=torch.uint8)[: storage.nbytes() // tensor.itemsize * tensor.itemsize]
        self.tensor = whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @property
    def is_gone(self) -> bool:
        """Whether the memory has been freed."""
        return self._storage is not None and self._storage.expired()


_BYTE = ctypes.c_uint8()  # the address of empty tensors


class _Recording(TorchDispatchMode):
    """Records operations of torch in its context."""

    def __init__(self, memory: _SharedMemory) -> None:
        super().__init__()
        self.is_paused = False
        self._memory = memory
        self._steps: list[tuple[Callable[[], object], list[_Place]]] = []

    def replay(self) -> None:
        """Run all recorded calls again. Raises `RuntimeError` if memory that they read or write has been freed."""
        self._memory.forget()
        for run, places in self._steps:
            if any(place.is_gone for place in places):
                raise RuntimeError("a captured graph uses memory that was given back")
            run()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in this context: an interpreted kernel uses torch, too."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def note(self, call: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call with the places of its tensors, without keeping the tensors alive."""
        with self.paused():
            places: list[_Place] = []

            def at(tensor: Tensor) -> Tensor:
                places.append(_Place(tensor, self._memory))
                return places[-1].tensor

            args, kwargs = tree_map_only(torch.Tensor, at, (args, kwargs))
        self._steps.append((lambda: call(*args, **kwargs), places))

    def _moved(self, tensor: Tensor) -> Tensor:
        return self._memory.like(tensor).copy_(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        name, tensors = func.overloadpacket.__name__, tree_flatten((args, kwargs))[0]
        tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
        by_mask = name.startswith("index") and any(each.dtype == torch.bool for each in tensors[1:])
        if name in _REFUSED_OPERATIONS or by_mask:
            raise _refusal(f"{name} by a mask" if by_mask else name)
        result = func(*args, **kwargs)
        read = {_address(each) for each in tensors}
        if func._schema.is_mutable:  # noqa: SLF001  torch's own name for it
            self.note(func, args, kwargs)
            return result
        with self.paused():
            # Views keep their address. Computed and newly allocated tensors go to the memory of graphs.
            moved = tree_map_only(
                torch.Tensor, lambda each: each if _address(each) in read else self._moved(each), result
            )
        if name not in _ALLOCATIONS:
            pairs = zip(tree_flatten(result)[0], tree_flatten(moved)[0], strict=True)
            targets = [(index, target) for index, (one, target) in enumerate(pairs) if one is not target]
            if targets:
                self.note(_compute_into, (func, [index for index, _ in targets], [target for _, target in targets]),
                          {"args": args, "kwargs": kwargs})  # fmt: skip
        return moved


def _compute_into(func: Any, indices: list[int], targets: list[Tensor], *, args: Any, kwargs: Any) -> None:
    results = tree_flatten(func(*args, **kwargs))[0]
    for index, target in zip(indices, targets, strict=True):
        target.copy_(results[index])


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(f"no graph can hold {name}: it goes through the host, and would be what it was at the capture")


class _CallsWithoutHost(TorchFunctionMode):
    """Refuses calls that would wait for a device, but that torch does not report to `_Recording` on a CPU."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", str(func))
        if name in _REFUSED_CALLS and not self._recording.is_paused:
            raise _refusal(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _launches_go_to(recording: _Recording) -> Iterator[None]:
    """Record launches in this context: the grid and the arguments."""
    run = InterpretedFunction.run

    def run_and_note(kernel: Any, *args: Any, **kwargs: Any) -> None:
        with recording.paused():
            run(kernel, *args, **kwargs)
        recording.note(run, (kernel, *args), kwargs)

    InterpretedFunction.run = run_and_note
    try:
        yield
    finally:
        InterpretedFunction.run = run
