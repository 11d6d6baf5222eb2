"""The configurations of an engine: one for each room.

What a user leaves open is None or "auto" here and is resolved once, in `build.py`, before the engine exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - commands read the types of fields
from typing import TYPE_CHECKING, Any

from octavo.config.fields import QUANTIZATIONS, at_least, check_choices, choice, not_negative, option
from octavo.config.kv_transfer import KVTransferConfig
from octavo.config.speculative import SpeculativeConfig
from octavo.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float")
KV_CACHE_DTYPES = ("auto", "int8", "fp8", "fp8_e4m3")
INSTRUCTION_SETS = ("auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")
DEFAULT_PACKED_CACHE_BYTES = 16 << 30
_GROUP_MULTIPLE = 32  # as in `octavo.kernels.quantization`
DEFAULT_GROUP_SIZE = 32  # of weights that are rounded to int4 as they are loaded
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_KV_CACHE_DTYPE_ALIASES = {"fp8_e4m3": "fp8"}
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_OFFLINE_BATCHED_TOKENS = 1024  # where nobody reads along and waits for the end of a step
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MIXED_STEP_MS = 100.0  # of an engine that somebody reads along with
DEFAULT_MAX_NUM_WAITING = 1024  # of a server
DEFAULT_MAX_NUM_WAITING_TOKENS = 1 << 20


class SchedulingPolicy(StrEnum):
    """Who goes first among those who wait, and who is the first victim among those who run."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    FAIR = "fair"


class AdmissionRule(StrEnum):
    """When a waiting request may start: as soon as its known tokens fit, or when all it may ever need is reserved."""

    OPTIMISTIC = "optimistic"
    RESERVATION = "reservation"


class BatchingMode(StrEnum):
    """Whether a step mixes prompts and answers, or holds only prompts as long as there are any."""

    MIXED = "mixed"
    PREFILL_FIRST = "prefill_first"


