"""Requests and sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Unpack

from octavo.data.request_options import NO_OPTIONS, OptionFields, RequestOptions

if TYPE_CHECKING:
    from octavo.data.draft_stats import AcceptanceRates
    from octavo.data.kv_transfer_params import KVTransferParams
    from octavo.sampling_params import SamplingParams


class RequestStatus(Enum):
    """A request's state. All states that begin with FINISHED are final."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        """True if final."""
        return self in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's finish reason, or None before the end."""
        return self.value if self.is_finished else None


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED"))


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """A prompt's positions `first` to `end` - 1: placeholders for an image or other content."""

    first: int
    end: int
    key: str  # identifies the content in block hashes


@dataclass(slots=True)
class StateSaves:
    """Where a sequence's recurrent state is saved: at the ends of blocks, named by the number of blocks.

    due: Descending. At these ends of the known tokens the state will be saved.
    goes_on: True if the state is saved at ends of later blocks, too.
    num_stored: Number of tokens in the sequence's slot after its last step.
    newest: The largest number of blocks that was saved, found or skipped.
    kept: The largest number of blocks whose save no later save replaces.
    pending: Slots of saves whose steps have no result yet, by number of blocks.
    loaded: Number of blocks whose state a store provided, until a step copies the state. Otherwise 0.
    replaceable: Slot of the newest save after `due`, and how often this slot was taken. The next save replaces it.
    """

    due: list[int] = field(default_factory=list)
    goes_on: bool = False
    num_stored: int = 0
    newest: int = 0
    kept: int = 0
    pending: dict[int, int] = field(default_factory=dict)
    loaded: int = 0
    replaceable: tuple[int, int] | None = None


@dataclass(slots=True)
class Sequence:
    """The tokens of one output stream and the blocks that hold their KV.

    `ResultProcessor` writes `token_ids`, and the KV cache manager writes all other fields.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int = 0  # tokens with KV found when the request first started
    next_commit: int = 0  # number of computed tokens at which the next commit is due
    block_tables: list[list[int]] = field(default_factory=lambda: [[]])  # by KV group
    first_held: list[int] = field(default_factory=lambda: [0])  # index of each table's first held block
    num_slots: int = 0  # number of tokens for which every table has blocks
    saves: StateSaves = field(default_factory=StateSaves)

    @property
    def block_table(self) -> list[int]:
        """First KV group's block table."""
        return self.block_tables[0]

    @property
    def prompt_token_ids(self) -> list[int]:
        """Prompt token ids."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """Generated token ids."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def last_token(self) -> int:
        """The newest token's id."""
        return self.token_ids[-1]

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens


class Request:
    """One output stream of a user's request. Only the core changes a request (see docs/architecture.md).

    Times are seconds on the engine's clock.

    fields: Values that replace fields of `options`.
    max_total_tokens: Maximum length of prompt and output together, or the length of a pooled prompt.
    reads_prefix_cache: False for prompt logprobs and mean pooling, which need every prompt position computed.
    awaits_results: True if the request has a grammar. Each step then depends on the previous result.
    """

    __slots__ = (
        "acceptance",
        "adapter",
        "admitted_time",
        "arrival_index",
        "arrival_time",
        "awaits_results",
        "block_hashes",
        "computed_acceptance",
        "deadline",
        "max_total_tokens",
        "num_computed_in_all",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "options",
        "predicted_token_ids",
        "reads_prefix_cache",
        "request_id",
        "rotary_positions",
        "sample_index",
        "sampling_params",
        "seed",
        "sequence",
        "spans",
        "spec_token_ids",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        options: RequestOptions = NO_OPTIONS,
        arrival_time: float = 0.0,
        seed: int = 0,
        sample_index: int = 0,
        stop_token_ids: frozenset[int] = frozenset(),
        adapter: str | None = None,
        spans: tuple[ContentSpan, ...] = (),
        rotary_positions: list[list[int]] | None = None,
        deadline: float | None = None,
        predicted_token_ids: list[int] | None = None,
        **fields: Unpack[OptionFields],
    ) -> None:
        self.request_id = request_id
        self.sequence = Sequence(list(prompt_token_ids), len(prompt_token_ids))
        self.sampling_params = sampling_params
        self.options = replace(options, **fields)
        self.arrival_time = arrival_time
        self.arrival_index = 0
        self.seed = seed  # 64 bits
        self.sample_index = sample_index  # index among the n outputs
        self.stop_token_ids = stop_token_ids  # includes EOS, unless EOS is ignored
        self.adapter = adapter  # a LoRA adapter, not supported yet
        self.spans = spans  # in order and without overlap
        if rotary_positions is not None and {*map(len, rotary_positions)} != {len(prompt_token_ids)}:
            raise ValueError("rotary_positions must have one position of each dimension for each token of the prompt")
        self.rotary_positions = rotary_positions  # lists by dimension; None for one dimension
        self.deadline = deadline  # time at which the request ends with an error
        self.predicted_token_ids = predicted_token_ids
        self.status = RequestStatus.WAITING
        self.admitted_time: float | None = None
        self.stop_reason: int | str | None = None
        most_output = (sampling_params.max_tokens or 2**62) if sampling_params.pooling is None else 0
        self.max_total_tokens = len(prompt_token_ids) + most_output
        self.num_computed_tokens = 0
        self.num_computed_in_all = 0  # includes tokens computed again and rejected drafts
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0  # already delivered
        self.spec_token_ids: list[int] = []
        self.acceptance: AcceptanceRates | None = None  # of looked-up drafts
        self.computed_acceptance: AcceptanceRates | None = None  # of a model's drafts
        self.block_hashes: list[bytes] = []
        self.awaits_results = sampling_params.structured_outputs is not None
        self.reads_prefix_cache = sampling_params.prompt_logprobs is None and sampling_params.pooling != "mean"

    @property
    def num_tokens(self) -> int:
        """Number of prompt, output and draft tokens."""
        return len(self.sequence.token_ids) + len(self.spec_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return self.sequence.num_prompt_tokens

    @property
    def priority(self) -> int:
        """See `RequestOptions`."""
        return self.options.priority

    @property
    def cache_salt(self) -> str | None:
        """See `RequestOptions`."""
        return self.options.cache_salt

    @property
    def tenant(self) -> str:
        """See `RequestOptions`."""
        return self.options.tenant

    @property
    def tenant_weight(self) -> float:
        """See `RequestOptions`."""
        return self.options.tenant_weight

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        """See `RequestOptions`."""
        return self.options.kv_transfer_params

    @property
    def cache_points(self) -> tuple[int, ...]:
        """See `RequestOptions`."""
        return self.options.cache_points

    @property
    def expects_kv(self) -> bool:
        """Whether another engine provides the prompt's KV."""
        return self.kv_transfer_params is not None and not self.kv_transfer_params.is_prefill

    @property
    def hands_kv_over(self) -> bool:
        """Whether this engine computes only the prompt's KV, for another engine."""
        return self.kv_transfer_params is not None and self.kv_transfer_params.is_prefill

    @property
    def is_finished(self) -> bool:
        """True if ended."""
        return self.status.is_finished

    def __repr__(self) -> str:
        progress = f"computed {self.num_computed_tokens} of {self.num_tokens}"
        return f"Request({self.request_id!r}, {self.status.name}, {progress})"
