"""Decides whether the next waiting request may start.

Optimistic: it starts if its known tokens fit. Reservation: it starts if all memory that it may ever need can be
reserved. Then no request is preempted for lack of memory, except for blocks that saves hold (`ReservationAdmission`).
The second is the rule of Hugging Face TGI (router/src/infer: `Queue::next_batch` and `batching_task`).
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Protocol

from octavo.config import AdmissionRule
from octavo.data.events import WaitReason
from octavo.errors import PromptTooLongError

if TYPE_CHECKING:
    from octavo.config import SchedulerConfig
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.kv.prefix_cache import ComputedBlocks
    from octavo.data.request import Request


class Admission(Protocol):
    """A rule of admission. The caller notifies it of each request that starts, ends or is preempted."""

    def check_fits(self, request: Request) -> None:
        """Raise `PromptTooLongError` if a request could never start."""
        ...

    def open_step(self, num_running: int, num_waiting: int) -> WaitReason | None:
        """Begin a step. A reason means that no request is admitted in it."""
        ...

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """Return why a request cannot start now, or None."""
        ...

    def num_reserved_tokens(self, request: Request) -> int:
        """Return for how many tokens a request gets blocks when it starts; 0: only for those of its first step."""
        ...

    def admitted(self, request: Request) -> None:
        """Record that a request started."""
        ...

    def left(self, request: Request) -> None:
        """Record that a request ended or was preempted."""
        ...


class OptimisticAdmission:
    """Starts a request if it fits now. If memory runs out later, a request is preempted.

    It keeps one block free for each running request; otherwise the new request would soon be preempted. A request that
    was preempted `max_num_preemptions` times starts only with all memory that it may ever need, and is never preempted
    again.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._max_preemptions = config.max_num_preemptions

    def check_fits(self, request: Request) -> None:
        """Raise `PromptTooLongError` unless the prompt fits an empty cache, with one more token if it is not pooled."""
        num_prompt, capacity = request.num_prompt_tokens, self._manager.capacity_tokens
        least = request.sampling_params.least_output_tokens
        if num_prompt + least > capacity:
            output = "with one output token " * least
            raise PromptTooLongError(
                f"prompt is too long: {num_prompt} tokens > {capacity - least} maximum; {output}it cannot fit the KV "
                f"cache of {capacity}: give the cache more memory (kv_cache_memory_bytes)",
                parameter="prompt",
            )

    def open_step(self, num_running: int, num_waiting: int) -> WaitReason | None:
        """Return None: requests are admitted in every step."""
        del num_running, num_waiting
        return None

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """Return NO_BLOCKS unless all known tokens fit."""
        num_tokens = max(request.num_tokens, self.num_reserved_tokens(request))
        fits = self._manager.can_hold(num_tokens, computed, num_running)
        return None if fits else WaitReason.NO_BLOCKS

    def num_reserved_tokens(self, request: Request) -> int:
        """Return all tokens that a request may ever need if it was preempted often enough, else 0.

        The last token needs no slot.
        """
        if request.num_preemptions < self._max_preemptions:
            return 0
        return max(request.max_total_tokens - 1, request.num_tokens)

    def admitted(self, request: Request) -> None:
        """Do nothing: no memory is reserved."""

    def left(self, request: Request) -> None:
        """Do nothing: no memory was reserved."""


class ReservationAdmission:
    """Reserves prompt + max_tokens of each running request under a limit; no request is preempted for lack of memory.

    most_saved_blocks: number of blocks of each bounded group that saves to a store may pin in addition to those of
    requests. Two kinds of pinned blocks are not counted and may cause a preemption: blocks of requests that ended, and
    blocks that are handed over to another engine.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, most_saved_blocks: int) -> None:
        self._config = config
        self._manager = kv_cache_manager
        self._most_saved_blocks = most_saved_blocks
        self._reserved: dict[str, tuple[int, list[int]]] = {}  # tokens, blocks by group
        self.num_reserved_total = 0
        self._num_blocks = [0] * len(kv_cache_manager.groups)
        self._steps_since_admission = 0

    @property
    def max_total_tokens(self) -> int:
        """The limit on the sum of prompt + max_tokens over all running requests, in tokens."""
        limit = self._config.max_batch_total_tokens
        return self._manager.capacity_tokens if limit is None else limit

    def check_fits(self, request: Request) -> None:
        """Raise `PromptTooLongError` unless prompt + max_tokens fit the limit and an empty cache."""
        limit = min(self.max_total_tokens, self._manager.capacity_tokens)
        if request.max_total_tokens > limit:
            raise PromptTooLongError(
                f"prompt and max_tokens together are {request.max_total_tokens} tokens; at most {limit} can be "
                "reserved (max_batch_total_tokens and the KV cache)",
                parameter="max_tokens",
            )

    def open_step(self, num_running: int, num_waiting: int) -> WaitReason | None:
        """Return GATHERING while few requests wait, for at most `max_waiting_tokens` steps, else None.

        Admitting requests together delays the running ones less often.
        """
        self._steps_since_admission += 1
        least = math.floor(num_running * self._config.waiting_served_ratio)
        if num_waiting < least and self._steps_since_admission <= self._config.max_waiting_tokens:
            return WaitReason.GATHERING
        return None

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """Return NO_RESERVATION unless the request's reservation fits the limit and all KV groups."""
        del computed, num_running
        if self.num_reserved_total + request.max_total_tokens > self.max_total_tokens:
            return WaitReason.NO_RESERVATION
        _, shares = self._share(request)
        for group, num_reserved, share in zip(self._manager.groups, self._num_blocks, shares, strict=True):
            if not group.can_reserve(num_reserved + share, self._most_saved_blocks, is_only=not self._reserved):
                return WaitReason.NO_RESERVATION
        return None

    def _share(self, request: Request) -> tuple[int, list[int]]:
        """Return the tokens, and the blocks of each group, to reserve for a request."""
        num_blocks = self._manager.num_blocks_for(request.max_total_tokens)
        return request.max_total_tokens, [group.num_reserved(num_blocks) for group in self._manager.groups]

    def num_reserved_tokens(self, request: Request) -> int:
        """Return 0: a reservation only counts blocks. They are allocated step by step."""
        del request
        return 0

    def admitted(self, request: Request) -> None:
        """Reserve the request's share."""
        num_tokens, shares = self._reserved[request.request_id] = self._share(request)
        self.num_reserved_total += num_tokens
        self._num_blocks = list(map(operator.add, self._num_blocks, shares))
        self._steps_since_admission = 0

    def left(self, request: Request) -> None:
        """Release the whole reservation, used or not."""
        num_tokens, shares = self._reserved.pop(request.request_id, (0, [0] * len(self._num_blocks)))
        self.num_reserved_total -= num_tokens
        self._num_blocks = list(map(operator.sub, self._num_blocks, shares))


def create_admission(config: SchedulerConfig, kv_cache_manager: KVCacheManager, most_saved_blocks: int) -> Admission:
    """Create the rule that `config.admission` names. most_saved_blocks: as of `ReservationAdmission`."""
    if config.admission is AdmissionRule.RESERVATION:
        return ReservationAdmission(config, kv_cache_manager, most_saved_blocks)
    return OptimisticAdmission(config, kv_cache_manager)