class PreemptionMode(StrEnum):
    """What becomes of a victim's KV: computed again, copied to host memory and back, or whichever costs less."""

    AUTO = "auto"
    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint, and how it is read.

    model: a directory in Hugging Face layout, a GGUF file, a hub id, or None for the built-in demo model.
    quantization: "int8" rotates and rounds weights as they are loaded, one scale per output feature, and multiplies
    them with activations rotated and rounded to int8, one scale per token (W8A8). "int4" rounds those of the layers to
    four bits, one scale per group_size input features (W4A8), and embeddings and lm_head to int8; "int4_all" rounds
    these to four bits, too: for small models, whose vocabulary is a large part of the weights. "fp8", for GPUs and
    plain torch, rounds those of the layers to E4M3, one scale per output feature; activations, embeddings and lm_head
    stay as they are (W8A16). None leaves weights as they are; FP8 of a checkpoint is expanded, but by kernels in Triton
    multiplied as it is. Weights that are integers in the checkpoint stay so in any case: four bits as they are, eight
    bits rotated and rounded again.
    group_size: larger groups take less memory and are less exact.
    packed_cache_bytes: what was kept serves while the checkpoint's files hold the same bytes.
    seed: the seeds of requests without one are drawn from it and their arrival number.
    """

    model: str | None = None
    tokenizer: str | None = option(
        None,
        "Take the tokenizer, and its chat template, from another checkpoint. Default: the model's own.",
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
        "How weights are read; dummy makes random ones, for measuring speed.",
        choices=("auto", "safetensors", "dummy"),
    )
    dtype: str = option(
        "auto", "Number format of the weights; auto takes the checkpoint's.", unit="auto|bfloat16|float16|float32"
    )
    quantization: str | None = option(
        None,
        "Round the weights as they are loaded: int8 halves their memory (of bfloat16), and on a "
        "CPU with VNNI it is 1.6 to 3 times as fast; int4 (embeddings and lm_head in int8) takes less again and "
        "changes answers more; int4_all rounds these to int4, too: for small models, whose vocabulary is a large "
        "part of the weights. On plain torch (a GPU today) they save memory only. fp8, on a GPU, halves the memory of "
        "the layers, and rounds no activations. Checkpoints that are quantized "
        "already need no option. Default: as in the checkpoint.",
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
        "Disk that int8 and int4 weights, and those of GGUF files, may take in ~/.cache/octavo, so that the next "
        "start need not round and pack them again; the longest unused go first; 0: keep none.",
        unit="SIZE",
    )
    max_model_len: int | None = option(
        None, "Longest prompt and answer together. Default: what the checkpoint was made for.", unit="TOKENS"
    )
    seed: int = option(0, "Requests without a seed draw theirs from this one.")
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
            raise ConfigError(f"group_size ({self.group_size}) is of int4 and int4_all, not of {self.quantization}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. Its size is `num_gpu_blocks` blocks, or `kv_cache_memory_bytes`, or found from free memory.

    Memory that is asked for by one of these is taken from the system at the start, in the background; what is found is
    taken as blocks are used.

    kv_cache_dtype: "int8" and "fp8" (also named "fp8_e4m3") round keys and values of each token and head with a scale
    of their own. "fp8" is for kernels triton and reference; flashinfer-inexact and flash-attn-3-inexact round none.
    """

    block_size: int = option(DEFAULT_BLOCK_SIZE, "Tokens in one block of the KV cache.", unit="TOKENS")
    enable_prefix_caching: bool = option(True, "Compute a beginning that prompts share only once.")
    kv_cache_dtype: str = option(
        "auto",
        "How keys and values are kept: as they are computed (auto), or rounded to int8, or with kernels triton or "
        "reference to fp8 (E4M3, also fp8_e4m3); either halves them.",
        choices=KV_CACHE_DTYPES,
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory for the KV cache, such as 4G or 512M; from the start on it is taken from the system. Default: "
        "half of what is free, up to 4G, taken as it is used (GPU: 90 %, at the start).",
        unit="SIZE",
    )
    swap_space_bytes: int = option(
        0,
        "Host memory for KV that the cache has no room for, such as 2G: of preempted requests, and what evicted blocks "
        "held, to be found again; 0: it is computed again.",
        unit="SIZE",
    )
    cache_decoded_blocks: bool = option(
        True, "Keep generated tokens findable, too: the next turn of a conversation begins with them."
    )
    num_gpu_blocks: int | None = option(
        None,
        "Number of KV cache blocks, whatever the memory. Default: as many as fit.",
        unit="BLOCKS",
        name="num_gpu_blocks_override",
    )

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        check_choices(self)
        kv_cache_dtype = _KV_CACHE_DTYPE_ALIASES.get(self.kv_cache_dtype, self.kv_cache_dtype)
        object.__setattr__(self, "kv_cache_dtype", kv_cache_dtype)
        at_least("swap_space_bytes", self.swap_space_bytes, 0)
        at_least("num_gpu_blocks", self.num_gpu_blocks, 1, may_be_none=True)
        at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, may_be_none=True)

    @property
    def asks_for_memory(self) -> bool:
        """Whether it says how large the cache is, and does not leave that to the free memory."""
        return self.num_gpu_blocks is not None or self.kv_cache_memory_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue, the order of requests, and what happens when memory is short.

    mixed_step_ms, max_num_mixed_prefill_tokens: of `mixed` batching.
    attention_cost_tokens: a prompt's token counts as 1 + attention_cost_tokens * position / 1000 tokens of a step's
    budget, as it attends to all before it; 0: as one.
    None: of mixed_step_ms an engine takes 100 (`LLM` takes 0), of attention_cost_tokens what the model's shape says; a
    scheduler on its own takes 0 of either.
    enable_chunked_prefill False: a prompt waits until it fits whole; only one larger than the whole budget is cut.
    ageing_s: None under `priority`: strict classes; under `deadline`: only deadlines count.
    max_num_waiting, max_num_waiting_tokens: None for no limit (an offline batch is known whole).
    async_scheduling: nothing is decided ahead where drafts are verified or a grammar is followed.
    swap_block_cost_tokens: `auto` swaps a victim out when its blocks, at this many tokens each, cost less than
    computing its tokens again.
    max_num_preemptions: who was preempted so often starts again only with all the blocks it may ever need, and stays.
    kv_transfer_timeout_s: so long may KV take on its way from or to a store outside; then it is computed here, or not
    saved. kv_lookup_timeout_s: so long may a request wait to hear what the store has of it.
    min_tokens_to_cache: shorter beginnings are neither saved in a store outside nor fetched from it.

    max_batch_prefill_tokens bounds the prompt tokens of one step, those of running prompts included, under every
    admission rule (None: the step's budget). A prompt that is longer is cut, also without enable_chunked_prefill.

    With `admission` = reservation (the rule of Hugging Face TGI), and only then: max_batch_total_tokens bounds prompt +
    max_tokens of all running requests (None: the cache). While requests run, others are admitted only once there are
    waiting_served_ratio times as many of them, or max_waiting_tokens steps after the last admission.
    """

    max_num_seqs: int = option(DEFAULT_MAX_NUM_SEQS, "Most sequences that are computed together.")
    max_num_batched_tokens: int = option(
        DEFAULT_MAX_NUM_BATCHED_TOKENS,
        "Most tokens of one step, prompts and answers together. Default: "
        f"{DEFAULT_MAX_NUM_BATCHED_TOKENS}, in octavo bench {DEFAULT_OFFLINE_BATCHED_TOKENS}, "
        "or max-num-seqs if that is more.",
        unit="TOKENS",
        is_open=True,
    )
    enable_chunked_prefill: bool = option(
        True, "Compute a long prompt in chunks, so that running requests get a token in the same steps."
    )
    long_prefill_token_threshold: int = option(
        0, "Most tokens that one prompt gets in a step; 0 sets no such limit.", unit="TOKENS"
    )
    mixed_step_ms: float | None = option(
        None,
        "About how long a step may take in which prompts come beside answers under way, which wait for all "
        "of it: prompts get what fits, but at least an eighth of max-num-batched-tokens, however long that takes; "
        "0 sets no such limit. Default: 100; in octavo bench 0.",
        unit="MILLISECONDS",
    )
    max_num_mixed_prefill_tokens: int = option(
        0, "Most tokens that prompts get in such a step, however fast it is; 0 sets no such limit.", unit="TOKENS"
    )
    attention_cost_tokens: float | None = option(
        None,
        "How much more a prompt's token takes of a step's budget for every 1000 tokens before it. Default: "
        "what attention costs beside the matrix products in a model of this shape.",
    )
    policy: SchedulingPolicy = option(
        SchedulingPolicy.FCFS,
        "Who goes first: who came first (fcfs), the lower priority number (priority), the earliest deadline "
        "(deadline: X-Request-Timeout), or the tenant that was served least (fair). Default: fair where a server "
        "has a file of API keys, else fcfs.",
        name="scheduling_policy",
        is_open=True,
    )
    ageing_s: float | None = option(
        60.0,
        "priority: waiting so long counts as one priority number. deadline: nobody waits behind one that came "
        "so much later.",
        unit="SECONDS",
    )
    fair_input_weight: float = option(1.0, "fair: what a computed prompt token costs a tenant.")
    fair_output_weight: float = option(2.0, "fair: what a generated token costs a tenant.")
    batching: BatchingMode = option(BatchingMode.MIXED, "Mix prompts and answers in a step, or compute prompts first.")
    admission: AdmissionRule = option(
        AdmissionRule.OPTIMISTIC,
        "Start a request when its tokens fit (optimistic: somebody may be preempted later), or when prompt + "
        "max_tokens can be set aside (reservation).",
    )
    max_batch_total_tokens: int | None = option(
        None,
        "With reservation: most prompt + max_tokens of all running requests. Default: the KV cache.",
        unit="TOKENS",
    )
    max_batch_prefill_tokens: int | None = option(
        None,
        "Most prompt tokens of one step, those of prompts under way included. Default: the step's budget.",
        unit="TOKENS",
    )
    waiting_served_ratio: float = option(
        0.3, "With reservation: so many times the running must wait before they are joined."
    )
    max_waiting_tokens: int = option(20, "With reservation: steps after which the waiting may join anyhow.")
    max_num_waiting: int | None = option(
        None,
        f"Requests that may wait; one more is refused. Default: {DEFAULT_MAX_NUM_WAITING} for a server, else no limit.",
    )
    max_num_waiting_tokens: int | None = option(
        None,
        f"Tokens of the requests that may wait. Default: {DEFAULT_MAX_NUM_WAITING_TOKENS} for a server, else no limit.",
        unit="TOKENS",
    )
    async_scheduling: bool = option(
        False,
        "Decide each step while the one before is computed, where what that brings can be foreseen. It never changes a "
        "token. Worth while where deciding takes long beside computing, as on a GPU.",
    )
    preemption: PreemptionMode = option(
        PreemptionMode.AUTO,
        "What becomes of a preempted request's KV: it is computed again, swapped to host memory, or either.",
    )
    swap_block_cost_tokens: float = option(
        1.0, "auto: tokens that could be computed while a block goes to host memory and back."
    )
    max_num_preemptions: int = option(8, "So often may one request be preempted; then it is protected.")
    kv_transfer_timeout_s: float = option(
        30.0,
        "So long may KV take from or to a store; then it is computed here, or not saved.",
        unit="SECONDS",
        panel="KV stores",
    )
    kv_lookup_timeout_s: float = option(
        0.1, "So long may a request wait to hear what a store has of it.", unit="SECONDS", panel="KV stores"
    )
    min_tokens_to_cache: int = option(
        64,
        "Shorter beginnings of prompts are neither saved in a store nor fetched from it.",
        unit="TOKENS",
        panel="KV stores",
    )

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
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
                raise ConfigError(f"{name} cuts prompts, which enable_chunked_prefill=False forbids")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request gets at least one token a step"
            )

    def _check_reservation(self) -> None:
        """Refuse options that another admission rule would ignore."""
        if self.admission is AdmissionRule.RESERVATION:
            return
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _OF_RESERVATION and value != each.default:
                raise ConfigError(
                    f"{each.name} = {value} has no effect with admission = {self.admission.value}: set admission to "
                    f"reservation (--admission reservation), or leave {each.name} out"
                )


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
    """Where tensors live and which kernels serve."""

    device: str | None = option(
        None, "Where the model runs. Default: CUDA where there is one, else the CPU.", unit="cpu|cuda"
    )
    kernels: str = option(
        "auto",
        "auto takes cpu where they are compiled, else plain torch, which is reference. triton: those for GPUs, asked "
        "for by name until they have been tried on one. The inexact ones are triton with torch's products (fast), or "
        "with attention of FlashInfer or FlashAttention 3, installed beside octavo: a token may depend on the batch it "
        "was computed in.",
        choices=("auto", "cpu", "triton", "fast-inexact", "flashinfer-inexact", "flash-attn-3-inexact", "reference"),
    )
    isa: str = option(
        "auto",
        "Instruction set of the compiled kernels. auto: OCTAVO_ISA in the environment, else the processor's best one.",
        choices=INSTRUCTION_SETS,
    )
    num_threads: int | None = option(
        None,
        "Threads that compute. Default: OMP_NUM_THREADS, else one for each physical core that this process "
        "may use (affinity, cgroup quota).",
    )
    enforce_eager: bool = option(
        False, "Launch every kernel by itself: no CUDA graphs of decode steps, which need kernels in Triton."
    )
    max_cudagraph_capture_size: int | None = option(
        None,
        "Decode steps of up to so many requests are captured as CUDA graphs as the engine starts. Default: "
        "max_num_seqs, 512 rows at most, on a GPU; 0: none.",
        unit="REQUESTS",
        low=0,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        at_least("num_threads", self.num_threads, 1, may_be_none=True)
        at_least("max_cudagraph_capture_size", self.max_cudagraph_capture_size, 0, may_be_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of them together, for the one place that builds an engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    record: Path | None = option(
        None,
        "Write every decision of the scheduler to FILE, without text: for octavo replay, explain and trace. "
        "Default: nothing is written.",
        unit="FILE",
    )

    def __post_init__(self) -> None:
        if self.kv_transfer.names_store and not self.cache.enable_prefix_caching:
            raise ConfigError(
                "kv_disk_dir, kv_mooncake and kv_direct keep and hand over what the prefix cache shares, and "
                "enable_prefix_caching is off: leave it on, or name none of them"
            )
        asks_for_drafts = self.speculative.method not in {"auto", "none"} or self.speculative.model is not None
        if self.scheduler.async_scheduling and asks_for_drafts:
            raise ConfigError(
                "async_scheduling decides a step before the tokens are known that drafts follow: leave it off, or ask "
                "for no speculative_method or speculative_model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the engine must know of a loaded model without seeing a tensor.

    generation_defaults: sampling parameters from the checkpoint's generation_config.json, by SamplingParams' names.
    pooling: how the checkpoint wants hidden states to become an embedding, "last" or "mean". pooling_problem: why
    octavo cannot do as it wants, or None. hidden_size: of an embedding.
    has_head: False for a checkpoint without lm_head, which gives embeddings and no tokens. model_type, architectures:
    as config.json names them. num_parameters: weights of the checkpoint. weight_bytes: what they take, rounded as
    asked, in the checkpoint's dtype. quantization_level, file_type: of a GGUF file, the name of its mix of types and
    the number, where the file gives one.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    pooling: str = "last"
    pooling_problem: str | None = None
    has_head: bool = True
    hidden_size: int = 1
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    num_parameters: int = 0
    weight_bytes: int = 0
    quantization_level: str = ""
    file_type: int | None = None

    def choose_pooling(self, asked: str | None = None) -> str:
        """Return how to make an embedding: as asked, None for as the checkpoint wants. Raises `RequestError`."""
        if asked is None and self.pooling_problem is not None:
            raise RequestError(
                f"{self.pooling_problem}; where a pooling is chosen (--pooling), that one is taken alone"
            )
        return self.pooling if asked is None else asked


def scheduling_policy(name: str) -> SchedulingPolicy:
    """Return the policy of that name. Raises `ConfigError`."""
    return SchedulingPolicy(choice("scheduling policy", SchedulingPolicy, name))


def default_max_num_batched_tokens(max_num_seqs: int, *, is_offline: bool = False) -> int:
    """Return the budget of a step where only the number of requests is named."""
    return max(DEFAULT_OFFLINE_BATCHED_TOKENS if is_offline else DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
