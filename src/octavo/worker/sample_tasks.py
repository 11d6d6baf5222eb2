"""What single requests ask for besides the sampling kernel, for each of their rows of logits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from octavo.errors import RequestError
from octavo.faults import REQUEST_FAILED, log_fault
from octavo.outputs import GRAMMAR_EXCEEDED
from octavo.worker.sampler import SampleTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from octavo.grammars import GrammarCompiler
    from octavo.worker.input_batch import InputBatch, ModelInputs, RequestRow

logger = logging.getLogger(__name__)


class SampleTasks:
    """Makes them, and walks grammars for them."""

    def __init__(self, batch: InputBatch, grammars: GrammarCompiler | None) -> None:
        self._batch = batch
        self._grammars = grammars

    def make(
        self, inputs: ModelInputs, requests: Sequence[RequestRow], errors: dict[str, str]
    ) -> dict[int, SampleTask]:
        """Return the tasks of a step by row of logits; requests: those that are sampled.

        errors: whose grammar cannot go on.
        """
        tasks = dict[int, SampleTask]()
        first = inputs.cu_num_logits
        is_plain = self._batch.sampling.is_plain[inputs.sampled_rows[first[:-1]]]
        if is_plain.all():
            return tasks
        for index in np.flatnonzero(~is_plain).tolist():
            request = requests[index]
            try:
                allowed = self._allowed(request)
            except RequestError as error:  # its own alone: the others of the step go on
                logger.info("request %s: %s", request.request_id, error)
                errors[request.request_id] = GRAMMAR_EXCEEDED
                continue
            except BaseException as error:  # noqa: BLE001 - see octavo.faults
                log_fault(request.request_id, "its grammar was walked", error)
                errors[request.request_id] = REQUEST_FAILED
                continue
            for row in range(first[index], first[index + 1]):
                tasks[row] = SampleTask(
                    sampling_params=request.sampling_params,
                    stop_token_ids=request.stop_token_ids,
                    known_tokens=self._batch.token_ids[request.row, : inputs.num_known[row]],
                    num_prompt_tokens=request.num_prompt_tokens,
                    allowed=allowed,
                )
        return tasks

    def _allowed(self, request: RequestRow) -> NDArray[np.bool_] | None:
        """Walk a request's grammar on over the tokens that came since; return what it allows next, None for all."""
        wanted = request.sampling_params.structured_outputs
        if wanted is None:
            return None
        if request.matcher is None:
            if self._grammars is None:
                raise RequestError("this worker has no tokenizer to compile grammars for")
            request.matcher = self._grammars.compile(wanted)
        matcher = request.matcher
        first = request.num_prompt_tokens + matcher.num_tokens
        matcher.advance(self._batch.known_tokens(request)[first:].tolist())
        return matcher.allowed()
