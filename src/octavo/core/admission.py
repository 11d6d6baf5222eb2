"""Decides whether the next waiting request may start.

Optimistic: as soon as its known tokens fit. Reservation: when everything that it may ever need can be set aside, so
that no request is preempted for lack of memory, except for blocks that saves hold (`ReservationAdmission`). The second
is the rule of Hugging Face TGI (router/src/infer: `Queue::next_batch` and `batching_task`).
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
    """The rule of admission. It is told of each request that starts or leaves."""

    def check_fits(self, request: Request) -> None:
        """Raise `PromptTooLongError` for a request that could never start."""
        ...

    def open_step(self, num_running: int, num_waiting: int) -> WaitReason | None:
        """Begin a step. A reason means that no request is admitted in it."""
        ...

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """Return why a request cannot start now, or None."""
        ...

    def num_reserved_tokens(self, request: Request) -> int:
        """Return the tokens that a request gets room for when it starts; 0 for those that it is given."""
        ...

    def admitted(self, request: Request) -> None:
        """Note that a request started."""
        ...

    def left(self, request: Request) -> None:
        """Note that a request ended or was preempted."""
        ...


class OptimisticAdmission:
    """Starts a request if it fits now. If memory runs out later, a request is preempted.

    Each running request keeps one block to grow into; otherwise the new request would be preempted at once. A request
    that was preempted often enough starts only with everything that it may ever need, and is never a victim again.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._max_preemptions = config.max_num_preemptions

    def check_fits(self, request: Request) -> None:
        """Check that the prompt fits an empty cache, with one more token unless it is pooled."""
        num_prompt, capacity = request.num_prompt_tokens, self._manager.capacity_tokens
        least = request.sampling_params.least_output_tokens
        if num_prompt + least > capacity:
            output = "with one token of output " * least
            raise PromptTooLongError(
                f"prompt is too long: {num_prompt} tokens > {capacity - least} maximum; {output}it can "
                f"never fit the KV cache of {capacity}: give that more memory (kv_cache_memory_bytes)",
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
        """Return all tokens that a request that was preempted often enough may need. The newest needs no slot."""
        if request.num_preemptions < self._max_preemptions:
            return 0
        return max(request.max_total_tokens - 1, request.num_tokens)

    def admitted(self, request: Request) -> None:
        """Nothing is set aside."""

    def left(self, request: Request) -> None:
        """Nothing was set aside."""


class ReservationAdmission:
    """Prompt + max_tokens of all running requests never exceed the limit; nobody is preempted for want of memory.

    most_saved_blocks: number of blocks of every group but the first that saves to a store may pin beside requests. Two
    kinds of pinned blocks are not counted and may cost a preemption: blocks of requests that ended, and blocks that are
    handed over to another engine.
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
        """The limit on prompt + max_tokens of all running requests."""
        limit = self._config.max_batch_total_tokens
        return self._manager.capacity_tokens if limit is None else limit

    def check_fits(self, request: Request) -> None:
        """Its prompt and max_tokens must fit the limit and an empty cache."""
        limit = min(self.max_total_tokens, self._manager.capacity_tokens)
        if request.max_total_tokens > limit:
            raise PromptTooLongError(
                f"prompt and max_tokens together are {request.max_total_tokens} tokens; at most {limit} can be "
                "reserved (max_batch_total_tokens and the KV cache)",
                parameter="max_tokens",
            )

    def open_step(self, num_running: int, num_waiting: int) -> WaitReason | None:
        """Let a few gather before the running are held up for them, but not for long."""
        self._steps_since_admission += 1
        least = math.floor(num_running * self._config.waiting_served_ratio)
        if num_waiting < least and self._steps_since_admission <= self._config.max_waiting_tokens:
            return WaitReason.GATHERING
        return None

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """Tested before it is added: what is reserved and the next one's share stay within the limit."""
        del computed, num_running
        if self.num_reserved_total + request.max_total_tokens > self.max_total_tokens:
            return WaitReason.NO_RESERVATION
        _, shares = self._share(request)
        for group, num_reserved, share in zip(self._manager.groups, self._num_blocks, shares, strict=True):
            if not group.can_reserve(num_reserved + share, self._most_saved_blocks, is_only=not self._reserved):
                return WaitReason.NO_RESERVATION
        return None

    def _share(self, request: Request) -> tuple[int, list[int]]:
        """Return the tokens, and the blocks of each group, to set aside for a request."""
        num_blocks = self._manager.num_blocks_for(request.max_total_tokens)
        return request.max_total_tokens, [group.num_reserved(num_blocks) for group in self._manager.groups]

    def num_reserved_tokens(self, request: Request) -> int:
        """Blocks are counted, not taken: they are taken as tokens come."""
        del request
        return 0

    def admitted(self, request: Request) -> None:
        """Reserve."""
        num_tokens, shares = self._reserved[request.request_id] = self._share(request)
        self.num_reserved_total += num_tokens
        self._num_blocks = list(map(operator.add, self._num_blocks, shares))
        self._steps_since_admission = 0

    def left(self, request: Request) -> None:
        """Return the whole reservation, used or not."""
        num_tokens, shares = self._reserved.pop(request.request_id, (0, [0] * len(self._num_blocks)))
        self.num_reserved_total -= num_tokens
        self._num_blocks = list(map(operator.sub, self._num_blocks, shares))


def create_admission(config: SchedulerConfig, kv_cache_manager: KVCacheManager, most_saved_blocks: int) -> Admission:
    """Create the rule that `config.admission` names; most_saved_blocks: as in `ReservationAdmission`."""
    if config.admission is AdmissionRule.RESERVATION:
        return ReservationAdmission(config, kv_cache_manager, most_saved_blocks)
    return OptimisticAdmission(config, kv_cache_manager)
