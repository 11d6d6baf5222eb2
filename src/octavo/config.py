"""Small frozen configurations, one per room; each class takes only the one it needs.

What a user leaves open is None or "auto" here and is resolved once, in `build.py`, before the engine exists.
This is the only module that reads settings from the environment.
"""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import POOLING

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float")
QUANTIZATIONS = ("int8", "int4", "int4_all")
KV_CACHE_DTYPES = ("auto", "int8")
INSTRUCTION_SETS = ("auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")
SPECULATIVE_METHODS = ("ngram",)
MAX_SPECULATIVE_TOKENS = 32
MAX_PROMPT_LOOKUP = 32
DEFAULT_PROMPT_LOOKUP = (2, 4)
LOG_FORMATS = ("text", "json")
API_KEY_VARIABLE = "OCTAVO_API_KEY"
PORT_VARIABLE = "OCTAVO_SERVE_PORT"
SECRET_VARIABLES = (API_KEY_VARIABLE, "OCTAVO_SERVE_API_KEY")  # the engine process has no use for them
DEFAULT_PACKED_CACHE_BYTES = 16 << 30
_GROUP_MULTIPLE = 32  # as in `octavo.kernels.quantization`
DEFAULT_GROUP_SIZE = 32  # of weights that are rounded to int4 as they are loaded
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512
DEFAULT_OFFLINE_BATCHED_TOKENS = 1024  # where nobody reads along and waits for the end of a step
DEFAULT_BLOCK_SIZE = 16
DEFAULT_MIXED_STEP_MS = 100.0  # of an engine that somebody reads along with
DEFAULT_MAX_BODY_BYTES = 8 << 20
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

    model: a directory in Hugging Face layout, a hub id, or None for the built-in demo model.
    dtype: "auto" takes the checkpoint's. max_model_len None takes the checkpoint's.
    quantization: "int8" rotates and rounds weights as they are loaded, one scale per output feature, and multiplies
    them with activations rotated and rounded to int8, one scale per token (W8A8). "int4" rounds those of the layers to
    four bits, one scale per group_size input features (W4A8), and embeddings and lm_head to int8; "int4_all" rounds
    these to four bits, too: for small models, whose vocabulary is a large part of the weights. None leaves weights as
    they are. Weights that are integers in the checkpoint stay so in any case: four bits as they are, eight bits rotated
    and rounded again.
    group_size: of four bits, a multiple of 32; larger groups take less memory and are less exact.
    packed_cache_bytes: how much disk rounded weights may take in the user's cache directory, so that the next start
    need not round and pack them again while the checkpoint's files hold the same bytes; the longest unused go first;
    0 keeps none.
    seed: the seeds of requests without one are drawn from it and their arrival number.
    generation_config: "auto" honours the checkpoint's generation_config.json, "vllm" (the name vLLM gave it) ignores
    its sampling defaults.
    """

    model: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    group_size: int = DEFAULT_GROUP_SIZE
    packed_cache_bytes: int = DEFAULT_PACKED_CACHE_BYTES
    max_model_len: int | None = None
    seed: int = 0
    skip_tokenizer_init: bool = False
    load_format: str = "auto"
    generation_config: str = "auto"
    chat_template: str | None = None
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        dtype = str(self.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        object.__setattr__(self, "dtype", _DTYPE_ALIASES.get(dtype, dtype))
        _at_least("max_model_len", self.max_model_len, 1, may_be_none=True)
        _at_least("packed_cache_bytes", self.packed_cache_bytes, 0)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        _at_least("group_size", self.group_size, _GROUP_MULTIPLE)
        if self.group_size % _GROUP_MULTIPLE:
            raise ConfigError(f"group_size must be a multiple of {_GROUP_MULTIPLE}, got {self.group_size}")
        if self.group_size != DEFAULT_GROUP_SIZE and self.quantization not in {"int4", "int4_all"}:
            raise ConfigError(f"group_size ({self.group_size}) is of int4 and int4_all, not of {self.quantization}")
        _one_of("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        _one_of("generation_config", self.generation_config, ("auto", "vllm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache. Its size is `num_gpu_blocks` blocks, or `kv_cache_memory_bytes`, or found from free memory.

    Memory that is asked for by one of these is taken from the system at the start, in the background; what is found is
    taken as blocks are used.

    probe_largest_batch: run the largest step that fits once at start-up, take no larger ones, and size the cache by
    what it took; the result is kept and serves later starts with the same model and limits.
    cache_decoded_blocks: whether blocks with generated tokens can be shared, too (the next turn of a conversation
    finds its history then).
    swap_space_bytes: host memory for the KV of preempted requests; 0 for none.
    kv_cache_dtype: "auto" keeps keys and values as they are computed; "int8" rounds those of each token and head with a
    scale of their own, which halves them.
    """

    block_size: int = DEFAULT_BLOCK_SIZE
    kv_cache_dtype: str = "auto"
    num_gpu_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    cache_decoded_blocks: bool = True
    swap_space_bytes: int = 0
    probe_largest_batch: bool = False

    def __post_init__(self) -> None:
        _at_least("block_size", self.block_size, 1)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _at_least("swap_space_bytes", self.swap_space_bytes, 0)
        _at_least("num_gpu_blocks", self.num_gpu_blocks, 1, may_be_none=True)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, may_be_none=True)

    @property
    def asks_for_memory(self) -> bool:
        """Whether it says how large the cache is, and does not leave that to the free memory."""
        return self.num_gpu_blocks is not None or self.kv_cache_memory_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of the queue, the order of requests, and what happens when memory is short.

    long_prefill_token_threshold: most tokens one prompt gets in a step; 0 for no such limit.
    mixed_step_ms: about how long a step may take in which prompts come beside answers, which wait for the whole of it:
    prompts get as many tokens as that leaves them, but at least an eighth of max_num_batched_tokens, however long that
    takes; 0 for no such limit. max_num_mixed_prefill_tokens: most tokens that prompts get there, however fast a step
    is; 0 for no such limit. Both are of `mixed` batching.
    attention_cost_tokens: a prompt's token counts as 1 + attention_cost_tokens * position / 1000 tokens of a step's
    budget, as it attends to all before it; 0: as one.
    None: of mixed_step_ms an engine takes 100 (`LLM` takes 0), of attention_cost_tokens what the model's shape says; a
    scheduler on its own takes 0 of either.
    enable_chunked_prefill False: a prompt waits until it fits whole; only one larger than the whole budget is cut.
    ageing_s: under `priority`, waiting so long counts as much as one priority number less (None: strict classes);
    under `deadline`, nobody waits behind a request that came so much later (None: only deadlines count).
    fair_input_weight, fair_output_weight: what a computed prompt token and a generated one cost a tenant under `fair`.
    max_num_waiting, max_num_waiting_tokens: requests that may wait, and their tokens; one more is refused. None for no
    limit (an offline batch is known whole).
    preemption, swap_block_cost_tokens: `auto` swaps a victim out when its blocks, at this many tokens each (what could
    be computed while one goes to host memory and back), cost less than computing its tokens again.
    max_num_preemptions: so often may one request be preempted; then it starts again only with all the blocks it may
    ever need, and stays.
    kv_load_timeout_s: so long may KV from outside take; then it is computed here.

    With `admission` = reservation (the rule of Hugging Face TGI): max_batch_total_tokens bounds prompt + max_tokens of
    all running requests (None: the cache), max_batch_prefill_tokens the prompt tokens admitted in one step (None: the
    step's budget). While requests run, others are admitted only once there are waiting_served_ratio times as many of
    them, or max_waiting_tokens steps after the last admission.
    """

    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    mixed_step_ms: float | None = None
    max_num_mixed_prefill_tokens: int = 0
    attention_cost_tokens: float | None = None
    batching: BatchingMode = BatchingMode.MIXED
    ageing_s: float | None = 60.0
    fair_input_weight: float = 1.0
    fair_output_weight: float = 2.0
    admission: AdmissionRule = AdmissionRule.OPTIMISTIC
    max_batch_total_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    max_num_waiting: int | None = None
    max_num_waiting_tokens: int | None = None
    preemption: PreemptionMode = PreemptionMode.AUTO
    swap_block_cost_tokens: float = 1.0
    max_num_preemptions: int = 8
    kv_load_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        for name in ("long_prefill_token_threshold", "max_num_mixed_prefill_tokens"):
            _at_least(name, getattr(self, name), 0)
        for name in ("max_num_waiting", "max_num_waiting_tokens"):
            _at_least(name, getattr(self, name), 0, may_be_none=True)
        for name in ("max_batch_total_tokens", "max_batch_prefill_tokens"):
            _at_least(name, getattr(self, name), 1, may_be_none=True)
        _at_least("max_waiting_tokens", self.max_waiting_tokens, 0)
        _at_least("max_num_preemptions", self.max_num_preemptions, 0)
        for name in ("fair_input_weight", "fair_output_weight", "swap_block_cost_tokens", "waiting_served_ratio"):
            _not_negative(name, getattr(self, name))
        for name in ("ageing_s", "attention_cost_tokens", "mixed_step_ms"):
            if getattr(self, name) is not None:
                _not_negative(name, getattr(self, name))
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, _choice(name, kind, getattr(self, name)))
        for name in _CUT_PROMPTS:
            if getattr(self, name) and not self.enable_chunked_prefill:
                raise ConfigError(f"{name} cuts prompts, which enable_chunked_prefill=False forbids")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request gets at least one token a step"
            )


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
    """Where tensors live and which kernels serve. device None: CUDA when there, else the CPU.

    isa: the instruction set of the compiled kernels; "auto" is the best that the processor has.
    """

    device: str | None = None
    kernels: str = "auto"
    isa: str = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        _one_of("kernels", self.kernels, ("auto", "cpu", "reference"))
        _one_of("isa", self.isa, INSTRUCTION_SETS)
        _at_least("num_threads", self.num_threads, 1, may_be_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed, so that one step verifies several. No token depends on it; named as in vLLM.

    method: "ngram" proposes what followed the last time that the newest tokens stood in the request.
    num_speculative_tokens: at most so many are guessed behind the newest token.
    prompt_lookup_min, prompt_lookup_max: how many tokens have to be the same for that; the most are looked for first.
    None: 2 and 4, or what leaves the other one as it is.
    """

    method: str
    num_speculative_tokens: int = 4
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        _one_of("method of speculative_config", self.method, SPECULATIVE_METHODS)
        _within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                _within(name, getattr(self, name), 1, MAX_PROMPT_LOOKUP)
        least, most = self.lookup_lengths
        if least > most:
            raise ConfigError(f"prompt_lookup_min ({least}) must be at most prompt_lookup_max ({most})")

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The least and the most tokens that are looked for."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None:
            least = DEFAULT_PROMPT_LOOKUP[0] if most is None else min(DEFAULT_PROMPT_LOOKUP[0], most)
        return least, max(DEFAULT_PROMPT_LOOKUP[1], least) if most is None else most

    @classmethod
    def parse(cls, fields: Mapping[str, Any] | None) -> SpeculativeConfig | None:
        """Return what a user wrote as an object of JSON; None for none. Raises `ConfigError`."""
        if fields is None:
            return None
        names = tuple(each.name for each in dataclass_fields(cls))
        if not hasattr(fields, "keys") or "method" not in fields:
            raise ConfigError(f"speculative_config must be an object that names a method, got {fields!r}")
        for name in fields:
            _one_of("a field of speculative_config", name, names)
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All of them together, for the one place that builds an engine.

    speculative: how tokens are guessed; None for not at all.
    record: a file to which every call into the core is written, for `octavo replay`, `explain` and `trace`.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    speculative: SpeculativeConfig | None = None
    record: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the engine must know of a loaded model without seeing a tensor.

    generation_defaults: sampling parameters from the checkpoint's generation_config.json, by SamplingParams' names.
    pooling: how the checkpoint wants hidden states to become an embedding, "last" or "mean". pooling_problem: why
    octavo cannot do as it wants, or None. hidden_size: of an embedding.
    has_head: False for a checkpoint without lm_head, which gives embeddings and no tokens. model_type, architectures:
    as config.json names them.
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

    def choose_pooling(self, asked: str | None = None) -> str:
        """Return how to make an embedding: as asked, None for as the checkpoint wants. Raises `RequestError`."""
        if asked is None and self.pooling_problem is not None:
            raise RequestError(
                f"{self.pooling_problem}; where a pooling is chosen (--pooling), that one is taken alone"
            )
        return self.pooling if asked is None else asked


TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "none", "think")
REASONING_FIELDS = ("reasoning_content", "reasoning")
EMBEDDING_POOLING = ("auto", *POOLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Who is let in, and how much is taken from each. Every limit is finite unless it is None.

    served_model_names: names that clients use; () for the model's own. api_key: one key for everybody, api_keys_file:
    a file with a key for each tenant (`octavo.server.access.tenants`); neither: nobody is asked.
    max_open_requests: output streams that may run and wait, max_num_waiting_tokens: tokens of prompts of which no
    output was told yet (of answers that are not streamed: until their end); more are refused with 429.
    request_timeout_s: the longest that a request may take, also where its X-Request-Timeout asks for more.
    body_timeout_s: within this time a request's headers, and then its body, have to arrive. idle_timeout_s: within
    it a client has to take what waits for it, or 16 KiB of that (seen on Linux only).
    keep_alive_timeout_s: so long may a connection be idle between two requests; longer than whatever stands before the
    server keeps one. max_unread_outputs: outputs of a stream that wait for a client who reads too slowly; one more ends
    it. max_request_logprobs: n x tokens x (logprobs + 1) of a request, over all prompts; one that could bring more is
    refused.
    grace_s: when the server is told to stop, how long open requests may go on.
    stream_keep_alive_s: a stream that has told nothing for so long sends a comment.
    tool_call_parser, reasoning_parser: how the model writes calls of tools, and its reasoning; "auto" looks at its chat
    template (`octavo.server.answers.tools`). reasoning_field: what chat completions call the latter.
    pooling: how an embedding is made of hidden states, "last" or "mean"; "auto" for what the checkpoint asks for.
    otlp_traces_endpoint: where OpenTelemetry's spans are sent; None for nowhere.
    dashboard: whether there is a page at /dashboard that shows what the engine does.
    forwarded_allow_ips: addresses and networks of proxies whose X-Forwarded-For says who a client is.
    allowed_hosts, allowed_origins: names to answer to, and pages that may ask (`octavo.server.access.origins`).
    """

    served_model_names: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    api_keys_file: Path | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_open_requests: int | None = DEFAULT_MAX_NUM_SEQS + DEFAULT_MAX_NUM_WAITING
    max_num_waiting_tokens: int | None = DEFAULT_MAX_NUM_WAITING_TOKENS
    request_timeout_s: float = 1800.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 75.0
    max_unread_outputs: int = 1024
    max_request_logprobs: int = 1 << 22
    grace_s: float = 5.0
    stream_keep_alive_s: float = 15.0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    reasoning_field: str = "reasoning_content"
    pooling: str = "auto"
    dashboard: bool = True
    otlp_traces_endpoint: str | None = None
    forwarded_allow_ips: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_unread_outputs", "max_request_logprobs"):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_open_requests", "max_num_waiting_tokens"):
            _at_least(name, getattr(self, name), 1, may_be_none=True)
        for name in ("request_timeout_s", "body_timeout_s", "idle_timeout_s", "grace_s"):
            _not_negative(name, getattr(self, name))
        _check_addresses("forwarded_allow_ips", self.forwarded_allow_ips)
        for name in ("stream_keep_alive_s", "keep_alive_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)}")
        choices = {
            "tool_call_parser": TOOL_CALL_PARSERS,
            "reasoning_parser": REASONING_PARSERS,
            "reasoning_field": REASONING_FIELDS,
            "pooling": EMBEDDING_POOLING,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("allowed_hosts", "allowed_origins"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(each.strip().lower().rstrip("/") for each in given))
        if self.api_key is not None and self.api_keys_file is not None:
            raise ConfigError("give one API key or a file of them, not both")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs a certificate and its key: ssl_certfile and ssl_keyfile")

    @property
    def asks_for_key(self) -> bool:
        """Whether nobody gets in without one."""
        return self.api_key is not None or self.api_keys_file is not None


def scheduling_policy(name: str) -> SchedulingPolicy:
    """Return the policy of that name. Raises `ConfigError`."""
    return SchedulingPolicy(_choice("scheduling policy", SchedulingPolicy, name))


def default_max_num_batched_tokens(max_num_seqs: int, *, is_offline: bool = False) -> int:
    """Return the budget of a step for whoever names only the number of requests."""
    return max(DEFAULT_OFFLINE_BATCHED_TOKENS if is_offline else DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)


def cache_directory() -> Path:
    """Return where octavo keeps what it found out: $XDG_CACHE_HOME/octavo, by default ~/.cache/octavo."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def kernels_required() -> bool:
    """Whether a missing compiled extension is an error (OCTAVO_REQUIRE_KERNELS=1) and not a warning."""
    return os.environ.get("OCTAVO_REQUIRE_KERNELS", "0") not in {"", "0"}


def threads_from_environment() -> int | None:
    """Return how many threads shall compute (the first number of OMP_NUM_THREADS), or None where it says nothing."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(asked) if asked.isdigit() and int(asked) else None


def api_key_from_environment() -> str | None:
    """Return the key that clients of the server must send (OCTAVO_API_KEY), or None where none is set."""
    return os.environ.get(API_KEY_VARIABLE) or None


def forget_service_link() -> str | None:
    """Forget an OCTAVO_SERVE_PORT that is none, and return it: tcp://10.0.0.1:8000, say.

    Kubernetes describes a Service called octavo-serve so, in every container of its namespace.
    """
    port = os.environ.get(PORT_VARIABLE, "")
    return os.environ.pop(PORT_VARIABLE) if port.startswith(("tcp://", "udp://")) else None


def _at_least(name: str, value: object, low: int, *, may_be_none: bool = False) -> None:
    if value is None and may_be_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of {low} or more, got {value!r}")


def _within(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            raise ConfigError(f"{name} must be addresses or networks: {error}") from None


def _not_negative(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be a number of 0 or more, got {value!r}")


def _choice(name: str, kind: type[StrEnum], value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} must be one of {', '.join(kind)}, got {value!r}") from None


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
