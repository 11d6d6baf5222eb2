"""The process that runs Mooncake: `python -m octavo.kv_transfer.mooncake_process ORDER`.

Mooncake's library holds the GIL while it connects and closes, which takes minutes if the master is down. Some failed
calls end the process. Therefore the library runs outside the engine.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import threading
from ctypes import addressof, c_char
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from octavo.kv_transfer.mooncake_client import ClientOrder, Opened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Call = Callable[[list[Any], int], Sequence[int]]

_OPEN_S = 12  # after this time, a signal ends the process, even if the GIL is held
_CLOSE_S = 4
_ADDRESSES = "P2PHANDSHAKE"  # clients find each other through the master alone
_CALL_BUFFER_BYTES = 16 << 20  # Mooncake's minimum, unused
# Mooncake's defaults (30 s, 20 tries) exceed the callers' deadlines.
_LIMITS = {
    "MC_RPC_TIMEOUT_MS": "2500",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}


def open_client(order: ClientOrder, address: int) -> dict[str, Call]:
    """Connect to the pool, and return calls by name. A call takes keys and the address of the first key's object.

    Raises `ImportError` and `OSError`.
    """
    from mooncake.store import (  # noqa: PLC0415 - an optional extra; its import may fail
        MooncakeDistributedStore,
        ReplicateConfig,
    )

    client = MooncakeDistributedStore()
    code = client.setup(
        order.host, _ADDRESSES, order.segment_bytes, _CALL_BUFFER_BYTES, order.protocol, "", order.master
    )
    if code:
        raise OSError(
            f"the client could not connect to mooncake_master at {order.master} over {order.protocol} (code {code})"
        )
    num_bytes = order.area_bytes * len(order.channels)
    if num_bytes and (code := client.register_buffer(address, num_bytes)):
        raise OSError(f"{num_bytes} bytes of memory could not be registered for {order.protocol} (code {code})")

    prefer_local = ReplicateConfig()
    if order.segment_bytes:
        prefer_local.preferred_segment = client.get_hostname()

    def places(keys: list[str], start: int) -> tuple[list[str], list[int], list[int]]:
        size = order.object_bytes
        return keys, [start + index * size for index in range(len(keys))], [size] * len(keys)

    return {
        "get": lambda keys, start: client.batch_get_into(*places(keys, start)),
        "put": lambda keys, start: client.batch_put_from(*places(keys, start), prefer_local),
        "has": lambda keys, _: client.batch_is_exist(keys),
        "remove": lambda keys, _: client.batch_remove(keys, True),  # even if leased
        "close": lambda _, __: [client.close()],
    }


def open_engine(order: ClientOrder, address: int) -> tuple[dict[str, Call], str]:
    """Start a TransferEngine, and return its calls and session name. Raises as in `open_client`.

    The call "write" copies objects into another engine's memory.
    """
    from mooncake.engine import TransferEngine  # noqa: PLC0415 - an optional extra; its import may fail

    engine = TransferEngine()
    if code := engine.initialize(order.host, _ADDRESSES, order.protocol, ""):
        raise OSError(f"the TransferEngine could not be started for {order.host} over {order.protocol} (code {code})")
    num_bytes = order.area_bytes * len(order.channels)
    if code := engine.register_memory(address, num_bytes):
        raise OSError(f"{num_bytes} bytes of memory could not be registered for {order.protocol} (code {code})")

    def write(arguments: list[Any], start: int) -> list[int]:
        session, target, count = arguments
        return [engine.transfer_sync_write(session, start, target, count * order.object_bytes)]

    return {
        "write": write,
        "ping": lambda _, __: [],
        "close": lambda _, __: [],
    }, f"{order.host}:{engine.get_rpc_port()}"


def _answer(channel: Connection, calls: dict[str, Call], start: int) -> None:
    """An exception ends the process and closes the pipe."""
    try:
        while True:
            try:
                name, keys = json.loads(channel.recv_bytes())
            except EOFError:
                return
            channel.send_bytes(json.dumps(list(calls[name](keys, start))).encode())
    finally:
        if sys.exc_info()[0] is not None:
            os._exit(1)


def main() -> None:
    """Connect, and answer calls until the control pipe is closed.

    Ends with `os._exit`, because Mooncake's threads may keep the process alive after the client is released.
    """
    try:
        _serve(ClientOrder.decode(sys.argv[1]))
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


def _serve(order: ClientOrder) -> None:
    control = Connection(order.control)
    for name, value in _LIMITS.items():
        os.putenv(name, value)
    memory = mmap.mmap(order.memory, order.area_bytes * len(order.channels))
    address = addressof(c_char.from_buffer(memory))
    signal.alarm(_OPEN_S)
    session = ""
    try:
        if order.master:
            calls = open_client(order, address)
        else:
            calls, session = open_engine(order, address)
    except (ImportError, OSError) as error:
        control.send_bytes(Opened(str(error) or type(error).__name__).encode())
        return
    signal.alarm(0)
    for index, channel in enumerate(order.channels):
        start = address + index * order.area_bytes
        threading.Thread(target=_answer, args=(Connection(channel), calls, start), daemon=True).start()
    control.send_bytes(Opened(session=session, address=address).encode())
    try:
        control.recv_bytes()
    except EOFError:
        signal.alarm(_CLOSE_S)
        calls["close"]([], 0)  # notifies the master


if __name__ == "__main__":
    main()
