"""Builds an engine from configurations. Only this module imports both engine and worker."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.config import (
    DEFAULT_MIXED_STEP_MS,
    WEIGHT_BITS,
    BatchingMode,
    EngineConfig,
    kernels_required,
    kv_secret_from_environment,
)
from octavo.core.kv.cache_listener import NO_LISTENER
from octavo.core.scheduler import Scheduler
from octavo.data.capacity import EngineCapacity, KVGroupCapacity
from octavo.data.events import FanOut, NullSink
from octavo.data.kv_event_figures import KVEventFigures
from octavo.data.kv_groups import RecurrentStates
from octavo.data.kv_tier_figures import KVTierFigures
from octavo.data.metrics import EngineMetrics, EngineStats
from octavo.data.recent_events import RecentEvents
from octavo.engine.engine_core import EngineCore
from octavo.engine.llm_engine import Engine
from octavo.engine.local_core import LocalCore
from octavo.errors import ConfigError
from octavo.journal.recorder import RecordedClock, RecordingScheduler, describe
from octavo.journal.stores import RecordedConnector
from octavo.kernels import are_exact, attention_slowness, default_instruction_set
from octavo.kv_transfer import create_store, host_bytes
from octavo.kv_transfer.connector import StoreConnector
from octavo.kv_transfer.direct import create_connector, num_load_threads
from octavo.kv_transfer.mooncake_library import check_mooncake
from octavo.kv_transfer.stored_states import count_pieces
from octavo.models.share import Share
from octavo.startup.draft_checkpoint import find_draft_checkpoint
from octavo.startup.identity import cache_keys, check_fingerprint, find_identity, kv_format
from octavo.startup.launch import ServedModel, make_grammars, make_processors
from octavo.startup.recurrent import check_recurrent_layers
from octavo.worker.device import resolve_device
from octavo.worker.local_executor import LocalExecutor
from octavo.worker.step_modes import ComputesAtOnce, ComputesInBackground, LaunchesAhead
from octavo.worker.transfer_threads import staging_bytes
from octavo.worker.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ResolvedSchedulerConfig,
        SpeculativeConfig,
    )
    from octavo.core.kv_connector import KVConnector
    from octavo.data.events import EventSink
    from octavo.data.fingerprint import EngineFingerprint
    from octavo.data.worker_info import WorkerInfo
    from octavo.kv_events import KVEventLog
    from octavo.kv_transfer import StoreFactory
    from octavo.kv_transfer.direct import MooncakeConnector
    from octavo.kv_transfer.direct_donor import DirectDonor
    from octavo.kv_transfer.direct_receiver import DirectReceiver
    from octavo.kv_transfer.tiers import TieredStore
    from octavo.models.architecture import Architecture
    from octavo.models.draft_checkpoint import DraftCheckpoint
    from octavo.ranks.leader import Leader
    from octavo.structured_output.grammars import GrammarCompiler
    from octavo.worker.step_modes import StepMode


logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    *,
    sink: EventSink | None = None,
    progress: Callable[[int, int], None] | None = None,
    kv_store: StoreFactory | None = None,
) -> Engine:
    """Load the checkpoint, size the KV cache, and return a ready engine.

    progress(done, total): Called with bytes of packed weights. kv_store: See `build_core`. Raises
    `ConfigError` and `ModelError`.
    """
    served = ServedModel.find(config.model)
    input_processor, output_processor = make_processors(config.model, served)
    core = build_core(config, served, sink=sink, progress=progress, kv_store=kv_store)
    return Engine(LocalCore(core), input_processor, output_processor, time.monotonic)


def build_core(
    config: EngineConfig,
    served: ServedModel | None = None,
    *,
    sink: EventSink | None = None,
    progress: Callable[[int, int], None] | None = None,
    reads_ahead: bool = False,
    kv_store: StoreFactory | None = None,
) -> EngineCore:
    """Build a scheduler and a worker with loaded weights. Raises `ConfigError` and `ModelError`.

    reads_ahead: True to read the vocabulary for grammars now. kv_store(block_bytes): Creates a store that is asked
    before the configured stores.
    """
    check_mooncake(config.kv_transfer)
    model_config = config.model
    served = served or ServedModel.find(model_config)
    check_recurrent_layers(config, served.architecture)
    device_config, architecture = _device_config(config), served.architecture
    dtype = architecture.dtype if model_config.dtype == "auto" else model_config.dtype
    isa = _instruction_set(device_config, dtype)
    device_type = resolve_device(device_config.device).type
    limits = config.scheduler.resolved(device_type, has_drafts=config.speculative.is_requested)
    scheduler_config = resolve_scheduler(limits, architecture, model_config.quantization, isa)
    speculative_config = None if scheduler_config.async_scheduling else _resolve_speculative(config, device_config)
    grammars = make_grammars(model_config, served)
    reading = grammars.read_ahead() if reads_ahead and grammars is not None else None
    has_store = kv_store is not None or config.kv_transfer.names_store
    identity = find_identity(model_config, served) if has_store else None
    draft = find_draft_checkpoint(speculative_config, model_config, served)
    with contextlib.ExitStack() as failing:
        kv_events = _open_kv_events(config.kv_events, failing)
        leader = _start_ranks(config, served, dtype, draft, has_store=has_store)
        if leader is not None:
            failing.push(leader.end_start)
        worker = _make_worker(
            config,
            served,
            dtype,
            scheduler_config,
            speculative_config,
            draft,
            grammars,
            progress,
            leader,
            has_store=has_store,
        )
        info = worker.start()
        if reading is not None:
            reading.result()
        fingerprint = check_fingerprint(config, served, worker.take_fingerprint(), info, draft, dtype, identity)
        scheduler_config = fit_reservation(info.scheduler_config, info.num_kv_tokens)
        keys = cache_keys(config, info, dtype, identity, fingerprint)
        direct = _create_direct(config, info.stored_block_bytes, keys)
        capacity = _capacity(info, scheduler_config, speculative_config, config, direct, keys, fingerprint)
        part_bytes = info.stored_part_bytes if info.bounded_groups else None
        store = create_store(config.kv_transfer, info.stored_block_bytes, kv_store, direct, part_bytes)
        executor = _make_executor(config, info, worker, store)
        connector, recorded = _connect(config, store, executor, direct, info)
        clock, recent = RecordedClock(time.monotonic), RecentEvents()
        metrics = EngineMetrics(_stats(store, worker, kv_events))
        sinks = FanOut([metrics, recent, sink or NullSink()])
        scheduler = _make_scheduler(
            scheduler_config, config.cache, served, info, keys, clock, sinks, connector, kv_events
        )
        journaled = _recorded(scheduler, clock, config.record, recorded, fingerprint)
        failing.pop_all()
        return EngineCore(journaled, executor, metrics, recent, capacity, kv_events)


def _make_scheduler(
    scheduler_config: ResolvedSchedulerConfig,
    cache_config: CacheConfig,
    served: ServedModel,
    info: WorkerInfo,
    keys: tuple[str, ...],
    clock: RecordedClock,
    sink: EventSink,
    connector: KVConnector | None,
    kv_events: KVEventLog | None,
) -> Scheduler:
    return Scheduler(
        scheduler_config,
        cache_config,
        num_blocks=info.num_blocks,
        max_model_len=served.max_model_len,
        clock=clock,
        sink=sink,
        num_host_blocks=info.num_host_blocks,
        bounded_groups=info.bounded_groups,
        cache_keys=keys,
        connector=connector,
        cache_listener=kv_events or NO_LISTENER,
    )


def _make_worker(
    config: EngineConfig,
    served: ServedModel,
    dtype: str,
    scheduler_config: ResolvedSchedulerConfig,
    speculative_config: SpeculativeConfig | None,
    draft: DraftCheckpoint | None,
    grammars: GrammarCompiler | None,
    progress: Callable[[int, int], None] | None,
    leader: Leader | None,
    *,
    has_store: bool,
) -> Worker:
    model_config = config.model
    if leader is not None and draft is not None and draft.shares_kv:
        draft = replace(draft, architecture=draft.architecture.split(leader.share))
    return Worker(
        served.checkpoint.weights,
        served.architecture if leader is None else served.architecture.split(leader.share),
        dtype=dtype,
        max_model_len=served.max_model_len,
        cache_config=config.cache.of_rank(config.device.tensor_parallel_size),
        scheduler_config=scheduler_config,
        device_config=_device_config(config),
        load_format=model_config.load_format,
        quantization=model_config.quantization,
        group_size=model_config.group_size,
        packed_cache_bytes=model_config.packed_cache_bytes,
        seed=model_config.seed,
        progress=progress,
        grammars=grammars,
        speculative_config=speculative_config,
        draft_checkpoint=draft,
        store_bytes=partial(_store_bytes, config.kv_transfer, has_store=has_store),
        staging_bytes=partial(_staging_bytes, config.kv_transfer, has_store=has_store),
        leader=leader,
    )


def _start_ranks(
    config: EngineConfig, served: ServedModel, dtype: str, draft: DraftCheckpoint | None, *, has_store: bool
) -> Leader | None:
    device, count = config.device, config.device.tensor_parallel_size
    if device.distributed_executor_backend != "mp":
        raise ConfigError(
            f"distributed_executor_backend {device.distributed_executor_backend} is not supported yet: choose mp"
        )
    if count == 1 and device.enable_expert_parallel:
        raise ConfigError("enable_expert_parallel needs ranks: set tensor_parallel_size to a power of two above 1")
    if count == 1:
        return None
    is_compiled = importlib.util.find_spec("octavo._kernels") is not None
    if resolve_device(device.device).type != "cpu" or device.kernels not in {"auto", "cpu"} or not is_compiled:
        raise ConfigError("tensor_parallel_size above 1 needs the compiled CPU kernels: choose device cpu, kernels cpu")
    served.architecture.split(Share(0, count, device.enable_expert_parallel))  # raises if it cannot be divided
    from octavo.ranks.leader import Leader  # noqa: PLC0415

    if config.model.model is not None:  # a hub id may refer to other files later
        config = replace(config, model=replace(config.model, model=str(served.checkpoint.path)))
    own_draft = draft.quantization if draft is not None and draft.shares_kv else None
    shares_kv = has_store or config.kv_transfer.role != "both"
    return Leader(config, served.architecture, dtype, own_draft, shares_kv=shares_kv)


def _create_direct(
    config: EngineConfig, block_bytes: int, keys: tuple[str, ...]
) -> DirectDonor | DirectReceiver | None:
    return create_connector(
        config.kv_transfer,
        block_bytes=block_bytes,
        block_size=config.cache.block_size,
        secret=kv_secret_from_environment(),
        kv_format=kv_format(keys),
    )


def _make_executor(config: EngineConfig, info: WorkerInfo, worker: Worker, store: TieredStore | None) -> LocalExecutor:
    # A thread completes the step on all ranks even if the caller is interrupted.
    mode: type[StepMode] = ComputesAtOnce if config.device.tensor_parallel_size == 1 else ComputesInBackground
    if info.scheduler_config.async_scheduling:
        mode = ComputesInBackground if info.device == "cpu" else LaunchesAhead
    return LocalExecutor(worker, store, num_threads=num_load_threads(config.kv_transfer), mode=mode)


def _open_kv_events(config: KVEventsConfig, failing: contextlib.ExitStack) -> KVEventLog | None:
    if not config.is_active:
        return None
    try:
        from octavo.kv_events import KVEventLog, KVEventPublisher  # noqa: PLC0415 - needs octavo[server]
    except ImportError as error:
        raise ConfigError(f"kv_events_config needs the package {error.name}: pip install 'octavo[server]'") from None
    log = KVEventLog(KVEventPublisher(config, KVEventFigures()))
    failing.callback(log.close)
    return log


def _stats(store: TieredStore | None, worker: Worker, kv_events: KVEventLog | None) -> EngineStats:
    tally = worker.runner.expert_tally
    stats = EngineStats(expert_tokens=None if tally is None else tally.tokens)
    stats.kv_events = None if kv_events is None else kv_events.figures
    if store is not None:
        stats.kv_stores = store.figures
        stats.tiers |= {name: KVTierFigures() for name in store.figures}
    return stats


def _store_bytes(config: KVTransferConfig, block_bytes: int, *, has_store: bool) -> int:
    of_stores = host_bytes(config, block_bytes) if has_store else 0
    return of_stores + _staging_bytes(config, block_bytes, has_store=has_store)


def _staging_bytes(config: KVTransferConfig, block_bytes: int, *, has_store: bool) -> int:
    return staging_bytes(block_bytes, num_load_threads(config)) if has_store else 0


def _connect(
    config: EngineConfig,
    store: TieredStore | None,
    executor: LocalExecutor,
    direct: MooncakeConnector | None,
    info: WorkerInfo,
) -> tuple[KVConnector | None, RecordedConnector | None]:
    if store is None:
        return None, None
    connector = StoreConnector(
        store,
        config.cache.block_size,
        executor.wake,
        direct,
        [spec.kind for spec in info.bounded_groups if not isinstance(spec.kind, RecurrentStates)],
        count_pieces(info.stored_state_bytes, info.stored_block_bytes),
    )
    if config.record is None:
        return connector, None
    recorded = RecordedConnector(connector)
    return recorded, recorded


def _resolve_speculative(config: EngineConfig, device_config: DeviceConfig) -> SpeculativeConfig | None:
    return config.speculative.resolved(is_exact=are_exact(resolve_device(device_config.device), device_config.kernels))


def _capacity(
    info: WorkerInfo,
    scheduler_config: ResolvedSchedulerConfig,
    speculative_config: SpeculativeConfig | None,
    config: EngineConfig,
    direct: DirectDonor | DirectReceiver | None,
    keys: tuple[str, ...],
    fingerprint: EngineFingerprint,
) -> EngineCapacity:
    capacity = EngineCapacity.of(
        scheduler_config,
        config.cache,
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        kv_cache_dtype=info.kv_dtype,
        speculative=speculative_config,
        kv_block_bytes=info.block_bytes + info.draft_block_bytes,
        bounded_groups=tuple(
            KVGroupCapacity(group.spec.kind.name, group.spec.num_blocks, group.block_bytes)
            for group in info.kv_groups[1:]
        ),
        role=config.kv_transfer.role,
        kv_transfer_port=None if direct is None else direct.port,
        kv_format=None if config.kv_transfer.role == "both" else kv_format(keys),
        fingerprint=fingerprint,
    )
    _log_capacity(info, capacity)
    return capacity


def _log_capacity(info: WorkerInfo, capacity: EngineCapacity) -> None:
    logger.info("KV cache: %s, %d bytes; %s", info.kv_cache_summary, info.kv_cache_bytes, capacity.summary)
    method, num_drafts = capacity.speculative_method, capacity.num_speculative_tokens
    logger.info("speculation: %s", f"{method}, up to {num_drafts} tokens a step" if num_drafts else method)
    if info.draft_summary is not None:
        logger.info("the engine drafts with %s", info.draft_summary)


def _recorded(
    scheduler: Scheduler,
    clock: RecordedClock,
    path: Path | None,
    store: RecordedConnector | None,
    fingerprint: EngineFingerprint,
) -> Scheduler | RecordingScheduler:
    if path is None:
        return scheduler
    try:
        header = describe(scheduler, fingerprint=fingerprint.to_json())
        return RecordingScheduler(scheduler, clock, path, header, store)
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be written: {error.strerror}") from None


def resolve_scheduler(
    config: ResolvedSchedulerConfig, architecture: Architecture, quantization: str | None, isa: str | None = None
) -> ResolvedSchedulerConfig:
    """Replace None in attention_cost_tokens and mixed_step_ms, if chunked prefill is enabled."""
    cost, step_ms = config.attention_cost_tokens, config.mixed_step_ms
    if not config.enable_chunked_prefill:
        return config
    if cost is None:
        bits = WEIGHT_BITS[quantization] if architecture.stored is None else architecture.stored.bits
        if architecture.block_bytes and quantization is None:
            bits = 4  # products with any GGUF blocks are about as fast as with int4
        cost = round(1000 * attention_slowness(isa, bits) * architecture.attention_share, 3)
    if step_ms is None:
        step_ms = DEFAULT_MIXED_STEP_MS if config.batching is BatchingMode.MIXED else 0.0
    return replace(config, attention_cost_tokens=cost, mixed_step_ms=step_ms)


def fit_reservation(config: ResolvedSchedulerConfig, num_kv_tokens: int) -> ResolvedSchedulerConfig:
    """Lower the limits of TGI's options to the engine's capacity. num_kv_tokens: Capacity of the KV cache."""
    there = {
        "max_batch_total_tokens": (num_kv_tokens, "the KV cache is not larger"),
        "max_batch_prefill_tokens": (
            config.max_num_batched_tokens,
            "a step computes at most max_num_batched_tokens tokens",
        ),
    }
    lowered: dict[str, Any] = {}
    for name, (most, reason) in there.items():
        wanted = getattr(config, name)
        if wanted is not None and wanted > most:
            logger.warning("%s is lowered from %d to %d: %s", name, wanted, most, reason)
            lowered[name] = most
    return replace(config, **lowered)


def _instruction_set(config: DeviceConfig, dtype: str) -> str | None:
    if dtype != "bfloat16" or config.kernels not in {"auto", "cpu"} or resolve_device(config.device).type != "cpu":
        return None
    return default_instruction_set() if config.isa == "auto" else config.isa


def _device_config(config: EngineConfig) -> DeviceConfig:
    on_cpu = resolve_device(config.device.device).type == "cpu"
    if on_cpu and kernels_required() and config.device.kernels == "auto":
        return replace(config.device, kernels="cpu")
    return config.device
