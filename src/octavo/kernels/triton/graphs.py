"""CUDA graphs: captured launches that one call repeats.

Input memory must not be freed. Launches must not depend on its content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class CaptureError(RuntimeError):
    """Capture or launch failed."""


class GraphPool(Protocol):
    """Captures graphs that share memory of intermediate results: only one may run at a time."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `run`, which must have run before. Return a function that repeats the launches.

        Capturing may execute the launches. Raises `RuntimeError`, on a GPU `CaptureError`.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of results and launches."""
        ...


class CudaGraphPool:
    """Graphs of CUDA or HIP."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # captures on one stream share memory

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `GraphPool`. Launches once for the driver's allocations."""
        before = self._memory()
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local", because KV transfers may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
            graph.replay()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        after = self._memory()
        self.num_bytes += max(after[0] - before[0], before[1] - after[1], 0)
        return graph.replay

    def _memory(self) -> tuple[int, int]:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]
