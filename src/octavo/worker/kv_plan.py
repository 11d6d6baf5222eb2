"""How memory is shared out between blocks and window blocks of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.models.kv_layout import ROUNDED_KV

if TYPE_CHECKING:
    from octavo.kernels import Kernels
    from octavo.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class KVSize:
    """Blocks of a KV cache; num_window_blocks: 0 where no layer has a window."""

    num_blocks: int
    num_window_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """What blocks and window blocks take, and how many of these are of use beside so many of those.

    A sequence has as many blocks as it is long, and window blocks of its window alone. Short ones have as many of both,
    so that window blocks for all blocks waste nothing, and long ones few window blocks. How long they are is not known.
    So there are window blocks for all that may run at once, or, if that is more, so many that each of both kinds, short
    ones and long ones, has the same part of what the best plan for them alone would give: a window block for each
    bytes_of_both / block_bytes blocks. The cache keeps more of what ended by that, too.

    block_bytes: of a block, and of what a drafting model keeps with it. window_block_bytes: 0 where no layer has a
    window. window_blocks_of_sequence, window_blocks_of_step: what one has behind a step, and what the step takes.
    """

    block_bytes: int
    window_block_bytes: int
    max_num_seqs: int
    window_blocks_of_sequence: int
    window_blocks_of_step: int

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
        """Look at the layers. Raises `ConfigError` for rounded heads whose scales would not be aligned."""
        check_kv_dtype(architecture, kv_dtype)
        layout = architecture.kv_layout
        return cls(
            block_bytes=layout.block_bytes(block_size, kv_dtype) + draft_block_bytes,
            window_block_bytes=layout.window_block_bytes(block_size, kv_dtype),
            max_num_seqs=max_num_seqs,
            # Its ends stand inside of blocks, and one may be a copy that another sequence still has.
            window_blocks_of_sequence=-(-(layout.window or 0) // block_size) + 2,
            window_blocks_of_step=-(-max_num_batched_tokens // block_size),
        )

    @property
    def bytes_of_both(self) -> int:
        """Bytes of a block and its window block."""
        return self.block_bytes + self.window_block_bytes

    @property
    def _window_blocks_that_run(self) -> int:
        """Window blocks of all sequences that may run, of a step, and of as many tokens that are being saved."""
        return self.max_num_seqs * self.window_blocks_of_sequence + 2 * self.window_blocks_of_step

    def num_bytes(self, size: KVSize) -> int:
        """Bytes of a cache of that size."""
        return size.num_blocks * self.block_bytes + size.num_window_blocks * self.window_block_bytes

    def with_blocks(self, num_blocks: int) -> KVSize:
        """Return the cache of so many blocks."""
        if not self.window_block_bytes:
            return KVSize(num_blocks)
        balanced = num_blocks * self.block_bytes // self.bytes_of_both
        return KVSize(num_blocks, min(num_blocks, max(balanced, self._window_blocks_that_run)))

    def num_usable_blocks(self, num_bytes: int, blocks_of_longest: int) -> int:
        """Return how many blocks sequences can use beside so many bytes; blocks_of_longest: one of full length has.

        Blocks that take no bytes still take time and memory of the core: there are those of as many sequences as have
        room for their windows beside a step, or of one and of all whose window blocks are kept.
        """
        most = self.max_num_seqs * blocks_of_longest
        if self.block_bytes:
            return most
        window_blocks = num_bytes // self.window_block_bytes
        num_sequences = max(window_blocks - self.window_blocks_of_step, 0) // self.window_blocks_of_sequence
        return min(most, max(num_sequences * blocks_of_longest, blocks_of_longest + window_blocks))

    def within(self, num_bytes: int, most_blocks: int) -> KVSize:
        """Return the largest cache that so many bytes hold, of up to most_blocks; what is left is window blocks."""
        if not self.window_block_bytes:
            return KVSize(min(num_bytes // self.block_bytes, most_blocks))
        balanced = num_bytes // (self.bytes_of_both + self.window_block_bytes)
        window_blocks = min(max(balanced, self._window_blocks_that_run), num_bytes // self.bytes_of_both)
        num_blocks = most_blocks
        if self.block_bytes:
            num_blocks = min((num_bytes - window_blocks * self.window_block_bytes) // self.block_bytes, most_blocks)
        window_blocks = min((num_bytes - num_blocks * self.block_bytes) // self.window_block_bytes, num_blocks)
        if window_blocks < self.window_blocks_of_sequence + self.window_blocks_of_step:
            num_blocks = window_blocks  # each has one, so that a sequence that is alone always finds enough
        return KVSize(num_blocks, window_blocks)


def check_kernels_have(kernels: Kernels, kv_cache_dtype: str) -> None:
    """Raise `ConfigError` for keys and values that are rounded in a way that the kernels have not."""
    if kv_cache_dtype in ROUNDED_KV and kv_cache_dtype not in kernels.kv_cache_dtypes:
        has = " or ".join(("auto", *kernels.kv_cache_dtypes))
        raise ConfigError(
            f"kernels {kernels.name} have no attention over kv_cache_dtype {kv_cache_dtype}: choose kv_cache_dtype "
            f"{has}, or kernels reference, or on a GPU triton"
        )


def check_kv_dtype(architecture: Architecture, kv_dtype: str) -> None:
    """Raise `ConfigError` for rounded heads whose scales would not be aligned."""
    for name, dtype in ROUNDED_KV.items():
        for shape in architecture.kv_layout.groups:
            if kv_dtype == dtype and shape.head_dim % 4:
                raise ConfigError(
                    f"kv_cache_dtype {name} needs a head_dim that is a multiple of 4, not {shape.head_dim}"
                )
