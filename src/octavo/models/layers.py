"""The decoder that all model families share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch

from octavo.kernels.interface import SplitLinear
from octavo.kernels.operations.divide import divide
from octavo.kernels.operations.soft_cap import soft_cap
from octavo.models.declared import RowsPart
from octavo.models.decoder_layer import DecoderLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from octavo.kernels.interface import (
        AttentionBatch,
        Kernels,
        PackedGroups,
        PackedLinear,
        RanksKernels,
        SamplingRows,
    )
    from octavo.models.architecture import Architecture
    from octavo.models.declared import Linear, Norm, Table, Vector
    from octavo.models.expert_layer import Experts
    from octavo.models.rope_config import RopeConfig
    from octavo.models.weight_source import TableRows

_NOISE_TOKENS = 64  # noise is computed for so many tokens at once; see `octavo.kernels.noise`


class KVCache(Protocol):
    """The KV cache."""

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """See `CacheSpec.views`."""
        ...


class Weights(Protocol):
    """Packed weights, by declaration."""

    def linear(self, declared: Linear) -> PackedLinear:
        """Return fused linear layers; see `Kernels.pack_linear`."""
        ...

    def norm(self, declared: Norm) -> Tensor:
        """Return a norm's weight in the activations' dtype."""
        ...

    def vector(self, declared: Vector) -> Tensor:
        """Return a float32 vector."""
        ...

    def table(self, declared: Table) -> TableRows:
        """See `StoredTensors`."""
        ...

    def skip(self, declared: Linear) -> None:
        """Count weights from another source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Kernels, weights and tables of layers. Methods record returned weights.

    cos_sin         (rope, head_dim) -> float32 [max_model_len, rotary_dim], cached
    query_scale     rope -> float32 [max_model_len] or None, cached
    linears, norms  the recorded weights
    experts         by layer
    """

    architecture: Architecture
    kernels: Kernels
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    cos_sin: Callable[[RopeConfig | None, int], Tensor]
    query_scale: Callable[[RopeConfig | None], Tensor | None]
    linears: list[PackedLinear] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)

    def linear(self, declared: Linear) -> PackedLinear:
        """See `Weights`."""
        packed = self.weights.linear(declared)
        if isinstance(declared, RowsPart) and (declared.inputs or declared.outputs):
            num_outputs = packed.out_features if declared.outputs is None else declared.whole.out_features
            whole = num_outputs, packed.in_features, packed.storage, packed.bias, packed.num_bytes
            packed = SplitLinear(*whole, own=packed, inputs=declared.inputs, outputs=declared.outputs)
        self.linears.append(packed)
        return packed

    def grouped(self, declared: Sequence[Linear]) -> PackedGroups:
        """Return equal linear layers, such as experts, as groups."""
        packed = [self.weights.linear(each) for each in declared]
        groups = self.kernels.pack_groups(packed)
        if isinstance(declared[0], RowsPart):
            groups = replace(groups, inputs=declared[0].inputs)
        if isinstance(groups.storage, torch.Tensor):  # a copy, so the parts can be freed
            packed = [replace(each, storage=own) for each, own in zip(packed, groups.storage, strict=True)]
        self.linears.extend(packed)
        return groups

    def optional_norm(self, declared: Norm | None) -> Tensor | None:
        """See `Weights.norm`."""
        return None if declared is None else self.norm(declared)

    def norm(self, declared: Norm) -> Tensor:
        """See `Weights`."""
        self.norms.append(self.weights.norm(declared))
        return self.norms[-1]

    def vector(self, declared: Vector) -> Tensor:
        """See `Weights`."""
        self.norms.append(self.weights.vector(declared))
        return self.norms[-1]

    def ones(self, size: int) -> Tensor:
        """Return a float32 vector of ones."""
        return torch.ones(size, device=self.device)

    def rounded(self, value: float) -> float:
        """Round to `dtype`."""
        return torch.tensor(value, dtype=self.dtype).item()


class CausalLM:
    """A decoder-only transformer: token ids -> hidden states -> logits.

    Rows may belong to any number of sequences, without padding.
    """

    __slots__ = (
        "architecture", "dtype", "embed_tokens", "embedding_scale", "experts", "first_norm", "kernels", "last_writer",
        "layer_inputs", "layers", "linears", "lm_head", "norms",
    )  # fmt: skip

    def __init__(self, context: ModelContext) -> None:
        self.architecture = context.architecture
        self.kernels = context.kernels
        self.dtype = context.dtype
        self.embedding_scale = context.rounded(context.architecture.embedding_scale)
        self.linears, self.norms, self.experts = context.linears, context.norms, context.experts
        tensors = context.architecture.tensors()
        self.embed_tokens = context.linear(tensors.embedding)
        self.first_norm = context.optional_norm(tensors.layers[0].before_attention)
        next_norms = [*(layer.before_attention for layer in tensors.layers[1:]), tensors.final_norm]
        embeddings = context.architecture.embeddings
        self.layer_inputs = None
        if embeddings is not None and tensors.layer_inputs is not None:
            self.layer_inputs = embeddings.build(context, tensors.layer_inputs)
        layout = context.architecture.kv_layout
        kv_groups = layout.group_indices
        self.last_writer = layout.last_writer
        layers = zip(context.architecture.layers, tensors.layers, kv_groups, next_norms, strict=True)
        self.layers = [DecoderLayer(context, *layer) for layer in layers]
        self.lm_head = self.embed_tokens if tensors.head is None else context.linear(tensors.head)

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv_cache: KVCache) -> Tensor:
        """Write KV for int64 token ids [num_tokens]. Return final hidden states [num_outputs, hidden].

        Once all KV is written, only the rows of `AttentionBatch.outputs` are computed.
        """
        kernels = self.kernels
        residual = kernels.embedding(token_ids, self.embed_tokens, self.dtype, self.embedding_scale)
        inputs = None if self.layer_inputs is None else self.layer_inputs.forward(token_ids, residual)
        hidden = residual
        if self.first_norm is not None:
            hidden = kernels.rms_norm(residual, self.first_norm, self.architecture.rms_norm_eps)
        for index, layer in enumerate(self.layers):
            cache = kv_cache.layer(index)
            q = layer.attention.write_kv(hidden, batch.of_group(layer.kv_group), cache)
            if index == self.last_writer and batch.outputs is not None:
                rows, batch = batch.outputs.rows, batch.outputs.attention
                q, residual = kernels.take_rows(q, rows), kernels.take_rows(residual, rows)
                inputs = None if inputs is None else kernels.take_rows(inputs, rows)
                if not len(rows):
                    return residual
            hidden = layer.attention.attend(q, batch.of_group(layer.kv_group), cache)
            hidden = layer.finish(hidden, residual, batch, None if inputs is None else inputs[:, index])
        return hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [rows, vocab_size], written to `out` if given."""
        return self._scaled(self.kernels.linear(hidden, self.lm_head, float32_out=True, out=out))

    @property
    def sampled_borders(self) -> tuple[int, ...] | None:
        """Borders of the ranks' logits, if ranks can sample from their own: see `RanksKernels.sample_columns`."""
        borders = self.lm_head.outputs if isinstance(self.lm_head, SplitLinear) else None
        return None if borders is None or any(border % _NOISE_TOKENS for border in borders[:-1]) else borders

    def sample_columns(self, hidden: Tensor, rows: SamplingRows) -> Tensor:
        """See `RanksKernels.sample_columns`. Requires `sampled_borders`."""
        kernels, borders = cast("RanksKernels", self.kernels), self.sampled_borders
        assert isinstance(self.lm_head, SplitLinear)
        assert borders is not None
        logits = kernels.linear(hidden, replace(self.lm_head, outputs=None), float32_out=True)
        return kernels.sample_columns(self._scaled(logits), rows, borders)

    def _scaled(self, logits: Tensor) -> Tensor:
        if self.architecture.logits_scaling != 1.0:
            divide(self.kernels, logits, self.architecture.logits_scaling)
        if self.architecture.logit_softcap is not None:
            soft_cap(self.kernels, logits, self.architecture.logit_softcap)
        return logits
