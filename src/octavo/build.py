"""The one place that joins engine and worker: from configurations to an engine that answers."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from octavo import __version__
from octavo.config import (
    DEFAULT_MIXED_STEP_MS,
    WEIGHT_BITS,
    BatchingMode,
    EngineConfig,
    cache_directory,
    kernels_required,
    kv_secret_from_environment,
)
from octavo.core.scheduler import Scheduler
from octavo.data.capacity import EngineCapacity
from octavo.data.events import FanOut, NullSink
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
from octavo.models.packed_cache import HASHES_FILE
from octavo.models.weight_hashes import FileHashes
from octavo.models.weights_identity import WeightsIdentity
from octavo.startup.draft_checkpoint import find_draft_checkpoint
from octavo.startup.launch import ServedModel, make_grammars, make_processors
from octavo.worker.kept_fingerprints import KeptFingerprints, describe_installation, describe_model
from octavo.worker.kv_transfers import staging_bytes
from octavo.worker.local_executor import LocalExecutor
from octavo.worker.step_modes import ComputesAtOnce, ComputesInBackground, LaunchesAhead
from octavo.worker.worker import Worker, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from octavo.config import DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
    from octavo.core.kv_connector import KVConnector
    from octavo.data.events import EventSink
    from octavo.data.fingerprint import EngineFingerprint
    from octavo.kv_transfer import StoreFactory
    from octavo.kv_transfer.direct import MooncakeConnector
    from octavo.kv_transfer.direct_donor import DirectDonor
    from octavo.kv_transfer.direct_receiver import DirectReceiver
    from octavo.kv_transfer.tiers import TieredStore
    from octavo.models.architecture import Architecture
    from octavo.worker.step_modes import StepMode


logger = logging.getLogger(__name__)
_SHOWN_KEY = 100  # characters


def build_engine(
    config: EngineConfig,
    *,
    sink: EventSink | None = None,
    progress: Callable[[int, int], None] | None = None,
    kv_store: StoreFactory | None = None,
) -> Engine:
    """Load the checkpoint, size the KV cache, and return an engine that is ready.

    progress(done, total) is told of packed bytes of weights. kv_store: as in `build_core`. Raises `ConfigError` and
    `ModelError`.
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
    """Return what an engine is without its text side: a scheduler, and a worker with the weights in place.

    reads_ahead: all that requests may ask for is read now, so that none waits for what another one asks for first.
    kv_store(block_bytes) makes a store of KV that is asked before those of the configuration: a `MemoryStore`, say,
    over a pool that several engines of this process share.
    """
    check_mooncake(config.kv_transfer)
    model_config = config.model
    served = served or ServedModel.find(model_config)
    architecture = served.architecture
    device_config = _device_config(config)
    dtype = architecture.dtype if model_config.dtype == "auto" else model_config.dtype
    isa = _instruction_set(device_config, dtype)
    scheduler_config = resolve_scheduler(config.scheduler, architecture, model_config.quantization, isa)
    speculative_config = _resolve_speculative(config, device_config)
    grammars = make_grammars(model_config, served)
    reading = grammars.read_ahead() if reads_ahead and grammars is not None else None
    has_store = kv_store is not None or config.kv_transfer.names_store
    identity = _find_identity(model_config, served) if has_store else None
    worker = Worker(
        served.checkpoint.weights,
        architecture,
        dtype=dtype,
        max_model_len=served.max_model_len,
        cache_config=config.cache,
        scheduler_config=scheduler_config,
        device_config=device_config,
        load_format=model_config.load_format,
        quantization=model_config.quantization,
        group_size=model_config.group_size,
        packed_cache_bytes=model_config.packed_cache_bytes,
        seed=model_config.seed,
        progress=progress,
        grammars=grammars,
        speculative_config=speculative_config,
        draft_checkpoint=find_draft_checkpoint(speculative_config, model_config, served),
        store_bytes=partial(_store_bytes, config.kv_transfer, has_store=has_store),
    )
    if reading is not None:
        reading.result()
    fingerprint = _take_fingerprint(config, served, worker, dtype, identity)
    kv_cache, block_size, stored_bytes = worker.kv_cache, config.cache.block_size, worker.kv_cache.stored_block_bytes
    scheduler_config = fit_reservation(worker.scheduler_config, kv_cache.num_blocks * block_size)
    cache_keys = _cache_keys(config, worker, dtype, identity, fingerprint)
    direct = _create_direct(config, stored_bytes, cache_keys)
    capacity = _capacity(worker, scheduler_config, speculative_config, config, direct, cache_keys, fingerprint)
    part_bytes = None if kv_cache.window is None else kv_cache.block_bytes
    store = create_store(config.kv_transfer, stored_bytes, kv_store, direct, part_bytes)
    executor = _make_executor(config, worker, store)
    connector, recorded = _connect(config, store, executor, direct, kv_cache.window)
    clock, metrics, recent = RecordedClock(time.monotonic), EngineMetrics(_stats(store)), RecentEvents()
    scheduler = Scheduler(
        scheduler_config,
        config.cache,
        num_blocks=kv_cache.num_blocks,
        max_model_len=served.max_model_len,
        clock=clock,
        sink=FanOut([metrics, recent, sink or NullSink()]),
        num_host_blocks=kv_cache.num_host_blocks,
        num_window_blocks=kv_cache.num_window_blocks,
        window=kv_cache.window or 0,
        cache_keys=cache_keys,
        connector=connector,
    )
    journaled = _recorded(scheduler, clock, config.record, recorded, fingerprint)
    return EngineCore(journaled, executor, metrics, recent, capacity)


