"""CUDA graphs: the launches of a forward pass, captured once, and run again with one call.

A graph keeps addresses and what was launched. So what it reads stands in memory that stays, and nothing that is
launched may follow from what stands there: `octavo.kernels.triton.decode_graphs` sees to both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class CaptureError(RuntimeError):
    """The driver captured no graph, or could not launch it."""


class GraphPool(Protocol):
    """Captures graphs that share the memory of what they compute in between: one of them runs at a time."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Note what `run` launches, which has run once before; return what launches it again.

        Whether it is computed now is open. Raises `RuntimeError` for what no graph can hold: a value of the device
        that is read on the host, say; on a GPU it is a `CaptureError`, as is whatever else the driver refuses.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that the graphs captured so far take: what they compute in between, and their launches."""
        ...


class CudaGraphPool:
    """Graphs of the CUDA or HIP runtime."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one for all captures: else they would not share memory

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture, launch once so that the driver takes what it needs, and measure what both took."""
        before = self._memory()
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that move KV may allocate meanwhile: what they do is none of this graph's.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
            graph.replay()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        after = self._memory()
        self.num_bytes += max(after[0] - before[0], before[1] - after[1], 0)
        return graph.replay

    def _memory(self) -> tuple[int, int]:
        """Return bytes that torch's allocator holds, and those that are free on the device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what is cached of other work would be given back during the capture
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]
