"""Computes a rank's share of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.ranks import messages
from octavo.worker.model_runner import ranks_sample
from octavo.worker.prompt_scores import slices_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.worker.forward_pass import ForwardPass
    from octavo.worker.input_batch import InputBatch


class FollowingRunner:
    """Computes a rank's share of steps. Rank 0 samples the tokens.

    draft: the share of the model that drafts from the same KV, or None. scratch_blocks: ids by row [rows, n], for
    drafts. note_copied: called with a step's number after its block copies.
    """

    def __init__(
        self,
        forward: ForwardPass,
        batch: InputBatch,
        note_copied: Callable[[int], None],
        draft: ForwardPass | None = None,
        scratch_blocks: Sequence[NDArray[np.int32]] = (),
    ) -> None:
        self._pass, self._batch, self._note_copied = forward, batch, note_copied
        self._draft, self._scratch_blocks = draft, scratch_blocks
        self._num_steps = 0

    def compute(self, message: messages.Step | messages.Draft) -> None:
        """Take part in all exchanges of rank 0's work. Raises `ValueError` if a message is missing."""
        self._num_steps += 1
        if message.number != self._num_steps:
            raise ValueError(f"step {message.number} came, but step {self._num_steps} is next")
        self._batch.append_sampled(message.sampled)
        if isinstance(message, messages.Draft):
            self._draft_tokens(message)
        else:
            self._compute_step(message.number, message.to_scheduled())

    def _compute_step(self, number: int, scheduled: SchedulerOutput) -> None:
        batch, forward = self._batch, self._pass
        forward.kv_cache.copy(scheduled.copies)
        self._note_copied(number)
        batch.update(scheduled)
        if not scheduled.num_scheduled_tokens:
            return
        inputs = batch.prepare_inputs(scheduled)
        hidden = forward(inputs.token_ids, inputs.attention)
        for _, rows in slices_of(inputs, hidden, batch):
            forward.model.compute_logits(rows)
        if not inputs.sampled:
            return
        hidden = hidden if inputs.logits_indices is None else hidden[inputs.logits_indices]
        if ranks_sample(forward.model, batch, inputs):
            forward.model.sample_columns(hidden, batch.sampling.gather(inputs.sampled_rows, inputs.known_there))
        else:
            forward.model.compute_logits(hidden)

    def _draft_tokens(self, message: messages.Draft) -> None:
        batch, draft = self._batch, self._draft
        assert draft is not None
        rows = np.array([batch.requests[request_id].row for request_id in message.requests])
        positions, ones = np.array(message.positions), np.ones(len(rows), dtype=np.int64)
        batch.write_scratch_blocks(rows, [blocks[rows] for blocks in self._scratch_blocks])
        batch.token_ids[rows, positions] = message.token_ids
        starts, cache = np.arange(len(rows) + 1), draft.kv_cache
        states = [] if cache.states is None else batch.draft_states(rows, positions)
        num_groups = len(cache.groups_of_tokens)
        token_ids, attention, _ = batch.gather(rows, positions, ones, starts, num_groups=num_groups, states=states)
        draft.model.compute_logits(draft(token_ids, attention))
