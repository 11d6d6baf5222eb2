"""A request as the engine core sees it: one output stream, its tokens and how far they are computed.

A user's request with n outputs becomes n of these before it reaches the core.
"""

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
    """Where a request is. Everything from FINISHED_STOPPED on is terminal."""

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
        """Whether nothing follows this status."""
        return self in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """The reason as the OpenAI API spells it; None while the request lives."""
        return self.value if self.is_finished else None


_FINISHED = frozenset(status for status in RequestStatus if status.name.startswith("FINISHED"))


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Positions `first` to `end` - 1 of a prompt whose tokens stand for other content, as those of an image do.

    key: identity of that content. The KV of these positions and of all later ones depends on it.
    """

    first: int
    end: int
    key: str


@dataclass(slots=True)
class Sequence:
    """The tokens of one output stream and the blocks that hold their KV.

    The scheduler writes `token_ids`, the KV cache manager everything else.

    num_cached_tokens: tokens of the prompt that were found in a cache.
    next_commit: number of computed tokens below which the request has nothing new to share.
    block_tables: for each KV group the ids of the blocks that hold the KV, in order. Blocks that no row of the request
    reads any more are `NO_BLOCK`.
    first_held: for each KV group the index of the first block in the table that is held.
    num_slots: number of tokens that fit into the blocks of every group.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    next_commit: int = 0
    block_tables: list[list[int]] = field(default_factory=lambda: [[]])
    first_held: list[int] = field(default_factory=lambda: [0])
    num_slots: int = 0

    @property
    def block_table(self) -> list[int]:
        """The table of the first group, which holds every block of the sequence."""
        return self.block_tables[0]

    @property
    def prompt_token_ids(self) -> list[int]:
        """The part the user sent."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """The part that was generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def last_token(self) -> int:
        """The newest token."""
        return self.token_ids[-1]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens


class Request:
    """One schedulable request: the only mutable thing in the core.

    Only the core writes it; docs/architecture.md says which part writes what.

    seed: 64-bit seed of its sampling noise. sample_index: which of the n outputs of the user's request it is.
    fields: replace those of `options`. stop_token_ids: all ids that end it, EOS included unless ignored.
    max_total_tokens: prompt and output together never exceed it. Of a prompt that is pooled into a vector it is the
    prompt alone: the token that ends it is not counted.
    num_computed_in_all: positions computed for it, those that a preemption lost and drafts in vain included.
    num_prompt_logprobs: how many were delivered; a preempted prompt is computed, but not told, twice.
    reads_prefix_cache: False for prompt_logprobs and means, which need every prompt position computed.
    awaits_results: whether its next step hangs on what the one before brings: a grammar may postpone its token.
    adapter: name of the adapter of weights (LoRA), part of block hashes; nothing sets it yet.
    spans: parts of the prompt that stand for other content, in order; they do not overlap.
    rotary_positions: for each dimension the positions of the prompt's tokens, for models with several; never changed.
    deadline: time on the engine's clock at which it is of no more use and ends with an error.
    acceptance: how often its drafts came true that were looked up; computed_acceptance: that a model computed. None
    before any was verified.
    block_hashes: keys of its full blocks, written by the KV cache manager.
    predicted_token_ids: what its client expects as its output, of which drafts are made; never changed.
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
        self.seed = seed
        self.sample_index = sample_index
        self.stop_token_ids = stop_token_ids
        self.adapter = adapter
        self.spans = spans
        if rotary_positions is not None and {*map(len, rotary_positions)} != {len(prompt_token_ids)}:
            raise ValueError("rotary_positions must have one position of each dimension for each token of the prompt")
        self.rotary_positions = rotary_positions
        self.deadline = deadline
        self.predicted_token_ids = predicted_token_ids
        self.status = RequestStatus.WAITING
        self.admitted_time: float | None = None
        self.stop_reason: int | str | None = None
        most_output = (sampling_params.max_tokens or 2**62) if sampling_params.pooling is None else 0
        self.max_total_tokens = len(prompt_token_ids) + most_output
        self.num_computed_tokens = 0
        self.num_computed_in_all = 0
        self.num_preemptions = 0
        self.num_prompt_logprobs = 0
        self.spec_token_ids: list[int] = []
        self.acceptance: AcceptanceRates | None = None
        self.computed_acceptance: AcceptanceRates | None = None
        self.block_hashes: list[bytes] = []
        self.awaits_results = sampling_params.structured_outputs is not None
        self.reads_prefix_cache = sampling_params.prompt_logprobs is None and sampling_params.pooling != "mean"

    @property
    def num_tokens(self) -> int:
        """Prompt, output and drafts: what `num_computed_tokens` chases."""
        return len(self.sequence.token_ids) + len(self.spec_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the user sent."""
        return self.sequence.num_prompt_tokens

    @property
    def priority(self) -> int:
        """The option of this name."""
        return self.options.priority

    @property
    def cache_salt(self) -> str | None:
        """The option of this name."""
        return self.options.cache_salt

    @property
    def tenant(self) -> str:
        """The option of this name."""
        return self.options.tenant

    @property
    def tenant_weight(self) -> float:
        """The option of this name."""
        return self.options.tenant_weight

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        """The option of this name."""
        return self.options.kv_transfer_params

    @property
    def expects_kv(self) -> bool:
        """Whether another engine has its prompt's KV, or is computing it."""
        return self.kv_transfer_params is not None and not self.kv_transfer_params.is_prefill

    @property
    def hands_kv_over(self) -> bool:
        """Whether its prompt's KV is for another engine, and all that is wanted of it."""
        return self.kv_transfer_params is not None and self.kv_transfer_params.is_prefill

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.status.is_finished

    def __repr__(self) -> str:
        progress = f"computed {self.num_computed_tokens} of {self.num_tokens}"
        return f"Request({self.request_id!r}, {self.status.name}, {progress})"
