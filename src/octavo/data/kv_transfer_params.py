"""A request's KV-transfer parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.errors import RequestError

_MAX_ID_CHARS = 256
_MAX_PORT = 65535
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+):(\d{1,5})")


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """Parameters of a request that one engine prefills and another engine decodes.

    transfer_id: Text of 1 to 256 printable characters, equal in both engines and for all outputs of a client's request.
    is_prefill: True if this engine computes the prompt, False if this engine receives the prompt's KV.
    source: HOST:PORT of the prefill engine, or None for a shared store.

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
