"""How memory is divided among the KV groups."""

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
    """The number of blocks of each KV group."""

    blocks_of_groups: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group."""
        return self.blocks_of_groups[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """The bytes of a block of each KV group, and how many blocks each bounded group needs for those of the first group.

    A sequence has as many blocks of the first group as it is long. Of every other group, which is bounded, it has only
    those that its next rows read. Short sequences have as many blocks of all groups, so nothing is wasted if every
    group has the same number; long ones need few blocks of the bounded groups. The lengths are not known. So a bounded
    group has blocks for all sequences that may run at the same time. If it is more, it has so many that short and long
    sequences get the same share of what the best plan for them alone would give: one for each
    `bytes_of_all / block_bytes[0]` blocks of the first group. The additional blocks also keep more of the requests that
    ended in the prefix cache.

    block_bytes: of a block of each group; for the first with the drafting model's block of the same positions.
    blocks_of_sequence: for each bounded group the number of blocks that a sequence holds after a step.
    blocks_of_step: number of blocks of the tokens of a step.
    """

    block_bytes: tuple[int, ...]
    max_num_seqs: int
    blocks_of_sequence: tuple[int, ...]
    blocks_of_step: int

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
    ) -> KVPlan:
        """Compute the plan from the layers. Raises `ConfigError` if scales of quantized heads would not be aligned."""
        check_kv_dtype(architecture, kv_dtype)
        layout = architecture.kv_layout
        first, *others = layout.block_bytes(block_size, kv_dtype)
        most_positions = (group.kind.most_positions for group in layout.kv_groups)
        return cls(
            block_bytes=(first + draft_block_bytes, *others),
            max_num_seqs=max_num_seqs,
            # Both ends may be inside a block, and one block may be a copy whose source another sequence still holds.
            blocks_of_sequence=tuple(-(-most // block_size) + 2 for most in most_positions if most is not None),
            blocks_of_step=-(-max_num_batched_tokens // block_size),
        )

    @property
    def bytes_of_all(self) -> int:
        """Bytes of one block of every group together."""
        return sum(self.block_bytes)

    @property
    def _bounded_bytes(self) -> int:
        """Bytes of one block of every bounded group together."""
        return sum(self.block_bytes[1:])

    @property
    def _blocks_that_run(self) -> list[int]:
        """Blocks of each bounded group for all sequences that may run, a step, and as many tokens being saved."""
        return [self.max_num_seqs * count + 2 * self.blocks_of_step for count in self.blocks_of_sequence]

    def num_bytes(self, size: KVSize) -> int:
        """Return the bytes of a cache of that size."""
        return sum(map(operator.mul, size.blocks_of_groups, self.block_bytes))

    def with_blocks(self, num_blocks: int) -> KVSize:
        """Return the size of a cache with `num_blocks` blocks of the first group."""
        if not self._bounded_bytes:
            return KVSize((num_blocks,))
        balanced = num_blocks * self.block_bytes[0] // self.bytes_of_all
        return KVSize((num_blocks, *(min(num_blocks, max(balanced, count)) for count in self._blocks_that_run)))

    def num_usable_blocks(self, num_bytes: int, blocks_of_longest: int) -> int:
        """Return how many blocks of the first group sequences can use if the bounded groups have `num_bytes`.

        blocks_of_longest: of a sequence of full length. Blocks that take no bytes still take time and memory of the
        core. Their number is that of as many sequences as have room in the bounded groups in addition to a step, or
        that of one sequence and of everything that the bounded groups keep.
        """
        most = self.max_num_seqs * blocks_of_longest
        if self.block_bytes[0]:
            return most
        kept = num_bytes // self._bounded_bytes
        num_sequences = max(kept - self.blocks_of_step, 0) // max(self.blocks_of_sequence)
        return min(most, max(num_sequences * blocks_of_longest, blocks_of_longest + kept))

    def within(self, num_bytes: int, most_blocks: int) -> KVSize:
        """Return the largest cache of `num_bytes` with `most_blocks` of the first group; bounded ones get the rest."""
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
        # A single sequence always finds enough blocks of every group.
        num_blocks = min([num_blocks, *(count for count, needed in zip(bounded, least, strict=True) if count < needed)])
        return KVSize((num_blocks, *(min(count, num_blocks) for count in bounded)))


def check_kernels_have(kernels: Kernels, kv_cache_dtype: str) -> None:
    """Raise `ConfigError` if the kernels do not support this KV cache dtype."""
    if kv_cache_dtype in ROUNDED_KV and kv_cache_dtype not in kernels.kv_cache_dtypes:
        has = " or ".join(("auto", *kernels.kv_cache_dtypes))
        raise ConfigError(
            f"kernels {kernels.name} do not support kv_cache_dtype {kv_cache_dtype}: choose kv_cache_dtype "
            f"{has}, or kernels reference, or on a GPU triton"
        )


def check_kv_dtype(architecture: Architecture, kv_dtype: str) -> None:
    """Raise `ConfigError` if the scales of quantized heads would not be aligned."""
    for name, dtype in ROUNDED_KV.items():
        for spec in architecture.kv_layout.specs:
            if kv_dtype == dtype and (obstacle := spec.obstacle(dtype)) is not None:
                raise ConfigError(f"kv_cache_dtype {name} {obstacle}")
