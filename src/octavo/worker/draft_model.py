"""The drafting model: what it takes, and its passes over the requests of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.runtime.faults import is_fault
from octavo.worker.draft_kv import OwnDraftKV, SharedDraftKV
from octavo.worker.forward_pass import ForwardPass
from octavo.worker.memory import activation_bytes, block_bytes
from octavo.worker.sample_tasks import Trouble

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.kernels.interface import Kernels
    from octavo.models.draft_checkpoint import DraftCheckpoint
    from octavo.models.layers import CausalLM
    from octavo.worker.draft_kv import DraftKV
    from octavo.worker.input_batch import InputBatch, RequestRow
    from octavo.worker.kv_cache import PagedKVCache
    from octavo.worker.sample_tasks import SampleTasks
    from octavo.worker.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A model that is loaded to draft, and the memory that this takes besides its weights.

    dtype: of its weights, where these are not rounded. kv_dtype: of the keys and values that it reads.
    num_speculative_tokens: of a request in a step at most.
    """

    checkpoint: DraftCheckpoint
    model: CausalLM
    dtype: str
    kv_dtype: str
    block_size: int
    max_num_seqs: int
    num_speculative_tokens: int

    @property
    def num_scratch_blocks(self) -> int:
        """Blocks of each request behind its own, which reach to the newest token but one: its drafts stand there."""
        return -(-self.num_speculative_tokens // self.block_size)

    @property
    def _block_bytes(self) -> int:
        return block_bytes(self.model.architecture, self.block_size, self.kv_dtype)

    @property
    def bytes_per_block(self) -> int:
        """What each block of the KV cache takes besides, for the drafting model's own keys and values."""
        return 0 if self.checkpoint.shares_kv else self._block_bytes

    @property
    def _scratch_bytes(self) -> int:
        return self.max_num_seqs * self.num_scratch_blocks * self._block_bytes

    def summary(self, num_blocks: int) -> str:
        """Return one line for the log, of what it takes beside a KV cache of so many blocks."""
        checkpoint, dtype = self.checkpoint, str(self.model.dtype).removeprefix("torch.")
        weights = checkpoint.architecture.weight_bytes(self.dtype, dtype, checkpoint.quantization)
        kv = self._scratch_bytes + num_blocks * self.bytes_per_block
        return (
            f"{checkpoint.name}: {checkpoint.architecture.num_parameters:,} parameters in {weights:,} bytes, {kv:,} "
            f"bytes of keys and values, up to {self.num_speculative_tokens} tokens a step"
        )

    def num_bytes(self, num_tokens: int, kernels: Kernels) -> int:
        """Return what passes of up to so many tokens take, and the scratch blocks."""
        architecture = self.model.architecture
        scratch = kernels.scratch_bytes(
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            vocab_size=architecture.vocab_size,
            max_seq_len=self.checkpoint.max_model_len,
            max_tokens=num_tokens,
        )
        dtype = str(self.model.dtype).removeprefix("torch.")
        step = activation_bytes(architecture, num_tokens, min(num_tokens, self.max_num_seqs), dtype)
        return scratch + step + self._scratch_bytes


class DraftRunner:
    """Runs it: an `octavo.speculative.model.DraftingModel`.

    cache: of the target, where it is shared, or of the drafting model.
    """

    def __init__(
        self,
        draft: DraftModel,
        kernels: Kernels,
        cache: PagedKVCache,
        batch: InputBatch,
        sampler: Sampler,
        tasks: SampleTasks,
        *,
        max_num_batched_tokens: int,
    ) -> None:
        self.max_model_len = draft.checkpoint.max_model_len
        self.kv: DraftKV = SharedDraftKV(cache)
        if not draft.checkpoint.shares_kv:
            self.kv = OwnDraftKV(cache, batch, draft.num_speculative_tokens)
        self.forward_pass = ForwardPass(draft.model, kernels, cache, max_num_batched_tokens)
        self._max_num_seqs = draft.max_num_seqs
        self._batch = batch
        self._sampler = sampler
        self._tasks = tasks
        scratch = np.arange(draft.max_num_seqs * draft.num_scratch_blocks, dtype=np.int32)
        self._scratch_blocks = cache.num_blocks + scratch.reshape(draft.max_num_seqs, -1)
        self._requests: list[RequestRow] = []
        self._rows = self._num_known = self._num_tokens = self._num_computed = np.empty(0, dtype=np.int64)

    def update(self, scheduled: SchedulerOutput) -> None:
        """Follow the scheduler's words, once the batch did."""
        self.kv.update(scheduled)

    def begin(self, request_ids: Sequence[str]) -> None:
        """Take up requests."""
        self._requests = requests = [self._batch.requests[request_id] for request_id in request_ids]
        self._rows = rows = np.array([request.row for request in requests])
        self._num_known = np.array([request.num_tokens for request in requests])
        self._num_tokens = self._num_known.copy()  # with what is guessed
        self._num_computed = self.kv.begin(rows, self._num_known)
        self._batch.write_scratch_blocks(rows, self._scratch_blocks[rows])

    def choose_next(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choose a token for each request that has caught up; the others do so as far as a pass has room for them."""
        rows, first, num_tokens = self._rows[indices], self._num_computed[indices], self._num_tokens[indices]
        counts = num_tokens - first
        if counts.sum() > self.forward_pass.max_tokens:
            counts = _within(self.forward_pass.max_tokens, counts)
        ends = first + counts
        is_due, is_part = ends == num_tokens, counts > 0
        token_ids, attention, _ = self._batch.gather(
            rows[is_part], first[is_part], counts[is_part], is_due[is_part].astype(np.int64)
        )
        hidden = self.forward_pass(token_ids, attention)
        if (num_tokens == self._num_known[indices]).all():
            self.kv.note_known(rows, ends)
        else:
            self.kv.note_guess(rows, ends)
        chosen = np.full(len(indices), -1, dtype=np.int64)
        if len(hidden):
            chosen[is_due] = self._choose(indices[is_due], hidden)
        return chosen

    def _choose(self, indices: NDArray[np.int64], hidden: Tensor) -> NDArray[np.int64]:
        """Return the choices behind hidden states of requests, as the target would make them; they count as tokens."""
        requests = [self._requests[index] for index in indices.tolist()]
        rows, num_tokens = self._rows[indices], self._num_tokens[indices]
        troubles = dict[int, Trouble]()
        tasks = self._tasks.make_for_drafts(requests, rows, num_tokens, troubles)
        logits = self.forward_pass.compute_logits(hidden, self._max_num_seqs)
        token_ids, faults = self._sampler.choose(logits, self._batch.sampling.gather(rows, num_tokens), tasks)
        for error in faults.values():
            if not is_fault(error):
                raise error
        for row, (token_id, request) in enumerate(zip(token_ids, requests, strict=True)):
            if row in troubles or row in faults or token_id in request.stop_token_ids:
                token_ids[row] = -1
        chosen = np.array(token_ids)
        self._batch.token_ids[rows, num_tokens] = np.maximum(chosen, 0)
        self._num_computed[indices] = num_tokens
        self._num_tokens[indices] = num_tokens + 1
        return chosen

    def end(self) -> None:
        """Let grammars stand where the known tokens end."""
        requests, self._requests = self._requests, []
        for request, num_known in zip(requests, self._num_known.tolist(), strict=False):
            self._tasks.forget_drafts(request, num_known)


def _within(budget: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many of its tokens each gets of so many in all: who has least to catch up with comes first."""
    order = np.argsort(counts, kind="stable")
    before = np.empty_like(counts)
    before[order] = counts[order].cumsum() - counts[order]
    return np.clip(budget - before, 0, counts)
