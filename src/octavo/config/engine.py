"""Configurations of an engine. `build.py` replaces None and "auto"."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - read at run time
from typing import TYPE_CHECKING, Any

from octavo.config.fields import QUANTIZATIONS, at_least, check_choices, choice, not_negative, option, within
from octavo.config.kv_events import KVEventsConfig
from octavo.config.kv_transfer import KVTransferConfig
from octavo.config.speculative import SpeculativeConfig
from octavo.config.step_defaults import CPU_DEFAULTS, GPU_DEFAULTS, STEP_DEFAULTS
from octavo.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float")
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e4m3")
INSTRUCTION_SETS = ("auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")
DEFAULT_PACKED_CACHE_BYTES = 16 << 30
_GROUP_MULTIPLE = 32
DEFAULT_GROUP_SIZE = 32
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_KV_CACHE_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}
DEFAULT_BLOCK_SIZE = 16
_SEED_BITS = 53  # larger numbers are inexact in JavaScript
LEAST_RANK_TIMEOUT_S = 0.1
MOST_RANKS = 64  # csrc/ranks.h
DEFAULT_MIXED_STEP_MS = 100.0
DEFAULT_MAX_NUM_WAITING = 1024
DEFAULT_MAX_NUM_WAITING_TOKENS = 1 << 20


class SchedulingPolicy(StrEnum):
    """The order of requests, for start and preemption."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    FAIR = "fair"


class AdmissionRule(StrEnum):
    """A waiting request starts if its known tokens fit (optimistic), or if prompt + max_tokens can be reserved."""

    OPTIMISTIC = "optimistic"
    RESERVATION = "reservation"


class BatchingMode(StrEnum):
    """Whether a step mixes prompts and decodes, or computes prompts first."""

    MIXED = "mixed"
    PREFILL_FIRST = "prefill_first"


