"""Computes fingerprints of engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.data.fingerprint import EngineFingerprint
from octavo.errors import FingerprintError
from octavo.kernels.checksum import digest
from octavo.models.attention import Attention
from octavo.models.latent_layer import LatentAttention
from octavo.models.rope import find_wrong_row, first_rows, make_query_scale
from octavo.worker.warm_up import fixed_prompt_logits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from octavo.models.layers import CausalLM
    from octavo.worker.model_runner import ModelRunner

_FIRST_ROWS = 256  # of rotary tables; equal for all model lengths


def take_fingerprint(
    runner: ModelRunner, num_prompt_tokens: int, num_threads: int, checksums: Sequence[tuple[str, str]] = ()
) -> EngineFingerprint:
    """Return the fingerprint. Requires compiled CPU kernels, because their results are equal in every start.

    checksums: `weights_checksum` of the model and of the draft model, of all ranks except rank 0.
    """
    kernels, model = runner.kernels, runner.model
    draft = None if runner.draft_runner is None else runner.draft_runner.forward_pass.model
    return EngineFingerprint(
        kernels=kernels.identity,
        num_threads=num_threads,
        weights=_joined([weights_checksum(model, num_threads), *(weights for weights, _ in checksums)]),
        tables=digest(_tables(model), num_threads),
        first_rows=digest(_first_rows(model)),
        logits=digest([_canonical(fixed_prompt_logits(runner, num_prompt_tokens))]),
        draft="" if draft is None else _joined([_draft_checksum(draft, num_threads), *(each for _, each in checksums)]),
    )


def weights_checksum(model: CausalLM, num_threads: int) -> str:
    """Return a checksum of all packed weights and norms."""
    return digest(_weights(model), num_threads)


def _draft_checksum(model: CausalLM, num_threads: int) -> str:
    return digest([*_weights(model), *_tables(model)], num_threads)


def _joined(checksums: Sequence[str]) -> str:
    if len(checksums) == 1:
        return checksums[0]
    return digest([torch.frombuffer(bytearray("".join(checksums), "ascii"), dtype=torch.uint8)])


def _weights(model: CausalLM) -> Iterator[Tensor]:
    for linear in model.linears:
        for part in model.kernels.keep_linear(linear):
            yield part.data
            if part.bias is not None:
                yield part.bias
    yield from model.norms


def check_tables(model: CausalLM) -> None:
    """Recompute rotary tables and query scales. Raises `FingerprintError` if a bit differs.

    Checked tables with equal configurations and first rows are equal.
    """
    for attention in _attentions(model):
        rope, table, scale = attention.config.rope, attention.cos_sin, attention.query_scale
        name, row = "rotary table", find_wrong_row(table, rope, attention.config.rotary_width)
        if row is None and scale is not None:
            again = make_query_scale(rope, len(scale), scale.device)
            assert again is not None
            differs = (scale.view(torch.int32) != again.view(torch.int32)).nonzero()
            name, row = "table of query scales", int(differs[0]) if len(differs) else None
        if row is not None:
            raise FingerprintError(
                f"row {row} of a {name} with {len(table)} rows has other bits when it is computed again: restart; "
                "the memory or the processor may be faulty, run `octavo doctor`"
            )


def _attentions(model: CausalLM) -> Iterable[Attention | LatentAttention]:
    kinds = (Attention, LatentAttention)
    attentions = [layer.attention for layer in model.layers if isinstance(layer.attention, kinds)]
    return {(each.config.rope, each.config.rotary_width): each for each in attentions}.values()


def _tables(model: CausalLM) -> Iterator[Tensor]:
    for each in _attentions(model):
        yield from (table for table in (each.cos_sin, each.query_scale) if table is not None and table.numel())


def _first_rows(model: CausalLM) -> Iterator[Tensor]:
    for each in _attentions(model):
        rope, num_positions = each.config.rope, len(each.cos_sin)
        rows = first_rows(rope, each.config.rotary_width, num_positions, _FIRST_ROWS)
        scales = make_query_scale(rope, _FIRST_ROWS, rows.device)
        yield from (table for table in (rows, scales) if table is not None and table.numel())


def _canonical(logits: Tensor) -> Tensor:
    return torch.where(logits.isnan(), torch.nan, logits)
