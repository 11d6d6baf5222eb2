"""What a request carries where its prompt is computed by one engine and its answer by another."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.errors import RequestError

_MAX_ID_CHARS = 256
_MAX_PORT = 65535
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """One side of a prefill/decode pair. Both are costs of time alone: no token depends on them.

    transfer_id: the same on both sides; whatever several requests of one client's request share is one transfer.
    is_prefill: this engine computes the prompt for another one; else it expects the prompt's KV from elsewhere.
    source: HOST:PORT at which the prefill engine hands KV over; None: through a store that both have.
    Raises `RequestError`.
    """

    transfer_id: str
    is_prefill: bool = False
    source: str | None = None

    def __post_init__(self) -> None:
        name = self.transfer_id
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID_CHARS or not name.isprintable():
            raise RequestError(
                f"transfer_id must be a text of 1 to {_MAX_ID_CHARS} printable characters", parameter="transfer_id"
            )
        if self.source is None:
            return
        address = _ADDRESS.fullmatch(self.source)
        if address is None or not 0 < int(address.group(2)) <= _MAX_PORT:
            raise RequestError(
                f"source must be the address of a prefill engine, HOST:PORT, got {self.source!r:.100}",
                parameter="source",
            )
