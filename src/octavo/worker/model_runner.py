"""SchedulerOutput -> inputs -> one forward -> tokens: the worker's side of a step."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.data.model_output import ModelOutput, TokenLogprobs
from octavo.outputs import NOTHING_ALLOWED
from octavo.runtime.faults import REQUEST_FAILED, is_fault, log_fault
from octavo.speculative.model import ModelProposer
from octavo.speculative.none import NoProposer
from octavo.speculative.prediction import PredictionProposer
from octavo.worker.draft_model import DraftRunner
from octavo.worker.drafting import Drafting
from octavo.worker.forward_pass import ForwardPass
from octavo.worker.input_batch import InputBatch, ModelInputs, RequestRow
from octavo.worker.kv_transfers import NoKVMover
from octavo.worker.memory import PROMPT_LOGPROBS_SLICE_ROWS
from octavo.worker.pooler import Pooler
from octavo.worker.sample_tasks import SampleTasks, Trouble
from octavo.worker.sampler import Sampler
from octavo.worker.verification import DraftedRows, ExactVerification

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.kernels.interface import DecodePlan, Kernels, SamplingRows
    from octavo.models.layers import CausalLM
    from octavo.speculative.interface import Proposer
    from octavo.structured_output.grammars import GrammarCompiler
    from octavo.worker.draft_model import DraftModel
    from octavo.worker.kv_cache import PagedKVCache
    from octavo.worker.kv_transfers import KVMover
    from octavo.worker.verification import Verification

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs steps on one device. The stages are methods, so that a reader or a test can walk through them.

    proposer: guesses what follows; then draft does, where there is one, and where the other has found nothing.
    draft_cache: of its keys and values, with blocks of the same numbers; None where it reads those of the target.
    kv_mover: moves KV from and to a store outside; set by who makes one. decodes: steps that become graphs.
    """

    def __init__(
        self,
        model: CausalLM,
        kernels: Kernels,
        kv_cache: PagedKVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        grammars: GrammarCompiler | None = None,
        proposer: Proposer | None = None,
        draft: DraftModel | None = None,
        draft_cache: PagedKVCache | None = None,
        verification: Verification | None = None,
        decodes: DecodePlan | None = None,
    ) -> None:
        self.model = model
        self.kernels = kernels
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.forward_pass = ForwardPass(model, kernels, kv_cache, max_num_batched_tokens, decodes)
        self.kv_cache = kv_cache
        self.kv_mover: KVMover = NoKVMover()
        self.sampler = Sampler(kernels)
        self.verification = verification or ExactVerification(kernels)
        self._pooler = Pooler()
        self.batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv_cache.block_size,
            device=kv_cache.blocks.device,
            num_scratch_blocks=0 if draft is None else draft.num_scratch_blocks,
            has_windows=kv_cache.window is not None,
        )
        self._tasks = SampleTasks(self.batch, grammars)
        self.drafting = Drafting(PredictionProposer(proposer or NoProposer()), self.batch, self._tasks)
        self.draft_runner: DraftRunner | None = None
        if draft is not None:
            passes = ForwardPass(draft.model, kernels, draft_cache or kv_cache, max_num_batched_tokens)
            self.draft_runner = DraftRunner(
                draft,
                passes,
                self.batch,
                self.sampler,
                self._tasks,
                self.verification,
                self.drafting.draft_probs,
            )
            self.drafting.proposer = ModelProposer(
                self.draft_runner, draft.num_speculative_tokens, self.drafting.proposer
            )

    @property
    def kv_caches(self) -> list[PagedKVCache]:
        """The KV cache, and that of a draft model."""
        draft = self.draft_runner
        return [self.kv_cache] if draft is None or draft.kv.cache is self.kv_cache else [self.kv_cache, draft.kv.cache]

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Compute a step: every scheduled token in one batched forward, tokens for the requests that are due some."""
        with torch.inference_mode():  # as a decorator it would enter twice as many functions, in every step
            host_moves = self.kv_cache.copy(scheduled.copies)
            output = self._execute(scheduled)
            output.host_moves.extend(host_moves)
            return output

    def _execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        if scheduled.kv_transfers or scheduled.kv_cancels:
            self.kv_mover.begin(scheduled)  # behind the copies: what is loaded may stand where they read
        self.drafting.finish(scheduled.finished_req_ids)
        if scheduled.preempted_req_ids:
            self.drafting.forget(scheduled.preempted_req_ids)
        self.batch.update(scheduled)
        if self.draft_runner is not None:
            self.draft_runner.update(scheduled)
        self._pooler.forget(scheduled.finished_req_ids)
        if not scheduled.num_scheduled_tokens:
            return ModelOutput(scheduled.step, {})
        inputs = self.batch.prepare_inputs(scheduled)
        self._tasks.begin(inputs)
        hidden = self.forward(inputs)
        assert hidden.shape[0] == inputs.output_start[-1]
        prompt_logprobs, errors = self._prompt_logprobs(inputs, hidden)
        pooled = self._pooler.pool(inputs, hidden, self.batch, errors)
        output = self.sample(scheduled.step, inputs, hidden, prompt_logprobs, errors)
        if output.sampled_token_ids:
            self.batch.append_sampled(output.sampled_token_ids)
        drafting = self.drafting
        drafts = drafting.propose(output.sampled_token_ids, scheduled.max_drafts)
        if not (pooled or drafting.seconds):
            return output
        return replace(
            output,
            pooled=pooled,
            draft_token_ids=drafts,
            drafting_s=drafting.seconds,
            num_drafting_passes=drafting.num_passes,
            computed_drafts=drafting.computed,
        )

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Return hidden states [num_outputs, hidden]; writes this step's KV. They last until the next call."""
        return self.forward_pass(inputs.token_ids, inputs.attention)

    def sample(
        self,
        step: int,
        inputs: ModelInputs,
        hidden: torch.Tensor,
        prompt_logprobs: dict[str, list[TokenLogprobs]] | None = None,
        errors: dict[str, str] | None = None,
    ) -> ModelOutput:
        """Choose tokens for every request whose known tokens are all computed now: one, and one behind each draft.

        As long as a draft is what is chosen, the choice behind it stands as well: by the same logits as if it had been
        fed back, and by the same noise, unless drafts are verified by rejection sampling.

        errors: of requests that failed in this step already.
        """
        errors = errors or {}
        if not inputs.sampled:
            return ModelOutput(step, {}, prompt_logprobs=prompt_logprobs or {}, errors=errors)
        requests = [inputs.requests[index] for index in inputs.sampled]
        troubles, postponed = dict[int, Trouble](), set[str]()
        tasks = self._tasks.make(inputs, troubles, postponed)
        logits = self._compute_logits(hidden if inputs.logits_indices is None else hidden[inputs.logits_indices])
        rows = self.batch.sampling.gather(inputs.sampled_rows, inputs.num_known)
        sampled = self.sampler.sample(logits, rows, tasks, self._chooser(inputs, requests))
        for row, error in sampled.faults.items():
            if not is_fault(error):
                raise error
            troubles.setdefault(row, Trouble(error, "its token was chosen"))
        tokens, logprobs = dict[str, list[int]](), dict[str, list[TokenLogprobs]]()
        standing = self._verify(inputs, sampled.token_ids)
        for request, first, token_ids in zip(requests, inputs.cu_num_logits.tolist(), standing, strict=False):
            name = request.request_id
            if name in errors or name in postponed:
                continue
            num_good = _num_good(first, token_ids, troubles)
            if not num_good:
                is_excluded = first in tasks and tasks[first].adjusts_logits and not bool(logits[first].isnan().any())
                nothing = NOTHING_ALLOWED if is_excluded else "the logits are not numbers"
                errors[name] = troubles[first].reason(name) if first in troubles else nothing
                continue
            tokens[name] = token_ids[:num_good]
            if first in sampled.logprobs:
                logprobs[name] = [sampled.logprobs[first + i] for i in range(len(tokens[name]))]
        return ModelOutput(step, tokens, logprobs, prompt_logprobs or {}, errors, postponed=postponed)

    def _chooser(
        self, inputs: ModelInputs, requests: list[RequestRow]
    ) -> Callable[[torch.Tensor, SamplingRows], torch.Tensor]:
        """Return what makes the choices of a step: the sampling kernel, or the verification of its drafts."""
        if len(inputs.num_known) == len(requests):
            return self.kernels.sample
        drafted = DraftedRows(
            is_greedy=[request.sampling_params.is_greedy for request in requests],
            cu_num_logits=inputs.cu_num_logits,
            draft_ids=self.batch.input_tokens(inputs),
            draft_probs=[self.drafting.draft_probs.get(request.request_id) for request in requests],
        )
        return partial(self.verification.choose, drafted=drafted)

    def _verify(self, inputs: ModelInputs, chosen: list[int]) -> list[list[int]]:
        """Return the choices that stand of each request that is sampled: those that its drafts are, and one."""
        if len(chosen) == len(inputs.sampled):
            return [[token_id] for token_id in chosen]
        cu_num_logits = torch.from_numpy(inputs.cu_num_logits)
        most_drafts = int(np.diff(inputs.cu_num_logits).max()) - 1
        sampled, num_sampled = self.kernels.rejection_sample(
            torch.tensor(chosen), torch.from_numpy(self.batch.input_tokens(inputs)), cu_num_logits, most_drafts
        )
        return [row[:count] for row, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True)]

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [rows, vocab_size], which last until the next call."""
        return self.forward_pass.compute_logits(
            hidden, self.max_num_seqs * (1 + self.drafting.proposer.num_speculative_tokens)
        )

    def _prompt_logprobs(
        self, inputs: ModelInputs, hidden: torch.Tensor
    ) -> tuple[dict[str, list[TokenLogprobs]], dict[str, str]]:
        """Log probabilities of the prompt tokens that follow this step's positions, and for whom that failed."""
        result, errors = dict[str, list[TokenLogprobs]](), dict[str, str]()
        for index, request in enumerate(inputs.requests):
            count = request.sampling_params.prompt_logprobs
            if count is None:
                continue
            first_row, end_row = (int(row) for row in inputs.output_start[index : index + 2])
            try:
                entries = self._prompt_entries(request, hidden[first_row:end_row], count)
            except BaseException as error:  # noqa: BLE001 - see octavo.runtime.faults
                log_fault(request.request_id, "its prompt was scored", error)
                errors[request.request_id] = REQUEST_FAILED
                continue
            if entries:
                result[request.request_id] = entries
        return result, errors

    def _prompt_entries(self, request: RequestRow, hidden: torch.Tensor, count: int) -> list[TokenLogprobs]:
        """Score the tokens behind a request's hidden states of this step, a slice of rows at a time."""
        position = int(self.batch.num_computed_tokens[request.row])
        num_rows = min(len(hidden), request.num_prompt_tokens - 1 - position)
        targets = self.batch.token_ids[request.row, position + 1 : position + 1 + max(num_rows, 0)].tolist()
        entries: list[TokenLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGPROBS_SLICE_ROWS):
            part = targets[start : start + PROMPT_LOGPROBS_SLICE_ROWS]
            logprobs = torch.log_softmax(self.model.compute_logits(hidden[start : start + len(part)]), dim=-1)
            entries += self.sampler.token_logprobs(logprobs, part, [count] * len(part))
        return entries


def _num_good(first: int, token_ids: list[int], troubles: Container[int]) -> int:
    """Return how many tokens stand before one that could not be chosen; first: the row of the first of them.

    What fails behind the first row fails in the next step again, where it is the first one.
    """
    if not troubles and min(token_ids) >= 0:
        return len(token_ids)
    return next((i for i, each in enumerate(token_ids) if each < 0 or first + i in troubles), len(token_ids))
