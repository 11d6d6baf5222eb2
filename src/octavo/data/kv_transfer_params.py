"""What a request carries where its prompt is computed by one engine and its answer by another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """One side of a prefill/decode pair. Both are costs of time alone: no token depends on them.

    transfer_id: the same on both sides; whatever several requests of one client's request share is one transfer.
    is_prefill: this engine computes the prompt for another one; else it expects the prompt's KV from elsewhere.
    source: HOST:PORT at which the prefill engine hands KV over; None: through a store that both have.
    """

    transfer_id: str
    is_prefill: bool = False
    source: str | None = None
