"""The chain of each request's blocks: under which names its full blocks are found, and how far they can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv.block_hash import extend_block_hashes, hash_block_tokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from octavo.core.kv.block_hash import BlockHash
    from octavo.core.kv.block_pool import BlockLink
    from octavo.data.request import Request


@dataclass(slots=True)
class BlockChain:
    """A request's block hashes so far (its own list), how many blocks are committed, and the last committed one's name.

    extra_keys: all that its KV depends on beside its tokens. partial: the name under which the last, partly filled
    block of its prompt can be copied by others.
    """

    extra_keys: tuple[str, ...]
    hashes: list[BlockHash]
    num_committed: int = 0
    name: BlockLink | None = None
    partial: BlockHash | None = None


class BlockChains:
    """The chains by request id; the only writer of `Request.block_hashes`.

    extra_keys: identities of the engine that the KV depends on (model, KV dtype, ...), part of every block hash.
    """

    def __init__(
        self,
        block_size: int,
        extra_keys: tuple[str, ...] = (),
        hash_function: Callable[..., BlockHash] = hash_block_tokens,
    ) -> None:
        self.extra_keys = extra_keys
        self.hash_function = hash_function
        self._block_size = block_size
        self._weights_epoch = 0
        self._chains: dict[str, BlockChain] = {}

    @property
    def request_ids(self) -> AbstractSet[str]:
        """Requests of which a chain is kept."""
        return self._chains.keys()

    def get(self, request_id: str) -> BlockChain | None:
        """Return the chain of a request, if one was begun."""
        return self._chains.get(request_id)

    def of(self, request: Request) -> BlockChain:
        """Return the chain of a request as it is; it begins without a block."""
        chain = self._chains.get(request.request_id)
        if chain is None:
            own = {"salt": request.cache_salt, "adapter": request.adapter}
            keys = [f"{name}:{value}" for name, value in own.items() if value is not None]
            if self._weights_epoch:
                keys.append(f"weights:{self._weights_epoch}")
            request.block_hashes = []
            chain = self._chains[request.request_id] = BlockChain((*self.extra_keys, *keys), request.block_hashes)
        return chain

    def extended(self, request: Request) -> BlockChain:
        """Return the chain of a request with the hashes of all full blocks of its known tokens."""
        chain = self.of(request)
        token_ids = request.sequence.token_ids
        extend_block_hashes(chain.hashes, token_ids, self._block_size, chain.extra_keys, self.hash_function)
        return chain

    def forget(self, request_id: str) -> None:
        """Forget the chain of a request that ended."""
        self._chains.pop(request_id, None)

    def advance_weights_epoch(self) -> None:
        """Forget all chains, and give other names to all that is computed from now on: the weights are others."""
        self._weights_epoch += 1
        self._chains.clear()
