"""What the scheduler tells the worker each step: plain data, everything a step must do rides in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from octavo.data.kv_groups import NO_BLOCK

if TYPE_CHECKING:
    from octavo.data.request import Request
    from octavo.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """All of a request, sent once: when it starts, and again when it resumes after a preemption.

    token_ids: prompt and, after a preemption, the output so far. Tokens below `num_computed_tokens` are in the cache.
    cache_salt: nothing of it is shared with requests that have another one. predicted_token_ids: what its client
    expects as its output.
    block_ids: for each KV group the request's block table. `NO_BLOCK` stands for a block that no later row reads.
    rotary_positions: see `Request`.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]
    block_ids: list[list[int]]
    num_computed_tokens: int
    cache_salt: str | None = None
    predicted_token_ids: list[int] | None = None
    rotary_positions: list[list[int]] | None = None

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
            block_ids=[list(table) for table in sequence.block_tables],
            num_computed_tokens=request.num_computed_tokens,
            cache_salt=request.cache_salt,
            predicted_token_ids=request.predicted_token_ids,
            rotary_positions=request.rotary_positions,
        )


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """What is new of the requests that the worker knows already; parallel lists.

    The worker appends the tokens that it samples by itself, and nobody else adds tokens.

    new_block_ids: for each KV group a list parallel to `req_ids`: the ids to append to each request's block table. A
    group may get its block of a position in a later step than another group. A table keeps the blocks that the request
    has released; no row reads them.
    num_computed_tokens: when the steps before are done.
    """

    req_ids: list[str]
    new_block_ids: list[list[list[int]]]
    num_computed_tokens: list[int]

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """No request at all."""
        return cls([], [], [])


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies of whole blocks at the beginning of a step, before anything else is written: in this order.

    swap_out: (group, block, host block), for preempted requests and for cached blocks that are evicted. The step may
    write to these blocks after the copy. If a host block comes twice, the last content is meant.
    block_copies: (group, source block, target block), copy on write. A source may be the target of a later copy.
    swap_in: (group, host block, block), for requests that resume and for prefixes found in host memory.

    A host block has room for the block of every group. Each of these is copied by itself.
    """

    swap_out: list[tuple[int, int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.block_copies or self.swap_in)

    def of_group(self, group: int) -> BlockCopies:
        """Return the copies of one KV group."""
        lists = self.swap_out, self.block_copies, self.swap_in
        return BlockCopies(*([each for each in copies if each[0] == group] for copies in lists))


class TransferDirection(Enum):
    """Which way KV moves: LOAD into this engine's blocks, SAVE from them."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """An order to move whole blocks between this engine and a store, beside the steps.

    The blocks are pinned until the transfer has ended, or until the worker was told that it is cancelled.

    keys: one for each block, a hash of everything that its KV depends on (`core.kv.block_hash`). A block is loaded with
    the content that was saved under its key, or the store counts as not having it. Under one key a store has the
    block's content of all groups.
    block_ids: for each KV group a list parallel to `keys`. `NO_BLOCK`: of that group nothing is moved, because no row
    reads the block (a load), or because its content is gone (a save). The first group has every block.
    request_id: the request that waits for the load; None for a save.
    """

    transfer_id: int
    direction: TransferDirection
    keys: list[bytes]
    block_ids: list[list[int]]
    request_id: str | None = None


def are_whole(block_ids: list[list[int]]) -> list[bool]:
    """Return of each block of a transfer, given by its ids in all groups, whether every group's content is moved."""
    return [NO_BLOCK not in ids for ids in zip(*block_ids, strict=True)]


def need_parts(block_ids: list[list[int]]) -> list[bool]:
    """Return of each block of a load, given by its ids in all groups, whether another group than the first needs it."""
    return [any(block_id != NO_BLOCK for block_id in ids[1:]) for ids in zip(*block_ids, strict=True)]


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
        """The blocks of the first KV group that each request received in this step (all of them for a new one)."""
        cached = self.scheduled_cached_reqs
        new_block_ids = cached.new_block_ids[0] if cached.req_ids else []
        return {new.request_id: new.block_ids[0] for new in self.scheduled_new_reqs} | dict(
            zip(cached.req_ids, new_block_ids, strict=True)
        )
