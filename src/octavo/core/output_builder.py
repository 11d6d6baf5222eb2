"""From a plan to a `SchedulerOutput`: the worker is sent all of a request that it does not know, else what is new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from octavo.core.kv_cache_manager import KVCacheManager
    from octavo.core.kv_transfers import KVTransfers
    from octavo.core.step_plan import StepPlan
    from octavo.data.request import Request


class OutputBuilder:
    """Knows what the worker was sent: which requests it knows, and who ended since. It keeps what it samples."""

    def __init__(self, kv_cache_manager: KVCacheManager, transfers: KVTransfers) -> None:
        self._manager = kv_cache_manager
        self._transfers = transfers
        self._known: set[str] = set()
        self._num_sent_parts: dict[str, int] = {}  # entries of tables of window blocks
        self._finished_req_ids: set[str] = set()

    @property
    def has_endings(self) -> bool:
        """Whether the worker has to be told who ended."""
        return bool(self._finished_req_ids)

    @property
    def num_records(self) -> int:
        """What is kept of single requests; 0 when nobody is left."""
        return len(self._known | self._num_sent_parts.keys())

    def build(
        self, step: int, plan: StepPlan, requests: dict[str, Request], max_drafts: dict[str, int]
    ) -> SchedulerOutput:
        """Return what the worker has to do and to know for a step; it counts as sent."""
        new: list[NewRequestData] = []
        cached = CachedRequestData.make_empty()
        drafts: dict[str, list[int]] = {}
        known, new_block_ids = self._known, plan.new_block_ids
        for request_id, count in plan.num_tokens.items():
            request = requests[request_id]
            if request_id in known:
                cached.req_ids.append(request_id)
                cached.new_block_ids.append(new_block_ids[request_id])
                cached.num_computed_tokens.append(request.num_computed_tokens)
            else:
                known.add(request_id)
                new.append(NewRequestData.from_request(request))
            if not request.spec_token_ids:
                continue
            num_drafts = request.num_computed_tokens + count - len(request.sequence.token_ids)
            if num_drafts > 0:
                drafts[request_id] = request.spec_token_ids[:num_drafts]
        if self._manager.windows.num_blocks:
            self._tell_windows(requests, new, cached)
        finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        assert plan.is_balanced, "a victim's budget was not returned"
        return SchedulerOutput(
            step=step,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=plan.num_tokens,
            total_num_scheduled_tokens=sum(plan.num_tokens.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=set(plan.preempted),
            scheduled_spec_decode_tokens=drafts,
            max_drafts=max_drafts,
            copies=self._manager.take_copies(),
            kv_transfers=self._transfers.take_orders(),
            kv_cancels=self._transfers.take_cancels(),
            num_pending_transfers=self._transfers.num_pending,
        )

    def _tell_windows(self, requests: dict[str, Request], new: list[NewRequestData], cached: CachedRequestData) -> None:
        """Add what is new in tables of window blocks; newcomers have theirs with them."""
        for data in new:
            self._num_sent_parts[data.request_id] = len(data.window_block_ids)
        for request_id in cached.req_ids:
            table = requests[request_id].sequence.window_table
            cached.new_window_block_ids.append(table[self._num_sent_parts[request_id] :])
            self._num_sent_parts[request_id] = len(table)

    def preempted(self, request_id: str) -> None:
        """Send a request whole when it comes back."""
        self._known.discard(request_id)
        self._num_sent_parts.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        """Tell with the next step that a request ended."""
        self._known.discard(request_id)
        self._num_sent_parts.pop(request_id, None)
        self._finished_req_ids.add(request_id)

    def fail_step(self, scheduled: SchedulerOutput) -> None:
        """Tell again who left, and that nothing is to be kept of whom it computed: what the worker heard is unknown."""
        self._finished_req_ids |= scheduled.finished_req_ids | scheduled.preempted_req_ids
        self._finished_req_ids |= scheduled.num_scheduled_tokens.keys()
