"""State that the scheduler's classes share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.admission import create_admission
from octavo.core.draft_policy import DraftPolicy
from octavo.core.output_builder import OutputBuilder
from octavo.core.policy import PromptCost, create_batching, create_policy
from octavo.core.steps_in_flight import StepsInFlight
from octavo.core.waiting_requests import WaitingRequests

if TYPE_CHECKING:
    from octavo.config import ResolvedSchedulerConfig
    from octavo.core.event_emitter import EventEmitter
    from octavo.core.kv.manager import KVCacheManager
    from octavo.core.transfer_scheduler import KVTransferScheduler
    from octavo.data.request import Request


class CoreState:
    """The open requests, and the objects that schedule them.

    docs/architecture.md says which class writes which state.
    """

    def __init__(
        self,
        config: ResolvedSchedulerConfig,
        manager: KVCacheManager,
        transfers: KVTransferScheduler,
        emitter: EventEmitter,
    ) -> None:
        self.config, self.manager, self.transfers, self.emitter = config, manager, transfers, emitter
        self.policy = create_policy(config)
        self.batching = create_batching(config)
        self.admission = create_admission(config, manager, transfers.most_saved_blocks)
        self.prompt_cost = PromptCost(config.attention_cost_tokens or 0.0)
        self.draft_policy = DraftPolicy()
        self.builder = OutputBuilder(manager, transfers)
        self.in_flight = StepsInFlight()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in scheduling order
        self.waiting_requests = WaitingRequests(self.policy.waiting)