class PreemptionMode(StrEnum):
    """How a preempted request regains its KV. `AUTO` chooses the cheaper way."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The checkpoint and how to read it.

    model: Directory in Hugging Face layout, GGUF file, hub id, or None for the built-in demo model.
    quantization: Number format to which weights are rounded at load.
    - "int8": W8A8, with one scale per output feature and per token. A Hadamard transform first rotates weights and
      activations.
    - "int4": W4A8.
    - "fp8": W8A16 in E4M3, with one scale per output feature. Embeddings and lm_head stay unquantized.
    - None: A checkpoint's 4-bit integers are unchanged. 8-bit integers are rotated and rounded again. FP8 is expanded,
      except for Triton kernels.
    """

    model: str | None = None
    tokenizer: str | None = option(
        None,
        "Take the tokenizer and its chat template from another checkpoint. Default: the model's own.",
        unit="PATH_OR_ID",
    )
    chat_template: str | None = option(
        None,
        "Use this Jinja template for conversations. Default: the tokenizer's, else the model's.",
        unit="FILE_OR_TEXT",
    )
    generation_config: str = option(
        "auto",
        "Take sampling defaults from the checkpoint's generation_config.json (auto), or vLLM's (vllm).",
        choices=("auto", "vllm"),
    )
    load_format: str = option(
        "auto",
        "How to read the weights. dummy makes random weights, to measure speed.",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto", "Number format of the weights; auto takes the checkpoint's.", unit="auto|bfloat16|float16|float32"
    )
    quantization: str | None = option(
        None,
        "Round the weights at load. int8 takes half the memory of bfloat16 and is 1.6 to 3 times as fast on a CPU "
        "with VNNI. int4 takes less memory and changes answers more; embeddings and lm_head are int8. int4_all "
        "rounds these to int4, too, for small models with a large vocabulary. fp8, on a GPU, halves the memory of the "
        "layers and does not round activations. With plain torch, rounding only saves memory. Default: as in the "
        "checkpoint.",
        choices=QUANTIZATIONS,
        short="-q",
    )
    group_size: int = option(
        DEFAULT_GROUP_SIZE,
        "Input features that share a scale in --quantization int4 and int4_all: a multiple of 32.",
        unit="N",
    )
    packed_cache_bytes: int = option(
        DEFAULT_PACKED_CACHE_BYTES,
        "Disk space in ~/.cache/octavo for packed weights (int8, int4 and GGUF), which the next start reads "
        "instead of packing them again. The least recently used are deleted first. 0 disables it.",
        unit="SIZE",
    )
    max_model_len: int | None = option(
        None, "Maximum length of prompt and answer together. Default: the checkpoint's.", unit="TOKENS"
    )
    seed: int = option(0, "Seed from which requests without a seed derive theirs.")
    skip_tokenizer_init: bool = False
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "dtype", _DTYPE_ALIASES.get(dtype, dtype))
        at_least("max_model_len", self.max_model_len, 1, may_be_none=True)
        at_least("packed_cache_bytes", self.packed_cache_bytes, 0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        check_choices(self)
        at_least("group_size", self.group_size, _GROUP_MULTIPLE)
        if self.group_size % _GROUP_MULTIPLE:
            raise ConfigError(f"group_size must be a multiple of {_GROUP_MULTIPLE}, got {self.group_size}")
        if self.group_size != DEFAULT_GROUP_SIZE and self.quantization not in {"int4", "int4_all"}:
            raise ConfigError(
                f"group_size ({self.group_size}) needs quantization int4 or int4_all, not {self.quantization}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    On a CPU, memory is allocated when blocks are first used, or at start by a thread if an option sets its size.

    kv_cache_dtype: "int8" and "fp8" have one scale per token and head.
    """

    block_size: int = option(DEFAULT_BLOCK_SIZE, "Tokens in one block of the KV cache.", unit="TOKENS")
    enable_prefix_caching: bool = option(True, "Compute a prefix that several prompts share only once.")
    kv_cache_dtype: str = option(
        "auto",
        "Number format of keys and values: that of the computation (auto), int8, or fp8 (E4M3, also fp8_e4m3; "
        "with kernels triton or reference). int8 and fp8 halve their memory.",
        choices=KV_CACHE_DTYPES,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory for the KV cache, such as 4G or 512M, allocated at start. Default: half of the free memory, at "
        "most 4G, allocated as it is used (GPU: 90 %, at start).",
        unit="SIZE",
    )
    swap_space_bytes: int = option(
        0,
        "Host memory, such as 2G, for KV that does not fit the cache: that of preempted requests and of evicted "
        "blocks. 0: such KV is computed again.",
        unit="SIZE",
    )
    cache_decoded_blocks: bool = option(
        True, "Also keep generated tokens in the prefix cache: the next turn of a conversation begins with them."
    )
    state_checkpoint_interval: int | None = option(
        None,
        "Models with recurrent layers: also save the state of a prompt every so many tokens (rounded down to whole "
        "blocks), so that other prompts can continue from there. Default: 4, 16, 64, ... blocks before the last full "
        "block of the prompt.",
        unit="TOKENS",
    )
    num_gpu_blocks: int | None = option(
        None,
        "Number of blocks of the KV cache, regardless of memory. Default: as many as fit.",
        unit="BLOCKS",
        name="num_gpu_blocks_override",
    )

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        check_choices(self)
        kv_cache_dtype = _KV_CACHE_DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", kv_cache_dtype)
        at_least("swap_space_bytes", self.swap_space_bytes, 0)
        at_least("state_checkpoint_interval", self.state_checkpoint_interval, 1, may_be_none=True)
        at_least("num_gpu_blocks", self.num_gpu_blocks, 1, may_be_none=True)
        at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, may_be_none=True)

    def of_rank(self, num_ranks: int) -> CacheConfig:
        """Return a copy with one rank's share of the memory."""
        configured = self.kv_cache_memory_bytes
        return replace(
            self,
            kv_cache_memory_bytes=None if configured is None else max(1, configured // num_ranks),
            swap_space_bytes=self.swap_space_bytes // num_ranks,
        )

    @property
    def sets_memory(self) -> bool:
        """True if the cache's size does not depend on free memory."""
        return self.num_gpu_blocks is not None or self.kv_cache_memory_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of steps and queue, order of requests, and rules for lack of memory.

    max_num_seqs, max_num_batched_tokens, async_scheduling: None means the device's default.
    is_offline: True if no user waits for a step. Changes the default of max_num_batched_tokens.
    mixed_step_ms: None means 100, or 0 without an engine. `LLM` uses 0 by default.
    attention_cost_tokens: None means a value from the model's shape, or 0 without an engine.
    enable_chunked_prefill: If False, only a prompt above a whole step's budget is divided.
    ageing_s: None ignores waiting time.
    async_scheduling: A step with drafts or a grammar still ends before the next step is scheduled.
    max_num_preemptions: After this many preemptions, a request restarts only when all blocks that it may need are free.
    It is then never preempted again.
    max_batch_prefill_tokens: A longer prompt is divided, even if enable_chunked_prefill is False.
    waiting_served_ratio, max_waiting_tokens: Used only while requests run.
    """

    max_num_seqs: int | None = option(
        None,
        f"Maximum number of sequences in a step. Default: {CPU_DEFAULTS.max_num_seqs}, on a GPU "
        f"{GPU_DEFAULTS.max_num_seqs}, or max-num-batched-tokens if that is smaller.",
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Maximum number of tokens in a step, of prompts and answers together. Default: "
        f"{CPU_DEFAULTS.max_num_batched_tokens} (octavo bench: {CPU_DEFAULTS.num_offline_tokens}), on a GPU "
        f"{GPU_DEFAULTS.max_num_batched_tokens}, or max-num-seqs if that is larger.",
        unit="TOKENS",
    )
    is_offline: bool = False
    enable_chunked_prefill: bool = option(
        True, "Compute a long prompt in chunks, so that running requests get a token in the same steps."
    )
    long_prefill_token_threshold: int = option(
        0, "Maximum number of tokens of one prompt in a step. 0: no such limit.", unit="TOKENS"
    )
    mixed_step_ms: float | None = option(
        None,
        "Target duration of a step that computes prompts while other requests decode, because these wait for the "
        "whole step. Prompts get the tokens that fit, but at least an eighth of max-num-batched-tokens. 0: no "
        "such limit. Default: 100; in octavo bench 0.",
        unit="MILLISECONDS",
    )
    max_num_mixed_prefill_tokens: int = option(
        0,
        "Maximum number of prompt tokens in a step that also decodes, however fast it is. 0: no such limit.",
        unit="TOKENS",
    )
    attention_cost_tokens: float | None = option(
        None,
        "Additional budget that a prompt token takes for every 1000 tokens before it. Default: the cost of "
        "attention compared with the matrix products in a model of this shape.",
    )
    policy: SchedulingPolicy = option(
        SchedulingPolicy.FCFS,
        "Order of requests: first come, first served (fcfs); the lowest priority number (priority); the earliest "
        "deadline (deadline: X-Request-Timeout); the tenant that was served least (fair). Default: fair if the "
        "server has a file of API keys, else fcfs.",
        name="scheduling_policy",
        is_open=True,
    )
    ageing_s: float | None = option(
        60.0,
        "priority: waiting this long counts as one priority number. deadline: a request never waits for one that "
        "arrived this much later.",
        unit="SECONDS",
    )
    fair_input_weight: float = option(1.0, "fair: cost of a computed prompt token for its tenant.")
    fair_output_weight: float = option(2.0, "fair: cost of a generated token for its tenant.")
    batching: BatchingMode = option(BatchingMode.MIXED, "Mix prompts and answers in a step, or compute prompts first.")
    admission: AdmissionRule = option(
        AdmissionRule.OPTIMISTIC,
        "Start a request when its tokens fit (optimistic: a request may be preempted later), or when prompt + "
        "max_tokens can be reserved (reservation).",
    )
    max_batch_total_tokens: int | None = option(
        None,
        "With reservation: maximum of prompt + max_tokens over all running requests. Default: the KV cache.",
        unit="TOKENS",
    )
    max_batch_prefill_tokens: int | None = option(
        None,
        "Maximum number of prompt tokens in a step, chunks of running prompts included. Default: the step's budget.",
        unit="TOKENS",
    )
    waiting_served_ratio: float = option(
        0.3, "With reservation: waiting requests are admitted if they number this many times the running ones."
    )
    max_waiting_tokens: int = option(
        20,
        "With reservation: number of steps after which waiting requests are admitted regardless of "
        "waiting-served-ratio.",
    )
    max_num_waiting: int | None = option(
        None,
        f"Maximum number of waiting requests; further ones are refused. Default: {DEFAULT_MAX_NUM_WAITING} for a "
        "server, else no limit.",
    )
    max_num_waiting_tokens: int | None = option(
        None,
        f"Maximum number of tokens of waiting requests. Default: {DEFAULT_MAX_NUM_WAITING_TOKENS} for a server, "
        "else no limit.",
        unit="TOKENS",
    )
    async_scheduling: bool | None = option(
        None,
        "Schedule the next step while the current one is computed, if its outcome is predictable. No token "
        "changes. It pays if scheduling is slow compared with the computation. Default: yes on a GPU "
        "without drafts.",
    )
    preemption: PreemptionMode = option(
        PreemptionMode.AUTO,
        "What to do with a preempted request's KV: compute it again, swap it to host memory, or whichever is "
        "cheaper (auto).",
    )
    swap_block_cost_tokens: float = option(
        1.0,
        "auto: number of tokens that could be computed in the time in which a block is copied to host memory and back.",
    )
    max_num_preemptions: int = option(8, "Maximum number of preemptions of one request; then it is protected.")
    kv_transfer_timeout_s: float = option(
        30.0,
        "Maximum time to load KV from a store or to save it. After that the KV is computed here, or not saved.",
        unit="SECONDS",
        panel="KV stores",
    )
    kv_lookup_timeout_s: float = option(
        0.1, "Maximum time that a request waits for a store's answer to a lookup.", unit="SECONDS", panel="KV stores"
    )
    min_tokens_to_cache: int = option(
        64,
        "Minimum length of a prefix that is saved to a store or loaded from it.",
        unit="TOKENS",
        panel="KV stores",
    )

    def __post_init__(self) -> None:
        self._check_step()
        for name in ("long_prefill_token_threshold", "max_num_mixed_prefill_tokens"):
            at_least(name, getattr(self, name), 0)
        for name in ("max_num_waiting", "max_num_waiting_tokens"):
            at_least(name, getattr(self, name), 0, may_be_none=True)
        for name in ("max_batch_total_tokens", "max_batch_prefill_tokens"):
            at_least(name, getattr(self, name), 1, may_be_none=True)
        at_least("max_waiting_tokens", self.max_waiting_tokens, 0)
        at_least("max_num_preemptions", self.max_num_preemptions, 0)
        at_least("min_tokens_to_cache", self.min_tokens_to_cache, 0)
        for name in ("fair_input_weight", "fair_output_weight", "swap_block_cost_tokens", "waiting_served_ratio"):
            not_negative(name, getattr(self, name))
        for name in ("kv_transfer_timeout_s", "kv_lookup_timeout_s"):
            not_negative(name, getattr(self, name))
        for name in ("ageing_s", "attention_cost_tokens", "mixed_step_ms"):
            if getattr(self, name) is not None:
                not_negative(name, getattr(self, name))
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, choice(name, kind, getattr(self, name)))
        self._check_reservation()
        for name in _CUT_PROMPTS:
            if getattr(self, name) and not self.enable_chunked_prefill:
                raise ConfigError(f"{name} divides prompts into chunks, so it needs enable_chunked_prefill = True")

    def _check_step(self) -> None:
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        at_least("max_num_seqs", num_seqs, 1, may_be_none=True)
        at_least("max_num_batched_tokens", num_tokens, 1, may_be_none=True)
        if num_seqs is not None and num_tokens is not None and num_tokens < num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({num_tokens}) must be at least max_num_seqs ({num_seqs}): every running "
                "request gets at least one token a step"
            )

    def _check_reservation(self) -> None:
        if self.admission is AdmissionRule.RESERVATION:
            return
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _OF_RESERVATION and value != each.default:
                raise ConfigError(
                    f"{each.name} = {value} has no effect with admission = {self.admission.value}: set admission to "
                    f"reservation (--admission reservation), or leave {each.name} out"
                )

    def resolved(self, device_type: str = "cpu", *, has_drafts: bool = False) -> ResolvedSchedulerConfig:
        """Return a copy with the device's defaults instead of None.

        device_type: "cpu" or "cuda". has_drafts: True turns async_scheduling off by default.
        """
        defaults, values = STEP_DEFAULTS[device_type], {each.name: getattr(self, each.name) for each in fields(self)}
        num_seqs, num_tokens, is_async = self.max_num_seqs, self.max_num_batched_tokens, self.async_scheduling
        if num_seqs is None:
            num_seqs = min(defaults.max_num_seqs, num_tokens or defaults.max_num_seqs)
        if num_tokens is None:
            default = defaults.num_offline_tokens if self.is_offline else defaults.max_num_batched_tokens
            num_tokens = max(default, num_seqs)
        if is_async is None:
            is_async = defaults.async_scheduling and not has_drafts
        values |= {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens, "async_scheduling": is_async}
        return ResolvedSchedulerConfig(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSchedulerConfig(SchedulerConfig):
    """A `SchedulerConfig` without None in these fields."""

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool


_OF_RESERVATION = ("max_batch_total_tokens", "waiting_served_ratio", "max_waiting_tokens")
_CUT_PROMPTS = (
    "long_prefill_token_threshold",
    "mixed_step_ms",
    "max_num_mixed_prefill_tokens",
    "attention_cost_tokens",
)
_CHOICES: dict[str, type[StrEnum]] = {
    "policy": SchedulingPolicy,
    "admission": AdmissionRule,
    "batching": BatchingMode,
    "preemption": PreemptionMode,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Device, kernels, threads."""

    device: str | None = option(
        None, "Where the model runs. Default: CUDA if there is a CUDA device, else the CPU.", unit="cpu|cuda"
    )
    kernels: str = option(
        "auto",
        "auto: cpu if it was compiled, else plain torch (reference). triton: kernels for GPUs, which no GPU has run "
        "yet. fast-inexact: triton with torch's matrix products; a token may depend on its batch.",
        choices=("auto", "cpu", "triton", "fast-inexact", "reference"),
    )
    isa: str = option(
        "auto",
        "Instruction set of the compiled kernels. auto: OCTAVO_ISA in the environment, else the processor's best one.",
        choices=INSTRUCTION_SETS,
    )
    num_threads: int | None = option(
        None,
        "Number of threads that compute. Default: OMP_NUM_THREADS, else one for each physical core that this "
        "process may use (affinity, cgroup quota).",
    )
    tensor_parallel_size: int = option(
        1,
        "Number of processes, called ranks, that compute the model together, on a CPU. Each has a part of the "
        "weights, the KV cache and the threads. Tokens do not change.",
        unit="RANKS",
        short="-tp",
        low=1,
    )
    distributed_executor_backend: str = option(
        "mp", "How ranks are started. mp: processes on this machine. ray: not supported yet.", choices=("mp", "ray")
    )
    enable_expert_parallel: bool = option(
        False,
        "With several ranks, each expert of a mixture belongs to one rank. Default: each expert is divided among all "
        "ranks. Tokens do not change.",
        short="-ep",
    )
    rank_timeout_s: float = option(
        6.0,
        "Time after which ranks that wait for another one declare it dead, and the engine restarts.",
        unit="SECONDS",
    )
    enforce_eager: bool = option(
        False, "Launch each kernel separately, without CUDA graphs of decode steps. Graphs need kernels triton."
    )
    max_cudagraph_capture_size: int | None = option(
        None,
        "Largest number of requests in a decode step for which a CUDA graph is captured at start. Default: "
        "max_num_seqs on a GPU, at most 512 rows. 0: no graphs.",
        unit="REQUESTS",
        low=0,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        at_least("num_threads", self.num_threads, 1, may_be_none=True)
        within("tensor_parallel_size", self.tensor_parallel_size, 1, MOST_RANKS)
        not_negative("rank_timeout_s", self.rank_timeout_s)
        if self.rank_timeout_s < LEAST_RANK_TIMEOUT_S:
            raise ConfigError(f"rank_timeout_s must be at least {LEAST_RANK_TIMEOUT_S}, got {self.rank_timeout_s}")
        at_least("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 0, may_be_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All configurations."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    record: Path | None = option(
        None,
        "Write every decision of the scheduler to FILE, without text, for octavo replay, explain and trace. "
        "Default: none.",
        unit="FILE",
    )

    def __post_init__(self) -> None:
        if self.kv_transfer.names_store and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "kv_disk_dir, kv_mooncake and kv_direct need enable_prefix_caching: turn it on, or set none of them"
            )
        if self.kv_events.is_active and not self.cache.enable_prefix_caching:
            raise ConfigError("kv_events_config publishes the prefix cache, so it needs enable_prefix_caching")
        if self.scheduler.async_scheduling and self.speculative.is_requested:
            raise ConfigError(
                "async_scheduling does not work with drafts, because they need the tokens of the previous step: turn "
                "it off, or set neither speculative_method nor speculative_model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a loaded model, without tensors.

    generation_defaults: The checkpoint's sampling parameters.
    pooling: "last" or "mean". pooling_problem: Why the checkpoint's pooling is unsupported.
    hidden_size: Length of an embedding. has_head: False if lm_head is missing, so only embeddings are served.
    has_recurrent_layers: If True, prefix hits end at saved states.
    weight_bytes: In the checkpoint's dtype, or after quantization.
    quantization_level, file_type: Name and number of a GGUF file's mix of types.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    pooling: str = "last"
    pooling_problem: str | None = None
    has_head: bool = True
    has_recurrent_layers: bool = False
    hidden_size: int = 1
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    num_parameters: int = 0
    weight_bytes: int = 0
    quantization_level: str = ""
    file_type: int | None = None

    def choose_pooling(self, requested: str | None = None) -> str:
        """Return `requested`, or the checkpoint's pooling. Raises `RequestError` if the latter is unsupported."""
        if requested is None and self.pooling_problem is not None:
            raise RequestError(f"{self.pooling_problem}; the option --pooling overrides it")
        return self.pooling if requested is None else requested


def random_seed() -> int:
    """Return a seed for an engine of a server."""
    return secrets.randbits(_SEED_BITS)


def scheduling_policy(name: str) -> SchedulingPolicy:
    """Parse a name. Raises `ConfigError`."""
    return SchedulingPolicy(choice("scheduling policy", SchedulingPolicy, name))
