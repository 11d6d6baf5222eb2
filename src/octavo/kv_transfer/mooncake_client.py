"""A client of Mooncake in a separate process. Calls have a deadline and use shared memory."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from octavo.kv_transfer.interface import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODULE = "octavo.kv_transfer.mooncake_process"
OPEN_S = 15.0
CALL_S = 4.0
REST_S = 6.0  # twice Mooncake's limit for a stalled transfer, which may still write into its area
GONE_S = 30.0
PING_S = 0.5
CLOSE_S = 5.0  # Mooncake withdraws lent memory in 2 s
PROCESS_BYTES = 64 << 20  # excluding lent and shared memory
NUM_AREAS = 4
AREA_BYTES = 8 << 20
TRANSFER_FAILED = -800
_SILENT = subprocess.DEVNULL  # Mooncake logs each missed heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOrder:
    """Configuration of a client process, with the descriptors that it inherits.

    master: HOST:PORT of the pool's master, or "" if the process writes into other engines' memory. channels: One pipe
    per area. memory, control, channels: Descriptors. Areas are contiguous in memory, and objects are contiguous in an
    area.
    """

    master: str
    host: str
    protocol: str
    segment_bytes: int
    object_bytes: int
    area_bytes: int
    memory: int
    control: int
    channels: tuple[int, ...]

    def encode(self) -> str:
        """Encode as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ClientOrder:
        """Decode from JSON."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Opened:
    """The first message on the control pipe. error: Reason why the process cannot be used, or "".

    session: Name of the shared memory for other engines. address: Address of this memory in the process.
    """

    error: str = ""
    session: str = ""
    address: int = 0

    def encode(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> Opened:
        """Decode from JSON."""
        return cls(**json.loads(message))


class BusyError(StoreError):
    """No area is free: Each is in use, or a failed transfer may still write into it."""


class Area:
    """A part of the shared memory, with a pipe for calls. One caller uses an area at a time.

    address: Address of the first object in Mooncake's process.
    """

    def __init__(self, channel: Connection, memory: memoryview, object_bytes: int) -> None:
        self.objects = [
            memory[start : start + object_bytes]
            for start in range(0, len(memory) - object_bytes + 1, object_bytes)
        ]  # fmt: skip
        self.channel = channel
        self.address = 0
        self.is_pending = False
        self.rests_until = 0.0
        self.requested_at = 0.0

    def call(self, name: str, arguments: Sequence[Any]) -> list[int]:
        """Return the codes of a call. Raises `StoreError` if the process ended or did not answer within `CALL_S`."""
        assert len(arguments) <= len(self.objects) or name not in {"get", "put"}
        try:
            self.channel.send_bytes(json.dumps([name, list(arguments)]).encode())
            self.is_pending, self.requested_at = True, time.monotonic()
            if not self.channel.poll(CALL_S):
                raise StoreError(f"Mooncake has not answered within {CALL_S:g} s ({name})")
            codes = self.answer()
        except (EOFError, OSError) as error:
            raise StoreError(f"the process that holds the client of Mooncake has ended ({name})") from error
        if (name == "get" and TRANSFER_FAILED in codes) or (name == "write" and any(codes)):
            self.rest()
        return codes

    def ping(self) -> bool:
        """Return True if the process answers within `PING_S`. The area is not free until the process answers."""
        self.is_pending, self.requested_at = True, time.monotonic()
        try:
            self.channel.send_bytes(json.dumps(["ping", []]).encode())
            if self.channel.poll(PING_S):
                self.answer()
        except (EOFError, OSError):
            pass
        return not self.is_pending

    def rest(self) -> None:
        """Keep the area unused while a failed transfer may still write into it."""
        self.rests_until = time.monotonic() + REST_S

    def answer(self) -> list[int]:
        """Wait for a call's answer, and return its codes."""
        codes: list[int] = json.loads(self.channel.recv_bytes())
        self.is_pending = False
        return codes

    def is_free(self, now: float) -> bool:
        """Return True if nothing can write into the area any more."""
        try:
            if self.is_pending and self.channel.poll():
                self.answer()
                self.rests_until = now + REST_S
        except (EOFError, OSError):
            return False
        return not self.is_pending and now >= self.rests_until


