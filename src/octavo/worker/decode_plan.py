"""Plans which decode graphs to capture."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from octavo.kernels.interface import DecodePlan
from octavo.models.architecture import DTYPE_BYTES
from octavo.worker.memory import forward_bytes, kernel_scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from octavo.config import DeviceConfig
    from octavo.models.architecture import Architecture
    from octavo.models.layers import CausalLM

logger = logging.getLogger(__name__)
MOST_ROWS = 512  # larger steps take longer to compute than to launch
BYTES_PER_LAYER = 512 << 10  # of one graph; estimated, because drivers do not report it
_SPARE_BYTES = 32 << 20  # margin; torch allocates up to 20 MiB


def make_decode_plan(
    model: CausalLM,
    config: DeviceConfig,
    device: torch.device,
    *,
    num_rows: Sequence[int],
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> DecodePlan | None:
    """Return the plan, or None if no graphs are captured.

    num_rows: Ascending. For each number, graphs are captured for steps that have on average at most this many rows per
        request.
    """
    sizes = {rows: found for rows in num_rows if (found := _sizes(config, device, max_num_seqs, rows))}
    architecture = model.architecture
    experts = [weights for each in model.experts for weights in each.groups]
    is_plain = architecture.num_position_dims == 1 and len(architecture.attentions) == len(architecture.layers)
    if sizes and architecture.tables:
        logger.info("no decode graphs are captured: each step reads per-layer embeddings on the host")
    if sizes and architecture.kv_layout.states:
        logger.info("no decode graphs are captured: recurrent layers do not support them yet")
    if not sizes or architecture.tables or not is_plain or not model.kernels.captures_graphs(experts):
        return None
    table_width, dtype = -(-max_model_len // block_size), str(model.dtype).removeprefix("torch.")
    most_seqs = max(of_rows[-1] for of_rows in sizes.values())
    most_rows = max(rows * of_rows[-1] for rows, of_rows in sizes.items())
    in_between = forward_bytes(architecture, most_rows, dtype) + kernel_scratch_bytes(
        architecture, model.kernels, max_seq_len=max_model_len, max_tokens=most_rows
    )
    kept = kept_bytes(architecture, most_seqs, most_rows, table_width, dtype)
    launches = sum(map(len, sizes.values())) * len(architecture.layers) * BYTES_PER_LAYER
    return DecodePlan(sizes, table_width, kept + in_between + launches + _SPARE_BYTES)


def kept_bytes(architecture: Architecture, num_seqs: int, num_rows: int, table_width: int, dtype: str) -> int:
    """Return the bytes of graphs' inputs and outputs."""
    num_groups = len(architecture.kv_layout.kv_groups)
    of_sequence = 4 + num_groups * 4 * table_width
    of_row = 8 + 8 + num_groups * 8 + architecture.hidden_size * DTYPE_BYTES[dtype]
    return num_seqs * of_sequence + num_rows * of_row + 4 * (num_seqs + 1)


def _sizes(config: DeviceConfig, device: torch.device, max_num_seqs: int, num_rows: int) -> tuple[int, ...]:
    configured = config.max_cudagraph_capture_size
    if config.enforce_eager or (configured is None and device.type != "cuda"):
        return ()
    most = min(max_num_seqs, MOST_ROWS // num_rows if configured is None else configured)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, most, 16)]
    return (*(size for size in steps if size < most), most) if most else ()
