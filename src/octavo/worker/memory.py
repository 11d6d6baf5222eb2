"""Computes memory sizes from shapes."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.errors import ConfigError
from octavo.kernels.machine import cgroup_folders, read_lines
from octavo.models.architecture import DTYPE_BYTES
from octavo.worker.kv_plan import KVPlan, KVSize, check_kv_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.config import CacheConfig, ResolvedSchedulerConfig
    from octavo.kernels.interface import Kernels
    from octavo.models.architecture import Architecture

DEFAULT_KV_CACHE_BYTES = 4 << 30
PROMPT_LOGPROBS_SLICE_ROWS = 32
_UNLIMITED = 1 << 60


def block_bytes(architecture: Architecture, block_size: int, kv_dtype: str) -> int:
    """Return a KV block's bytes over all layers. Raises `ConfigError` for an unsupported `kv_dtype`."""
    check_kv_dtype(architecture, kv_dtype)
    return sum(architecture.kv_layout.block_bytes(block_size, kv_dtype))


def kernel_scratch_bytes(architecture: Architecture, kernels: Kernels, *, max_seq_len: int, max_tokens: int) -> int:
    """See `Kernels.scratch_bytes`."""
    attentions = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in architecture.attentions}
    needed = (
        kernels.scratch_bytes(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=architecture.vocab_size,
            max_seq_len=max_seq_len,
            max_tokens=max_tokens,
        )
        for num_heads, num_kv_heads, head_dim in attentions
    )
    return max(needed, default=0)


def activation_bytes(architecture: Architecture, num_tokens: int, num_logits_rows: int, dtype: str) -> int:
    """Return an upper bound of a step's bytes without weights and KV.

    The peak is in attention, or in an MLP: residual, hidden, gate, up, their product and a float32 copy. The sampler
    adds three float32 copies of logits.
    """
    of_logits = max(num_logits_rows, PROMPT_LOGPROBS_SLICE_ROWS) * 3 * 4 * architecture.vocab_size
    return forward_bytes(architecture, num_tokens, dtype) + of_logits


def forward_bytes(architecture: Architecture, num_tokens: int, dtype: str) -> int:
    """Return activations' bytes."""
    width = DTYPE_BYTES[dtype]
    hidden, inner = architecture.hidden_size, max(layer.mlp.intermediate_size for layer in architecture.layers)
    mixed = max(layer.attention.width for layer in architecture.layers)
    inputs = 0 if architecture.embeddings is None else 3 * architecture.embeddings.total_width
    return num_tokens * (width * (3 * hidden + max(3 * inner, 2 * mixed) + inputs) + 4 * max(hidden, inner))


