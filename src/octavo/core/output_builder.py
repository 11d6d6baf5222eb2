"""Builds the messages to the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from octavo.core.kv.checkpoints import Checkpoints
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.step_plan import StepPlan
    from octavo.core.transfer_scheduler import KVTransferScheduler
    from octavo.data.request import Request

_NONE: list[int] = []


class OutputBuilder:
    """Builds each step's message, excluding data that the worker already has."""

    def __init__(self, kv_cache_manager: KVCacheManager, transfers: KVTransferScheduler) -> None:
        self._manager = kv_cache_manager
        self._transfers = transfers
        # Lengths of the worker's block tables by request id and group
        self._num_sent: dict[str, list[int]] = {}
        self._finished_req_ids: set[str] = set()
        self.are_notices_due = True  # True if a step without tokens may report endings and cancellations

    @property
    def has_endings(self) -> bool:
        """Whether ended requests must still be reported."""
        return bool(self._finished_req_ids)

    @property
    def num_records(self) -> int:
        """Number of requests that the worker knows."""
        return len(self._num_sent)

    def build(
        self, step: int, plan: StepPlan, requests: dict[str, Request], max_drafts: dict[str, int]
    ) -> SchedulerOutput:
        """Return a step's message, and record it as sent."""
        new: list[NewRequestData] = []
        req_ids: list[str] = []
        num_computed: list[int] = []
        drafts: dict[str, list[int]] = {}
        known, grown = self._num_sent, self._manager.grown
        places: list[int] = []  # indices in `req_ids` of requests with new blocks
        for request_id, count in plan.num_tokens.items():
            request = requests[request_id]
            if request_id in known:
                if request_id in grown:
                    places.append(len(req_ids))
                req_ids.append(request_id)
                num_computed.append(request.num_computed_tokens)
            else:
                new.append(NewRequestData.from_request(request))
            if not request.spec_token_ids:
                continue
            num_drafts = request.num_computed_tokens + count - len(request.sequence.token_ids)
            if num_drafts > 0:
                drafts[request_id] = request.spec_token_ids[:num_drafts]
        new_block_ids = [[_NONE] * len(req_ids) for _ in self._manager.groups]
        for place in places:
            self._add_new_blocks(new_block_ids, place, requests[req_ids[place]])
        for data in new:
            known[data.request_id] = list(map(len, data.block_ids))
        finished_req_ids, self._finished_req_ids = self._finished_req_ids, set()
        self.are_notices_due = True
        checkpoints = self._manager.checkpoints
        assert plan.is_balanced, "a victim's budget was not returned"
        return SchedulerOutput(
            step=step,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(req_ids, new_block_ids, num_computed),
            num_scheduled_tokens=plan.num_tokens,
            total_num_scheduled_tokens=sum(plan.num_tokens.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids=set(plan.preempted),
            scheduled_spec_decode_tokens=drafts,
            max_drafts=max_drafts,
            state_saves={} if checkpoints is None else _plan_saves(checkpoints, plan, requests),
            copies=self._manager.take_copies(),
            kv_transfers=self._transfers.take_orders(),
            kv_cancels=self._transfers.take_cancels(),
            num_pending_transfers=self._transfers.num_pending,
        )

    def _add_new_blocks(self, new_block_ids: list[list[list[int]]], place: int, request: Request) -> None:
        self._manager.grown.discard(request.request_id)
        tables, num_sent = request.sequence.block_tables, self._num_sent[request.request_id]
        for new, table, count in zip(new_block_ids, tables, num_sent, strict=True):
            new[place] = table[count:]
        num_sent[:] = map(len, tables)

    def preempted(self, request_id: str) -> None:
        """Make `build` send the whole request again."""
        self._num_sent.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        """Report an ended request with the next step."""
        self.preempted(request_id)
        self._finished_req_ids.add(request_id)

    def fail_step(self, scheduled: SchedulerOutput) -> None:
        """Make the next step report all requests of a failed step as ended.

        The worker then drops its records of these requests. It is unknown which of the requests the worker has.
        """
        self._finished_req_ids |= scheduled.finished_req_ids | scheduled.preempted_req_ids
        self._finished_req_ids |= scheduled.num_scheduled_tokens.keys()
        # A failed step without tokens is not retried, because it may fail forever.
        self.are_notices_due = bool(scheduled.num_scheduled_tokens)


def _plan_saves(
    checkpoints: Checkpoints, plan: StepPlan, requests: dict[str, Request]
) -> dict[str, list[tuple[int, int]]]:
    saves: dict[str, list[tuple[int, int]]] = {}
    for request_id, count in plan.num_tokens.items():
        request = requests[request_id]
        num_certain = min(request.num_computed_tokens + count, len(request.sequence.token_ids))
        planned = checkpoints.plan(request, num_certain)
        if planned:
            saves[request_id] = planned
    return saves
