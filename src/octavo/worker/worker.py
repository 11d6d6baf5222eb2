"""Computes steps on one device."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from octavo.config import DEFAULT_GROUP_SIZE
from octavo.data.fingerprint import EngineFingerprint
from octavo.data.kv_groups import KVGroupSpec, RecurrentStates
from octavo.data.worker_info import KVGroupInfo, WorkerInfo
from octavo.errors import ConfigError
from octavo.kernels import create_kernels
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.machine import default_num_threads
from octavo.models.kv_layout import ROUNDED_KV
from octavo.models.loader import load_model, open_packed_cache
from octavo.speculative import create_proposer
from octavo.worker.decode_plan import make_decode_plan
from octavo.worker.device import machine_name, resolve_device, use_device
from octavo.worker.draft_model import DraftModel
from octavo.worker.fingerprint import check_tables, take_fingerprint
from octavo.worker.kv_cache import LAYOUT_VERSION, PagedKVCache
from octavo.worker.kv_plan import check_kernels_have
from octavo.worker.memory import (
    block_bytes,
    decide_host_size,
    decide_kv_size,
    free_bytes,
    kernel_scratch_bytes,
    largest_batch,
)
from octavo.worker.model_runner import ModelRunner
from octavo.worker.prefault import Prefault
from octavo.worker.stored_blocks import StoredBlocks
from octavo.worker.transfer_threads import KVTransferThreads
from octavo.worker.verification import create_verification
from octavo.worker.warm_up import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from octavo.config import CacheConfig, DeviceConfig, ResolvedSchedulerConfig, SpeculativeConfig
    from octavo.data.kv_tiers import EndedTransfer
    from octavo.data.model_output import ModelOutput
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.kernels.interface import DecodePlan
    from octavo.kv_transfer.tiers import TieredStore
    from octavo.models.architecture import Architecture
    from octavo.models.draft_checkpoint import DraftCheckpoint
    from octavo.models.kv_layout import KVLayout
    from octavo.models.layers import CausalLM
    from octavo.models.weight_source import WeightSource
    from octavo.structured_output.grammars import GrammarCompiler
    from octavo.worker.kv_plan import KVSize
    from octavo.worker.launched_step import LaunchedStep
    from octavo.worker.step_leader import StepLeader
    from octavo.worker.stored_blocks import TransferredBlocks
    from octavo.worker.transfer_threads import KVMover

logger = logging.getLogger(__name__)
WARM_UP_TOKENS = 16
ResultT = TypeVar("ResultT")


class Worker:
    """Loads a model and computes steps. Call `start`, or `load`, `plan` and `allocate`, once.

    store_bytes(block_bytes), staging_bytes(block_bytes): bytes of KV stores in host and GPU memory. leader: leads the
    other ranks, if `architecture` is one rank's share. Raises `ConfigError` if the device or kernels are missing.
    """

    def __init__(
        self,
        weights: WeightSource,
        architecture: Architecture,
        *,
        dtype: str,
        max_model_len: int,
        cache_config: CacheConfig,
        scheduler_config: ResolvedSchedulerConfig,
        device_config: DeviceConfig,
        load_format: str = "auto",
        quantization: str | None = None,
        group_size: int = DEFAULT_GROUP_SIZE,
        packed_cache_bytes: int = 0,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
        grammars: GrammarCompiler | None = None,
        speculative_config: SpeculativeConfig | None = None,
        draft_checkpoint: DraftCheckpoint | None = None,
        store_bytes: Callable[[int], int] = lambda _block_bytes: 0,
        staging_bytes: Callable[[int], int] = lambda _block_bytes: 0,
        leader: StepLeader | None = None,
    ) -> None:
        self.device = resolve_device(device_config.device)
        use_device(self.device)
        num_threads, group = device_config.num_threads, None
        if leader is not None:
            num_threads, group = leader.num_threads, leader.group
        self.kernels = create_kernels(self.device, device_config.kernels, num_threads, device_config.isa, group)
        self._leader, self._num_ranks = leader, device_config.tensor_parallel_size
        check_kernels_have(self.kernels, cache_config.kv_cache_dtype)
        if self.device.type == "cpu" and not self.kernels.has_own_threads:
            torch.set_num_threads(device_config.num_threads or default_num_threads())
        self.max_model_len, self.cache_config, self.scheduler_config = max_model_len, cache_config, scheduler_config
        self.grammars = grammars
        self.num_speculative_tokens = 0 if speculative_config is None else speculative_config.num_speculative_tokens
        self._device_config, self._speculative_config = device_config, speculative_config
        self._checkpoint = (weights, architecture)
        self._draft_checkpoint = draft_checkpoint
        self._weight_dtype = dtype
        self._quantization, self._group_size = quantization, group_size
        self._store_bytes_of, self._staging_bytes_of = store_bytes, staging_bytes
        self._load_model = partial(
            load_model,
            kernels=self.kernels,
            dtype=dtype,
            device=self.device,
            load_format=load_format,
            packed_cache=open_packed_cache(packed_cache_bytes),
            seed=seed,
            progress=progress,
        )

    def start(self) -> WorkerInfo:
        """Call `load`, `plan` and `allocate`."""
        self.load()
        info = self.plan()
        self.allocate()
        return info

    def load(self) -> None:
        """Load and pack all weights. Raises `ModelError`."""
        weights, architecture = self._checkpoint
        self.model = self._load_model(
            weights,
            architecture,
            max_model_len=self.max_model_len,
            quantization=self._quantization,
            group_size=self._group_size,
        )
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self.kv_dtype = ROUNDED_KV.get(self.cache_config.kv_cache_dtype, self.dtype)
        self.proposer = create_proposer(
            self._speculative_config,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_model_len=self.max_model_len,
        )
        self.verification = create_verification(self._speculative_config, self.kernels)
        self.draft = None if self._draft_checkpoint is None else self._load_draft(self._draft_checkpoint)
        if self._leader is not None:
            self._leader.await_loaded(self.kernels.identity)

    def plan(self) -> WorkerInfo:
        """Divide free memory between steps and KV groups. Allocates nothing.

        Lowers max_num_batched_tokens if a step would take too much memory. Raises `ConfigError` if memory is too small.
        """
        architecture = self.model.architecture
        of_block = block_bytes(architecture.whole or architecture, self.cache_config.block_size, self.kv_dtype)
        self._store_bytes = -(-self._store_bytes_of(of_block) // self._num_ranks)
        is_cpu = self.device.type == "cpu"
        self._store_bytes_on_device = self._store_bytes if is_cpu else self._staging_bytes_of(of_block)
        self._decodes = self._plan_decodes(
            self.model, num_rows=sorted({1, 1 + self.num_speculative_tokens}), max_model_len=self.max_model_len
        )
        self._take_states_that_fit()
        self._take_steps_that_fit()
        self.info = self._describe(*self._decide_num_blocks())
        return self.info

    def allocate(self) -> None:
        """Allocate KV and warm up."""
        self.runner = self._make_runner()
        self.kv_cache = self.runner.kv_cache
        if self._leader is not None:
            self._leader.allocate(self.info, self._num_scratch_blocks, self.kv_cache.num_kept_rows)
        self._on_device(lambda: warm_up(self.runner, self.info.num_warm_up_tokens))
        if self.runner.expert_tally is not None:
            self.runner.expert_tally.reset()
        if self.device.type == "cpu" and self.cache_config.sets_memory:
            for cache in self.runner.kv_caches:
                for blocks in cache.memory:
                    weakref.finalize(self, Prefault(blocks).stop)

    def start_kv_transfers(
        self, store: TieredStore, report: Callable[[EndedTransfer], None], *, num_threads: int
    ) -> KVMover:
        """Start transfers. report: called from any thread when a transfer ends."""
        blocks: TransferredBlocks = StoredBlocks(self.kv_cache)
        if self._leader is not None:
            blocks = self._leader.blocks_of_ranks(self.model.architecture, self.kv_cache)
        self.runner.kv_mover = KVTransferThreads(blocks, store, report, num_threads=num_threads)
        return self.runner.kv_mover

    def _plan_decodes(self, model: CausalLM, *, num_rows: list[int], max_model_len: int) -> DecodePlan | None:
        return make_decode_plan(
            model,
            num_rows=num_rows,
            max_model_len=max_model_len,
            config=self._device_config,
            device=self.device,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            block_size=self.cache_config.block_size,
        )

    def _describe(self, size: KVSize, host_size: tuple[int, int]) -> WorkerInfo:
        num_host_blocks, num_host_states = host_size
        architecture, block_size, draft = self.model.architecture, self.cache_config.block_size, self.draft
        layout, whole = architecture.kv_layout, (architecture.whole or architecture).kv_layout
        of_ranks = [rank.kv_layout.block_bytes(block_size, self.kv_dtype) for rank in architecture.ranks]
        groups = [
            KVGroupInfo(KVGroupSpec(group.kind, num_blocks), sum(of_group), stored_bytes)
            for group, num_blocks, stored_bytes, *of_group in zip(
                layout.kv_groups,
                size.blocks_of_groups,
                whole.block_bytes(block_size, self.kv_dtype),
                *of_ranks,
                strict=False,  # states follow
            )
        ]
        num_scratch_blocks = self._num_scratch_blocks * self.scheduler_config.max_num_seqs
        num_tokens = min(size.blocks_of_groups[: len(groups)]) * block_size
        if layout.states:
            of_all_ranks = sum(rank.kv_layout.state_bytes(self.dtype) for rank in architecture.ranks)
            spec = KVGroupSpec(RecurrentStates(), size.blocks_of_groups[-1], num_host_states)
            groups.append(KVGroupInfo(spec, of_all_ranks, whole.state_bytes(self.dtype)))
        most_tokens = self.scheduler_config.max_num_batched_tokens
        return WorkerInfo(
            device=self.device.type,
            machine=machine_name(self.device),
            kernels=self.kernels.identity,
            kernel_layout=self.kernels.layout,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            scheduler_config=self.scheduler_config,
            block_size=block_size,
            kv_groups=tuple(groups),
            num_host_blocks=num_host_blocks,
            draft_block_bytes=0 if draft is None else draft.bytes_per_block,
            kv_cache_bytes=sum((group.spec.num_blocks + num_scratch_blocks) * group.block_bytes for group in groups),
            kv_layout_version=LAYOUT_VERSION + len(groups) - 1,
            num_warm_up_tokens=min(WARM_UP_TOKENS, most_tokens, self.max_model_len, num_tokens),
            draft_summary=None if draft is None else draft.summary(size.num_blocks),
        )

    @property
    def _num_scratch_blocks(self) -> int:
        """Blocks per request, and slots per request, for drafts from the model's own KV and states."""
        return self.draft.num_scratch_blocks if self.draft is not None and self.draft.checkpoint.shares_kv else 0

    def take_fingerprint(self) -> EngineFingerprint:
        """Check rotary tables. Return checksums of weights, tables and logits (only with compiled CPU kernels).

        Raises `FingerprintError` if a table is wrong.
        """
        kernels = self.kernels
        draft = self.runner.draft_runner
        for model in [self.model] + ([] if draft is None else [draft.forward_pass.model]):
            self._on_device(partial(check_tables, model))
        if not isinstance(kernels, CpuKernels):
            return EngineFingerprint(kernels.identity, torch.get_num_threads())
        others = [] if self._leader is None else self._leader.checksums
        num_tokens = self.info.num_warm_up_tokens
        return self._on_device(lambda: take_fingerprint(self.runner, num_tokens, kernels.num_threads, others))

    def _decide_num_blocks(self) -> tuple[KVSize, tuple[int, int]]:
        architecture = self.model.architecture
        draft_block_bytes = 0 if self.draft is None else self.draft.bytes_per_block
        host_size = decide_host_size(
            architecture,
            self.cache_config,
            kv_dtype=self.kv_dtype,
            draft_block_bytes=draft_block_bytes,
            store_bytes=self._store_bytes,
            num_ranks=self._num_ranks,
            state_bytes=architecture.kv_layout.state_bytes(self.dtype),
        )
        size = decide_kv_size(
            architecture,
            self.cache_config,
            self.scheduler_config,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            max_model_len=self.max_model_len,
            device=self.device,
            scratch_bytes=self._scratch_bytes(self.scheduler_config.max_num_batched_tokens),
            num_speculative_tokens=self.num_speculative_tokens,
            draft_block_bytes=draft_block_bytes,
            store_bytes=self._store_bytes_on_device,
            num_ranks=self._num_ranks,
        )
        return size, host_size

    def _load_draft(self, checkpoint: DraftCheckpoint) -> DraftModel:
        model = self._load_model(
            checkpoint.weights,
            checkpoint.architecture,
            max_model_len=checkpoint.max_model_len,
            quantization=checkpoint.quantization,
        )
        model_kv_dtype = ROUNDED_KV.get(self.cache_config.kv_cache_dtype, str(model.dtype).removeprefix("torch."))
        return DraftModel(
            checkpoint=checkpoint,
            model=model,
            dtype=self._weight_dtype,
            kv_dtype=self.kv_dtype if checkpoint.shares_kv else model_kv_dtype,
            block_size=self.cache_config.block_size,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            num_speculative_tokens=self.num_speculative_tokens,
            # Without shared KV, the last accepted draft may have no KV, so the first pass may have two rows.
            decodes=self._plan_decodes(
                model, num_rows=[1] if checkpoint.shares_kv else [1, 2], max_model_len=checkpoint.max_model_len
            ),
        )

    def _make_runner(self) -> ModelRunner:
        draft, info, most = self.draft, self.info, self.scheduler_config.max_num_seqs
        make_cache = partial(self._make_cache, num_host_blocks=info.num_host_blocks)
        draft_cache = None
        if draft is not None and not draft.checkpoint.shares_kv:
            draft_layout = draft.model.architecture.kv_layout.without_windows
            draft_cache = make_cache(
                draft_layout, draft.kv_dtype, [info.num_blocks], num_scratch_blocks=draft.num_scratch_blocks * most
            )
        return ModelRunner(
            self.model,
            self.kernels,
            make_cache(
                self.model.architecture.kv_layout,
                self.kv_dtype,
                [group.spec.num_blocks for group in info.kv_groups],
                num_scratch_blocks=self._num_scratch_blocks * most,
                num_host_states=info.kv_groups[-1].spec.num_host_blocks,
            ),
            max_num_seqs=most,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            grammars=self.grammars,
            proposer=self.proposer,
            draft=draft,
            draft_cache=draft_cache,
            verification=self.verification,
            decodes=self._decodes,
            leader=self._leader,
        )

    def _make_cache(
        self, layout: KVLayout, kv_dtype: str, num_blocks: Sequence[int], **more_blocks: int
    ) -> PagedKVCache:
        return PagedKVCache(
            layout,
            num_blocks=num_blocks,
            block_size=self.cache_config.block_size,
            dtype=getattr(torch, kv_dtype),
            device=self.device,
            num_kept_rows=self.scheduler_config.max_num_seqs * (1 + self.num_speculative_tokens),
            state_dtype=self.model.dtype,
            allocate=self.kernels.allocate if self.device.type == "cpu" else None,
            **more_blocks,
        )

    def _scratch_bytes(self, num_tokens: int) -> int:
        architecture = self.model.architecture
        max_drafts = min(num_tokens, self.scheduler_config.max_num_seqs * self.num_speculative_tokens)
        of_drafts = self.proposer.num_bytes + self.verification.num_bytes(max_drafts, architecture.vocab_size)
        if self.draft is not None:
            of_drafts += self.draft.num_bytes(num_tokens, self.kernels)
        of_graphs = 0 if self._decodes is None else self._decodes.num_bytes
        of_states = self.scheduler_config.max_num_seqs * self._state_bytes
        return (
            of_drafts
            + of_graphs
            + of_states
            + kernel_scratch_bytes(architecture, self.kernels, max_seq_len=self.max_model_len, max_tokens=num_tokens)
        )

    @property
    def _state_bytes(self) -> int:
        """Bytes of a running request's states, those of its drafts, and kept rows."""
        layout, num_kept = self.model.architecture.kv_layout, 1 + self.num_speculative_tokens
        return (1 + self._num_scratch_blocks) * layout.state_bytes(self.dtype) + num_kept * layout.kept_bytes(
            self.dtype
        )

    def _take_states_that_fit(self) -> None:
        """Lower max_num_seqs if recurrent states would take more than half of the free memory."""
        size, wanted = self._state_bytes, self.scheduler_config.max_num_seqs
        if not size:
            return
        most = free_bytes(self.device) // self._num_ranks // 2 // size
        if most < 1:
            raise ConfigError(f"there is no free memory for the states of a request, which take {size:,} bytes")
        if most < wanted:
            logger.warning(
                "max_num_seqs is lowered from %d to %d: the states of a request take %d bytes", wanted, most, size
            )
            self.scheduler_config = replace(self.scheduler_config, max_num_seqs=most)
            if self.draft is not None:
                self.draft = replace(self.draft, max_num_seqs=most)
        logger.info("recurrent states: %d bytes", self.scheduler_config.max_num_seqs * size)

    def _take_steps_that_fit(self) -> None:
        num_tokens, wanted = self._largest_batch(), self.scheduler_config.max_num_batched_tokens
        if num_tokens < wanted:
            logger.warning(
                "max_num_batched_tokens is lowered from %d to %d: free memory does not allow a larger step",
                wanted,
                num_tokens,
            )
            self.scheduler_config = replace(self.scheduler_config, max_num_batched_tokens=num_tokens)

    def _largest_batch(self) -> int:
        return largest_batch(
            self.model.architecture,
            self.cache_config,
            self.scheduler_config,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            scratch_bytes=self._scratch_bytes,
            num_speculative_tokens=self.num_speculative_tokens,
            draft_block_bytes=0 if self.draft is None else self.draft.bytes_per_block,
            store_bytes=self._store_bytes_on_device,
            num_ranks=self._num_ranks,
        )

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """See `ModelRunner.execute`. With several ranks, an error ends all ranks and raises `EngineDeadError`."""
        if self._leader is None:
            return self._with_compilations(self._on_device(lambda: self.runner.execute(scheduled)))
        try:
            return self._on_device(lambda: self.runner.execute(scheduled))
        except BaseException as error:
            raise self._leader.failed(error) from error

    def check(self) -> None:
        """Raise `EngineDeadError` if a rank has failed."""
        if self._leader is not None and (failure := self._leader.failure()) is not None:
            raise failure

    def close(self) -> None:
        """End the other ranks."""
        if self._leader is not None:
            self._leader.shutdown()

    def needs_sampled_tokens(self, scheduled: SchedulerOutput) -> bool:
        """See `ModelRunner.needs_sampled_tokens`."""
        return self.runner.needs_sampled_tokens(scheduled)

    def launch(self, scheduled: SchedulerOutput) -> LaunchedStep:
        """See `ModelRunner.launch`."""
        return self._on_device(lambda: self.runner.launch(scheduled))

    def collect(self, step: LaunchedStep) -> ModelOutput:
        """See `ModelRunner.collect`."""
        return self._with_compilations(self._on_device(lambda: self.runner.collect(step)))

    def _with_compilations(self, result: ModelOutput) -> ModelOutput:
        compiled = self.kernels.take_compilations()
        for kernel in compiled:
            logger.warning("step %d waited for a kernel that the warm-up did not compile: %s", result.step, kernel)
        return replace(result, num_compilations=len(compiled)) if compiled else result

    def wait_idle(self) -> None:
        """Wait for launched work. Raises the work's error."""
        self._on_device(lambda: self.runner.copies.mark().synchronize())

    def _on_device(self, run: Callable[[], ResultT]) -> ResultT:
        """Call `run` in any thread. If kernels have own threads, torch uses one."""
        if self.device.index is not None:
            use_device(self.device)
        if not self.kernels.has_own_threads:
            return run()
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return run()
        finally:
            torch.set_num_threads(num_threads)
