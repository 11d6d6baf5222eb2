"""Calls proposers for draft tokens."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from octavo.errors import EngineDeadError
from octavo.runtime.faults import is_fault
from octavo.speculative.interface import DraftTask, EndedRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from torch import Tensor

    from octavo.speculative.interface import Proposer
    from octavo.worker.input_batch import InputBatch, RequestRow
    from octavo.worker.sample_tasks import SampleTasks

logger = logging.getLogger(__name__)


class Drafting:
    """Calls a proposer and cuts off drafts that cannot be accepted.

    computed: ids of requests with a draft model's drafts in this step. draft_probs: the newest drafts' distributions by
    request id, float32 [num_drafts, vocab]; empty without rejection sampling.
    """

    def __init__(self, proposer: Proposer, batch: InputBatch, tasks: SampleTasks) -> None:
        self.proposer = proposer
        self.seconds = 0.0
        self.num_passes = 0
        self.computed: AbstractSet[str] = frozenset()
        self.draft_probs: dict[str, Tensor] = {}
        self._batch = batch
        self._tasks = tasks

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop preempted requests' state."""
        request_ids = list(request_ids)
        self._drop_probs(request_ids)
        self.proposer.forget(request_ids)

    def _drop_probs(self, request_ids: Iterable[str]) -> None:
        if self.draft_probs:
            for request_id in request_ids:
                self.draft_probs.pop(request_id, None)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Pass ended requests to the proposer. Call this before the batch drops them. Ignores unknown ids."""
        if not self.proposer.num_speculative_tokens:
            return
        self._drop_probs(request_ids)
        requests = [each for name in request_ids if (each := self._batch.requests.get(name)) is not None]
        ended = [
            EndedRequest(each.request_id, self._batch.known_tokens(each), each.num_prompt_tokens, each.cache_salt)
            for each in requests
        ]
        if not ended:
            return
        try:
            self.proposer.finish(ended)
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.exception("outputs of %d requests could not be kept for drafting", len(ended))
            self.forget(each.request_id for each in ended)

    def propose(
        self, sampled_token_ids: Mapping[str, list[int]], max_drafts: Mapping[str, int]
    ) -> dict[str, list[int]]:
        """Return drafts for a step's requests.

        max_drafts: limits by request id. With a draft model, looked-up drafts have no such limits.
        """
        if not self.proposer.num_speculative_tokens:
            return {}
        self.num_passes, self.computed = 0, frozenset()
        is_bounded = max_drafts and not self.proposer.computes
        if is_bounded and not any(max_drafts.get(request_id, 1) for request_id in sampled_token_ids):
            self.seconds = 0.0
            self._drop_probs(sampled_token_ids)
            return {}
        start = time.perf_counter()
        drafts = self._propose(sampled_token_ids, max_drafts)
        self.seconds = time.perf_counter() - start
        return drafts

    def _propose(
        self, sampled_token_ids: Mapping[str, list[int]], max_drafts: Mapping[str, int]
    ) -> dict[str, list[int]]:
        tasks: list[DraftTask] = []
        for request_id, token_ids in sampled_token_ids.items():
            request = self._batch.requests[request_id]
            known = self._batch.known_tokens(request)
            most = self._max_drafts(request, len(known), token_ids)
            worth = min(most, max_drafts.get(request_id, most)) if max_drafts else most
            if not self.proposer.computes:
                most = worth
            if most > 0:
                prompt = request.num_prompt_tokens, request.predicted_token_ids
                tasks.append(DraftTask(request_id, known, most, request.cache_salt, *prompt, worth))
        self._drop_probs(sampled_token_ids)
        if not tasks:
            return {}
        try:
            proposed = self.proposer.propose(tasks)
            self.num_passes, self.computed = self.proposer.num_passes, self.proposer.computed
        except BaseException as error:
            if not is_fault(error) or isinstance(error, EngineDeadError):
                raise
            logger.exception("no tokens are drafted in this step")
            self.forget(task.request_id for task in tasks)
            return {}
        found = {task.request_id: self._cut(task, drafts) for task, drafts in zip(tasks, proposed, strict=True)}
        return {request_id: drafts for request_id, drafts in found.items() if drafts}

    def _max_drafts(self, request: RequestRow, num_tokens: int, token_ids: list[int]) -> int:
        params = request.sampling_params
        num_output = num_tokens - request.num_prompt_tokens
        may_end = num_output > params.min_tokens
        if params.pooling is not None or (may_end and not request.stop_token_ids.isdisjoint(token_ids)):
            return 0
        most = self.proposer.num_speculative_tokens
        if params.num_speculative_tokens is not None:
            most = min(most, params.num_speculative_tokens)
        return most if params.max_tokens is None else min(most, params.max_tokens - num_output - 1)

    def _cut(self, task: DraftTask, drafts: list[int]) -> list[int]:
        """Cut off the first draft that ends the request or that the grammar forbids, and all later ones.

        With rejection sampling, this first draft is kept: a decision that depends on its token would bias the result.
        """
        request = self._batch.requests[task.request_id]
        drafts = drafts[: task.max_drafts]
        end = next((i for i, token_id in enumerate(drafts) if token_id in request.stop_token_ids), len(drafts))
        try:
            num_useful = self._tasks.num_allowed(request, task.token_ids, drafts[:end])
            return drafts[: num_useful + (task.request_id in self.draft_probs)]
        except BaseException as error:
            if not is_fault(error):
                raise
            logger.info("request %s gets no drafts: %s", task.request_id, error)
            request.matcher = None
            return []
