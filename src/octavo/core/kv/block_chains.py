"""Requests' block hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.core.kv.block_hash import extend_block_hashes, hash_block_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.block_pool import BlockLink
    from octavo.data.request import ContentSpan, Request


@dataclass(slots=True)
class BlockChain:
    """A request's block hashes, and the number of its committed blocks."""

    extra_keys: tuple[str, ...]
    spans: tuple[ContentSpan, ...]
    positions: list[list[int]] | None
    block_size: int
    hashes: list[BlockHash]
    num_committed: int = 0
    name: BlockLink | None = None  # of the last committed block
    partial: BlockHash | None = None  # hash of the prompt's partly filled last block
    saving: list[tuple[int, BlockHash]] = field(default_factory=list)  # where the state will be saved: blocks, hash

    def keys(self, index: int) -> tuple[str, ...]:
        """Return the `extra_keys` of `hash_block_tokens` for the block at `index`."""
        if not self.spans and self.positions is None:
            return self.extra_keys
        start, end = index * self.block_size, (index + 1) * self.block_size
        met = (each for each in self.spans if each.first < end and each.end > start)
        keys = [f"span:{each.first - start}:{each.end - start}:{each.key}" for each in met]
        if self.positions is not None and start < len(self.positions[0]):
            keys.append(f"positions:{[each[start:end] for each in self.positions]}")
        return (*self.extra_keys, *keys)


class BlockChains:
    """Stores the chains by request id.

    extra_keys: Keys in all hashes (see `hash_block_tokens`).
    """

    def __init__(self, block_size: int, extra_keys: tuple[str, ...] = ()) -> None:
        self.extra_keys = extra_keys
        self.hash_function: Callable[..., BlockHash] = hash_block_tokens
        self._block_size = block_size
        self._weights_epoch = 0
        self._chains: dict[str, BlockChain] = {}

    @property
    def request_ids(self) -> AbstractSet[str]:
        """Ids of requests with chains."""
        return self._chains.keys()

    def get(self, request_id: str) -> BlockChain | None:
        """Return a request's chain, or None."""
        return self._chains.get(request_id)

    def of(self, request: Request) -> BlockChain:
        """Return or create a request's chain."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            seed_fields = {
                "salt": request.cache_salt,
                "adapter": request.adapter,
                "weights": self._weights_epoch or None,
            }
            keys = *self.extra_keys, *(f"{name}:{value}" for name, value in seed_fields.items() if value is not None)
            request.block_hashes = []
            chain = self._chains[request.request_id] = BlockChain(
                keys, request.spans, request.rotary_positions, self._block_size, request.block_hashes
            )
        return chain

    def extended(self, request: Request) -> BlockChain:
        """Return a request's chain with the hashes of all full blocks."""
        chain = self.of(request)
        token_ids = request.sequence.token_ids
        extend_block_hashes(chain.hashes, token_ids, self._block_size, chain.keys, self.hash_function)
        return chain

    def forget(self, request_id: str) -> None:
        """Drop a chain."""
        self._chains.pop(request_id, None)

    def advance_weights_epoch(self) -> None:
        """Drop all chains after a change of weights. New hashes differ from all earlier hashes."""
        self._weights_epoch += 1
        self._chains.clear()
