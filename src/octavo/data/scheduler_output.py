"""Scheduler-to-worker messages."""

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
    """A whole request, sent when it starts or resumes."""

    request_id: str
    token_ids: list[int]  # prompt and output so far
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    sample_index: int
    stop_token_ids: frozenset[int]
    block_ids: list[list[int]]  # one table for each KV group
    num_computed_tokens: int
    cache_salt: str | None = None
    predicted_token_ids: list[int] | None = None
    rotary_positions: list[list[int]] | None = None

    @classmethod
    def from_request(cls, request: Request) -> NewRequestData:
        """Copy the fields that the worker needs."""
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
    """Changes of requests that the worker knows, as parallel lists.

    The worker itself appends the tokens that it samples.

    new_block_ids: Ids to append to the block tables, by KV group, then by request.
    """

    req_ids: list[str]
    new_block_ids: list[list[list[int]]]
    num_computed_tokens: list[int]

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """Return empty data."""
        return cls([], [], [])


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies of whole blocks at the beginning of a step, in the order `swap_out`, `block_copies`, `swap_in`.

    If a host block occurs twice in `swap_out`, the last copy counts. The source of a copy may be the target of a later
    copy.
    """

    swap_out: list[tuple[int, int, int]] = field(default_factory=list)  # (group, block, host block)
    block_copies: list[tuple[int, int, int]] = field(default_factory=list)  # (group, source, target), copy on write
    swap_in: list[tuple[int, int, int]] = field(default_factory=list)  # (group, host block, block)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.block_copies or self.swap_in)

    def of_group(self, group: int) -> BlockCopies:
        """Return one KV group's copies."""
        lists = self.swap_out, self.block_copies, self.swap_in
        return BlockCopies(*([each for each in copies if each[0] == group] for copies in lists))


class TransferDirection(Enum):
    """LOAD moves KV from a store into this engine's blocks. SAVE is the reverse."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """An order to move whole blocks between this engine and a store, while steps are computed.

    keys: The hash of each block. A store keeps a block's content of all groups, except recurrent states, under one key.
    A load fails for a block if the store lacks the block's key.
    block_ids: For each of these groups, a list parallel to `keys`. `NO_BLOCK` in a bounded group's list means:
    - In a load, no token reads the group's part of the block.
    - In a save, the part was evicted.

    states: Slots of recurrent states to move, by index of the block that the state follows. A store keeps states under
    keys of their own. A load has the state after its last block.
    """

    transfer_id: int
    direction: TransferDirection
    keys: list[bytes]
    block_ids: list[list[int]]
    request_id: str | None = None  # of the request that waits for a load
    states: dict[int, int] = field(default_factory=dict)


def are_whole(block_ids: list[list[int]]) -> list[bool]:
    """Return for each block whether every group's content is moved."""
    return [NO_BLOCK not in ids for ids in zip(*block_ids, strict=True)]


def need_parts(block_ids: list[list[int]]) -> list[bool]:
    """Return for each block of a load whether any bounded group's content is needed."""
    return [any(block_id != NO_BLOCK for block_id in ids[1:]) for ids in zip(*block_ids, strict=True)]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The message to the worker for one step.

    max_drafts: Maximum number of new drafts by request id. For a request without an entry, only the proposer's limit
    applies. If a draft model exists, looked-up drafts have no maximum.
    kv_cancels: Ids of cancelled transfers. After this step, the worker does not access their blocks.
    state_saves: Slots for a request's recurrent state after a number of its tokens, as (tokens, slot), ascending. The
    tokens may have been computed in the previous step.
    """

    step: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # in the order of scheduling
    total_num_scheduled_tokens: int
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    # Drafts to verify, which are a request's last scheduled tokens:
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    max_drafts: dict[str, int] = field(default_factory=dict)
    copies: BlockCopies = field(default_factory=BlockCopies)
    kv_transfers: list[KVTransfer] = field(default_factory=list)  # to start after `copies`
    kv_cancels: list[int] = field(default_factory=list)
    state_saves: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    num_pending_transfers: int = 0  # includes lookups; if above 0, the worker must be asked for results

    @property
    def is_empty(self) -> bool:
        """Whether the step need not be sent."""
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
        """Whether the step has no tokens, but transfers or lookups are pending."""
        return bool(self.num_pending_transfers) and not self.num_scheduled_tokens

    @property
    def block_ids(self) -> dict[str, list[int]]:
        """New blocks of the first group, by request id."""
        cached = self.scheduled_cached_reqs
        new_block_ids = cached.new_block_ids[0] if cached.req_ids else []
        return {new.request_id: new.block_ids[0] for new in self.scheduled_new_reqs} | dict(
            zip(cached.req_ids, new_block_ids, strict=True)
        )
