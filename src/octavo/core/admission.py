"""Decides when the next waiting request may start."""

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
    """An admission rule."""

    def check_fits(self, request: Request) -> None:
        """Raise `PromptTooLongError` if a request could never start."""
        ...

    def open_step(self, num_running: int, num_waiting: int) -> WaitReason | None:
        """Begin a step. Return why no request may start in the step, or None if requests may start."""
        ...

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """Return why a request cannot start now, or None if it can. computed: The request's prefix hit."""
        ...

    def num_reserved_tokens(self, request: Request) -> int:
        """Return the minimum number of tokens that get blocks when a request starts.

        0 means that blocks are allocated step by step.
        """
        ...

    def admitted(self, request: Request) -> None:
        """Record that a request started."""
        ...

    def left(self, request: Request) -> None:
        """Record that an admitted request ended or was requeued."""
        ...


class OptimisticAdmission:
    """Starts a request if its known tokens fit. If blocks run out later, a running request is preempted.

    To delay preemptions, a start must keep one block per running request free. A request that was preempted
    `max_num_preemptions` times restarts only when all blocks that it may ever need are free.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self._manager = kv_cache_manager
        self._max_preemptions = config.max_num_preemptions

    def check_fits(self, request: Request) -> None:
        """See `Admission`."""
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
        """See `Admission`."""
        del num_running, num_waiting
        return None

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """See `Admission`."""
        num_tokens = max(request.num_tokens, self.num_reserved_tokens(request))
        fits = self._manager.can_hold(num_tokens, computed, num_running)
        return None if fits else WaitReason.NO_BLOCKS

    def num_reserved_tokens(self, request: Request) -> int:
        """Return 0, or after `max_num_preemptions` preemptions the request's maximum length minus 1.

        The last token needs no KV.
        """
        if request.num_preemptions < self._max_preemptions:
            return 0
        return max(request.max_total_tokens - 1, request.num_tokens)

    def admitted(self, request: Request) -> None:
        """See `Admission`."""

    def left(self, request: Request) -> None:
        """See `Admission`."""


class ReservationAdmission:
    """Reserves blocks for prompt + max_tokens of each running request.

    A request is preempted only if blocks run out because KV transfers pin some. These pinned blocks belong to ended
    requests, or are saved for another engine.
    Source: Hugging Face TGI (router/src/infer, `Queue::next_batch` and `batching_task`).

    most_saved_blocks: Number of unreserved blocks that saves may pin in each bounded KV group.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, most_saved_blocks: int) -> None:
        self._config = config
        self._manager = kv_cache_manager
        self._most_saved_blocks = most_saved_blocks
        self._reserved: dict[str, tuple[int, list[int]]] = {}  # (tokens, blocks by group) by request id
        self.num_reserved_total = 0
        self._num_blocks = [0] * len(kv_cache_manager.groups)
        self._steps_since_admission = 0

    @property
    def max_total_tokens(self) -> int:
        """Limit on the sum of all reservations."""
        limit = self._config.max_batch_total_tokens
        return self._manager.capacity_tokens if limit is None else limit

    def check_fits(self, request: Request) -> None:
        """See `Admission`."""
        limit = min(self.max_total_tokens, self._manager.capacity_tokens)
        if request.max_total_tokens > limit:
            raise PromptTooLongError(
                f"prompt and max_tokens together are {request.max_total_tokens} tokens; at most {limit} can be "
                "reserved (max_batch_total_tokens and the KV cache)",
                parameter="max_tokens",
            )

    def open_step(self, num_running: int, num_waiting: int) -> WaitReason | None:
        """Return GATHERING if fewer than `waiting_served_ratio` x `num_running` requests wait.

        After `max_waiting_tokens` steps without an admission, return None.
        """
        self._steps_since_admission += 1
        least = math.floor(num_running * self._config.waiting_served_ratio)
        if num_waiting < least and self._steps_since_admission <= self._config.max_waiting_tokens:
            return WaitReason.GATHERING
        return None

    def refusal(self, request: Request, computed: ComputedBlocks, num_running: int) -> WaitReason | None:
        """See `Admission`."""
        del computed, num_running
        if self.num_reserved_total + request.max_total_tokens > self.max_total_tokens:
            return WaitReason.NO_RESERVATION
        _, shares = self._share(request)
        for group, num_reserved, share in zip(self._manager.groups, self._num_blocks, shares, strict=True):
            if not group.can_reserve(num_reserved + share, self._most_saved_blocks, is_only=not self._reserved):
                return WaitReason.NO_RESERVATION
        return None

    def _share(self, request: Request) -> tuple[int, list[int]]:
        num_blocks = self._manager.num_blocks_for(request.max_total_tokens)
        return request.max_total_tokens, [group.num_reserved(num_blocks) for group in self._manager.groups]

    def num_reserved_tokens(self, request: Request) -> int:
        """Return 0, because blocks are allocated step by step."""
        del request
        return 0

    def admitted(self, request: Request) -> None:
        """See `Admission`."""
        num_tokens, shares = self._reserved[request.request_id] = self._share(request)
        self.num_reserved_total += num_tokens
        self._num_blocks = list(map(operator.add, self._num_blocks, shares))
        self._steps_since_admission = 0

    def left(self, request: Request) -> None:
        """See `Admission`."""
        num_tokens, shares = self._reserved.pop(request.request_id, (0, [0] * len(self._num_blocks)))
        self.num_reserved_total -= num_tokens
        self._num_blocks = list(map(operator.sub, self._num_blocks, shares))


def create_admission(config: SchedulerConfig, kv_cache_manager: KVCacheManager, most_saved_blocks: int) -> Admission:
    """Create the rule for `config.admission`."""
    if config.admission is AdmissionRule.RESERVATION:
        return ReservationAdmission(config, kv_cache_manager, most_saved_blocks)
    return OptimisticAdmission(config, kv_cache_manager)
