"""Computes a rank's share of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.worker.prompt_scores import slices_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.models.layers import CausalLM
    from octavo.ranks import messages
    from octavo.worker.forward_pass import ForwardPass
    from octavo.worker.input_batch import InputBatch
    from octavo.worker.kv_cache import PagedKVCache


class FollowingRunner:
    """Computes a rank's share of steps. Rank 0 samples the tokens.

    note_copied: called with a step's number after its block copies.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: PagedKVCache,
        forward: ForwardPass,
        batch: InputBatch,
        note_copied: Callable[[int], None],
    ) -> None:
        self._model, self._cache, self._pass, self._batch = model, cache, forward, batch
        self._note_copied = note_copied
        self._num_steps = 0

    def compute(self, step: messages.Step) -> None:
        """Take part in all exchanges of rank 0's step. Raises `ValueError` if a step is missing."""
        self._num_steps += 1
        if step.number != self._num_steps:
            raise ValueError(f"step {step.number} came, but step {self._num_steps} is next")
        scheduled, batch = step.to_scheduled(), self._batch
        batch.append_sampled(step.sampled)
        self._cache.copy(scheduled.copies)
        self._note_copied(step.number)
        batch.update(scheduled)
        if not scheduled.num_scheduled_tokens:
            return
        inputs = batch.prepare_inputs(scheduled)
        hidden = self._pass(inputs.token_ids, inputs.attention)
        for _, rows in slices_of(inputs, hidden, batch):
            self._model.compute_logits(rows)
        if inputs.sampled:
            rows = hidden if inputs.logits_indices is None else hidden[inputs.logits_indices]
            self._model.compute_logits(rows)
