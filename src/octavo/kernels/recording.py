"""A forward pass of the compiled CPU kernels, recorded once and run again for other tokens without Python in between.

The model's own code runs once; every kernel call that it makes is noted with its addresses (csrc/program.h), as a CUDA
graph notes kernel launches. Buffers between the calls are sized for the largest step and used again as soon as nothing
refers to them. From then on a step is one call: between two kernels Python takes longer than a small kernel does.
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch

_aten = torch.ops.aten
_VIEWS = frozenset(
    (_aten.view, _aten.split_with_sizes, _aten.slice, _aten.select, _aten.unsqueeze, _aten.detach, _aten.alias)
)


class NotRecordableError(Exception):
    """The forward pass computes something with torch itself, which a recording would leave out."""


class Recorder:
    """Stands in for the compiled module's `KernelSet` while a forward pass runs: makes each call and notes it.

    empty: what the kernels allocate their results with meanwhile.
    """

    def __init__(
        self,
        kernel_set: Any,
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        allocate: Callable[[int], Tensor],
    ) -> None:
        self._set = kernel_set
        self._num_tokens, self._max_tokens = token_ids.shape[0], max_tokens
        self._allocate = allocate
        self._program = kernel_set.begin_program(*_step(token_ids, batch))
        self._blocks: dict[int, Tensor] = {}  # all there are, by address
        self._free: dict[int, list[Tensor]] = {}  # by size
        self.views_only = _ViewsOnly()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return the kernel of that name, which is noted when it is called."""
        call, add = getattr(self._set, name), getattr(self._program, name)

        def call_and_add(*args: Any) -> None:
            call(*args)
            add(*args)

        return call_and_add

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of undefined content in a buffer that has room for the rows of the largest step."""
        with _disable_current_modes():
            return self._empty(shape, dtype)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // self._num_tokens) * self._max_tokens
        block = self._free[room].pop() if self._free.get(room) else self._allocate(room)
        self._blocks[block.data_ptr()] = block
        # The array lives as long as any view of the tensor does; then the buffer is free for the next result.
        array = block.numpy()[:size]
        weakref.finalize(array, self._free.setdefault(room, []).append, block)
        return torch.from_numpy(array).view(dtype).view(shape)

    def finish(self, hidden: Tensor) -> RecordedForward:
        """Return what was recorded; hidden: the result of the forward pass."""
        block = self._blocks[hidden.data_ptr()]
        result = block[: self._max_tokens * hidden[0].nbytes].view(hidden.dtype).view(self._max_tokens, -1)
        return RecordedForward(self._set, self._program, result, list(self._blocks.values()))


class RecordedForward:
    """The forward pass of one model over one KV cache: (token ids [num_tokens], batch) -> hidden states.

    The result is overwritten by the next call. num_tokens may be anything up to max_tokens.
    """

    def __init__(self, kernel_set: Any, program: Any, result: Tensor, buffers: list[Tensor]) -> None:
        self._set = kernel_set
        self._program = program
        self._result = result
        self._buffers = buffers  # the program has their addresses only

    @property
    def max_tokens(self) -> int:
        """Rows of the largest step."""
        return self._result.shape[0]

    @property
    def num_calls(self) -> int:
        """Kernel calls of a step."""
        return int(self._program.size)

    def __call__(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Compute a step."""
        assert token_ids.is_contiguous()
        assert token_ids.shape[0] <= self.max_tokens
        self._set.run(self._program, *_step(token_ids, batch))
        return self._result[: token_ids.shape[0]]


def _step(token_ids: Tensor, batch: AttentionBatch) -> tuple[int, ...]:
    """Return the arguments that csrc/program.h calls StepArgs."""
    return (
        token_ids.data_ptr(),
        token_ids.shape[0],
        batch.positions.data_ptr(),
        batch.slot_mapping.data_ptr(),
        batch.query_start.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.stride(0),
        batch.seq_lens.shape[0],
    )


class _ViewsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets torch make views and nothing else: what it computed would be missing from the recording."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.overloadpacket not in _VIEWS:
            raise NotRecordableError(str(func))
        return func(*args, **(kwargs or {}))
