"""Events as vLLM 0.33 decodes them: msgpack maps with the field `type`, in a batch that is an array."""

from __future__ import annotations

from typing import Any

import msgspec

GPU, CPU = "GPU", "CPU"  # media; GPU is the engine's device, even if the device is a processor
_FULL_ATTENTION = "full_attention"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks of one sequence can be found.

    token_ids: Of all blocks. extra_keys: None, or [salt] or None for each block.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    @classmethod
    def of(
        cls, block_hash: int, parent: int | None, token_ids: tuple[int, ...], medium: str, salt: str | None
    ) -> BlockStored:
        """Return the event of one block."""
        keys: list[list[Any] | None] | None = None if salt is None else [[salt]]
        hashes, size = [block_hash], len(token_ids)
        return cls(hashes, parent, list(token_ids), size, None, medium, None, keys, 0, _FULL_ATTENTION)

    def extend(self, event: BlockStored) -> bool:
        """Append the block of an event. Return False and change nothing if the block is not the next one."""
        if event.parent_block_hash != self.block_hashes[-1] or event.medium != self.medium:
            return False
        self.block_hashes += event.block_hashes
        self.token_ids += event.token_ids
        if self.extra_keys is not None:
            self.extra_keys.append(None)
        return True


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks can no longer be found."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block can be found."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The events of a step. ts: Seconds since 1970."""

    ts: float
    events: list[Event]
    data_parallel_rank: int


encode = msgspec.msgpack.Encoder().encode
