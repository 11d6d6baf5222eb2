"""What single requests ask for besides the sampling kernel, for each of their rows of logits."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import RequestError
from octavo.outputs import GRAMMAR_EXCEEDED
from octavo.runtime.faults import REQUEST_FAILED, is_fault, log_fault
from octavo.worker.sampler import SampleTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo.structured_output.grammars import GrammarCompiler, Matcher
    from octavo.worker.input_batch import InputBatch, ModelInputs, RequestRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why no token can be chosen in a row of logits. doing: what was done when the error came."""

    error: BaseException
    doing: str

    def reason(self, request_id: str) -> str:
        """Log it as what ended a request; return what the request hears."""
        if isinstance(self.error, RequestError):
            logger.info("request %s: %s", request_id, self.error)
            return GRAMMAR_EXCEEDED
        log_fault(request_id, self.doing, self.error)
        return REQUEST_FAILED


class SampleTasks:
    """Makes them, and walks grammars for them and for drafts."""

    def __init__(self, batch: InputBatch, grammars: GrammarCompiler | None) -> None:
        self._batch = batch
        self._grammars = grammars

    def make(
        self, inputs: ModelInputs, requests: Sequence[RequestRow], troubles: dict[int, Trouble]
    ) -> dict[int, SampleTask]:
        """Return the tasks of a step by row of logits; requests: those that are sampled.

        Each row sees the drafts before it as tokens that came. None is made where it makes no difference what is
        chosen: behind a draft that the grammar forbids.
        troubles: rows of those whose grammar cannot go on, and so what is behind them.
        """
        return self._make(requests, inputs.cu_num_logits, inputs.sampled_rows, inputs.num_known, troubles)

    def make_for_drafts(
        self,
        requests: Sequence[RequestRow],
        rows: NDArray[np.int64],
        num_known: NDArray[np.int64],
        troubles: dict[int, Trouble],
    ) -> dict[int, SampleTask]:
        """Return the tasks of a model that drafts one token of each request, by its index.

        Their tokens so far count as known, drafts among them: `forget_drafts` is to be called before anything else is.
        """
        return self._make(requests, np.arange(len(rows) + 1), rows, num_known, troubles)

    def forget_drafts(self, request: RequestRow, num_known: int) -> None:
        """Go back in a request's grammar to so many known tokens."""
        matcher = request.matcher
        if matcher is None:
            return
        try:
            matcher.step_back(max(matcher.num_tokens + request.num_prompt_tokens - num_known, 0))
        except BaseException as error:
            request.matcher = None  # it is walked anew
            if not is_fault(error):
                raise

    def _make(
        self,
        requests: Sequence[RequestRow],
        first: NDArray[np.integer],
        sampled_rows: NDArray[np.int64],
        num_known: NDArray[np.int64],
        troubles: dict[int, Trouble],
    ) -> dict[int, SampleTask]:
        tasks = dict[int, SampleTask]()
        is_plain = self._batch.sampling.is_plain[sampled_rows[first[:-1]]]
        if is_plain.all():
            return tasks
        for index in np.flatnonzero(~is_plain).tolist():
            request, rows = requests[index], range(int(first[index]), int(first[index + 1]))
            known = self._batch.token_ids[request.row, : num_known[rows[-1]]]
            masks: list[NDArray[np.bool_] | None] = [None] * len(rows)
            if request.sampling_params.structured_outputs is not None:
                masks = []
                try:
                    self._walk(request, known, len(rows) - 1, masks)
                except BaseException as error:
                    if not is_fault(error):
                        raise
                    request.matcher = None  # it cannot go back
                    if len(masks) < len(rows):
                        troubles[rows[len(masks)]] = Trouble(error, "its grammar was walked")
            for row, allowed in zip(rows, masks, strict=False):
                tasks[row] = SampleTask(
                    sampling_params=request.sampling_params,
                    stop_token_ids=request.stop_token_ids,
                    known_tokens=known[: num_known[row]],
                    num_prompt_tokens=request.num_prompt_tokens,
                    allowed=allowed,
                )
        return tasks

    def num_allowed(self, request: RequestRow, known: NDArray[np.int32], drafts: list[int]) -> int:
        """Return how many drafts behind the known tokens could come true: up to one that the grammar forbids."""
        if request.sampling_params.structured_outputs is None:
            return len(drafts)
        return self._matcher(request, known).num_allowed(drafts)

    def _walk(
        self,
        request: RequestRow,
        known: NDArray[np.int32],
        num_drafts: int,
        masks: list[NDArray[np.bool_] | None],
    ) -> None:
        """Note what a grammar allows behind the newest token and behind each draft; then forget the drafts again.

        known: with the drafts, at its end.
        """
        num_tokens = len(known) - num_drafts
        matcher = self._matcher(request, known[:num_tokens])
        allowed = matcher.allowed()
        masks.append(allowed)
        for token_id in known[num_tokens:].tolist():
            if not allowed[token_id]:
                break
            matcher.advance([token_id])
            allowed = matcher.allowed()
            masks.append(allowed)
        matcher.step_back(len(masks) - 1)

    def _matcher(self, request: RequestRow, known: NDArray[np.int32]) -> Matcher:
        """Return a request's way through its grammar, walked on over the tokens that came since."""
        if request.matcher is None:
            wanted = request.sampling_params.structured_outputs
            assert wanted is not None
            if self._grammars is None:
                raise RequestError("this worker has no tokenizer to compile grammars for")
            request.matcher = self._grammars.compile(wanted)
        matcher = request.matcher
        matcher.advance(known[request.num_prompt_tokens + matcher.num_tokens :].tolist())
        return matcher
