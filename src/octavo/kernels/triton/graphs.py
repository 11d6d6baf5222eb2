"""CUDA graphs: the launches of a forward pass, captured once, and run again with one call.

A graph records launches and addresses. So its inputs must be in memory that is not freed, and no launch may depend on
the content of the inputs. `octavo.kernels.triton.decode_graphs` ensures both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class CaptureError(RuntimeError):
    """The driver could not capture or launch a graph."""


class GraphPool(Protocol):
    """Captures graphs that share the memory of their intermediate results: only one of them may run at a time."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture the launches of `run`, which must have run once before; return a function that launches them again.

        Capturing may or may not compute the launches. Raises `RuntimeError` if a graph cannot hold them, for example if
        the host reads a value of the device. On a GPU this and every other refusal of the driver is a `CaptureError`.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the graphs captured so far: their intermediate results and their launches."""
        ...


class CudaGraphPool:
    """Graphs of the CUDA or HIP runtime."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # one for all captures: else they would not share memory

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture, launch once so that the driver allocates its memory, and measure the memory that both took."""
        before = self._memory()
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that move KV may allocate meanwhile; their calls are not part of this graph.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
            graph.replay()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        after = self._memory()
        self.num_bytes += max(after[0] - before[0], before[1] - after[1], 0)
        return graph.replay

    def _memory(self) -> tuple[int, int]:
        """Return the bytes that torch's allocator holds, and the free bytes of the device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # otherwise the capture would release cached memory, and the difference be wrong
        return torch.cuda.memory_reserved(self._device), torch.cuda.mem_get_info(self._device)[0]
