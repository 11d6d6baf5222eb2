"""Runs a model's steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.data.model_output import ModelOutput, TokenLogprobs
from octavo.outputs import ErrorCode
from octavo.runtime.faults import is_fault
from octavo.speculative.model import ModelProposer
from octavo.speculative.none import NoProposer
from octavo.speculative.prediction import PredictionProposer
from octavo.worker.draft_model import DraftRunner
from octavo.worker.drafting import Drafting
from octavo.worker.expert_tally import ExpertTally
from octavo.worker.forward_pass import ForwardPass
from octavo.worker.host_copies import create_host_copies
from octavo.worker.input_batch import InputBatch, ModelInputs
from octavo.worker.launched_step import LaunchedStep
from octavo.worker.pooler import Pooler
from octavo.worker.prompt_scores import PromptScorer
from octavo.worker.sample_tasks import SampleTasks, Trouble
from octavo.worker.sampler import Sampler
from octavo.worker.transfer_threads import NoKVMover
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
    from octavo.worker.sampler import Sampled
    from octavo.worker.step_leader import StepLeader
    from octavo.worker.transfer_threads import KVMover
    from octavo.worker.verification import Verification


class ModelRunner:
    """Runs steps on one device.

    draft: used if `proposer` finds no drafts. draft_cache: KV cache of `draft`, with the block ids of `kv_cache`.
    leader: sends steps to other ranks.
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
        leader: StepLeader | None = None,
    ) -> None:
        self.model = model
        self._leader = leader
        self.kernels = kernels
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.forward_pass = ForwardPass(model, kernels, kv_cache, max_num_batched_tokens, decodes)
        self.kv_cache = kv_cache
        self.kv_mover: KVMover = NoKVMover()
        self.copies = copies = create_host_copies(kv_cache.device)
        self.expert_tally = ExpertTally(model.experts, kv_cache.device) if model.experts else None
        self.sampler = Sampler(kernels, copies)
        self.verification = verification or ExactVerification(kernels)
        self._pooler = Pooler()
        self._newest: LaunchedStep | None = None  # not yet collected
        self.batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv_cache.block_size,
            copies=copies,
            num_scratch_blocks=0 if draft is None else draft.num_scratch_blocks,
            num_groups=len(kv_cache.groups),
            num_position_dims=model.architecture.num_position_dims,
            num_kept_rows=kv_cache.num_kept_rows // max_num_seqs,
        )
        self._prompts = PromptScorer(model, self.batch, self.sampler, copies, has_ranks=leader is not None)
        self._tasks = SampleTasks(self.batch, grammars)
        self.drafting = Drafting(PredictionProposer(proposer or NoProposer()), self.batch, self._tasks)
        self.draft_runner: DraftRunner | None = None
        if draft is not None:
            passes = ForwardPass(draft.model, kernels, draft_cache or kv_cache, max_num_batched_tokens, draft.decodes)
            self.draft_runner = DraftRunner(
                draft,
                passes,
                self.batch,
                self.sampler,
                self._tasks,
                self.verification,
                self.drafting.draft_probs,
                leader if draft.checkpoint.shares_kv else None,
            )
            self.drafting.proposer = ModelProposer(
                self.draft_runner, draft.num_speculative_tokens, self.drafting.proposer
            )

    @property
    def kv_caches(self) -> list[PagedKVCache]:
        """All KV caches."""
        draft = self.draft_runner
        return [self.kv_cache] if draft is None or draft.kv.cache is self.kv_cache else [self.kv_cache, draft.kv.cache]

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Compute a step."""
        with torch.inference_mode():
            return self._collect(self._launch(scheduled))

    def needs_sampled_tokens(self, scheduled: SchedulerOutput) -> bool:
        """Return True if earlier steps must be collected before this one is launched.

        Drafts, penalties and grammars need sampled tokens on the host. Steps with copies, transfers or preemptions are
        rare, so they wait, too.
        """
        return bool(
            self.drafting.proposer.num_speculative_tokens
            or scheduled.scheduled_spec_decode_tokens
            or scheduled.preempted_req_ids
            or scheduled.copies
            or scheduled.kv_transfers
            or scheduled.kv_cancels
            or self._reads_newest()
        )

    def _reads_newest(self) -> bool:
        rows = None if self._newest is None else self._newest.due_rows
        return rows is not None and bool(self.batch.sampling.reads_tokens[rows].any())

    def launch(self, scheduled: SchedulerOutput) -> LaunchedStep:
        """Enqueue a step. One earlier step may be uncollected, unless `needs_sampled_tokens` is True."""
        with torch.inference_mode():
            return self._launch(scheduled)

    def _launch(self, scheduled: SchedulerOutput) -> LaunchedStep:
        self.copies.begin()
        if scheduled.kv_cancels:
            self.kv_mover.cancel(scheduled)  # before other ranks, which start now, write the blocks
        if self._leader is not None:
            self._leader.announce(scheduled)
        if self._newest is not None:
            self._await(self._newest)
        step = LaunchedStep(scheduled, self.kv_cache.copy(scheduled.copies))
        self._follow(scheduled)
        step.num_changes = self.batch.num_changes
        if scheduled.num_scheduled_tokens:
            step.inputs = inputs = self.batch.prepare_inputs(scheduled)
            self._tasks.begin(inputs)
            if self.expert_tally is not None:
                self.expert_tally.begin(int(inputs.output_start[-1]))
            hidden = self.forward(inputs)
            if self.expert_tally is not None:
                step.experts = self.expert_tally.take(self.copies)
            assert hidden.shape[0] == inputs.output_start[-1]
            step.prompt_scores = self._prompts.score(inputs, hidden, step.errors)
            step.pooled_rows = self._pooler.take(inputs, hidden, self.batch, self.copies, step.errors)
            if inputs.sampled:
                self.sample(step, inputs, hidden)
        step.end = self.copies.mark()
        self._newest = step
        return step

    def _await(self, step: LaunchedStep) -> None:
        if step.chosen is not None and step.due_rows is not None:
            assert step.inputs is not None
            self.batch.await_sampled(step.inputs.rows_there, step.chosen.token_ids, step.due_rows)
            step.is_awaited = True

    def _follow(self, scheduled: SchedulerOutput) -> None:
        if scheduled.kv_transfers:
            self.kv_mover.begin(scheduled)  # after the copies, which may read blocks that a load writes
        if scheduled.finished_req_ids:
            self.drafting.finish(scheduled.finished_req_ids)
        if scheduled.preempted_req_ids:
            self.drafting.forget(scheduled.preempted_req_ids)
        self.batch.update(scheduled)
        if self.draft_runner is not None:
            self.draft_runner.update(scheduled)
        if scheduled.finished_req_ids:
            self._pooler.forget(scheduled.finished_req_ids)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Write KV and return hidden states [num_outputs, hidden], valid until the next call."""
        return self.forward_pass(inputs.token_ids, inputs.attention)

    def compute_logits(self, scheduled: SchedulerOutput) -> torch.Tensor:
        """Compute prompts. Return each prompt's last logits, float32 [num_requests, vocab_size], until the next step.

        All earlier steps must be collected. With ranks, the requests must have filters: see `ranks_sample`.
        """
        with torch.inference_mode():
            self.copies.begin()
            if self._leader is not None:
                self._leader.announce(scheduled)
            self._follow(scheduled)
            inputs = self.batch.prepare_inputs(scheduled)
            hidden = self.forward(inputs)
            return self._compute_logits(hidden if inputs.logits_indices is None else hidden[inputs.logits_indices])

    def sample(self, step: LaunchedStep, inputs: ModelInputs, hidden: torch.Tensor) -> None:
        """Choose each sampled request's next token, and a token after each draft."""
        tasks = self._tasks.make(inputs, step.troubles, step.postponed)
        hidden = hidden if inputs.logits_indices is None else hidden[inputs.logits_indices]
        rows = self.batch.sampling.gather(inputs.sampled_rows, inputs.known_there)
        if self._leader is not None and ranks_sample(self.model, self.batch, inputs):
            assert not tasks
            chosen = self.sampler.read_choices(self.model.sample_columns(hidden, rows))
        else:
            chosen = self.sampler.choose(self._compute_logits(hidden), rows, tasks, self._chooser(inputs))
        step.chosen = chosen
        for row, error in chosen.faults.items():
            if not is_fault(error):
                raise error
            step.troubles.setdefault(row, Trouble(error, "its token was chosen"))
        if len(inputs.num_known) > len(inputs.sampled):
            return
        step.due_rows = inputs.sampled_rows
        if step.troubles or step.postponed or step.errors:
            without = step.postponed | step.errors.keys()
            names = (inputs.requests[index].request_id for index in inputs.sampled)
            is_due = [i not in step.troubles and name not in without for i, name in enumerate(names)]
            step.due_rows = inputs.sampled_rows[is_due]

    def collect(self, step: LaunchedStep) -> ModelOutput:
        """Wait for the oldest uncollected step. Return results of requests that have not ended."""
        with torch.inference_mode():
            return self._collect(step)

    def _collect(self, step: LaunchedStep) -> ModelOutput:
        assert step.end is not None, "the launch failed"
        step.end.synchronize()
        if step is self._newest:
            self._newest = None
        if step.inputs is None:
            return ModelOutput(step.scheduled.step, {}, host_moves=list(step.host_moves()))
        requests, errors = step.inputs.requests, step.errors
        left = [] if step.num_changes == self.batch.num_changes else self.batch.left_among(requests)
        if step.is_awaited and step.due_rows is not None:
            self.batch.end_awaiting(step.due_rows, left)
        scores, pooled_rows = step.prompt_scores, step.pooled_rows
        if left:
            scores = [each for each in scores if each.request not in left]
            pooled_rows = [each for each in pooled_rows if each.request not in left]
        prompt_logprobs = self._prompts.read(scores, errors) if scores else {}
        pooled = self._pooler.pool(pooled_rows, errors) if pooled_rows else {}
        tokens, logprobs = dict[str, list[int]](), dict[str, list[TokenLogprobs]]()
        if step.chosen is not None:
            without = step.postponed | errors.keys()
            if left:
                without.update(each.request_id for each in left)
            self._read(step, step.inputs, step.chosen.read(), without, tokens, logprobs)
        if tokens:
            self.batch.append_sampled(tokens)
            if self._leader is not None:
                self._leader.take_sampled(tokens)
        if errors:
            self.batch.fail(each for each in requests if each.request_id in errors)
        experts, drafting = None, self.drafting
        if self.expert_tally is not None and step.experts is not None:
            experts = self.expert_tally.read(step.experts)
        drafts = drafting.propose(tokens, step.scheduled.max_drafts)
        return ModelOutput(
            step.scheduled.step,
            tokens,
            logprobs,
            prompt_logprobs,
            errors,
            pooled,
            step.postponed,
            host_moves=list(step.host_moves()),
            draft_token_ids=drafts,
            drafting_s=drafting.seconds,
            num_drafting_passes=drafting.num_passes,
            computed_drafts=drafting.computed,
            experts=experts,
        )

    def _read(
        self,
        step: LaunchedStep,
        inputs: ModelInputs,
        sampled: Sampled,
        without: set[str],
        tokens: dict[str, list[int]],
        logprobs: dict[str, list[TokenLogprobs]],
    ) -> None:
        """Record accepted tokens and log probabilities, or errors. Skips ids in `without`.

        Without rejection sampling, drafts do not change tokens: after accepted drafts, logits and noise are the same as
        without drafts.
        """
        errors, troubles, chosen = step.errors, step.troubles, sampled.token_ids
        is_plain = not (without or troubles or sampled.logprobs) and len(chosen) == len(inputs.sampled)
        if is_plain and min(chosen) >= 0:
            for index, token_id in zip(inputs.sampled, chosen, strict=True):
                tokens[inputs.requests[index].request_id] = [token_id]
            return
        standing = self._verify(inputs, chosen)
        for index, first, token_ids in zip(inputs.sampled, inputs.cu_num_logits.tolist(), standing, strict=False):
            request = inputs.requests[index]
            name = request.request_id
            if name in without:
                continue
            num_good = _num_good(first, token_ids, troubles)
            if not num_good:
                nothing = ErrorCode.NOTHING_ALLOWED if first in sampled.none_allowed else "the logits are NaN"
                errors[name] = troubles[first].reason(name) if first in troubles else nothing
                continue
            tokens[name] = token_ids[:num_good]
            if first in sampled.logprobs:
                logprobs[name] = [sampled.logprobs[first + i] for i in range(len(tokens[name]))]

    def _chooser(self, inputs: ModelInputs) -> Callable[[torch.Tensor, SamplingRows], torch.Tensor]:
        if len(inputs.num_known) == len(inputs.sampled):
            return self.kernels.sample
        requests = [inputs.requests[index] for index in inputs.sampled]
        drafted = DraftedRows(
            is_greedy=[request.sampling_params.is_greedy for request in requests],
            cu_num_logits=inputs.cu_num_logits,
            draft_ids=self.batch.input_tokens(inputs),
            draft_probs=[self.drafting.draft_probs.get(request.request_id) for request in requests],
        )
        return partial(self.verification.choose, drafted=drafted)

    def _verify(self, inputs: ModelInputs, chosen: list[int]) -> list[list[int]]:
        if len(chosen) == len(inputs.sampled):
            return [[token_id] for token_id in chosen]
        cu_num_logits = torch.from_numpy(inputs.cu_num_logits)
        most_drafts = int(np.diff(inputs.cu_num_logits).max()) - 1
        sampled, num_sampled = self.kernels.rejection_sample(
            torch.tensor(chosen), torch.from_numpy(self.batch.input_tokens(inputs)), cu_num_logits, most_drafts
        )
        return [row[:count] for row, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True)]

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.forward_pass.compute_logits(
            hidden, self.max_num_seqs * (1 + self.drafting.proposer.num_speculative_tokens)
        )


def ranks_sample(model: CausalLM, batch: InputBatch, inputs: ModelInputs) -> bool:
    """Return True if each rank samples from its own logits. All ranks must get the same result."""
    if model.sampled_borders is None or len(inputs.num_known) > len(inputs.sampled):
        return False
    return bool(batch.sampling.is_simple[inputs.sampled_rows].all())


def _num_good(first: int, token_ids: list[int], troubles: Container[int]) -> int:
    if not troubles and min(token_ids) >= 0:
        return len(token_ids)
    return next((i for i, each in enumerate(token_ids) if each < 0 or first + i in troubles), len(token_ids))