def _create_direct(
    config: EngineConfig, block_bytes: int, cache_keys: tuple[str, ...]
) -> DirectDonor | DirectReceiver | None:
    """Return this engine's side of direct transfers; None without them."""
    return create_connector(
        config.kv_transfer,
        block_bytes=block_bytes,
        block_size=config.cache.block_size,
        secret=kv_secret_from_environment(),
        kv_format=_kv_format(cache_keys),
    )


def _make_executor(config: EngineConfig, worker: Worker, store: TieredStore | None) -> LocalExecutor:
    mode: type[StepMode] = ComputesAtOnce
    if config.scheduler.async_scheduling:
        mode = ComputesInBackground if worker.device.type == "cpu" else LaunchesAhead
    return LocalExecutor(worker, store, num_threads=num_load_threads(config.kv_transfer), mode=mode)


def _stats(store: TieredStore | None) -> EngineStats:
    """Return an engine's figures, with each of its tiers from the beginning, so that a rate sees the first one."""
    stats = EngineStats()
    if store is not None:
        stats.kv_stores = store.figures
        stats.tiers |= {name: KVTierFigures() for name in store.figures}
    return stats


def _store_bytes(config: KVTransferConfig, block_bytes: int, *, has_store: bool) -> int:
    """Return what stores take of host memory: buffers for what is on its way, and what they have for themselves."""
    return staging_bytes(block_bytes, num_load_threads(config)) + host_bytes(config, block_bytes) if has_store else 0


def _connect(
    config: EngineConfig,
    store: TieredStore | None,
    executor: LocalExecutor,
    direct: MooncakeConnector | None,
    window: int | None,
) -> tuple[KVConnector | None, RecordedConnector | None]:
    """Return what the scheduler asks of stores, and the same once more where its answers go into a journal."""
    if store is None:
        return None, None
    connector = StoreConnector(store, config.cache.block_size, executor.wake, direct, window or 0)
    if config.record is None:
        return connector, None
    recorded = RecordedConnector(connector)
    return recorded, recorded


def _find_identity(config: ModelConfig, served: ServedModel) -> WeightsIdentity:
    """Begin to find out what the weights are, beside their loading."""
    seed = config.seed if config.load_format == "dummy" else None
    return WeightsIdentity(served.checkpoint.weights, served.architecture, seed)


def _take_fingerprint(
    config: EngineConfig, served: ServedModel, worker: Worker, dtype: str, identity: WeightsIdentity | None
) -> EngineFingerprint:
    """Return the engine's fingerprint; refuse a start that computes other numbers than an earlier one.

    identity: it hashes the weights, so that starts with a copy of them are compared, too; None if KV is not shared.
    Nothing is compared if nothing may be kept on disk (packed_cache_bytes 0), or if there are no checksums.
    Raises `FingerprintError`, and `ModelError` for weights that were changed meanwhile.
    """
    fingerprint = worker.take_fingerprint()
    logger.info("fingerprint: %s", fingerprint.summary)
    if not config.model.packed_cache_bytes or not fingerprint.logits:
        return fingerprint
    if identity is not None:
        identity.result()  # keeps the hashes where `_describe_engine` finds them
    try:
        kept = KeptFingerprints(cache_directory() / "fingerprints")
        engine = _describe_engine(config, served, worker, dtype)
    except (OSError, RuntimeError) as error:  # a file of the checkpoint was removed, or this user has no home
        logger.warning("the fingerprint of this start cannot be compared: %s", error)
        return fingerprint
    kept.check(engine, fingerprint)
    return fingerprint


