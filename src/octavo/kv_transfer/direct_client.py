"""Mooncake TransferEngine processes."""

from __future__ import annotations

import logging
import threading
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING

from octavo.kv_transfer.interface import StoreError
from octavo.kv_transfer.mooncake_client import MooncakeClient, local_address

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
_PAUSE_S = 5.0  # after a failed start
_GONE_S = 10.0  # a process silent for longer is replaced
_ANYBODY = "192.0.2.1:9"  # reserved for documentation (RFC 5737)


class TransferClient:
    """Runs a `MooncakeClient` without a pool, and restarts its process if the process ends. Thread-safe.

    object_bytes: Bytes of a header and a block. num_areas: Maximum number of concurrent transfers.
    """

    def __init__(self, *, protocol: str, object_bytes: int, num_areas: int) -> None:
        self._open: Callable[[str], MooncakeClient] = lambda host: MooncakeClient(
            host=host, protocol=protocol, object_bytes=object_bytes, num_areas=num_areas, gone_s=_GONE_S
        )
        self._changed = threading.Condition()
        self._client: MooncakeClient | None = None
        self._host = _usual_address()
        self._is_guess = True  # no peer has confirmed _host
        self._is_opening = self._is_closed = False
        self._error = ""
        self._again_at = 0.0
        with self._changed:
            self._begin()

    @property
    def process_id(self) -> int | None:
        """Process id, or None if not ready."""
        client = self._client
        return None if client is None else client.process_id

    def get(self, host: str, timeout_s: float) -> MooncakeClient | None:
        """Return a living client, or None if no client is ready within timeout_s.

        host: This machine's address on the route to the peer. The first host that is not loopback replaces the default
        address, and restarts the process if they differ. Raises `StoreError` after `close`, and during a pause after a
        failed start.
        """
        with self._changed:
            if self._is_guess and not ip_address(host).is_loopback:  # local peers can use any address
                is_other, self._host, self._is_guess = host != self._host, host, False
                if is_other:
                    self._changed.wait_for(lambda: not self._is_opening, timeout_s)
                    self._drop()
            if self._client is not None and not self._client.is_alive:
                self._client = None
            if self._client is None and not self._is_opening and time.monotonic() >= self._again_at:
                self._begin()
            self._changed.wait_for(lambda: not self._is_opening, timeout_s)
            if self._is_closed or self._error:
                raise StoreError(self._error or "the client of direct transfers is closed")
            return self._client

    def _begin(self) -> None:
        """Needs the lock."""
        self._is_opening, self._error = True, ""
        threading.Thread(target=self._start, name="octavo-kv-direct-open", daemon=True).start()

    def _drop(self) -> None:
        """Needs the lock."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _start(self) -> None:
        client, error = None, ""
        try:
            client = self._open(self._host)
        except Exception as failure:
            error = str(failure) or type(failure).__name__
            if not isinstance(failure, StoreError):
                logger.exception("the process for direct transfers of KV could not be started")
        with self._changed:
            self._is_opening, self._error = False, error
            self._again_at = time.monotonic() + _PAUSE_S if error else 0.0
            is_late = self._is_closed
            self._client = None if is_late else client
            self._changed.notify_all()
        if client is not None and is_late:
            client.close()

    def close(self) -> None:
        """End the process. Later `get` calls raise `StoreError`."""
        with self._changed:
            self._is_closed = True
            self._drop()
            self._changed.notify_all()


def _usual_address() -> str:
    try:
        return local_address(_ANYBODY)
    except StoreError:
        return "127.0.0.1"
