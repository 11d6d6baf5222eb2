"""A family that octavo does not have: its layers are attention, a linear recurrence, and attention over latent rows.

The two other mixers are written in plain torch, one row at a time, so that a row has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from octavo.data.kv_groups import FullAttention, register
from octavo.models.architecture import Architecture, read_decoder
from octavo.models.attention import AttentionConfig
from octavo.models.declared import Linear
from octavo.models.decoder_layer import LayerConfig
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.rope_config import read_rope

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from octavo.data.kv_groups import KVGroupKind
    from octavo.kernels.interface import AttentionBatch

NAME = "HybridForCausalLM"
_BYTES = {"float32": 4, "bfloat16": 2}


def read_architecture(config, name) -> Architecture:
    """Return a model of four layers: attention, recurrence, latent attention, and attention with a window."""
    rope, mlp = read_rope(config, 2048), GatedMLPConfig.read(config)
    num_dims = config.values.get("num_position_dims", 1)
    attention = AttentionConfig.read(config, rope=rope)
    if num_dims > 1:  # attention has a rotary embedding of one dimension
        attention = replace(attention, rope=None)
    size = config.count("hidden_size")
    mixers = (attention, RecurrenceConfig(size), LatentConfig(size, 8), replace(attention, window=32))
    layers = tuple(LayerConfig(attention=mixer, mlp=mlp) for mixer in mixers)
    architecture = read_decoder(config, name, layers=layers, max_context_tokens=2048)
    return replace(architecture, num_position_dims=num_dims)


@register
@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The row at position p reads the state after position p - 1, and writes the state after p."""

    name: ClassVar[str] = "recurrent_state"

    @property
    def most_positions(self) -> int:
        return 2

    def first_position(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One row of numbers for each position, without heads: [num_blocks, block_size, size]."""

    size: int
    kind: KVGroupKind
    shared_layer: None = None

    @property
    def keeping_all(self) -> RowSpec:
        return replace(self, kind=FullAttention())

    def block_bytes(self, block_size: int, dtype: str) -> int:
        return self.size * block_size * _BYTES[dtype]

    def views(self, part: Tensor, block_size: int) -> tuple[Tensor, ...]:
        return (part.view(part.shape[0], block_size, self.size),)

    def obstacle(self, dtype: str) -> str | None:
        return None if dtype in _BYTES else "has no form for layers that keep one row for each position"


def rows_of(batch: AttentionBatch) -> Iterator[tuple[int, int, Tensor]]:
    """Yield row, position and block table of each row of a batch."""
    starts = batch.query_start.tolist()
    for sequence, (first, end) in enumerate(pairwise(starts)):
        for row in range(first, end):
            yield row, int(batch.positions[row]), batch.block_tables[sequence]


class RecurrenceTensors(NamedTuple):
    gate_and_input: Linear
    out: Linear


@dataclass(frozen=True, slots=True)
class RecurrenceConfig:
    """h[p] = sigmoid(gate(x[p])) * h[p - 1] + input(x[p]); the layer adds out(h[p])."""

    size: int

    @property
    def cache_spec(self) -> RowSpec:
        return RowSpec(self.size, RecurrentState())

    @property
    def width(self) -> int:
        return 2 * self.size

    def within(self, max_model_len: int) -> RecurrenceConfig:
        return self

    def tensors(self, name: str, hidden_size: int) -> RecurrenceTensors:
        name = f"{name}.recurrence"
        parts = ((f"{name}.gate", self.size), (f"{name}.input", self.size))
        return RecurrenceTensors(Linear(parts, hidden_size), Linear(((f"{name}.out", hidden_size),), self.size))

    def build(self, context, tensors) -> Recurrence:
        return Recurrence(context, self, tensors)


class Recurrence:
    def __init__(self, context, config, tensors):
        self.kernels, self.size = context.kernels, config.size
        self.gate_and_input = context.linear(tensors.gate_and_input)
        self.out = context.linear(tensors.out)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        (states,) = cache
        gates, inputs = self.kernels.linear(hidden, self.gate_and_input).split(self.size, dim=1)
        after, block_size = torch.empty_like(inputs), states.shape[1]
        for row, position, table in rows_of(batch):
            state = torch.zeros_like(inputs[row])
            if position:
                state = states[int(table[(position - 1) // block_size]), (position - 1) % block_size]
            after[row] = torch.sigmoid(gates[row]) * state + inputs[row]
            block, offset = divmod(int(batch.slot_mapping[row]), block_size)
            states[block, offset] = after[row]
        return after

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        return self.kernels.linear(q, self.out)


class LatentTensors(NamedTuple):
    query_and_latent: Linear
    value: Linear


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """One-head attention whose keys and values are one row of `rank` numbers, as in MLA without its rotary part.

    In a model whose positions have several dimensions, rows are scaled by them.
    """

    size: int
    rank: int

    @property
    def cache_spec(self) -> RowSpec:
        return RowSpec(self.rank, FullAttention())

    @property
    def width(self) -> int:
        return 2 * self.rank

    def within(self, max_model_len: int) -> LatentConfig:
        return self

    def tensors(self, name: str, hidden_size: int) -> LatentTensors:
        name = f"{name}.latent"
        parts = ((f"{name}.query", self.rank), (f"{name}.latent", self.rank))
        return LatentTensors(Linear(parts, hidden_size), Linear(((f"{name}.value", hidden_size),), self.rank))

    def build(self, context, tensors) -> Latent:
        return Latent(context, self, tensors)


class Latent:
    def __init__(self, context, config, tensors):
        self.kernels, self.rank = context.kernels, config.rank
        self.query_and_latent = context.linear(tensors.query_and_latent)
        self.value = context.linear(tensors.value)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        (rows,) = cache
        q, latents = self.kernels.linear(hidden, self.query_and_latent).split(self.rank, dim=1)
        if batch.rotary_positions is not None:
            down, right = batch.rotary_positions.to(latents.dtype)
            latents = latents * (1 + 0.5 * torch.sin(down) + 0.25 * torch.cos(right))[:, None]
        blocks = batch.slot_mapping // rows.shape[1]
        rows[blocks, batch.slot_mapping % rows.shape[1]] = latents
        return q.contiguous()

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        (rows,) = cache
        mixed = torch.empty_like(q)
        for row, position, table in rows_of(batch):
            count = position // rows.shape[1] + 1
            known = rows[table[:count].long()].reshape(-1, self.rank)[: position + 1].float()
            scores = torch.softmax((known * q[row].float()).sum(1), dim=0)
            mixed[row] = (scores[:, None] * known).sum(0).to(q.dtype)
        return self.kernels.linear(mixed, self.value)