def free_bytes(device: torch.device) -> int:
    """Return the device's free bytes. On a CPU, cgroups' limits apply."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_machine_free_bytes(), _cgroup_free_bytes())


def largest_batch(
    architecture: Architecture,
    cache_config: CacheConfig,
    scheduler_config: ResolvedSchedulerConfig,
    *,
    dtype: str,
    kv_dtype: str,
    device: torch.device,
    scratch_bytes: Callable[[int], int],
    num_speculative_tokens: int = 0,
    draft_block_bytes: int = 0,
    store_bytes: int = 0,
    num_ranks: int = 1,
) -> int:
    """Return max_num_batched_tokens, or fewer (at least max_num_seqs) if the step and the KV cache would not fit.

    If the cache's size is not configured, the cache must hold the step's tokens.
    scratch_bytes(num_tokens): bytes of kernels, drafting and graphs. store_bytes: bytes of KV stores on the device.
    num_ranks: processes that share the free memory.
    """
    most, least = scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs
    configured_blocks, configured_bytes = cache_config.num_gpu_blocks, cache_config.kv_cache_memory_bytes
    free = _free_for_step(device, cache_config, store_bytes, num_ranks)
    budget = free if cache_config.sets_memory else _share(free, device)

    def is_too_large(num_tokens: int) -> bool:
        plan = KVPlan.of(
            architecture,
            block_size=cache_config.block_size,
            kv_dtype=kv_dtype,
            max_num_seqs=least,
            max_num_batched_tokens=num_tokens,
            draft_block_bytes=draft_block_bytes,
            dtype=dtype,
            saves_states=cache_config.enable_prefix_caching,
        )
        if configured_blocks is not None:
            kv_bytes = plan.num_bytes(plan.with_blocks(configured_blocks))
        elif configured_bytes is not None:
            kv_bytes = configured_bytes
        else:
            kv_bytes = -(-num_tokens // cache_config.block_size) * plan.bytes_of_all
        num_logits_rows = min(num_tokens, least * (1 + num_speculative_tokens))
        step = activation_bytes(architecture, num_tokens, num_logits_rows, dtype) + scratch_bytes(num_tokens)
        return step + kv_bytes > budget

    return least + bisect_left(range(least + 1, most + 1), True, key=is_too_large)


def _free_for_step(device: torch.device, cache_config: CacheConfig, store_bytes: int, num_ranks: int) -> int:
    return (
        free_bytes(device) // num_ranks - store_bytes - (cache_config.swap_space_bytes if device.type == "cpu" else 0)
    )


def _share(free: int, device: torch.device) -> int:
    return int(0.9 * free) if device.type == "cuda" else free // 2


def decide_kv_size(
    architecture: Architecture,
    cache_config: CacheConfig,
    scheduler_config: ResolvedSchedulerConfig,
    *,
    dtype: str,
    kv_dtype: str,
    max_model_len: int,
    device: torch.device,
    scratch_bytes: int = 0,
    num_speculative_tokens: int = 0,
    draft_block_bytes: int = 0,
    store_bytes: int = 0,
    num_ranks: int = 1,
) -> KVSize:
    """Return each KV group's number of blocks. Call this after weights are loaded. See `largest_batch` for arguments.

    store_bytes and, on a CPU, swap_space_bytes are reserved first. num_gpu_blocks or kv_cache_memory_bytes decides, if
    set. Otherwise the cache gets half of the free memory (90 % on a GPU) minus activations and scratch_bytes, but at
    most max_num_seqs full sequences and, on a CPU, 4 GiB for all ranks. Raises `ConfigError` if no block fits or memory
    is too small.
    """
    plan = KVPlan.of(
        architecture,
        block_size=cache_config.block_size,
        kv_dtype=kv_dtype,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        draft_block_bytes=draft_block_bytes,
        dtype=dtype,
        saves_states=cache_config.enable_prefix_caching,
    )
    longest = -(-max_model_len // cache_config.block_size)
    free = _free_for_step(device, cache_config, store_bytes, num_ranks)
    if cache_config.num_gpu_blocks is not None:
        size, reason = plan.with_blocks(cache_config.num_gpu_blocks), "num_gpu_blocks"
    elif cache_config.kv_cache_memory_bytes is not None:
        configured = cache_config.kv_cache_memory_bytes
        most_blocks = (
            configured // plan.block_bytes[0] if plan.block_bytes[0] else plan.num_usable_blocks(configured, longest)
        )
        size, reason = plan.within(configured, most_blocks), "kv_cache_memory_bytes"
    else:
        num_tokens = scheduler_config.max_num_batched_tokens
        num_logits_rows = min(num_tokens, scheduler_config.max_num_seqs * (1 + num_speculative_tokens))
        activations = activation_bytes(architecture, num_tokens, num_logits_rows, dtype)
        budget = _share(free, device) - activations - scratch_bytes
        if device.type == "cpu":
            budget = min(DEFAULT_KV_CACHE_BYTES // num_ranks, budget)
        budget = max(budget, 0)
        size, reason = plan.within(budget, plan.num_usable_blocks(budget, longest)), "free memory"
    if size.num_blocks < 1:
        raise ConfigError(
            f"{reason} leaves no space for one KV block of {plan.bytes_of_all:,} bytes "
            f"({free:,} bytes are free); increase it, or choose a smaller block_size or kv_cache_dtype int8"
        )
    num_bytes = plan.num_bytes(size)
    if num_bytes > free:
        raise ConfigError(f"the KV cache would take {num_bytes:,} bytes ({reason}), but only {free:,} are free")
    return size


def decide_host_size(
    architecture: Architecture,
    cache_config: CacheConfig,
    *,
    kv_dtype: str,
    draft_block_bytes: int = 0,
    store_bytes: int = 0,
    num_ranks: int = 1,
    state_bytes: int = 0,
) -> tuple[int, int]:
    """Return how many blocks and recurrent states fit in `swap_space_bytes`, of which states get half.

    state_bytes: bytes of a sequence's recurrent states. Raises `ConfigError` if too little is free.
    """
    wanted, free = cache_config.swap_space_bytes, free_bytes(torch.device("cpu")) // num_ranks
    if wanted + store_bytes > free:
        of_stores = f" and KV stores take {store_bytes:,} bytes" if store_bytes else ""
        raise ConfigError(f"swap_space_bytes is {wanted:,}{of_stores}, but only {free:,} bytes of host memory are free")
    of_block = block_bytes(architecture, cache_config.block_size, kv_dtype) + draft_block_bytes
    if not state_bytes:
        return wanted // of_block, 0
    return wanted // 2 // of_block, wanted // 2 // state_bytes


def _machine_free_bytes() -> int:
    for line in read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _cgroup_free_bytes() -> int:
    """Return the least free bytes of cgroups. Inactive page cache counts as free."""
    free = _UNLIMITED
    for limit_file, usage_file, stat_file in _cgroup_files():
        limit = "".join(read_lines(limit_file)).strip()
        usage = "".join(read_lines(usage_file)).strip()
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split()[:2] for line in read_lines(stat_file) if len(line.split()) == 2)
            reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
            free = min(free, max(int(limit) - int(usage) + reclaimable, 0))
    return free


def _cgroup_files() -> list[tuple[Path, Path, Path]]:
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    return [
        (folder / limit, folder / use, folder / "memory.stat")
        for folder in cgroup_folders("memory")
        for limit, use in names
    ]
