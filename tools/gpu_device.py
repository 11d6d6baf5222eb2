"""Shared by the stages of `tools/gpu_check.py`: the device, sizes, clocks, attention batches, and results."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from interpreted_graphs import InterpretedGraphPool
from triton.testing import do_bench

from octavo.kernels import AttentionBatch, SamplingRows, create_kernels
from octavo.kernels.block_weight import random_blocks
from octavo.kernels.quantization import ROUNDED_KV_DTYPES, kv_scales
from octavo.kernels.triton.backend import TritonKernels
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.worker.kv_cache import PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from octavo.kernels import Kernels
    from octavo.kernels.block_weight import BlockKind, BlockWeight

BLOCK_SIZE = 16
BEGUN = {"error": "the process ended, or ran out of time, while this was measured"}
DEVICE = "device"  # the entry of a device that was lost
_WARM_MS, _MEASURED_MS = 20, 80  # of each operation that is timed


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One kind of attention. group: query heads per KV head. kv_dtype: of quantized KV, or None.

    value_dim: of latents, which are the first values of keys, or None.
    """

    group: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None
    has_sinks: bool = False
    value_dim: int | None = None

    def views(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, given two caches of the width of keys."""
        return k_cache, v_cache if self.value_dim is None else k_cache[..., : self.value_dim]

    def name(self, dtype: torch.dtype) -> str:
        """Return the name of its entry."""
        options = {
            "window": self.window,
            "soft cap": self.softcap,
            "KV": self.kv_dtype,
            "sinks": self.has_sinks or None,
            "latents": self.value_dim,
        }
        said = [f"{name} {value}" for name, value in options.items() if value is not None]
        return " ".join([f"paged_attention {dtype} group {self.group} head_dim {self.head_dim}", *said])


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all stages: large enough for meaningful figures on a GPU, or small enough for an interpreter.

    rows: row counts of timed steps. exact_rows: row counts of steps that must give a row the same bits. layers:
    (in_features, out_features) of products. decodes: (sequences, positions of each). prefills: (tokens, positions).
    prompt: tokens of a prompt that is cut into chunks. attention, dtypes: the cases tried with it. requests,
    longest_prompt, new_tokens: for the engine's stages. stream_tokens: of the single stream. requests_at_once:
    for nano-vllm's benchmark. max_num_seqs: of an engine; None for the default.
    """

    rows: tuple[int, ...]
    exact_rows: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    vocab: int
    peak_values: int
    prompt: int
    chunks: tuple[int, ...]
    attention: tuple[AttentionCase, ...]
    dtypes: tuple[torch.dtype, ...]
    requests: int
    longest_prompt: int
    new_tokens: int
    stream_tokens: int
    requests_at_once: int
    max_num_seqs: int | None = None


ON_GPU = Sizes(
    rows=(1, 64, 256, 4096),
    exact_rows=(1, 2, 17, 63, 64, 65, 300, 1030),
    layers=((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (4096, 6144), (12288, 4096), (1024, 151936)),
    decodes=((1, 1024), (64, 1024), (256, 1024), (1, 8192), (64, 8192), (1, 32768), (16, 32768), (64, 32768)),
    prefills=((2048, 2048), (8192, 8192), (2048, 32768)),
    vocab=151936,
    peak_values=1 << 28,
    prompt=700,
    chunks=(7, 64, 129),
    attention=(
        AttentionCase(1, 64),
        AttentionCase(7, 64, window=100, softcap=2.0, kv_dtype=torch.int8),
        AttentionCase(7, 128, window=100),
        AttentionCase(8, 128, kv_dtype=torch.int8),
        AttentionCase(8, 128, kv_dtype=torch.float8_e4m3fn),
        AttentionCase(8, 256, softcap=2.0),
        AttentionCase(8, 64, window=128, has_sinks=True),
        AttentionCase(8, 512),
        AttentionCase(8, 512, kv_dtype=torch.int8),
        AttentionCase(16, 576, value_dim=512),
        AttentionCase(16, 576, kv_dtype=torch.float8_e4m3fn, value_dim=512),
    ),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    requests=20,
    longest_prompt=700,
    new_tokens=32,
    stream_tokens=256,
    requests_at_once=256,
)
DRY = Sizes(
    rows=(1,),
    exact_rows=(1, 5),
    layers=((530, 3),),
    decodes=((2, 40),),
    prefills=((3, 20),),
    vocab=70,
    peak_values=1 << 10,
    prompt=70,
    chunks=(64,),
    attention=(AttentionCase(1, 64, window=20, softcap=2.0, kv_dtype=torch.int8), AttentionCase(2, 24, value_dim=16)),
    dtypes=(torch.float32,),
    requests=2,
    longest_prompt=8,
    new_tokens=2,
    stream_tokens=4,
    requests_at_once=2,
    max_num_seqs=2,
)


@dataclass(slots=True)
class Entries:
    """The entries of a stage by operation. Each one is reported before and after it is measured.

    report: called with each entry. skip: names of entries that are not measured again. part: (index, count): of `count`
    processes that divide the stage among them, this one measures every `count`-th entry.
    """

    device: torch.device
    report: Callable[[dict[str, Any]], None]
    skip: frozenset[str] = frozenset()
    part: tuple[int, int] = (0, 1)
    found: dict[str, Any] = field(default_factory=dict)
    is_lost: bool = False
    _num_added: int = 0

    def add(self, name: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure one operation. An error becomes its entry. After the loss of the device no more is measured.

        The entry is `BEGUN` while it is measured, so an operation that ends the process is known by name.
        """
        index, self._num_added = self._num_added, self._num_added + 1
        if self.is_lost or name in self.skip or index % self.part[1] != self.part[0]:
            return
        self._put(name, BEGUN)
        try:
            self._put(name, measure())
            wait(self.device)
        except Exception as error:  # noqa: BLE001  compilers, kernels or peers may raise anything: measure the others
            self._put(name, {"error": f"{type(error).__name__}: {error}"[-2000:]})
            self._look_at_device()

    def _look_at_device(self) -> None:
        try:
            wait(self.device)
        except RuntimeError as error:  # an illegal access: every later call of this process fails
            self.is_lost = True
            self._put(DEVICE, {"error": f"lost, nothing more was measured: {error}"})

    def _put(self, name: str, entry: dict[str, Any]) -> None:
        self.found[name] = entry
        self.report({name: entry})


def wait(device: torch.device) -> None:
    """Wait until the device is idle. Raises errors of kernels."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Check:
    """The state that stages share. folder: for their files. soak_s: how long the soak stage sends requests."""

    device: torch.device
    sizes: Sizes
    folder: Path
    kernels: Kernels
    soak_s: float = 0.0

    @property
    def is_dry(self) -> bool:
        """Whether this is a dry run, which tests only the tool itself."""
        return self.device.type == "cpu"

    @property
    def device_name(self) -> str:
        """The name of the device, or `interpreter` in a dry run."""
        return "interpreter" if self.is_dry else torch.cuda.get_device_name(self.device)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
        """Return normal random numbers, the same on every device of one type."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.device, dtype=dtype)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call in seconds by the device's clock, with cold caches for its input."""
        if self.is_dry:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        return float(do_bench(call, warmup=_WARM_MS, rep=_MEASURED_MS, return_mode="median")) / 1000

    def caches(self, num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values with random numbers in all slots."""
        made = PagedKVCache(
            KVLayout((KVShape(kv_heads, head_dim),)),
            num_blocks=[num_blocks], block_size=BLOCK_SIZE, dtype=dtype, device=self.device,
        )  # fmt: skip
        generator = torch.Generator(self.device).manual_seed(3)
        k_cache, v_cache = made.layer(0)
        for cache in (k_cache, v_cache):
            if dtype in ROUNDED_KV_DTYPES:
                values = torch.randint(-127, 128, cache.shape, generator=generator, device=self.device)
                cache.copy_(values.to(torch.int8 if dtype == torch.int8 else torch.float32))
                kv_scales(cache).uniform_(0.005, 0.02, generator=generator)
            else:
                cache.normal_(generator=generator)
        return k_cache, v_cache

    def batch(self, spans: list[tuple[int, int]], tables: Tensor) -> AttentionBatch:
        """Return a batch of tokens first .. last - 1 of each sequence. tables: block tables, [num_seqs, blocks]."""
        counts = torch.tensor([0, *(last - first for first, last in spans)], device=self.device)
        starts = counts.cumsum(0).int()
        positions = torch.cat([torch.arange(first, last, device=self.device) for first, last in spans])
        sequence = torch.repeat_interleave(torch.arange(len(spans), device=self.device), starts.diff())
        slots = tables[sequence, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        lengths = torch.tensor([last for _, last in spans], dtype=torch.int32, device=self.device)
        return AttentionBatch(starts, lengths, tables, positions, slots, BLOCK_SIZE)

    def tables(self, num_seqs: int, num_positions: int) -> Tensor:
        """Return block tables of sequences that share no block, scattered over the cache."""
        blocks = -(-num_positions // BLOCK_SIZE)
        order = torch.randperm(num_seqs * blocks, generator=torch.Generator().manual_seed(5))
        return order.int().view(num_seqs, blocks).to(self.device)

    def sampling(self, count: int) -> tuple[Tensor, SamplingRows]:
        """Return logits and parameters of rows: greedy, without filters and with each of them."""
        index = torch.arange(count, device=self.device)
        rows = SamplingRows(
            temperature=torch.where(index % 4 == 0, 0.0, 0.8),
            top_k=torch.where(index % 4 == 2, 20, 0).int(),
            top_p=torch.where(index % 4 == 3, 0.9, 1.0),
            min_p=torch.zeros(count, device=self.device),
            seed=index,
            sample_index=index.int() * 0,
            position=index.int(),
        )
        return self.random(count, self.sizes.vocab, dtype=torch.float32) * 4, rows


def in_blocks(kind: BlockKind, weight: Tensor) -> list[BlockWeight]:
    """Return weights in blocks of a kind with random content."""
    return [random_blocks(torch.Generator().manual_seed(4), kind, *weight.shape).to(weight.device)]


def open_check(folder: Path, *, is_dry: bool) -> Check:
    """Return the shared state of stages on the GPU, or in Triton's interpreter for a dry run."""
    device = torch.device("cpu" if is_dry else "cuda")
    if is_dry:
        TritonKernels.graph_pool = lambda _device: InterpretedGraphPool()
    return Check(device, DRY if is_dry else ON_GPU, folder, create_kernels(device, "triton"))