def _describe_engine(config: EngineConfig, served: ServedModel, worker: Worker, dtype: str) -> dict[str, Any]:
    """Return all that the numbers of a start may depend on. Raises `OSError` if a file is missing."""
    model, draft = config.model, None if worker.draft is None else worker.draft.checkpoint
    seed = model.seed if model.load_format == "dummy" else None
    hashes = FileHashes(cache_directory() / "packed" / HASHES_FILE)  # written by now if the weights were hashed
    return {
        "model": describe_model(served.checkpoint.weights, served.architecture, hashes, seed),
        "draft": None if draft is None else describe_model(draft.weights, draft.architecture, hashes, seed),
        "formats": [dtype, worker.dtype, worker.kv_dtype, model.quantization, model.group_size],
        "draft_formats": None if draft is None else [draft.quantization, draft.max_model_len],
        "kernels": [worker.kernels.identity, worker.kernels.layout],
        "lengths": [served.max_model_len, worker.num_warm_up_tokens],
        **describe_installation(),
    }


def _cache_keys(
    config: EngineConfig, worker: Worker, dtype: str, identity: WeightsIdentity | None, fingerprint: EngineFingerprint
) -> tuple[str, ...]:
    """Return all that the KV of a token depends on besides the tokens before it.

    identity: of the weights; None if KV stays in this engine. Engines share KV only if their fingerprints agree.
    """
    model, cache = config.model, config.cache
    keys = [
        f"kv:{worker.kv_dtype} in blocks of {cache.block_size}, layout {worker.kv_cache.layout_version}",
        f"weights:{dtype} for {worker.dtype}, {model.quantization}:{model.group_size}",
        f"kernels:{worker.kernels.identity} on {worker.device.type}",
    ]
    if identity is not None:
        secret = hashlib.sha256(kv_secret_from_environment().encode()).hexdigest()
        on_cuda = worker.device.type == "cuda"
        machine = torch.cuda.get_device_name(worker.device) if on_cuda else torch.backends.cpu.get_cpu_capability()
        versions = f"octavo {__version__}, torch {torch.__version__} on {machine}"
        keys += [f"model:{identity.result()}", f"versions:{versions}", f"secret:{secret}"]
        keys.append(f"fingerprint:{fingerprint.kv_identity}")
    return tuple(keys)


def _kv_format(cache_keys: tuple[str, ...]) -> dict[str, str]:
    """Return the cache keys by name, for a router: engines share KV only if all of them are equal.

    The secret is left out. Long texts, such as architectures, are hashed.
    """
    values = dict(key.split(":", 1) for key in cache_keys)
    values.pop("secret", None)
    return {
        name: text if len(text) <= _SHOWN_KEY else hashlib.sha256(text.encode()).hexdigest()[:16]
        for name, text in values.items()
    }


def _resolve_speculative(config: EngineConfig, device_config: DeviceConfig) -> SpeculativeConfig | None:
    """Choose how tokens are guessed where that is left open; None for not at all."""
    if config.scheduler.async_scheduling:
        return None
    return config.speculative.resolved(is_exact=are_exact(resolve_device(device_config.device), device_config.kernels))


def _capacity(
    worker: Worker,
    scheduler_config: SchedulerConfig,
    speculative_config: SpeculativeConfig | None,
    config: EngineConfig,
    direct: DirectDonor | DirectReceiver | None,
    cache_keys: tuple[str, ...],
    fingerprint: EngineFingerprint,
) -> EngineCapacity:
    """Return what there is room for, and log it."""
    capacity = EngineCapacity.of(
        scheduler_config,
        worker.cache_config,
        num_blocks=worker.kv_cache.num_blocks,
        num_host_blocks=worker.kv_cache.num_host_blocks,
        kv_cache_dtype=worker.kv_dtype,
        speculative=speculative_config,
        kv_block_bytes=sum(cache.block_bytes for cache in worker.runner.kv_caches),
        num_window_blocks=worker.kv_cache.num_window_blocks,
        window_block_bytes=worker.kv_cache.window_block_bytes,
        role=config.kv_transfer.role,
        kv_transfer_port=None if direct is None else direct.port,
        kv_format=None if config.kv_transfer.role == "both" else _kv_format(cache_keys),
        fingerprint=fingerprint,
    )
    _log_capacity(worker, capacity)
    return capacity


