"""Divides KV memory."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.models.kv_layout import ROUNDED_KV

if TYPE_CHECKING:
    from octavo.kernels import Kernels
    from octavo.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class KVSize:
    """Blocks of each KV group."""

    blocks_of_groups: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group."""
        return self.blocks_of_groups[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """Bytes per block of each KV group, and the blocks that bounded groups (with windows) need.

    A short sequence has equally many blocks in every group, a long one has fewer in bounded groups. Because lengths are
    unknown, a bounded group gets enough blocks for all sequences that may run, and at least `block_bytes[0] /
    bytes_of_all` times the blocks of the first group.
    block_bytes: the first entry includes the draft model's KV. blocks_of_sequence: by bounded group, the blocks that a
    sequence holds after a step. state_bytes: bytes of a sequence's recurrent states.

    Recurrent states are the last group. Their number is `max_num_seqs`, whose memory is planned elsewhere, plus as many
    saved states as have the size of all blocks.
    """

    block_bytes: tuple[int, ...]
    max_num_seqs: int
    blocks_of_sequence: tuple[int, ...]
    blocks_of_step: int
    state_bytes: int = 0
    saves_states: bool = True

    @classmethod
    def of(
        cls,
        architecture: Architecture,
        *,
        block_size: int,
        kv_dtype: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        draft_block_bytes: int = 0,
        dtype: str = "float32",
        saves_states: bool = True,
    ) -> KVPlan:
        """Compute the plan. Raises `ConfigError`; see `check_kv_dtype`.

        dtype: of activations. saves_states: True for a prefix cache.
        """
        check_kv_dtype(architecture, kv_dtype)
        layout = architecture.kv_layout
        first, *others = layout.block_bytes(block_size, kv_dtype)
        most_positions = (group.kind.most_positions for group in layout.kv_groups)
        return cls(
            block_bytes=(first + draft_block_bytes, *others),
            max_num_seqs=max_num_seqs,
            # 2 more: a window may begin inside a block, and a copy has a source block.
            blocks_of_sequence=tuple(-(-most // block_size) + 2 for most in most_positions if most is not None),
            blocks_of_step=-(-max_num_batched_tokens // block_size),
            state_bytes=layout.state_bytes(dtype),
            saves_states=saves_states,
        )

    @property
    def bytes_of_all(self) -> int:
        """A block's bytes in all groups."""
        return sum(self.block_bytes)

    @property
    def _bounded_bytes(self) -> int:
        return sum(self.block_bytes[1:])

    @property
    def _blocks_that_run(self) -> list[int]:
        """By bounded group, blocks for all sequences, a step's tokens, and as many tokens that are being saved."""
        return [self.max_num_seqs * count + 2 * self.blocks_of_step for count in self.blocks_of_sequence]

    def num_bytes(self, size: KVSize) -> int:
        """Return a cache's bytes, without the states of running sequences."""
        of_blocks: int = sum(map(operator.mul, size.blocks_of_groups, self.block_bytes))
        num_saved = size.blocks_of_groups[-1] - self.max_num_seqs if self.state_bytes else 0
        return of_blocks + num_saved * self.state_bytes

    def with_blocks(self, num_blocks: int) -> KVSize:
        """Return the size for `num_blocks` of the first group."""
        size = self._with_blocks(num_blocks)
        return self._with_states(size, sum(map(operator.mul, size.blocks_of_groups, self.block_bytes)))

    def _with_states(self, size: KVSize, num_bytes: int) -> KVSize:
        """Add states, of which saved ones take `num_bytes`, but at most one for each block."""
        if not self.state_bytes:
            return size
        num_saved = min(num_bytes // self.state_bytes, size.num_blocks) if self.saves_states else 0
        return KVSize((*size.blocks_of_groups, self.max_num_seqs + num_saved))

    def _with_blocks(self, num_blocks: int) -> KVSize:
        if not self._bounded_bytes:
            return KVSize((num_blocks,))
        balanced = num_blocks * self.block_bytes[0] // self.bytes_of_all
        return KVSize((num_blocks, *(min(num_blocks, max(balanced, count)) for count in self._blocks_that_run)))

    def num_usable_blocks(self, num_bytes: int, blocks_of_longest: int) -> int:
        """Return how many blocks of the first group are useful if bounded groups have `num_bytes`.

        Without full-attention layers, these blocks have no bytes, but cost the scheduler time and memory. Then the
        result is enough for all sequences that fit in the bounded groups, and for one longest sequence plus all cached
        blocks.
        """
        most = self.max_num_seqs * blocks_of_longest
        if self.block_bytes[0]:
            return most
        kept = num_bytes // self._bounded_bytes
        num_sequences = max(kept - self.blocks_of_step, 0) // max(self.blocks_of_sequence)
        return min(most, max(num_sequences * blocks_of_longest, blocks_of_longest + kept))

    def within(self, num_bytes: int, most_blocks: int) -> KVSize:
        """Return the largest cache in `num_bytes`, with up to `most_blocks` of the first group."""
        if not self.state_bytes:
            return self._within(num_bytes, most_blocks)
        of_states = num_bytes // 2 if self.saves_states else 0
        return self._with_states(self._within(num_bytes - of_states, most_blocks), of_states)

    def _within(self, num_bytes: int, most_blocks: int) -> KVSize:
        first_bytes, bounded_bytes = self.block_bytes[0], self._bounded_bytes
        if not bounded_bytes:
            return KVSize((min(num_bytes // first_bytes, most_blocks),))
        balanced, most_bounded = num_bytes // (self.bytes_of_all + bounded_bytes), num_bytes // self.bytes_of_all
        bounded = [min(max(balanced, count), most_bounded) for count in self._blocks_that_run]
        num_blocks, taken = most_blocks, sum(map(operator.mul, bounded, self.block_bytes[1:]))
        if first_bytes:
            num_blocks = min((num_bytes - taken) // first_bytes, most_blocks)
        num_more = (num_bytes - num_blocks * first_bytes - taken) // bounded_bytes
        bounded = [min(count + num_more, num_blocks) for count in bounded]
        least = [count + self.blocks_of_step for count in self.blocks_of_sequence]
        num_blocks = min([num_blocks, *(count for count, needed in zip(bounded, least, strict=True) if count < needed)])
        return KVSize((num_blocks, *(min(count, num_blocks) for count in bounded)))


def check_kernels_have(kernels: Kernels, kv_cache_dtype: str) -> None:
    """Raise `ConfigError` if the kernels do not support a dtype."""
    if kv_cache_dtype in ROUNDED_KV and kv_cache_dtype not in kernels.kv_cache_dtypes:
        has = " or ".join(("auto", *kernels.kv_cache_dtypes))
        raise ConfigError(
            f"kernels {kernels.name} do not support kv_cache_dtype {kv_cache_dtype}: choose kv_cache_dtype "
            f"{has}, or kernels reference, or on a GPU triton"
        )


def check_kv_dtype(architecture: Architecture, kv_dtype: str) -> None:
    """Raise `ConfigError` if scales in the KV cache would not be aligned."""
    for name, dtype in ROUNDED_KV.items():
        for spec in architecture.kv_layout.specs:
            if kv_dtype == dtype and (obstacle := spec.obstacle(dtype)) is not None:
                raise ConfigError(f"kv_cache_dtype {name} {obstacle}")