class MooncakeClient:
    """Starts a client process and calls it. Thread-safe. Raises `StoreError` if the process does not start or connect.

    master: See `ClientOrder`. host: Address by which other engines reach this process. segment_bytes: Memory lent to
    the pool. gone_s: A process silent for this time is killed, by default `GONE_S`.
    """

    def __init__(
        self,
        *,
        host: str,
        protocol: str,
        object_bytes: int,
        master: str = "",
        segment_bytes: int = 0,
        num_areas: int = NUM_AREAS,
        gone_s: float | None = None,
    ) -> None:
        self._gone_s = gone_s
        area_bytes = _area_bytes(object_bytes)
        memory = os.memfd_create("octavo-mooncake")
        pairs = [socket.socketpair() for _ in range(num_areas + 1)]
        try:
            os.ftruncate(memory, area_bytes * num_areas)
            order = ClientOrder(
                master=master,
                host=host,
                protocol=protocol,
                segment_bytes=segment_bytes,
                object_bytes=object_bytes,
                area_bytes=area_bytes,
                memory=memory,
                control=pairs[0][1].fileno(),
                channels=tuple(theirs.fileno() for _, theirs in pairs[1:]),
            )
            self._process = subprocess.Popen(  # noqa: S603 - a command of ours
                [sys.executable, "-m", MODULE, order.encode()],
                stdin=_SILENT,
                stdout=_SILENT,
                stderr=_SILENT,
                pass_fds=(memory, order.control, *order.channels),
                start_new_session=True,  # Ctrl-C must only reach the engine
            )
            view = memoryview(mmap.mmap(memory, area_bytes * num_areas))
            self._control, *channels = [Connection(ours.detach()) for ours, _ in pairs]
        finally:
            os.close(memory)
            for pair in pairs:
                for end in pair:
                    end.close()
        self._areas = [
            Area(channel, view[index * area_bytes : (index + 1) * area_bytes], object_bytes)
            for index, channel in enumerate(channels)
        ]
        self._free = threading.Condition()
        self._idle = list(self._areas)
        self._aside: list[Area] = []
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        opened = Opened("it cannot connect")
        try:
            late = Opened(f"no answer in {OPEN_S:g} s")
            opened = Opened.decode(self._control.recv_bytes()) if self._control.poll(OPEN_S) else late
        except (EOFError, OSError):
            pass
        finally:
            if opened.error:
                self.kill()
        if opened.error:
            raise StoreError(f"the client of Mooncake could not be opened: {opened.error}")
        self.session = opened.session
        size = sum(map(len, self._areas[0].objects))
        for index, area in enumerate(self._areas):
            area.address = opened.address + index * size

    @property
    def process_id(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True if the process may be called. Kills a silent process."""
        now, gone_s = time.monotonic(), GONE_S if self._gone_s is None else self._gone_s
        if any(area.is_pending and now - area.requested_at > gone_s for area in self._areas):
            self.kill()
        return self._process.poll() is None

    @contextmanager
    def area(self, timeout_s: float | None = None) -> Iterator[Area]:
        """Lend a free area. Raises `BusyError` if no area becomes free within timeout_s (by default `CALL_S`)."""
        area = self._take(CALL_S if timeout_s is None else timeout_s)
        try:
            yield area
        finally:
            with self._free:
                (self._idle if area.is_free(time.monotonic()) else self._aside).append(area)
                self._free.notify()

    def _take(self, timeout_s: float) -> Area:
        deadline = time.monotonic() + timeout_s
        with self._free:
            while True:
                now = time.monotonic()
                back = [area for area in self._aside if area.is_free(now)]
                self._aside = [area for area in self._aside if area not in back]
                self._idle += back
                if self._idle:
                    return self._idle.pop()
                if now >= deadline or len(self._aside) == len(self._areas):
                    raise BusyError(f"Mooncake answers none of {len(self._areas)} calls")
                self._free.wait(deadline - now)

    def close(self) -> None:
        """Ask the process to exit, and kill it after `CLOSE_S`. Does not wait."""
        self._control.close()
        threading.Thread(target=self._end, name="octavo-mooncake-close", daemon=True).start()

    def _end(self) -> None:
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def client_bytes(object_bytes: int, segment_bytes: int, num_areas: int = NUM_AREAS) -> int:
    """Return host memory of a client and its process, in bytes."""
    return PROCESS_BYTES + num_areas * _area_bytes(object_bytes) + segment_bytes


def _area_bytes(object_bytes: int) -> int:
    return max(AREA_BYTES // object_bytes, 1) * object_bytes


def local_address(peer: str) -> str:
    """Return this machine's address on the route to HOST:PORT. Raises `StoreError`."""
    host, port = peer.rsplit(":", 1)
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreError(f"{peer} cannot be reached: {error}") from error
