"""The one place that joins engine and worker: from configurations to an engine that answers."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.assets import BUILT_IN_MODEL, built_in_model_path
from octavo.config import EngineConfig, ModelConfig, ModelInfo, kernels_required
from octavo.core.scheduler import Scheduler
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.engine_core import EngineCore
from octavo.engine.generation_config import read_generation_defaults
from octavo.engine.input_processor import InputProcessor
from octavo.engine.llm_engine import Engine
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, ModelError, RequestError
from octavo.journal.recorder import RecordedClock, RecordingScheduler, describe
from octavo.models.loader import resolve_model_path
from octavo.models.registry import read_architecture
from octavo.sampling_params import SamplingParams
from octavo.worker.worker import LocalExecutor, Worker, resolve_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.config import DeviceConfig, SchedulerConfig
    from octavo.events import EventSink
    from octavo.models.architecture import Architecture


logger = logging.getLogger(__name__)

_BITS = {None: 16, "int8": 8, "int4": 4}  # of the weights
# Seconds of an operation of attention over those of one in a matrix product of weights of so many bits, measured with
# 512 rows of qwen2-0.5b on a processor with AVX-512 VNNI (benchmarks/curves.py shows what they give).
_ATTENTION_SLOWNESS = {16: 1.7, 8: 5.2, 4: 3.4}


def build_engine(
    config: EngineConfig,
    *,
    sink: EventSink | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load the checkpoint, size the KV cache, and return an engine that is ready.

    progress(done, total) is told of packed bytes of weights. Raises `ConfigError` and `ModelError`.
    """
    model_config = config.model
    directory = built_in_model_path() if model_config.model is None else resolve_model_path(model_config.model)
    architecture = read_architecture(directory)
    tokenizer = None
    if not model_config.skip_tokenizer_init:
        tokenizer = Tokenizer.from_directory(
            directory if model_config.tokenizer is None else resolve_model_path(model_config.tokenizer)
        )
    max_model_len = resolve_max_model_len(model_config, architecture)
    info = _model_info(model_config, directory, architecture, tokenizer, max_model_len)
    scheduler_config = resolve_scheduler(config.scheduler, architecture, model_config.quantization)
    worker = Worker(
        directory,
        architecture,
        dtype=architecture.dtype if model_config.dtype == "auto" else model_config.dtype,
        max_model_len=max_model_len,
        cache_config=config.cache,
        scheduler_config=scheduler_config,
        device_config=_device_config(config),
        load_format=model_config.load_format,
        quantization=model_config.quantization,
        packed_cache_bytes=model_config.packed_cache_bytes,
        seed=model_config.seed,
        progress=progress,
    )
    clock = RecordedClock(time.monotonic)
    scheduler = Scheduler(
        scheduler_config,
        config.cache,
        num_blocks=worker.kv_cache.num_blocks,
        max_model_len=max_model_len,
        clock=clock,
        sink=sink,
        num_host_blocks=worker.kv_cache.num_host_blocks,
        cache_keys=(f"model:{directory.resolve()}", f"kv:{worker.kv_dtype}", f"weights:{model_config.quantization}"),
    )
    template = None if tokenizer is None else _chat_template(model_config, directory, tokenizer)
    return Engine(
        EngineCore(_recorded(scheduler, clock, config.record), LocalExecutor(worker)),
        InputProcessor(tokenizer, info, model_config.seed, template),
        OutputProcessor(tokenizer, time.monotonic),
        time.monotonic,
    )


def _recorded(scheduler: Scheduler, clock: RecordedClock, path: Path | None) -> Scheduler | RecordingScheduler:
    """Let a journal be written where one is asked for."""
    if path is None:
        return scheduler
    try:
        return RecordingScheduler(scheduler, clock, path, describe(scheduler))
    except OSError as error:
        raise ConfigError(f"the journal {path} cannot be written: {error.strerror}") from None


def resolve_max_model_len(model_config: ModelConfig, architecture: Architecture) -> int:
    """Return the longest sequence to serve: what was asked for, at most what the checkpoint was made for."""
    longest = architecture.max_context_tokens
    asked = model_config.max_model_len
    if asked is not None and asked > longest:
        raise ConfigError(f"max_model_len {asked} is more than the {longest} positions this checkpoint was made for")
    return longest if asked is None else asked


def resolve_scheduler(config: SchedulerConfig, architecture: Architecture, quantization: str | None) -> SchedulerConfig:
    """Choose what is left open of how prompts share steps.

    A token attends to all before it, which is slower an operation than the matrix products are: the more so, the
    narrower the integers that these multiply.
    """
    cost, mixed = config.attention_cost_tokens, config.max_num_mixed_prefill_tokens
    if not config.enable_chunked_prefill:
        return config  # prompts are not cut
    if cost is None:
        bits = _BITS[quantization] if architecture.stored is None else architecture.stored.bits
        cost = round(1000 * _ATTENTION_SLOWNESS[bits] * architecture.attention_share, 3)
    if mixed is None:
        mixed = max(config.max_num_batched_tokens // 4, 1)
    return replace(config, attention_cost_tokens=cost, max_num_mixed_prefill_tokens=mixed)


def _model_info(
    model_config: ModelConfig, directory: Path, architecture: Architecture, tokenizer: Tokenizer | None, length: int
) -> ModelInfo:
    name = model_config.served_model_name or model_config.model or BUILT_IN_MODEL
    generation = read_generation_defaults(directory)
    eos = set(architecture.eos_token_ids) | set(generation.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    outside = {token_id for token_id in eos if not 0 <= token_id < architecture.vocab_size}
    if outside:
        logger.warning("%s names EOS ids outside the vocabulary, which can never come: %s", directory, sorted(outside))
    defaults = generation.sampling if model_config.generation_config == "auto" else {}
    try:
        SamplingParams(**defaults)  # type: ignore[arg-type]  # its values are checked here, whatever they are
    except RequestError as error:
        raise ModelError(
            f"{directory / 'generation_config.json'}: {error}; mend it, or ignore it with generation_config='vllm'"
        ) from error
    return ModelInfo(
        name=name,
        vocab_size=architecture.vocab_size,
        max_model_len=length,
        eos_token_ids=frozenset(eos - outside),
        generation_defaults=defaults,
    )


def _chat_template(model_config: ModelConfig, directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Read the template of the user's choice (a file, or the text itself), else the checkpoint's."""
    chosen = model_config.chat_template
    if chosen is None:
        return ChatTemplate.from_directory(directory, tokenizer.special_tokens)
    looks_like_text = "{" in chosen or "\n" in chosen
    if not looks_like_text and not Path(chosen).is_file():
        raise ConfigError(f"chat_template {chosen!r} is neither a file nor the text of a template")
    text = chosen if looks_like_text else Path(chosen).read_text(encoding="utf-8")
    return ChatTemplate(text, tokenizer.special_tokens)


def _device_config(config: EngineConfig) -> DeviceConfig:
    """Where OCTAVO_REQUIRE_KERNELS is set, "auto" means the compiled kernels on a CPU and nothing less."""
    on_cpu = resolve_device(config.device.device).type == "cpu"
    if on_cpu and kernels_required() and config.device.kernels == "auto":
        return replace(config.device, kernels="cpu")
    return config.device