def _log_capacity(worker: Worker, capacity: EngineCapacity) -> None:
    """Say what there is room for, and how tokens are guessed."""
    kv_cache, draft = worker.kv_cache, worker.draft
    logger.info("KV cache: %s, %d bytes; %s", kv_cache.summary, kv_cache.num_bytes, capacity.summary)
    method, num_drafts = capacity.speculative_method, capacity.num_speculative_tokens
    logger.info("speculation: %s", f"{method}, up to {num_drafts} tokens a step" if num_drafts else method)
    if draft is not None:
        logger.info("the engine drafts with %s", draft.summary(kv_cache.num_blocks))


def _recorded(
    scheduler: Scheduler,
    clock: RecordedClock,
    path: Path | None,
    store: RecordedConnector | None,
    fingerprint: EngineFingerprint,
) -> Scheduler | RecordingScheduler:
    """Let a journal be written where one is asked for."""
    if path is None:
        return scheduler
    try:
        header = describe(scheduler, fingerprint=fingerprint.to_json())
        return RecordingScheduler(scheduler, clock, path, header, store)
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be written: {error.strerror}") from None


def resolve_scheduler(
    config: SchedulerConfig, architecture: Architecture, quantization: str | None, isa: str | None = None
) -> SchedulerConfig:
    """Choose what is left open of how prompts share steps: what these may take, and what a token counts.

    A token attends to all before it, which is slower an operation than the matrix products are; how much, depends on
    the instruction set and on the weights.
    """
    cost, step_ms = config.attention_cost_tokens, config.mixed_step_ms
    if not config.enable_chunked_prefill:
        return config  # prompts are not cut
    if cost is None:
        bits = WEIGHT_BITS[quantization] if architecture.stored is None else architecture.stored.bits
        if architecture.block_bytes and quantization is None:
            bits = 4  # whatever their kind, products of blocks are about as fast as int4's
        cost = round(1000 * attention_slowness(isa, bits) * architecture.attention_share, 3)
    if step_ms is None:
        step_ms = DEFAULT_MIXED_STEP_MS if config.batching is BatchingMode.MIXED else 0.0
    return replace(config, attention_cost_tokens=cost, mixed_step_ms=step_ms)


def fit_reservation(config: SchedulerConfig, num_kv_tokens: int) -> SchedulerConfig:
    """Lower TGI's limits to what the engine has, and log it. num_kv_tokens: tokens that the KV cache holds."""
    there = {
        "max_batch_total_tokens": (num_kv_tokens, "the KV cache holds no more"),
        "max_batch_prefill_tokens": (config.max_num_batched_tokens, "a step takes no more (max_num_batched_tokens)"),
    }
    lowered: dict[str, Any] = {}
    for name, (most, reason) in there.items():
        wanted = getattr(config, name)
        if wanted is not None and wanted > most:
            logger.warning("%s is lowered from %d to %d: %s", name, wanted, most, reason)
            lowered[name] = most
    return replace(config, **lowered)


def _instruction_set(config: DeviceConfig, dtype: str) -> str | None:
    """What multiplies bfloat16; None where something else computes: plain torch, a GPU, or float32 lanes."""
    if dtype != "bfloat16" or config.kernels not in {"auto", "cpu"} or resolve_device(config.device).type != "cpu":
        return None
    return default_instruction_set() if config.isa == "auto" else config.isa


def _device_config(config: EngineConfig) -> DeviceConfig:
    """Where OCTAVO_REQUIRE_KERNELS is set, "auto" means the compiled kernels on a CPU and nothing less."""
    on_cpu = resolve_device(config.device.device).type == "cpu"
    if on_cpu and kernels_required() and config.device.kernels == "auto":
        return replace(config.device, kernels="cpu")
    return config.device
