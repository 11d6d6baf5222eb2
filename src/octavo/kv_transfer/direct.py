"""KV from a prefill engine to a decode engine, without a store between them, by Mooncake's TransferEngine."""

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
    """What a side of a prefill/decode pair hears of requests and transfers; the side itself is a `KVStore`.

    All of it is told by the engine's thread, and returns at once. port: where a prefill engine is asked for KV.
    """

    port: int | None

    def request_added(self, request: Request) -> None:
        """Take note of a newcomer."""
        ...

    def request_finished(self, request: Request) -> None:
        """Take note that a request ended."""
        ...

    def transfer_ordered(self, transfer: KVTransfer) -> None:
        """Take note that blocks are loaded or saved from now on."""
        ...

    def transfer_ended(self, transfer: KVTransfer) -> None:
        """Take note that this is over, however it ended."""
        ...

    def expect(self, request: Request) -> bool:
        """Take note that a request is asked for; return whether its blocks come from a prefill engine directly."""
        ...

    def forget_expected(self, request_id: str) -> None:
        """Take note that nobody waits any more for what was expected."""
        ...


class NoConnector:
    """KV goes through stores alone."""

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
        """Expect nothing."""
        del request
        return False

    def forget_expected(self, request_id: str) -> None:
        """Do nothing."""


def create_connector(
    config: KVTransferConfig, *, block_bytes: int, block_size: int, secret: str, kv_format: Mapping[str, str]
) -> DirectDonor | DirectReceiver | None:
    """Return this engine's side of direct transfers; None without `config.direct`. Raises `ConfigError`.

    secret: both sides need the same. kv_format: what the KV of this engine depends on besides tokens, by name; an
    engine in which it differs is refused, and both logs say why.
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
    """Return the memory on this machine that direct transfers take."""
    if not config.direct:
        return 0
    if config.role == "prefill":
        return config.direct_bytes + client_bytes(HEADER_BYTES + block_bytes, 0, DONOR_AREAS)
    return client_bytes(HEADER_BYTES + block_bytes, 0, RECEIVER_AREAS)


def num_load_threads(config: KVTransferConfig) -> int:
    """Return how many loads go on at once: those that wait for prompts to be computed are in nobody's way."""
    return config.num_threads + (RECEIVER_AREAS if config.direct and config.role == "decode" else 0)
