"""Which decode steps become graphs, and the memory that is set aside for these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.kernels.interface import DecodePlan
from octavo.worker.memory import forward_bytes, kernel_scratch_bytes

if TYPE_CHECKING:
    import torch

    from octavo.config import DeviceConfig
    from octavo.kernels.interface import Kernels
    from octavo.models.architecture import Architecture

MOST_ROWS = 512  # of a graph, unless more are asked for: the launches of larger steps take less than what they compute
# What a driver keeps of a launch is not told: an estimate, held against what is measured as graphs are captured.
BYTES_PER_LAYER = 512 << 10
_SPARE_BYTES = 32 << 20  # torch's allocator takes pieces of up to 20 MiB


def capture_sizes(config: DeviceConfig, device: torch.device, kernels: Kernels, max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of sequences whose decode steps are captured, ascending; none where there are no graphs."""
    asked = config.max_cudagraph_capture_size
    if not kernels.captures_graphs or config.enforce_eager or (asked is None and device.type != "cuda"):
        return ()
    most = min(max_num_seqs, MOST_ROWS if asked is None else asked)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, most, 16)]
    return (*(size for size in steps if size < most), most) if most else ()


def make_decode_plan(
    architecture: Architecture,
    kernels: Kernels,
    sizes: tuple[int, ...],
    *,
    dtype: str,
    max_model_len: int,
    block_size: int,
    num_scratch_blocks: int,
) -> DecodePlan | None:
    """Return the plan of graphs of these sizes, or None for none.

    dtype: of the activations. num_scratch_blocks: of a request, behind those of its own.
    Counted are the inputs and results of the largest, what it computes in between, which the others use again, and
    each graph's launches.
    """
    if not sizes:
        return None
    most, table_width = sizes[-1], -(-max_model_len // block_size) + num_scratch_blocks
    of_row = 2 * (4 * table_width + 8) + 24 + 4 * architecture.hidden_size
    in_between = forward_bytes(architecture, most, dtype) + kernel_scratch_bytes(
        architecture, kernels, max_seq_len=max_model_len, max_tokens=most
    )
    launches = len(sizes) * len(architecture.layers) * BYTES_PER_LAYER
    return DecodePlan(sizes, table_width, most * of_row + in_between + launches + _SPARE_BYTES)
