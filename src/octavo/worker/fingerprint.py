"""Take an engine's fingerprint: checksums of its weights and tables, and of the logits of a fixed prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.data.fingerprint import EngineFingerprint
from octavo.kernels.checksum import digest
from octavo.worker.warm_up import fixed_prompt_logits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from octavo.models.layers import CausalLM
    from octavo.worker.model_runner import ModelRunner

_FIRST_ROWS = 256  # of rotary tables: a sequence that an engine serves may be longer


def take_fingerprint(runner: ModelRunner, num_prompt_tokens: int, num_threads: int) -> EngineFingerprint:
    """Return the fingerprint of an engine of compiled CPU kernels: they give the same results in every start.

    Reads all weights once on `num_threads` threads, and runs a prompt of num_prompt_tokens.
    """
    kernels, model = runner.kernels, runner.model
    draft = None if runner.draft_runner is None else runner.draft_runner.forward_pass.model
    return EngineFingerprint(
        kernels=kernels.identity,
        num_threads=num_threads,
        weights=digest(_weights(model), num_threads),
        tables=digest(_tables(model), num_threads),
        first_rows=digest(table[:_FIRST_ROWS] for table in _tables(model)),
        logits=digest([_canonical(fixed_prompt_logits(runner, num_prompt_tokens))]),
        draft="" if draft is None else digest([*_weights(draft), *_tables(draft)], num_threads),
    )


def _weights(model: CausalLM) -> Iterator[Tensor]:
    """Yield all packed weights with their biases, and the norms."""
    for linear in model.linears:
        for part in model.kernels.keep_linear(linear):
            yield part.data
            if part.bias is not None:
                yield part.bias
    yield from model.norms


def _tables(model: CausalLM) -> Iterable[Tensor]:
    """Return each rotary table and query scale once: layers share them."""
    attentions = [layer.attention for layer in model.layers]
    tables = [table for each in attentions for table in (each.cos_sin, each.query_scale) if table is not None]
    return {table.data_ptr(): table for table in tables if table.numel()}.values()


def _canonical(logits: Tensor) -> Tensor:
    """Return logits with one bit pattern for all NaN: a broken model has a fingerprint, too."""
    return torch.where(logits.isnan(), torch.nan, logits)
