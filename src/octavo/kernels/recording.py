"""Recorded forward passes, repeated without Python calls (csrc/program.h)."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from octavo.kernels.interface import AttentionBatch, OutputRows
from octavo.kernels.state_batch import state_arrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_ALIGNMENT = 64
_VIEWS = frozenset({"view", "split_with_sizes", "split", "select", "unsqueeze", "transpose"})
_QUESTIONS = frozenset({"__get__", "data_ptr", "stride", "is_contiguous", "numel", "dim", "size", "__len__"})


class NotRecordableError(Exception):
    """The pass computes with torch, or calls an unrecordable kernel."""


class Rehearsal:
    """Measures the lifetimes of a pass's results. Results with disjoint lifetimes share memory."""

    def __init__(self, num_tokens: int, max_tokens: int) -> None:
        self._num_tokens, self._max_tokens = num_tokens, max_tokens
        self._sizes: list[int] = []
        self._ends: dict[int, int] = {}  # by result: the next result after its end
        self.views_only = _ViewsOnly()

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Allocate a result."""
        index, size = len(self._sizes), math.prod(shape) * dtype.itemsize
        self._sizes.append(-(-size // self._num_tokens) * self._max_tokens)
        # The array lives as long as any view of it.
        array = np.empty(size, dtype=np.uint8)
        weakref.finalize(array, self._let_go, index).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _let_go(self, index: int) -> None:
        self._ends[index] = len(self._sizes)

    def plan(self) -> tuple[list[int], int]:
        """Return offsets and total bytes."""
        never = len(self._sizes)
        offsets: dict[int, int] = {}
        for index in sorted(range(never), key=lambda i: (-self._sizes[i], i)):
            begin, end = index, self._ends.get(index, never)
            meets = sorted(
                (offsets[other], self._sizes[other])
                for other in offsets
                if other < end and begin < self._ends.get(other, never)
            )
            offset = 0
            for first, size in meets:
                if offset + self._sizes[index] <= first:
                    break
                offset = max(offset, -(-(first + size) // _ALIGNMENT) * _ALIGNMENT)
            offsets[index] = offset
        total = max((offset + self._sizes[index] for index, offset in offsets.items()), default=0)
        return [offsets[index] for index in range(never)], total


class Recorder:
    """Replaces the `KernelSet` during a pass: calls kernels and records the calls.

    offsets: of the pass's results in `memory`.
    """

    def __init__(
        self,
        kernel_set: Any,
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        offsets: list[int],
        memory: Tensor,
    ) -> None:
        self._set = kernel_set
        self._max_tokens = max_tokens
        assert batch.outputs is not None
        self._program = kernel_set.begin_program(*_step(token_ids, batch, batch.outputs))
        self._offsets = iter(offsets)
        self._memory = memory
        self._calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        call = getattr(self._set, name)
        add = getattr(self._program, name, None)
        if add is None:
            raise NotRecordableError(name)

        def call_and_add(*args: Any) -> None:
            call(*args)
            add(*args)
            self._calls.append(name)

        return call_and_add

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return planned memory."""
        offset = next(self._offsets)
        return self._memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def finish(self, hidden: Tensor) -> RecordedForward:
        """Return the recording."""
        first = hidden.data_ptr() - self._memory.data_ptr()
        rows = self._memory[first : first + self._max_tokens * hidden[0].nbytes]
        result = rows.view(hidden.dtype).view(self._max_tokens, -1)
        return RecordedForward(self._set, self._program, tuple(self._calls), result)


class RecordedForward:
    """A recorded forward pass over one KV cache: (token ids, batch) -> hidden states of output rows.

    The next call overwrites the result.
    """

    def __init__(self, kernel_set: Any, program: Any, calls: tuple[str, ...], result: Tensor) -> None:
        self.calls = calls
        self._set = kernel_set
        self._program = program
        self._result = result  # keeps the program's memory alive
        self._all_rows = torch.arange(result.shape[0])
        self._takes_rows = "take_rows" in calls
        self._nanoseconds: Tensor | None = None

    @property
    def max_tokens(self) -> int:
        """Rows of the largest step."""
        return self._result.shape[0]

    def measure_calls(self) -> Tensor:
        """Return int64 [calls]. Later steps add each call's nanoseconds."""
        self._nanoseconds = torch.zeros(len(self.calls), dtype=torch.int64)
        return self._nanoseconds

    def __call__(self, token_ids: Tensor, batch: AttentionBatch) -> Tensor:
        """Compute a step."""
        assert token_ids.is_contiguous()
        assert token_ids.shape[0] <= self.max_tokens
        outputs = batch.outputs
        assert outputs is None or self._takes_rows
        if outputs is None:
            outputs = OutputRows(self._all_rows[: token_ids.shape[0]], batch)
        nanoseconds = 0 if self._nanoseconds is None else self._nanoseconds.data_ptr()
        self._set.run(self._program, *_step(token_ids, batch, outputs), nanoseconds)
        return self._result[: outputs.rows.shape[0]]


def with_all_rows(batch: AttentionBatch) -> AttentionBatch:
    """Return the batch with all rows as outputs, in copies."""
    rows = torch.arange(batch.positions.shape[0])
    return replace(batch, outputs=OutputRows(rows, _copy(batch)))


def _copy(batch: AttentionBatch) -> AttentionBatch:
    names = ("query_start", "seq_lens", "block_tables", "positions", "slot_mapping")
    copies = {name: getattr(batch, name).clone() for name in names}
    return replace(batch, outputs=None, more_groups=tuple(map(_copy, batch.more_groups)), **copies)


def _step(token_ids: Tensor, batch: AttentionBatch, outputs: OutputRows) -> tuple[Any, ...]:
    """See csrc/arguments.h's StepArgs."""
    return (
        token_ids.data_ptr(),
        token_ids.shape[0],
        _arrays_of_groups(batch),
        outputs.rows.data_ptr(),
        outputs.rows.shape[0],
        _arrays_of_groups(outputs.attention),
        state_arrays(batch.states),
    )


def _arrays_of_groups(batch: AttentionBatch) -> list[tuple[int, ...]]:
    return [_arrays(batch), *map(_arrays, batch.more_groups)]


def _arrays(batch: AttentionBatch) -> tuple[int, ...]:
    """See csrc/arguments.h's BatchArgs."""
    return (
        batch.positions.data_ptr(),
        batch.slot_mapping.data_ptr(),
        batch.query_start.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.stride(0),
        batch.seq_lens.shape[0],
    )


class _ViewsOnly(TorchFunctionMode):
    """Raises `NotRecordableError` if torch computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", str(func))
        if name not in _VIEWS and name not in _QUESTIONS and not (name == "__getitem__" and _is_plain(args[1])):
            raise NotRecordableError(name)
        return func(*args, **(kwargs or {}))


def _is_plain(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, int | slice) for part in parts)
