"""Direct KV transfer from a prefill to a decode engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from octavo.kv_transfer.direct_segment import DONOR_AREAS, HEADER_BYTES, RECEIVER_AREAS
from octavo.kv_transfer.mooncake_client import client_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo.config import KVTransferConfig
    from octavo.data.request import Request
    from octavo.data.scheduler_output import KVTransfer
    from octavo.kv_transfer.direct_donor import DirectDonor
    from octavo.kv_transfer.direct_receiver import DirectReceiver


class MooncakeConnector(Protocol):
    """An engine's side of direct transfers. Implementations are also a `KVStore`.

    Methods are called on the engine's thread and must not block. port: Port at which a prefill engine serves KV.
    """

    port: int | None

    def request_added(self, request: Request) -> None:
        """See `KVConnector`."""
        ...

    def request_finished(self, request: Request) -> None:
        """See `KVConnector`."""
        ...

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """See `KVConnector`."""
        ...

    def transfer_ended(self, transfer: KVTransfer) -> None:
        """See `KVConnector`."""
        ...

    def expect(self, request: Request) -> bool:
        """Expect a request's KV. Return True if a prefill engine sends it directly."""
        ...

    def forget_expected(self, request_id: str) -> None:
        """Cancel `expect`."""
        ...


class NoConnector:
    """The connector without direct transfers."""

    port: int | None = None

    def request_added(self, request: Request) -> None:
        """Do nothing."""

    def request_finished(self, request: Request) -> None:
        """Do nothing."""

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Do nothing."""

    def transfer_ended(self, transfer: KVTransfer) -> None:
        """Do nothing."""

    def expect(self, request: Request) -> bool:
        """Return False."""
        del request
        return False

    def forget_expected(self, request_id: str) -> None:
        """Do nothing."""


def create_connector(
    config: KVTransferConfig, *, block_bytes: int, block_size: int, secret: str, kv_format: Mapping[str, str]
) -> DirectDonor | DirectReceiver | None:
    """Return this engine's side of direct transfers, or None. Raises `ConfigError`.

    secret, kv_format: Must be equal in both engines. kv_format: Properties on which KV depends, except tokens, by name.
    """
    if not config.direct:
        return None
    from octavo.kv_transfer.direct_donor import DirectDonor  # noqa: PLC0415 - they need msgspec
    from octavo.kv_transfer.direct_receiver import DirectReceiver  # noqa: PLC0415

    protocol = config.mooncake_protocol
    if config.role == "prefill":
        return DirectDonor(block_bytes, config.direct_bytes, protocol=protocol, secret=secret, kv_format=kv_format)
    return DirectReceiver(block_bytes, block_size=block_size, protocol=protocol, secret=secret, kv_format=kv_format)


def host_bytes(config: KVTransferConfig, block_bytes: int) -> int:
    """Return direct transfers' host memory in bytes."""
    if not config.direct:
        return 0
    if config.role == "prefill":
        return config.direct_bytes + client_bytes(HEADER_BYTES + block_bytes, 0, DONOR_AREAS)
    return client_bytes(HEADER_BYTES + block_bytes, 0, RECEIVER_AREAS)


def num_load_threads(config: KVTransferConfig) -> int:
    """Return the number of load threads."""
    return config.num_threads + (RECEIVER_AREAS if config.direct and config.role == "decode" else 0)
