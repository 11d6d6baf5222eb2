"""Prepares sampling outside the kernel."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import RequestError
from octavo.outputs import ErrorCode
from octavo.runtime.faults import is_fault, log_fault
from octavo.worker.grammar_walks import GrammarWalks, Walk, Walked, wait_for
from octavo.worker.sampler import SampleTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo.structured_output.grammars import GrammarCompiler, Matcher
    from octavo.worker.input_batch import InputBatch, ModelInputs, RequestRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a row of logits gives no token. doing: a clause for the log."""

    error: BaseException
    doing: str

    def reason(self, request_id: str) -> str:
        """Log the error. Return a code for the client."""
        if isinstance(self.error, RequestError):
            logger.info("request %s: %s", request_id, self.error)
            return ErrorCode.GRAMMAR_EXCEEDED
        log_fault(request_id, self.doing, self.error)
        return ErrorCode.REQUEST_FAILED


class SampleTasks:
    """Makes `SampleTask`s and advances grammars."""

    def __init__(self, batch: InputBatch, grammars: GrammarCompiler | None) -> None:
        self._batch = batch
        self._grammars = grammars
        self._walks = GrammarWalks()
        self._start_s = 0.0
        self._asking: list[tuple[RequestRow, range]] = []  # requests with their rows of logits

    def begin(self, inputs: ModelInputs) -> None:
        """Start the step's grammar walks."""
        self._start_s = time.monotonic()
        self._asking = self._not_plain(inputs)
        for request, rows in self._asking:
            if request.sampling_params.structured_outputs is not None:
                known = self._batch.token_ids[request.row, : inputs.num_known[rows[-1]]]
                self._add_walk(request, known, len(rows) - 1)
        if self._asking:
            self._walks.begin()

    def make(self, inputs: ModelInputs, troubles: dict[int, Trouble], postponed: set[str]) -> dict[int, SampleTask]:
        """Return the step's tasks by row of logits. A task's known tokens include the drafts before its row.

        Requests with a late walk are added to `postponed`. Their rows, and rows after a forbidden draft, get no task.
        If a grammar fails, its first row without a mask is added to `troubles`.
        """
        tasks, not_plain, self._asking = dict[int, SampleTask](), self._asking, []
        if not not_plain:
            return tasks
        walks = [request.walk for request, _ in not_plain if request.walk is not None]
        wait_for(walks, time.monotonic() - self._start_s, is_all=len(walks) == len(inputs.requests))
        for request, rows in not_plain:
            known = self._batch.token_ids[request.row, : inputs.num_known[rows[-1]]]
            masks: Sequence[NDArray[np.bool_] | None] = [None] * len(rows)
            if request.walk is not None:
                if not request.walk.is_ready:
                    postponed.add(request.request_id)
                    continue
                walked = request.walk.result.result()
                masks = walked.masks
                if walked.error is not None and len(masks) < len(rows):
                    troubles[rows[len(masks)]] = Trouble(walked.error, "its grammar was advanced")
            for row, allowed in zip(rows, masks, strict=False):
                tasks[row] = _task(request, known[: inputs.num_known[row]], allowed)
        return tasks

    def make_for_drafts(
        self, requests: Sequence[RequestRow], rows: NDArray[np.int64], num_known: NDArray[np.int64]
    ) -> dict[int, SampleTask]:
        """Return tasks for a draft model's pass, by index into `requests`, without grammars.

        num_known: number of known tokens and drafts.
        """
        is_plain = self._batch.sampling.is_plain[rows]
        return {
            index: _task(requests[index], self._batch.token_ids[rows[index], : num_known[index]], None)
            for index in np.flatnonzero(~is_plain).tolist()
        }

    def num_allowed(self, request: RequestRow, known: NDArray[np.int32], drafts: list[int]) -> int:
        """Return how many drafts precede the first forbidden one.

        With a large grammar, return the number of all drafts: the next step checks.
        """
        if request.sampling_params.structured_outputs is None:
            return len(drafts)
        matcher = self._matcher(request)
        if matcher.is_large:
            return len(drafts)
        matcher.advance(known[request.num_prompt_tokens + matcher.num_tokens :].tolist())
        return matcher.num_allowed(drafts)

    def _not_plain(self, inputs: ModelInputs) -> list[tuple[RequestRow, range]]:
        first = inputs.cu_num_logits
        is_plain = self._batch.sampling.is_plain[inputs.sampled_rows[first[:-1]]]
        if is_plain.all():
            return []
        return [
            (inputs.requests[inputs.sampled[index]], range(int(first[index]), int(first[index + 1])))
            for index in np.flatnonzero(~is_plain).tolist()
        ]

    def _add_walk(self, request: RequestRow, known: NDArray[np.int32], num_drafts: int) -> None:
        num_tokens, last = len(known) - num_drafts, request.walk
        drafts = known[num_tokens:].tolist()
        if last is not None and last.num_tokens == num_tokens:
            if drafts == last.drafts[:num_drafts]:
                return
            last.wait()  # the drafts after a postponed token have changed
        num_walked = 0 if request.matcher is None else request.matcher.num_tokens
        new = known[request.num_prompt_tokens + num_walked : num_tokens].tolist()
        request.walk = walk = Walk(num_tokens, drafts)
        self._walks.add(walk, lambda: self._walk(request, new, drafts), 0.0 if last is None else last.seconds)

    def _walk(self, request: RequestRow, new: list[int], drafts: list[int]) -> Walked:
        masks: list[NDArray[np.bool_]] = []
        try:
            matcher = self._matcher(request)
            matcher.advance(new)
            masks.append(matcher.allowed())
            for token_id in drafts:
                if not masks[-1][token_id]:
                    break
                matcher.advance([token_id])
                masks.append(matcher.allowed())
            matcher.step_back(len(masks) - 1)
        except BaseException as error:
            if not is_fault(error):
                raise
            request.matcher = None  # it cannot step back
            return Walked(masks, error)
        return Walked(masks, None)

    def _matcher(self, request: RequestRow) -> Matcher:
        if request.matcher is None:
            wanted = request.sampling_params.structured_outputs
            assert wanted is not None
            if self._grammars is None:
                raise RequestError("structured outputs need a tokenizer, and this worker has none")
            request.matcher = self._grammars.compile(wanted)
        return request.matcher


def _task(request: RequestRow, known: NDArray[np.int32], allowed: NDArray[np.bool_] | None) -> SampleTask:
    return SampleTask(
        sampling_params=request.sampling_params,
        stop_token_ids=request.stop_token_ids,
        known_tokens=known,
        num_prompt_tokens=request.num_prompt_tokens,
        allowed=allowed,
    )
