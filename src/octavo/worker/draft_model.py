"""The draft model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.models.weight_bytes import weight_bytes
from octavo.runtime.faults import is_fault
from octavo.worker.draft_kv import OwnDraftKV, SharedDraftKV
from octavo.worker.memory import activation_bytes, block_bytes, kernel_scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.kernels.interface import AttentionBatch, DecodePlan, Kernels
    from octavo.models.draft_checkpoint import DraftCheckpoint
    from octavo.models.layers import CausalLM
    from octavo.worker.draft_kv import DraftKV
    from octavo.worker.forward_pass import ForwardPass
    from octavo.worker.input_batch import InputBatch, RequestRow
    from octavo.worker.kv_cache import PagedKVCache
    from octavo.worker.sample_tasks import SampleTasks
    from octavo.worker.sampler import Sampler
    from octavo.worker.step_leader import StepLeader
    from octavo.worker.verification import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A loaded draft model.

    dtype: dtype of unquantized weights. kv_dtype: dtype of the KV that the model reads.
    """

    checkpoint: DraftCheckpoint
    model: CausalLM
    dtype: str
    kv_dtype: str
    block_size: int
    max_num_seqs: int
    num_speculative_tokens: int
    decodes: DecodePlan | None

    @property
    def num_scratch_blocks(self) -> int:
        """Blocks per request for drafts' KV."""
        return -(-self.num_speculative_tokens // self.block_size)

    @property
    def _block_bytes(self) -> int:
        return block_bytes(self.model.architecture, self.block_size, self.kv_dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes added to each KV block."""
        return 0 if self.checkpoint.shares_kv else self._block_bytes

    @property
    def _scratch_bytes(self) -> int:
        return self.max_num_seqs * self.num_scratch_blocks * self._block_bytes

    def summary(self, num_blocks: int) -> str:
        """Return a log line."""
        checkpoint, dtype = self.checkpoint, str(self.model.dtype).removeprefix("torch.")
        weights = weight_bytes(checkpoint.architecture, self.dtype, dtype, checkpoint.quantization)
        kv = self._scratch_bytes + num_blocks * self.bytes_per_block
        return (
            f"{checkpoint.name}: {checkpoint.architecture.num_parameters:,} parameters in {weights:,} bytes, {kv:,} "
            "bytes of keys and values"
        )

    def num_bytes(self, num_tokens: int, kernels: Kernels) -> int:
        """Return the bytes of scratch blocks, graphs and a pass."""
        architecture = self.model.architecture
        scratch = kernel_scratch_bytes(
            architecture, kernels, max_seq_len=self.checkpoint.max_model_len, max_tokens=num_tokens
        )
        dtype = str(self.model.dtype).removeprefix("torch.")
        step = activation_bytes(architecture, num_tokens, min(num_tokens, self.max_num_seqs), dtype)
        of_graphs = 0 if self.decodes is None else self.decodes.num_bytes
        return scratch + step + of_graphs + self._scratch_bytes


class DraftRunner:
    """Runs the draft model.

    draft_probs: receives the drafts' distributions, if verification needs them. leader: sends passes to other ranks, if
    they have a share of the draft model.
    """

    def __init__(
        self,
        draft: DraftModel,
        forward_pass: ForwardPass,
        batch: InputBatch,
        sampler: Sampler,
        tasks: SampleTasks,
        verification: Verification,
        draft_probs: dict[str, Tensor],
        leader: StepLeader | None = None,
    ) -> None:
        self._leader = leader
        cache = forward_pass.kv_cache
        self.max_model_len = draft.checkpoint.max_model_len
        self.kv: DraftKV = SharedDraftKV(cache)
        if not draft.checkpoint.shares_kv:
            self.kv = OwnDraftKV(cache, batch, draft.num_speculative_tokens)
        self.forward_pass = forward_pass
        self._max_num_seqs = draft.max_num_seqs
        self._batch = batch
        self._sampler = sampler
        self._tasks = tasks
        self._verification = verification
        self._draft_probs = draft_probs
        self._scratch_blocks = scratch_blocks(cache, draft.max_num_seqs)
        self._num_groups, self._has_states = len(cache.groups_of_tokens), cache.states is not None
        self._requests: list[RequestRow] = []
        self._rows = self._num_known = self._num_tokens = self._num_computed = np.empty(0, dtype=np.int64)
        self._drawn_from: list[list[Tensor]] = []
        self._has_noted = False

    def update(self, scheduled: SchedulerOutput) -> None:
        """Apply a step, after `InputBatch.update`."""
        self.kv.update(scheduled)

    def warm_up(self, request_id: str) -> None:
        """Capture graphs by drafting, unless a pass has run or the request is too long."""
        num_tokens = self._batch.num_tokens[self._batch.requests[request_id].row]
        if self.forward_pass.has_run or num_tokens > self.max_model_len:
            return
        try:
            self.begin([request_id])
            self.choose_next(np.array([0]))
        finally:
            self.end()
            self._draft_probs.pop(request_id, None)

    def begin(self, request_ids: Sequence[str]) -> None:
        """See `DraftingModel`."""
        self._requests = requests = [self._batch.requests[request_id] for request_id in request_ids]
        self._drawn_from = [[] for _ in requests]
        self._rows = rows = np.array([request.row for request in requests])
        self._num_known = self._batch.num_tokens[rows]
        self._num_tokens = self._num_known.copy()  # including guesses
        self._num_computed = self.kv.begin(rows, self._num_known)
        self._batch.write_scratch_blocks(rows, [scratch[rows] for scratch in self._scratch_blocks])

    def choose_next(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See `DraftingModel`. Returns -1 for a failed request.

        If not all tokens fit in a pass, requests with the fewest tokens come first. A request that needs another
        pass gets -1.
        """
        rows, first, num_tokens = self._rows[indices], self._num_computed[indices], self._num_tokens[indices]
        counts = num_tokens - first
        most = self.forward_pass.max_tokens
        if counts.sum() > most:
            assert self._leader is None, "other ranks do not take part"
            return self._catch_up(indices, _within(most, counts))
        if self._leader is None:
            return self._choose_after(indices, counts)
        assert (counts == 1).all()
        names = [self._requests[index].request_id for index in indices.tolist()]
        try:
            self._leader.announce_drafts(names, self._batch.token_ids[rows, first].tolist(), first.tolist())
            return self._choose_after(indices, counts)
        except BaseException as error:  # the other ranks wait in this pass
            raise self._leader.failed(error) from error

    def _choose_after(
        self, indices: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        num_tokens = self._num_tokens[indices]
        token_ids, attention, known_there = self._gather(indices, counts, np.arange(len(counts) + 1), num_tokens)
        hidden = self.forward_pass(token_ids, attention)
        self._note_known(indices, num_tokens)
        return self._choose(indices, hidden, known_there)

    def _catch_up(
        self, indices: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        ends = self._num_computed[indices] + counts
        is_due, is_part = ends == self._num_tokens[indices], counts > 0
        part = indices[is_part]
        output_start = np.append(0, is_due[is_part].cumsum())
        token_ids, attention, known_there = self._gather(part, counts[is_part], output_start, ends[is_due])
        hidden = self.forward_pass(token_ids, attention)
        self._note_known(indices, ends)
        chosen, can_continue = np.full(len(indices), -1, dtype=np.int64), np.zeros(len(indices), dtype=bool)
        if len(hidden):
            chosen[is_due], can_continue[is_due] = self._choose(indices[is_due], hidden, known_there)
        return chosen, can_continue

    def _gather(
        self,
        indices: NDArray[np.int64],
        counts: NDArray[np.int64],
        output_start: NDArray[np.int64],
        num_known: NDArray[np.int64],
    ) -> tuple[Tensor, AttentionBatch, Tensor]:
        rows, first = self._rows[indices], self._num_computed[indices]
        states = self._batch.draft_states(rows, first) if self._has_states else []
        others, num_groups = [num_known.astype(np.int32)], self._num_groups
        token_ids, attention, (known_there,) = self._batch.gather(
            rows, first, counts, output_start, others, num_groups=num_groups, states=states
        )
        return token_ids, attention, known_there

    def _note_known(self, indices: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        if not self._has_noted:
            self._has_noted = True
            self.kv.note_known(self._rows[indices], ends)

    def _choose(
        self, indices: NDArray[np.int64], hidden: Tensor, known_there: Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        requests = [self._requests[index] for index in indices.tolist()]
        rows, num_tokens = self._rows[indices], self._num_tokens[indices]
        tasks = self._tasks.make_for_drafts(requests, rows, num_tokens)
        logits = self.forward_pass.compute_logits(hidden, self._max_num_seqs)
        faults = self._sampler.adjust(logits, tasks)
        for error in faults.values():
            if not is_fault(error):
                raise error
        drawn, probs = self._verification.draw_drafts(logits, self._batch.sampling.gather(rows, known_there))
        chosen: NDArray[np.int64] = drawn.cpu().numpy()
        chosen[list(faults)] = -1
        if probs is not None:
            for index, of_request in zip(indices.tolist(), probs, strict=True):
                self._drawn_from[index].append(of_request)
        self._batch.token_ids[rows, num_tokens] = np.maximum(chosen, 0)
        self._num_computed[indices] = num_tokens
        self._num_tokens[indices] = num_tokens + 1
        can_continue = [
            token_id >= 0 and token_id not in request.stop_token_ids
            for token_id, request in zip(chosen.tolist(), requests, strict=True)
        ]
        return chosen, np.array(can_continue)

    def end(self) -> None:
        """Record drafts' KV, and add drafts' distributions to `draft_probs`."""
        requests, self._requests = self._requests, []
        if self._has_noted:
            self._has_noted = False
            self.kv.note_guesses(self._rows, self._num_known, self._num_computed)
        for request, probs in zip(requests, self._drawn_from, strict=False):
            if probs:
                self._draft_probs[request.request_id] = torch.stack(probs)
        self._drawn_from = []


def scratch_blocks(cache: PagedKVCache, max_num_seqs: int) -> list[NDArray[np.int32]]:
    """Return each KV group's ids of scratch blocks [max_num_seqs, n]."""
    return [
        np.arange(group.num_blocks, len(group.blocks), dtype=np.int32).reshape(max_num_seqs, -1)
        for group in cache.groups
    ]


def _within(budget: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(counts, kind="stable")
    before = np.empty_like(counts)
    before[order] = counts[order].cumsum() - counts[order]
    return np.clip(budget - before, 0, counts)
