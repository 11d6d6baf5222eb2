"""The life of a rank other than rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

import torch

from octavo import __version__
from octavo.errors import ConfigError, OctavoError
from octavo.kernels import create_kernels
from octavo.kernels.ranked import RankGroup
from octavo.models.loader import load_model, open_packed_cache
from octavo.models.share import Share
from octavo.ranks import channel, measured_rank, messages
from octavo.ranks.following_runner import FollowingRunner
from octavo.ranks.shared_kv import SharedKV
from octavo.runtime import logs
from octavo.startup.launch import ServedModel
from octavo.worker.draft_model import scratch_blocks
from octavo.worker.fingerprint import weights_checksum
from octavo.worker.forward_pass import ForwardPass
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_cache import PagedKVCache

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from torch import Tensor

    from octavo.kernels.interface import Kernels
    from octavo.models.layers import CausalLM

logger = logging.getLogger(__name__)
_CPU = torch.device("cpu")


def run(end: socket.socket) -> None:
    """Serve rank 0 until it closes the socket, or measure the machine."""
    torch.set_num_threads(1)
    with contextlib.suppress(channel.ClosedError):
        launch = messages.decode_to_rank(channel.receive(end))
        if isinstance(launch, messages.Measure):
            measured_rank.measure(end, launch)
            return
        assert isinstance(launch, messages.Launch)
        logs.configure(launch.log_level, launch.log_format, process=f"rank {launch.rank}")
        os.sched_setaffinity(0, launch.cores)
        serve(end, launch)


def serve(end: socket.socket, launch: messages.Launch) -> None:
    """Load a rank's share, and compute steps. Raises `ClosedError` when rank 0 closes the socket."""
    timeout_s = launch.config.device.rank_timeout_s
    group = RankGroup(launch.memory, launch.rank, launch.count, timeout_s, launch.cores)
    try:
        runner, ready = _prepare(end, launch, group)
    except OctavoError as error:
        channel.send(end, messages.encode(messages.Failed(str(error))))
        return
    channel.send(end, messages.encode(ready))
    with torch.inference_mode():
        while True:
            message = messages.decode_to_rank(channel.receive(end))
            assert isinstance(message, messages.Step | messages.Draft)
            try:
                runner.compute(message)
            except Exception as error:
                if group.failed_rank is None:
                    logger.exception("a step failed")
                    group.fail(launch.rank)
                else:  # another rank failed first
                    logger.error("this rank stops: %s", error)  # noqa: TRY400
                return


def _prepare(end: socket.socket, launch: messages.Launch, group: RankGroup) -> tuple[FollowingRunner, messages.Ready]:
    if launch.version != __version__:
        raise ConfigError(f"rank {launch.rank} is octavo {__version__}, but rank 0 is {launch.version}: restart")
    config, model_config = launch.config, launch.config.model
    kernels = create_kernels(_CPU, config.device.kernels, launch.num_threads, config.device.isa, group)
    served = ServedModel.find(model_config)
    load = partial(
        load_model,
        served.checkpoint.weights,
        served.architecture.split(Share(launch.rank, launch.count, config.device.enable_expert_parallel)),
        kernels,
        dtype=launch.dtype,
        device=_CPU,
        max_model_len=served.max_model_len,
        load_format=model_config.load_format,
        seed=model_config.seed,
        packed_cache=open_packed_cache(model_config.packed_cache_bytes),
    )
    model = load(quantization=model_config.quantization, group_size=model_config.group_size)
    draft = None if launch.draft is None else load(quantization=launch.draft)
    channel.send(end, messages.encode(messages.Loaded(kernels.identity, messages.model_digest(served.architecture))))
    sizes = messages.decode_to_rank(channel.receive(end))
    assert isinstance(sizes, messages.Allocate)
    cache, note_copied = _allocate_kv(model, kernels, sizes, launch.kv_memory, config.cache.block_size)
    runner = _make_runner(model, draft, kernels, cache, sizes, served.max_model_len, note_copied)
    checksums = [weights_checksum(each, launch.num_threads) if each is not None else "" for each in (model, draft)]
    return runner, messages.Ready(*checksums)


def _allocate_kv(
    model: CausalLM, kernels: Kernels, sizes: messages.Allocate, memory: int | None, block_size: int
) -> tuple[PagedKVCache, Callable[[int], None]]:
    layout, num_scratch_blocks = model.architecture.kv_layout, sizes.max_num_seqs * sizes.num_scratch_blocks
    allocate: Callable[[int], Tensor] = kernels.allocate
    note_copied: Callable[[int], None] = _note_nothing
    if memory is not None:
        num_blocks = [count + num_scratch_blocks for count in sizes.num_blocks]
        state_dtype = str(model.dtype).removeprefix("torch.")
        shared = SharedKV.of(memory, layout, num_blocks, block_size, sizes.kv_dtype, state_dtype)
        allocate, note_copied = shared.allocate, shared.note_copied
    cache = PagedKVCache(
        layout,
        num_blocks=sizes.num_blocks,
        block_size=block_size,
        dtype=getattr(torch, sizes.kv_dtype),
        device=_CPU,
        num_host_blocks=sizes.num_host_blocks,
        num_scratch_blocks=num_scratch_blocks,
        num_kept_rows=sizes.num_kept_rows,
        num_host_states=sizes.num_host_states,
        state_dtype=model.dtype,
        allocate=allocate,
    )
    return cache, note_copied


def _make_runner(
    model: CausalLM,
    draft: CausalLM | None,
    kernels: Kernels,
    cache: PagedKVCache,
    sizes: messages.Allocate,
    max_model_len: int,
    note_copied: Callable[[int], None],
) -> FollowingRunner:
    batch = InputBatch(
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=max_model_len,
        block_size=cache.block_size,
        num_scratch_blocks=sizes.num_scratch_blocks,
        num_groups=len(cache.groups),
        num_position_dims=model.architecture.num_position_dims,
        num_kept_rows=cache.num_kept_rows // sizes.max_num_seqs,
    )
    forward = ForwardPass(model, kernels, cache, sizes.max_num_batched_tokens)
    if draft is None:
        return FollowingRunner(forward, batch, note_copied)
    drafting = ForwardPass(draft, kernels, cache, sizes.max_num_batched_tokens)
    return FollowingRunner(forward, batch, note_copied, drafting, scratch_blocks(cache, sizes.max_num_seqs))


def _note_nothing(_num_steps: int) -> None:
    pass
