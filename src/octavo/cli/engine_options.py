"""Options of every command that runs a model; named as those of `vllm serve` where they mean the same."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.assets import BUILT_IN_MODEL
from octavo.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_GROUP_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_MAX_NUM_WAITING,
    DEFAULT_MAX_NUM_WAITING_TOKENS,
    DEFAULT_OFFLINE_BATCHED_TOKENS,
    DEFAULT_PACKED_CACHE_BYTES,
    INSTRUCTION_SETS,
    QUANTIZATIONS,
    AdmissionRule,
    BatchingMode,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
    SpeculativeConfig,
    default_max_num_batched_tokens,
)
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.engine.llm_engine import Engine
    from octavo.engine.remote_engine import RemoteEngine

_MODEL = "Model"
_CACHE = "KV cache"
_SCHEDULER = "Scheduler"
_DEVICE = "Device"
_SAME_NAMES = (  # options that are fields of SchedulerConfig under the same name
    "mixed_step_ms",
    "max_num_mixed_prefill_tokens",
    "attention_cost_tokens",
    "ageing_s",
    "fair_input_weight",
    "fair_output_weight",
    "swap_block_cost_tokens",
    "batching",
    "admission",
    "max_batch_total_tokens",
    "max_batch_prefill_tokens",
    "waiting_served_ratio",
    "max_waiting_tokens",
    "max_num_waiting",
    "max_num_waiting_tokens",
    "preemption",
    "max_num_preemptions",
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Read a number with an optional unit: 4G and 4GiB are 4 * 1024**3, 4g is 4 * 1000**3 (vLLM's rule)."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 4G, 512M or a number")
    number, unit, binary = match.groups()
    base = 1024 if unit.isupper() or binary else 1000
    return int(float(number) * base ** " kmgt".index(unit.lower() or " "))


def parse_speculative(text: str | SpeculativeConfig) -> SpeculativeConfig | None:
    """Read a speculative configuration."""
    if isinstance(text, SpeculativeConfig):
        return text
    try:
        return SpeculativeConfig.parse(json.loads(text))
    except (ValueError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None


def _unless_named_before(context: typer.Context, model: str | None) -> str | None:
    """Let MODEL on the command line count more than a model of the environment or of a file."""
    source = context.get_parameter_source("model")
    is_weaker = source is not None and source.name != "COMMANDLINE"
    return None if is_weaker and context.params.get("model_argument") is not None else model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What `EngineConfig` is made of."""

    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A directory in Hugging Face layout or a hub id (owner/name). Default: the built-in model.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID",
            rich_help_panel=_MODEL,
            help="The same as MODEL, as an option. Default: the built-in model.",
            show_default=False,
            callback=_unless_named_before,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID",
            rich_help_panel=_MODEL,
            help="Take the tokenizer, and its chat template, from another checkpoint. Default: the model's own.",
            show_default=False,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE_OR_TEXT",
            rich_help_panel=_MODEL,
            help="Use this Jinja template for conversations. Default: the tokenizer's, else the model's.",
            show_default=False,
        ),
    ] = None
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|vllm",
            rich_help_panel=_MODEL,
            help="Take sampling defaults from the checkpoint's generation_config.json (auto), or vLLM's (vllm).",
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        typer.Option(
            metavar="auto|safetensors|dummy",
            rich_help_panel=_MODEL,
            help="How weights are read; dummy makes random ones, for measuring speed.",
        ),
    ] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|bfloat16|float16|float32",
            rich_help_panel=_MODEL,
            help="Number format of the weights; auto takes the checkpoint's.",
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            "-q",
            metavar="|".join(QUANTIZATIONS),
            rich_help_panel=_MODEL,
            help="Round the weights to integers as they are loaded: int8 halves their memory (of bfloat16), and on a "
            "CPU with VNNI it is 1.6 to 3 times as fast; int4 (embeddings and lm_head in int8) takes less again and "
            "changes answers more; int4_all rounds these to int4, too: for small models, whose vocabulary is a large "
            "part of the weights. On plain torch (a GPU today) they save memory only. Checkpoints that are quantized "
            "already need no option. Default: as in the checkpoint.",
        ),
    ] = None
    group_size: Annotated[
        int,
        typer.Option(
            metavar="N",
            rich_help_panel=_MODEL,
            help="Input features that share a scale in --quantization int4 and int4_all: a multiple of 32.",
        ),
    ] = DEFAULT_GROUP_SIZE
    packed_cache_bytes: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            rich_help_panel=_MODEL,
            help="Disk that int8 and int4 weights may take in ~/.cache/octavo, so that the next start need not round "
            "them again; the longest unused go first; 0: keep none.",
        ),
    ] = DEFAULT_PACKED_CACHE_BYTES
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            parser=parse_size,
            rich_help_panel=_MODEL,
            help="Longest prompt and answer together. Default: what the checkpoint was made for.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(rich_help_panel=_MODEL, help="Requests without a seed draw theirs from this one."),
    ] = 0
    max_num_seqs: Annotated[
        int, typer.Option(rich_help_panel=_SCHEDULER, help="Most sequences that are computed together.")
    ] = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            parser=parse_size,
            rich_help_panel=_SCHEDULER,
            help="Most tokens of one step, prompts and answers together. Default: "
            f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}, in octavo bench {DEFAULT_OFFLINE_BATCHED_TOKENS}, "
            "or max-num-seqs if that is more.",
            show_default=False,
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            rich_help_panel=_SCHEDULER,
            help="Cut long prompts into pieces, so that answers under way go on beside them.",
        ),
    ] = True
    long_prefill_token_threshold: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            rich_help_panel=_SCHEDULER,
            help="Most tokens that one prompt gets in a step; 0 sets no such limit.",
        ),
    ] = 0
    mixed_step_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MILLISECONDS",
            rich_help_panel=_SCHEDULER,
            help="About how long a step may take in which prompts come beside answers under way, which wait for all "
            "of it: prompts get what fits, but at least an eighth of max-num-batched-tokens, however long that takes; "
            "0 sets no such limit. Default: 100; in octavo bench 0.",
            show_default=False,
        ),
    ] = None
    max_num_mixed_prefill_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            rich_help_panel=_SCHEDULER,
            help="Most tokens that prompts get in such a step, however fast it is; 0 sets no such limit.",
        ),
    ] = 0
    attention_cost_tokens: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_SCHEDULER,
            help="How much more a prompt's token takes of a step's budget for every 1000 tokens before it. Default: "
            "what attention costs beside the matrix products in a model of this shape.",
            show_default=False,
        ),
    ] = None
    scheduling_policy: Annotated[
        SchedulingPolicy | None,
        typer.Option(
            rich_help_panel=_SCHEDULER,
            help="Who goes first: who came first (fcfs), the lower priority number (priority), the earliest deadline "
            "(deadline: X-Request-Timeout), or the tenant that was served least (fair). Default: fair where a server "
            "has a file of API keys, else fcfs.",
            show_default=False,
        ),
    ] = None
    ageing_s: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            rich_help_panel=_SCHEDULER,
            help="priority: waiting so long counts as one priority number. deadline: nobody waits behind one that came "
            "so much later.",
        ),
    ] = 60.0
    fair_input_weight: Annotated[
        float,
        typer.Option(rich_help_panel=_SCHEDULER, help="fair: what a computed prompt token costs a tenant."),
    ] = 1.0
    fair_output_weight: Annotated[
        float,
        typer.Option(rich_help_panel=_SCHEDULER, help="fair: what a generated token costs a tenant."),
    ] = 2.0
    batching: Annotated[
        BatchingMode,
        typer.Option(rich_help_panel=_SCHEDULER, help="Mix prompts and answers in a step, or compute prompts first."),
    ] = BatchingMode.MIXED
    admission: Annotated[
        AdmissionRule,
        typer.Option(
            rich_help_panel=_SCHEDULER,
            help="Start a request when its tokens fit (optimistic: somebody may be preempted later), or when prompt + "
            "max_tokens can be set aside (reservation).",
        ),
    ] = AdmissionRule.OPTIMISTIC
    max_batch_total_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            parser=parse_size,
            rich_help_panel=_SCHEDULER,
            help="With reservation: most prompt + max_tokens of all running requests. Default: the KV cache.",
            show_default=False,
        ),
    ] = None
    max_batch_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            parser=parse_size,
            rich_help_panel=_SCHEDULER,
            help="With reservation: most prompt tokens admitted in one step. Default: the step's budget.",
            show_default=False,
        ),
    ] = None
    waiting_served_ratio: Annotated[
        float,
        typer.Option(
            rich_help_panel=_SCHEDULER,
            help="With reservation: so many times the running must wait before they are joined.",
        ),
    ] = 0.3
    max_waiting_tokens: Annotated[
        int,
        typer.Option(
            rich_help_panel=_SCHEDULER, help="With reservation: steps after which the waiting may join anyhow."
        ),
    ] = 20
    max_num_waiting: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_SCHEDULER,
            help=f"Requests that may wait; one more is refused. Default: {DEFAULT_MAX_NUM_WAITING} for a server, else "
            "no limit.",
            show_default=False,
        ),
    ] = None
    max_num_waiting_tokens: Annotated[
        int | None,
        typer.Option(
            parser=parse_size,
            metavar="TOKENS",
            rich_help_panel=_SCHEDULER,
            help=f"Tokens of the requests that may wait. Default: {DEFAULT_MAX_NUM_WAITING_TOKENS} for a server, else "
            "no limit.",
            show_default=False,
        ),
    ] = None
    preemption: Annotated[
        PreemptionMode,
        typer.Option(
            rich_help_panel=_SCHEDULER,
            help="What becomes of a preempted request's KV: it is computed again, swapped to host memory, or either.",
        ),
    ] = PreemptionMode.AUTO
    swap_block_cost_tokens: Annotated[
        float,
        typer.Option(
            rich_help_panel=_SCHEDULER,
            help="auto: tokens that could be computed while a block goes to host memory and back.",
        ),
    ] = 1.0
    max_num_preemptions: Annotated[
        int,
        typer.Option(rich_help_panel=_SCHEDULER, help="So often may one request be preempted; then it is protected."),
    ] = 8
    speculative_config: Annotated[
        SpeculativeConfig | None,
        typer.Option(
            metavar="JSON",
            parser=parse_speculative,
            rich_help_panel=_SCHEDULER,
            help="Guess tokens, so that one step verifies several; no token depends on it. An object with method "
            "(ngram: what followed the last time) and num_speculative_tokens, prompt_lookup_min, prompt_lookup_max. "
            "Default: nothing is guessed.",
            show_default=False,
        ),
    ] = None
    block_size: Annotated[
        int, typer.Option(metavar="TOKENS", rich_help_panel=_CACHE, help="Tokens in one block of the KV cache.")
    ] = DEFAULT_BLOCK_SIZE
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            rich_help_panel=_CACHE,
            help="Compute a beginning that prompts share only once.",
        ),
    ] = True
    probe_largest_batch: Annotated[
        bool,
        typer.Option(
            "--probe-largest-batch",
            rich_help_panel=_CACHE,
            help="Find the largest step that fits by running it once, and size the cache by what it took; the result "
            "is kept for later starts.",
        ),
    ] = False
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|int8",
            rich_help_panel=_CACHE,
            help="How keys and values are kept: as they are computed (auto), or rounded to int8, which halves them.",
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            rich_help_panel=_CACHE,
            help="Memory for the KV cache, such as 4G or 512M; from the start on it is taken from the system. Default: "
            "half of what is free, up to 4G, taken as it is used (GPU: 90 %, at the start).",
            show_default=False,
        ),
    ] = None
    swap_space_bytes: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            rich_help_panel=_CACHE,
            help="Host memory for the KV of preempted requests, such as 2G; 0: it is computed again.",
        ),
    ] = 0
    cache_decoded_blocks: Annotated[
        bool,
        typer.Option(
            "--cache-decoded-blocks/--no-cache-decoded-blocks",
            rich_help_panel=_CACHE,
            help="Keep generated tokens findable, too: the next turn of a conversation begins with them.",
        ),
    ] = True
    num_gpu_blocks_override: Annotated[
        int | None,
        typer.Option(
            metavar="BLOCKS",
            rich_help_panel=_CACHE,
            help="Number of KV cache blocks, whatever the memory. Default: as many as fit.",
            show_default=False,
        ),
    ] = None
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            rich_help_panel=_SCHEDULER,
            help="Write every decision of the scheduler to FILE, without text: for octavo replay, explain and trace. "
            "Default: nothing is written.",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            rich_help_panel=_DEVICE,
            help="Where the model runs. Default: CUDA where there is one, else the CPU.",
            show_default=False,
        ),
    ] = None
    kernels: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|reference",
            rich_help_panel=_DEVICE,
            help="auto takes the fastest kernels there are; reference is plain torch.",
        ),
    ] = "auto"
    isa: Annotated[
        str,
        typer.Option(
            metavar="|".join(INSTRUCTION_SETS),
            rich_help_panel=_DEVICE,
            help="Instruction set of the compiled kernels; auto takes the best that the processor has.",
        ),
    ] = "auto"
    num_threads: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=_DEVICE,
            help="Threads that compute. Default: OMP_NUM_THREADS, else one for each physical core that this process "
            "may use (affinity, cgroup quota).",
            show_default=False,
        ),
    ] = None

    @property
    def chosen_model(self) -> str | None:
        """The model, whichever way it was named; None for the built-in one. Raises `typer.BadParameter` for two."""
        if self.model_argument is not None and self.model is not None and self.model_argument != self.model:
            raise typer.BadParameter(f"two models are named: {self.model_argument} and --model {self.model}")
        return self.model_argument if self.model is None else self.model

    @property
    def served_name(self) -> str:
        """How the model is called where its path is nobody's business."""
        model = self.chosen_model
        if model is None:
            return BUILT_IN_MODEL
        path = Path(model).expanduser()
        return path.resolve().name if path.is_dir() else model

    def config(self) -> EngineConfig:
        """Build the configuration. Raises `ConfigError`."""
        budget = self.max_num_batched_tokens
        return EngineConfig(
            model=ModelConfig(
                model=self.chosen_model,
                tokenizer=self.tokenizer,
                dtype=self.dtype,
                quantization=self.quantization,
                group_size=self.group_size,
                packed_cache_bytes=self.packed_cache_bytes,
                max_model_len=self.max_model_len,
                seed=self.seed,
                load_format=self.load_format,
                generation_config=self.generation_config,
                chat_template=self.chat_template,
                served_model_name=self.served_name,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_gpu_blocks=self.num_gpu_blocks_override,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                kv_cache_dtype=self.kv_cache_dtype,
                enable_prefix_caching=self.enable_prefix_caching,
                cache_decoded_blocks=self.cache_decoded_blocks,
                swap_space_bytes=self.swap_space_bytes,
                probe_largest_batch=self.probe_largest_batch,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=default_max_num_batched_tokens(self.max_num_seqs) if budget is None else budget,
                policy=self.scheduling_policy or SchedulingPolicy.FCFS,
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                **{name: getattr(self, name) for name in _SAME_NAMES},
            ),
            speculative=self.speculative_config,
            record=self.record,
            device=DeviceConfig(device=self.device, kernels=self.kernels, isa=self.isa, num_threads=self.num_threads),
        )

    def launch(self, meanwhile: Callable[[], object] | None = None) -> RemoteEngine:
        """Load the model in a process of its own, and do something meanwhile. Raises `ConfigError` and `ModelError`."""
        from octavo.runtime.progress import LoadingProgress
        from octavo.startup.launch import launch_engine

        config = self.config()
        with LoadingProgress() as progress:
            return launch_engine(config, progress=progress, meanwhile=meanwhile)

    def build(self) -> Engine:
        """Load the model, with a progress bar where somebody watches. Raises `ConfigError` and `ModelError`."""
        config = self.config()  # wrong options are told before torch is imported
        from octavo.build import build_engine  # imports torch
        from octavo.runtime.progress import LoadingProgress

        with LoadingProgress() as progress:
            return build_engine(config, progress=progress)
