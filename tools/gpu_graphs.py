"""Decode graphs on a device: their bits compared with launching kernel by kernel, their time and their memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_device import BLOCK_SIZE
from gpu_engine import free, make_engine, random_model

if TYPE_CHECKING:
    from gpu_device import Check, Entries

    from octavo.kernels.triton.decode_graphs import DecodeGraphs
    from octavo.worker.model_runner import ModelRunner

_COUNTS = (1, 2, 3, 17, 64, 100, 255)  # numbers of sequences in the compared steps
_ROWS_ALONE = 4  # rows of each step that are also computed alone


def graphs(check: Check, entries: Entries) -> None:
    """Measure the memory, exactness and step time of graphs for a model of a real shape, compared with no graphs.

    Times are those of the forward pass, without the engine's own work and without sampling.
    """
    free()
    engine = make_engine(check, random_model(check), dry_graphs=2)
    executor: Any = engine.core.executor
    runner: ModelRunner = executor.worker.runner
    captured: Any = runner.forward_pass.recorded  # `DecodeGraphs`, of these kernels
    if captured is None:
        raise RuntimeError("no graphs were captured; the log says why")
    generator = torch.Generator(check.device).manual_seed(0)
    for memory in runner.kv_cache.memory:
        memory.normal_(generator=generator)
    num_blocks = runner.kv_cache.num_blocks
    widest = min(runner.batch.block_tables[0].shape[1], 3 if check.is_dry else num_blocks)
    entries.add("memory", lambda: {"sizes": captured.sizes[1], "num_bytes": captured.num_bytes})
    for count in (2,) if check.is_dry else _COUNTS:
        if count <= captured.sizes[1][-1]:
            longest = min(widest, num_blocks // count) * BLOCK_SIZE
            entries.add(f"bits of {count}", partial(_bits, check, captured, count, longest))
    for count, context in check.sizes.decodes:
        blocks = -(-context // BLOCK_SIZE)
        if count <= captured.sizes[1][-1] and blocks <= widest and count * blocks <= num_blocks:
            entries.add(f"step of {count} at {context}", partial(_times, check, captured, count, context))
    engine.shutdown()


def _step(check: Check, lengths: list[int]) -> tuple[torch.Tensor, Any]:
    tables = check.tables(len(lengths), max(lengths))
    batch = check.batch([(length - 1, length) for length in lengths], tables)
    token_ids = torch.arange(len(lengths), device=check.device) + 5
    return token_ids, batch


def _bits(check: Check, captured: DecodeGraphs, count: int, longest: int) -> dict[str, Any]:
    """Compare steps of sequences of many lengths, up to `longest`, with and without graphs, and rows alone."""
    lengths = [1 + (index * 389 + longest - 1) % longest for index in range(count)]
    token_ids, batch = _step(check, lengths)
    with torch.inference_mode():
        by_graph = captured(token_ids, batch).clone()
        one_by_one = captured.forward(token_ids, batch)
        differ = [row for row in range(count) if not torch.equal(by_graph[row], one_by_one[row])]
        for row in range(min(count, 1 if check.is_dry else _ROWS_ALONE)):
            alone = captured(token_ids[row : row + 1], _row(batch, row))
            if not torch.equal(alone[0], by_graph[row]):
                differ.append(row)
    return {"is_equal": not differ} | ({"rows_that_differ": differ[:10]} if differ else {})


def _row(batch: Any, row: int) -> Any:
    return type(batch)(
        batch.query_start[:2],
        batch.seq_lens[row : row + 1],
        batch.block_tables[row : row + 1].contiguous(),
        batch.positions[row : row + 1],
        batch.slot_mapping[row : row + 1],
        batch.block_size,
    )


def _times(check: Check, captured: DecodeGraphs, count: int, context: int) -> dict[str, float]:
    step = _step(check, [context] * count)
    with torch.inference_mode():
        with_graph = check.seconds(lambda: captured(*step))
        without = check.seconds(lambda: captured.forward(*step))
    return {"us": with_graph * 1e6, "us_one_by_one": without * 1e6, "faster": without / with_graph}
