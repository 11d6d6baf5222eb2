"""What the scheduler tells the worker each step: plain data, everything a step must do rides in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.data.request import Request
    from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """All of a request, sent once: when it starts, and again when it resumes after a preemption.

    token_ids: prompt and, after a preemption, the output so far. Tokens below `num_computed_tokens` are in the cache.
    cache_salt: nothing of it is shared with requests that have another one. predicted_token_ids: what its client
    expects as its output.
    window_block_ids: where layers with a window keep what block_ids holds of the others: parallel to these as far as it
    goes, -1 behind the window. Empty where no layer has one.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]
    block_ids: list[int]
    num_computed_tokens: int
    cache_salt: str | None = None
    predicted_token_ids: list[int] | None = None
    window_block_ids: list[int] = field(default_factory=list)

    @classmethod
    def from_request(cls, request: Request) -> NewRequestData:
        """Copy what the worker needs; later changes of the request do not show here."""
        sequence = request.sequence
        return cls(
            request_id=request.request_id,
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling_params=request.sampling_params,
            seed=request.seed,
            sample_index=request.sample_index,
            stop_token_ids=request.stop_token_ids,
            block_ids=list(sequence.block_table),
            num_computed_tokens=request.num_computed_tokens,
            cache_salt=request.cache_salt,
            predicted_token_ids=request.predicted_token_ids,
            window_block_ids=list(sequence.window_table),
        )


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Only what is new of the requests that the worker knows already; parallel lists.

    What was sampled of them the worker knows by itself, and nobody else adds tokens. new_block_ids: to append to each
    one's block table. num_computed_tokens: when the steps before are done.
    new_window_block_ids: to append to its table of window blocks, perhaps in another step than the blocks themselves;
    what has fallen behind the window stays in that table and is never read. No lists where no layer has a window.
    """

    req_ids: list[str]
    new_block_ids: list[list[int]]
    num_computed_tokens: list[int]
    new_window_block_ids: list[list[int]] = field(default_factory=list)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """No request at all."""
        return cls([], [], [])


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies of whole blocks that a step begins with, in this order, before anything else is written.

    swap_out: (block, host block) of preempted requests and of cached blocks that are evicted; these blocks may be
    written to in this very step. A host block may come twice: then the last one's content is meant.
    block_copies: (block, block), copy on write; a source may be a target of what comes after it.
    swap_in: (host block, block) of requests that resume, or find in host memory what the device had.
    window_swap_out, window_copies, window_swap_in: the same with window blocks in place of blocks, each beside its
    neighbour: all that goes out before all copies, and these before all that comes in. A host block has room for both
    parts; either is copied alone.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    window_swap_out: list[tuple[int, int]] = field(default_factory=list)
    window_copies: list[tuple[int, int]] = field(default_factory=list)
    window_swap_in: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.block_copies or self.swap_in or self.has_window_copies)

    @property
    def has_window_copies(self) -> bool:
        """Whether any window part is copied."""
        return bool(self.window_swap_out or self.window_copies or self.window_swap_in)


class TransferDirection(Enum):
    """Which way KV moves: LOAD into this engine's blocks, SAVE from them."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """An order to move whole blocks between this engine and a store, beside the steps.

    keys: one for each of block_ids, a hash of all that the KV in it depends on (`core.block_hash`): what is loaded into
    a block is what was saved under its key, or it counts as not there. The blocks are pinned until the transfer ended,
    or the worker was told that it is cancelled. request_id: who waits for it; None for what is saved.
    window_block_ids: where layers with a window have their part of each block, empty where no layer has one. A load has
    -1 where nobody will look at that part; a save has all of them. Under a key a store has both parts.
    """

    transfer_id: int
    direction: TransferDirection
    keys: list[bytes]
    block_ids: list[int]
    request_id: str | None = None
    window_block_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what is copied first, who gets how many tokens, and which requests the worker may forget.

    num_scheduled_tokens is in the order in which the requests were scheduled; the worker orders its rows itself.
    kv_transfers: to start, behind `copies`. kv_cancels: ids of those to give up; after this step their blocks are
    neither written nor read.
    num_pending_transfers: under way, lookups included, so that somebody must ask for their results.
    max_drafts: how many tokens are worth guessing behind a request's newest one, 0 for none; one that is not named has
    no bound but the proposer's. Where a model drafts it bounds what that computes, and nothing that is looked up.
    """

    step: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    max_drafts: dict[str, int] = field(default_factory=dict)
    copies: BlockCopies = field(default_factory=BlockCopies)
    kv_transfers: list[KVTransfer] = field(default_factory=list)
    kv_cancels: list[int] = field(default_factory=list)
    num_pending_transfers: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the worker need not hear of it: nothing to compute, to move or to forget."""
        return not (
            self.num_scheduled_tokens
            or self.finished_req_ids
            or self.preempted_req_ids
            or self.num_pending_transfers
            or self.kv_cancels
            or self.copies
        )

    @property
    def only_waits_for_transfers(self) -> bool:
        """Whether there is nothing to compute, and KV is on its way."""
        return bool(self.num_pending_transfers) and not self.num_scheduled_tokens

    @property
    def block_ids(self) -> dict[str, list[int]]:
        """Blocks that each request received in this step (all of them for a new one)."""
        cached = self.scheduled_cached_reqs
        return {new.request_id: new.block_ids for new in self.scheduled_new_reqs} | dict(
            zip(cached.req_ids, cached.new_block_ids, strict=True)
        )
