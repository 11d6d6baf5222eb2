"""Blocks from a prefill to a decode engine over Mooncake's real TransferEngine.

Each block is checked, and faults raise no error.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from mooncake_master import needs_mooncake

from octavo.config import KVTransferConfig
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.data.request_options import RequestOptions
from octavo.data.scheduler_output import KVTransfer, TransferDirection
from octavo.errors import ConfigError
from octavo.kv_transfer import direct_client, direct_donor, direct_messages, direct_receiver, mooncake_client
from octavo.kv_transfer.direct import NoConnector, create_connector
from octavo.kv_transfer.direct_donor import DirectDonor
from octavo.kv_transfer.direct_messages import Channel
from octavo.kv_transfer.direct_receiver import DirectReceiver
from octavo.kv_transfer.direct_segment import HEADER_BYTES, RECEIVER_AREAS, checksum
from octavo.kv_transfer.interface import StoreError
from octavo.sampling_params import SamplingParams

BLOCK_BYTES = 3000
SIZE = 4
NUMBERS = itertools.count()
KV_FORMAT = {"kv": "bfloat16 in blocks of 4", "weights": "bfloat16"}


def new_keys(count):
    return [next(NUMBERS).to_bytes(32, "big") for _ in range(count)]


def content(key):
    return key[-4:] * (BLOCK_BYTES // 4)


def contents(keys):
    return [memoryview(content(key)) for key in keys]


def room(keys):
    return [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]


class Sides:
    """A donor and a receiver, with new keys for each transfer."""

    def __init__(self, secret="s", secret_there=None, kv_format_there=KV_FORMAT):
        self.donor = DirectDonor(BLOCK_BYTES, 4096 * BLOCK_BYTES, protocol="tcp", secret=secret, kv_format=KV_FORMAT)
        there = secret if secret_there is None else secret_there
        self.receiver = DirectReceiver(
            BLOCK_BYTES, block_size=SIZE, protocol="tcp", secret=there, kv_format=kv_format_there
        )

    def ready(self):
        for side in (self.donor, self.receiver):
            assert side._client.get("127.0.0.1", 20) is not None
        return self

    def begin(self, count, *, is_known=True, port=None):
        """Begin a transfer of `count` blocks. Return the requests of the prefill and of the decode engine."""
        name, keys = f"t{next(NUMBERS)}", new_keys(count)
        source = f"127.0.0.1:{port or self.donor.port}"
        prompt = list(range(SIZE * count + 1))
        sides = [KVTransferParams(name, is_prefill=True), KVTransferParams(name, source=source)]
        there, here = (Request(f"{name}-{s.source}", prompt, SamplingParams(), kv_transfer_params=s) for s in sides)
        there.block_hashes = here.block_hashes = keys
        if is_known:
            self.donor.request_added(there)
        assert self.receiver.expect(here)
        return there, here

    def save(self, keys):
        assert self.donor.save(keys, contents(keys)) == len(keys)

    def load(self, request, blocks=None):
        """Return the number of blocks that were loaded, after checking each of them."""
        keys = request.block_hashes
        blocks = blocks or room(keys)
        count = self.receiver.load(keys, blocks)
        assert [bytes(block) for block in blocks[:count]] == [content(key) for key in keys[:count]]
        return count

    def close(self):
        self.donor.close()
        self.receiver.close()


@pytest.fixture(scope="module")
def shared():
    sides = Sides().ready()
    yield sides
    sides.close()


@pytest.fixture
def sides(shared):
    yield shared
    for area in shared.receiver._client._client._areas:
        area.rests_until = 0.0


@contextmanager
def loading(sides, request):
    """Run a load in a thread. `.count` is set when it has ended."""

    class Loading(threading.Thread):
        count = None

        def run(self):
            self.count = sides.load(request)

    thread = Loading()
    thread.start()
    yield thread
    thread.join(20)
    assert not thread.is_alive()


# --- transfers --------------------------------------------------------------------------------------------------------


@needs_mooncake
def test_blocks_are_transferred_as_they_are_computed(sides, monkeypatch):
    seen, (there, here) = [], sides.begin(10)
    take = sides.receiver._take
    monkeypatch.setattr(sides.receiver, "_take", lambda *args: (seen.append(args[2]), take(*args))[1])
    keys = there.block_hashes
    assert sides.receiver.num_matched(keys) == 10
    with loading(sides, here) as load:
        for start in range(0, 10, 4):
            end = time.monotonic() + 10
            sides.save(keys[start : start + 4])
            while seen != keys[: start + 4] and time.monotonic() < end:
                time.sleep(0.002)
            assert seen == keys[: start + 4]
            if start == 8:
                load.join(10)  # it has all blocks
            assert load.is_alive() is (start < 8)  # the transfer is open, because more blocks may come
    assert load.count == 10
    sides.donor.request_finished(there)


@needs_mooncake
def test_transfer_larger_than_one_area_completes(sides):
    there, here = sides.begin(6000)
    assert len(sides.receiver._client._client._areas[0].objects) < 6000
    keys = there.block_hashes[:4000]
    sides.save(keys)
    sides.donor.request_finished(there)
    assert sides.load(here) == 4000


@needs_mooncake
def test_load_waits_for_pending_saves_of_finished_request(sides):
    there, here = sides.begin(3)
    keys = there.block_hashes
    order = KVTransfer(0, TransferDirection.SAVE, keys[:2], [1, 2])
    sides.donor.transfer_ordered(order)
    sides.donor.request_finished(there)
    with loading(sides, here) as load:
        time.sleep(0.1)
        assert load.is_alive()
        sides.save(keys[:1])
        sides.donor.transfer_ended(order)  # the second block could not be saved
    assert load.count == 1
    assert not sides.donor._saving
    assert there.kv_transfer_params.transfer_id not in sides.donor._open


@needs_mooncake
def test_transfer_of_several_requests_ends_with_last_request(sides, monkeypatch):
    monkeypatch.setattr(direct_messages, "BEAT_S", 60.0)  # no heartbeat may reveal the end
    monkeypatch.setattr(Channel.receive, "__defaults__", (60.0,))
    there, here = sides.begin(2)
    sides.donor.request_added(there)
    sides.donor.request_finished(there)
    with loading(sides, here) as load:
        time.sleep(0.1)
        assert load.is_alive()
        sides.donor.request_finished(there)
    assert load.count == 0


@needs_mooncake
@pytest.mark.parametrize("comes", [True, False])
def test_unknown_transfer_is_awaited_for_grace_period(sides, monkeypatch, comes):
    monkeypatch.setattr(direct_messages, "BEAT_S", 0.05)
    monkeypatch.setattr(direct_donor, "_GRACE_S", 60.0)
    there, here = sides.begin(2, is_known=False)
    with loading(sides, here) as load:
        time.sleep(0.2)
        assert load.is_alive()
        if comes:
            sides.donor.request_added(there)
        monkeypatch.setattr(direct_donor, "_GRACE_S", 0.0)
        if comes:
            time.sleep(0.2)
            assert load.is_alive()
            sides.save(there.block_hashes)
    assert load.count == (2 if comes else 0)
    sides.donor.request_finished(there)


@needs_mooncake
def test_finished_request_stops_waiting_for_transfer(sides):
    there, here = sides.begin(2)
    with loading(sides, here) as load:
        time.sleep(0.05)
        sides.receiver.request_finished(here)
    assert load.count == 0
    assert sides.receiver.num_matched(here.block_hashes) == 0
    assert sides.load(here) == 0
    sides.donor.request_finished(there)


@needs_mooncake
def test_loads_over_number_of_areas_queue(sides, monkeypatch):
    monkeypatch.setattr(direct_messages, "BEAT_S", 0.05)
    take, refused = mooncake_client.MooncakeClient._take, set()

    def watched(client, timeout_s):
        try:
            return take(client, timeout_s)
        except mooncake_client.BusyError:
            refused.add(threading.get_ident())
            raise

    monkeypatch.setattr(mooncake_client.MooncakeClient, "_take", watched)
    pairs = [sides.begin(1) for _ in range(RECEIVER_AREAS + 3)]
    counts = []
    threads = [threading.Thread(target=lambda here=here: counts.append(sides.load(here))) for _, here in pairs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 20
    while len(refused) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert counts == []
    for there, _ in pairs:
        sides.save(there.block_hashes)
        sides.donor.request_finished(there)
    for thread in threads:
        thread.join(20)
    assert counts == [1] * len(pairs)


def test_receiver_expects_no_blocks_without_source():
    receiver = object.__new__(DirectReceiver)
    for params in (None, KVTransferParams("t"), KVTransferParams("t", is_prefill=True)):
        assert not receiver.expect(Request("r", [1], SamplingParams(), kv_transfer_params=params))


# --- wrong content ----------------------------------------------------------------------------------------------------


def lie(sides, monkeypatch, spoil):
    """Spoil the donor's second block in its area before it is written: spoil(object, ready, area, address)."""
    write = sides.donor._write

    def spoilt(area, ready, first, count):
        spoilt_key = ready.keys[1]

        class Spoiling:
            objects = area.objects

            @staticmethod
            def call(name, arguments):
                session, address, number = arguments
                for index in range(number):
                    if ready.keys[first + index] == spoilt_key:
                        spoil(area.objects[index], ready, area, address + index * (HEADER_BYTES + BLOCK_BYTES))
                return area.call(name, [session, address, number])

        return write(Spoiling, ready, first, count)

    monkeypatch.setattr(sides.donor, "_write", spoilt)


def wrong_bytes(written, *_):
    written[HEADER_BYTES + 100] ^= 1


def last_byte(written, *_):
    written[-1] ^= 128


def old_generation(written, ready, *_):
    whole = direct_messages.header_in(written)
    written[: len(whole)] = whole.replace(ready.generation, bytes(16))


def other_key(written, ready, *_):
    block = memoryview(content(ready.keys[0]))
    head = direct_messages.header(ready.generation, ready.keys[0], checksum(ready.keys[0], block))
    written[: len(head)] = head
    written[HEADER_BYTES:] = block


def other_block_under_its_key(written, ready, *_):
    written[HEADER_BYTES:] = content(ready.keys[0])


def nothing(written, *_):
    written[:] = bytes(len(written))


@needs_mooncake
@pytest.mark.parametrize(
    "spoil", [wrong_bytes, last_byte, old_generation, other_key, other_block_under_its_key, nothing]
)
def test_corrupted_block_is_rejected_and_loaded_again(sides, monkeypatch, spoil):
    lie(sides, monkeypatch, spoil)
    num_corrupt = sides.receiver.stats().num_corrupt
    there, here = sides.begin(4)
    sides.save(there.block_hashes)
    assert sides.load(here) == 1
    assert sides.receiver.stats().num_corrupt == num_corrupt + 1
    monkeypatch.undo()
    assert sides.load(here) == 4  # the same blocks are requested again
    sides.donor.request_finished(there)


def test_checksum_is_verified_on_private_copy_of_block(monkeypatch):
    """A late writer may still write there, so the checksum is that of the private copy."""
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    receiver = DirectReceiver(BLOCK_BYTES, block_size=SIZE, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    [key], generation = new_keys(1), os.urandom(16)
    right, wrong = memoryview(content(key)), memoryview(b"\xff" * BLOCK_BYTES)
    written = memoryview(bytearray(HEADER_BYTES + BLOCK_BYTES))
    head = direct_messages.header(generation, key, checksum(key, right))
    written[: len(head)] = head

    def take(first, then):
        def change(key, block):
            written[HEADER_BYTES:] = then
            return checksum(key, block)

        written[HEADER_BYTES:] = first
        monkeypatch.setattr(direct_receiver, "checksum", change)
        [block] = room([key])
        return receiver._take(written, generation, key, block), bytes(block)

    assert take(wrong, then=right) == (False, bytes(wrong))
    assert take(right, then=wrong) == (True, bytes(right))
    receiver.close()


@needs_mooncake
def test_unwritten_block_is_rejected(sides, monkeypatch):
    monkeypatch.setattr(sides.donor, "_write", lambda area, ready, first, count: count)
    there, here = sides.begin(3)
    sides.save(there.block_hashes)
    assert sides.load(here) == 0
    sides.donor.request_finished(there)


@needs_mooncake
def test_late_write_of_older_generation_is_rejected(sides, monkeypatch):
    """The keys and the area are the same; only the generation differs."""
    asks = []
    write = sides.donor._write

    def note(area, ready, first, count):
        asks.append(ready)
        return write(area, ready, first, count)

    monkeypatch.setattr(sides.donor, "_write", note)
    there, here = sides.begin(2)
    sides.save(there.block_hashes)
    assert sides.load(here) == 2

    def write_old(area, ready, first, count):
        [old] = asks
        assert old.address == ready.address
        assert old.generation != ready.generation
        return write(area, old, first, count)

    monkeypatch.setattr(sides.donor, "_write", write_old)
    assert sides.load(here) == 0
    sides.donor.request_finished(there)


@needs_mooncake
def test_area_of_failed_transfer_is_not_reused_at_once(sides, monkeypatch):
    lie(sides, monkeypatch, wrong_bytes)
    there, here = sides.begin(2)
    sides.save(there.block_hashes)
    addresses, notify = set(), sides.receiver.notify_ready_to_receive
    monkeypatch.setattr(
        sides.receiver,
        "notify_ready_to_receive",
        lambda *args: (addresses.add(args[1].address), notify(*args)),
    )
    for _ in range(3):
        assert sides.load(here) == 1
    assert len(addresses) == 3
    sides.donor.request_finished(there)


@contextmanager
def ended(process):
    try:
        yield
    finally:
        process.kill()


@pytest.mark.sweep(8)
@needs_mooncake
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_frozen_donor_ends_load_with_received_blocks(sides, monkeypatch, end):
    """A request waits for at most the allowed silence. After that, pending requests do not ask this source again."""
    receive, late = Channel.receive, []

    def watched(channel, *kinds_and_seconds):
        try:
            return receive(channel, *kinds_and_seconds)
        except TimeoutError:
            late.append(None)
            raise

    monkeypatch.setattr(Channel, "receive", watched)
    script = Path(__file__).with_name("donor_process.py")
    command = [sys.executable, str(script), "3", str(BLOCK_BYTES), json.dumps(KV_FORMAT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ended(process):
        port = int(process.stdout.readline())
        keys = [bytes([index]) * 32 for index in range(5)]
        params = KVTransferParams("t", source=f"127.0.0.1:{port}")
        here = Request("r", list(range(21)), SamplingParams(), kv_transfer_params=params)
        here.block_hashes = keys
        sides.receiver.expect(here)
        take, num_taken = sides.receiver._take, []

        def end_it(*args):
            num_taken.append(None)
            if len(num_taken) == 3:
                process.send_signal(end)
                monkeypatch.setattr(receive, "__defaults__", (1.0,))
            return take(*args)

        monkeypatch.setattr(sides.receiver, "_take", end_it)
        blocks = room(keys)
        assert sides.receiver.load(keys, blocks) == 3
        assert len(late) == (end is signal.SIGSTOP)
        assert [bytes(block) for block in blocks[:3]] == [key[:1] * BLOCK_BYTES for key in keys[:3]]
        assert sides.receiver.num_matched(keys) == sides.receiver.load(keys, blocks) == 0
        assert len(late) == (end is signal.SIGSTOP)
        sides.receiver.expect(here)
        assert sides.receiver.num_matched(keys) == 5, "it may be back for a new request"
        assert sides.receiver.load(keys, blocks) == 0
        assert len(late) == 2 * (end is signal.SIGSTOP)
        process.kill()
    sides.receiver.forget_expected("r")


@needs_mooncake
@pytest.mark.parametrize("source", ["127.0.0.1:1", "no.such.host.invalid:80"])
def test_unreachable_source_loads_no_blocks(sides, source):
    _, here = sides.begin(2)
    params = KVTransferParams("t", source=source)
    here.options = RequestOptions(kv_transfer_params=params)
    sides.receiver.expect(here)
    errors = sides.receiver.stats().num_errors
    assert sides.load(here) == 0
    assert sides.receiver.stats().num_errors == errors + 1


@pytest.mark.turn(8)
@needs_mooncake
def test_killed_transfer_processes_are_restarted(sides):
    for side in (sides.donor, sides.receiver):
        there, here = sides.begin(2)
        sides.save(there.block_hashes)
        os.kill(side._client.process_id, signal.SIGKILL)
        end = time.monotonic() + 20
        while sides.load(here) < 2 and time.monotonic() < end:
            assert sides.receiver.expect(here)  # as a new request does
        assert sides.load(here) == 2
        sides.donor.request_finished(there)


# --- authentication ---------------------------------------------------------------------------------------------------


@needs_mooncake
def test_receiver_with_wrong_secret_gets_no_blocks():
    sides = Sides(secret="one", secret_there="another").ready()
    there, here = sides.begin(1)
    sides.save(there.block_hashes)
    assert sides.load(here) == 0
    sides.receiver._secret = "one"
    assert sides.load(here) == 0, "what was expected before the failure is not asked for again"
    assert sides.receiver.expect(here)
    assert sides.load(here) == 1
    sides.close()


def connect(donor):
    connection = socket.create_connection(("127.0.0.1", donor.port), 5)
    return connection, Channel(connection)


def ready_for(keys, block_bytes=BLOCK_BYTES):
    return direct_messages.ReadyToReceive("t", keys, block_bytes, KV_FORMAT, "127.0.0.1:1", 0, bytes(16))


@pytest.fixture
def donor(monkeypatch):
    """A donor without a TransferEngine, which is not needed before a block is written."""
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    donor = DirectDonor(BLOCK_BYTES, 8 * BLOCK_BYTES, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    yield donor
    donor.close()


def test_donor_and_receiver_authenticate_mutually(donor):
    nonce, encoded = b"n" * 16, direct_messages.encode(ready_for(new_keys(1)))
    for spoil in (False, True):
        connection, channel = connect(donor)
        channel.send(direct_messages.Hello(direct_messages.VERSION, nonce))
        challenge = channel.receive(direct_messages.Challenge)
        assert direct_messages.is_proof(challenge.proof, "s", "donor", nonce, challenge.nonce)
        assert not direct_messages.is_proof(challenge.proof, "t", "donor", nonce, challenge.nonce)
        proof = direct_messages.proof_of("s", "receiver", nonce, challenge.nonce, encoded)
        asked = direct_messages.encode(ready_for(new_keys(1))) if spoil else encoded
        channel.send(direct_messages.Notice(asked, proof))
        if spoil:
            with pytest.raises(OSError, match="closed the connection"):
                channel.receive(direct_messages.Beat)
        else:
            channel.receive(direct_messages.Beat)
        connection.close()


def test_receiver_sends_no_keys_to_impostor_donor(monkeypatch):
    """It gets neither the keys nor the addresses of blocks."""
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    receiver = DirectReceiver(BLOCK_BYTES, block_size=SIZE, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    ours, theirs = socket.socketpair()
    impostor = Channel(theirs)
    for proof in (b"", bytes(32), direct_messages.proof_of("", "donor", b"n" * 16, b"m" * 16)):
        impostor.send(direct_messages.Challenge(b"m" * 16, proof))
        with pytest.raises(ConnectionError, match="OCTAVO_KV_SECRET"):
            receiver.notify_ready_to_receive(Channel(ours), ready_for(new_keys(1)))
        impostor.receive(direct_messages.Hello)
    ours.close()
    assert theirs.recv(1) == b""
    theirs.close()
    receiver.close()


def framed(message):
    encoded = direct_messages.encode(message)
    return len(encoded).to_bytes(4, "little") + encoded


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        b"\x09\x00\x00\x00",
        framed(direct_messages.Beat()),
        framed(direct_messages.Written(1)),
    ],
)
def test_invalid_first_message_closes_connection(donor, said):
    connection, _ = connect(donor)
    connection.settimeout(10)
    with suppress(OSError):  # the connection may end before everything was sent
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    connection.close()
    other, channel = connect(donor)
    channel.send(direct_messages.Hello(direct_messages.VERSION, b"n" * 16))
    channel.receive(direct_messages.Challenge)
    other.close()


def ask(channel, encoded):
    channel.send(direct_messages.Hello(direct_messages.VERSION, b"n" * 16))
    challenge = channel.receive(direct_messages.Challenge)
    proof = direct_messages.proof_of("s", "receiver", b"n" * 16, challenge.nonce, encoded)
    channel.send(direct_messages.Notice(encoded, proof))


def test_malformed_request_closes_connection(donor):
    connection, channel = connect(donor)
    ask(channel, b"\xc1")
    with pytest.raises(OSError, match="closed the connection"):
        channel.receive(direct_messages.Beat)
    connection.close()


def test_other_protocol_version_is_refused_with_reason(donor, caplog):
    connection, channel = connect(donor)
    channel.send(direct_messages.Hello(99, b"n" * 16))
    reason = r"version of the protocol is '2' in the prefill engine and '99' in the decode engine"
    with pytest.raises(direct_messages.RefusalError, match=reason):
        channel.receive(direct_messages.Challenge)
    assert re.search(reason, caplog.text)
    connection.close()


OTHER_KV = [
    (
        {"kv": "int8 in blocks of 4"},
        0,
        "kv is 'bfloat16 in blocks of 4' in the prefill engine and 'int8 in blocks of 4'",
    ),
    ({"kv": "bfloat16 in blocks of 8"}, 0, "kv is .* and 'bfloat16 in blocks of 8' in the decode engine"),
    ({"weights": "float32"}, 0, "weights is 'bfloat16' in the prefill engine and 'float32' in the decode engine"),
    ({"model": "another"}, 0, "model is 'unknown' in the prefill engine and 'another' in the decode engine"),
    ({}, 1, "size of a block is '3000 bytes' in the prefill engine and '3001 bytes' in the decode engine"),
]


@pytest.mark.parametrize(("other", "more_bytes", "reason"), OTHER_KV)
def test_different_kv_format_is_refused_and_logged_by_both_sides(donor, monkeypatch, caplog, other, more_bytes, reason):
    receiver = DirectReceiver(
        BLOCK_BYTES + more_bytes, block_size=SIZE, protocol="tcp", secret="s", kv_format=KV_FORMAT | other
    )
    monkeypatch.setattr(receiver._client, "get", lambda *_: Areas())
    for _ in range(3):
        keys = expected(receiver, "r", f"127.0.0.1:{donor.port}")
        assert receiver.load(keys, room(keys)) == 0
    told = [record for record in caplog.records if re.search(reason, record.getMessage())]
    assert sorted(record.name.rpartition("_")[2] for record in told) == ["donor", "receiver"], "each tells it once"
    assert {record.levelname for record in told} == {"WARNING"}
    receiver.close()


def test_refusal_reason_is_printable_and_short():
    ours, theirs = socket.socketpair()
    Channel(theirs).send(direct_messages.Refused("a\n\x1b[31m" + "b" * 10_000))
    with pytest.raises(direct_messages.RefusalError) as refusal:
        Channel(ours).receive(direct_messages.Challenge)
    text = str(refusal.value)
    assert text.isprintable()
    assert len(text) < 600
    ours.close()
    theirs.close()


class Areas:
    """A Mooncake client without a process, with `count` areas of one block each."""

    session, is_alive = "127.0.0.1:1", True

    def __init__(self, count=1):
        self._free = threading.Semaphore(count)

    @contextmanager
    def area(self, timeout_s):
        if not self._free.acquire(timeout=timeout_s):
            raise mooncake_client.BusyError("no area is free")
        try:
            yield SimpleNamespace(objects=[None], address=0, rest=lambda: None, ping=lambda: True)
        finally:
            self._free.release()


def test_donor_refuses_connections_over_limit(donor, monkeypatch):
    monkeypatch.setattr(direct_donor, "_MAX_CONNECTIONS", 2)
    held = [connect(donor) for _ in range(2)]
    for _, channel in held:
        channel.send(direct_messages.Hello(direct_messages.VERSION, b"n" * 16))
        channel.receive(direct_messages.Challenge)
    extra, channel = connect(donor)
    with pytest.raises(ConnectionError):
        channel.receive(direct_messages.Challenge)
    for connection in (extra, *(each for each, _ in held)):
        connection.close()


def test_receive_timeout_covers_whole_message():
    """The timeout is for the whole message: at this rate it would take a minute."""
    ours, theirs = socket.socketpair()
    channel, is_over = Channel(ours), threading.Event()

    def drip():
        theirs.sendall((1200).to_bytes(4, "little"))
        for _ in range(100):
            theirs.sendall(b"a")
            if is_over.wait(0.05):
                break
        theirs.close()

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            channel.receive(direct_messages.Beat, 0.2)
    finally:
        is_over.set()
        thread.join()
        ours.close()


def test_number_of_remembered_ended_transfers_is_bounded(donor, monkeypatch):
    monkeypatch.setattr(direct_donor, "_MAX_KNOWN", 3)
    for index in range(5):
        params = KVTransferParams(f"t{index}", is_prefill=True)
        request = Request("r", [1], SamplingParams(), kv_transfer_params=params)
        donor.request_added(request)
        donor.request_finished(request)
    assert list(donor._ended) == ["t2", "t3", "t4"]
    assert not donor._open


# --- failed sources ---------------------------------------------------------------------------------------------------


@contextmanager
def silent_source(num_asks):
    """Run a prefill engine that never answers.

    Yields its address, a list that gets an entry per connection, an event that is set after `num_asks` connections, and
    the connections.
    """
    asked, are_all_in, held = [], threading.Event(), []

    def listen(listener):
        with suppress(OSError):
            while True:
                held.append(listener.accept()[0])
                asked.append(None)
                if len(asked) == num_asks:
                    are_all_in.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen, args=(listener,))
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", asked, are_all_in, held
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    for connection in held:
        connection.close()


def expected(receiver, name, source, count=2):
    """Return the keys of a new request that expects its blocks from a source."""
    params = KVTransferParams("t", source=source)
    request = Request(name, list(range(SIZE * count + 1)), SamplingParams(), kv_transfer_params=params)
    request.block_hashes = new_keys(count)
    assert receiver.expect(request)
    return request.block_hashes


@pytest.mark.turn(12)
@pytest.mark.parametrize("end", ["silent", "gone"])
def test_failed_source_ends_all_requests_waiting_for_area(monkeypatch, end):
    """One failure is enough for all: only as many requests as there are areas ask the source."""
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    monkeypatch.setattr(Channel.receive, "__defaults__", (60.0 if end == "gone" else 1.0,))
    receiver = DirectReceiver(BLOCK_BYTES, block_size=SIZE, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    client, counts = Areas(RECEIVER_AREAS), []
    monkeypatch.setattr(receiver._client, "get", lambda *_: client)

    def load(keys):
        counts.append(receiver.load(keys, room(keys)))

    with silent_source(RECEIVER_AREAS) as (source, asked, are_all_in, held):
        keys_of = [expected(receiver, str(index), source) for index in range(3 * RECEIVER_AREAS)]
        threads = [threading.Thread(target=load, args=(keys,), daemon=True) for keys in keys_of]
        for thread in threads:
            thread.start()
        assert are_all_in.wait(20)
        if end == "gone":
            for connection in held[:RECEIVER_AREAS]:
                connection.close()
        for thread in threads:
            thread.join(20)
        assert counts == [0] * len(keys_of)
        if end == "silent":
            assert len(asked) == RECEIVER_AREAS
        else:  # each request may check once whether the source answers a new connection
            assert RECEIVER_AREAS < len(asked) <= 2 * RECEIVER_AREAS
        assert receiver.num_matched(keys_of[-1]) == 0, "nor is what has not been ordered yet"
    receiver.close()


def reset_once(donor, monkeypatch):
    hear, calls = donor._receive, []

    def reset(channel):
        calls.append(hear(channel))
        if len(calls) == 1:
            raise ConnectionResetError("a switch restarts")
        return calls[-1]

    monkeypatch.setattr(donor, "_receive", reset)


def full(_donor, monkeypatch):
    monkeypatch.setattr(direct_donor, "_MAX_CONNECTIONS", 0)


def slow_to_connect_once(_donor, monkeypatch):
    connect, calls = socket.create_connection, []

    def slow(*args):
        calls.append(args)
        if len(calls) == 1:
            raise TimeoutError("timed out")
        return connect(*args)

    monkeypatch.setattr(socket, "create_connection", slow)


def never_connects(_donor, monkeypatch):
    def slow(*_):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", slow)


def refuses(donor, _monkeypatch):
    donor.close()


@pytest.mark.parametrize(
    ("fault", "num_left"), [(reset_once, 2), (full, 2), (slow_to_connect_once, 2), (never_connects, 0), (refuses, 0)]
)
def test_transfer_fault_stops_other_transfers_only_if_source_is_down(donor, monkeypatch, fault, num_left):
    receiver = DirectReceiver(BLOCK_BYTES, block_size=SIZE, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    monkeypatch.setattr(receiver._client, "get", lambda *_: Areas())
    monkeypatch.setattr(direct_receiver, "local_address", lambda _: "127.0.0.1")
    first, waiting = (expected(receiver, name, f"127.0.0.1:{donor.port}") for name in ("a", "b"))
    fault(donor, monkeypatch)
    assert receiver.load(first, room(first)) == 0
    assert receiver.stats().num_errors == 1
    assert receiver.num_matched(waiting) == num_left
    receiver.close()


def test_request_queued_before_source_failure_does_not_query_source(monkeypatch):
    """Otherwise a queue that is asked for a few requests at a time would wait for one failure after the other."""
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    receiver = DirectReceiver(BLOCK_BYTES, block_size=SIZE, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    params = KVTransferParams("t", source="127.0.0.1:1")
    prompt = list(range(2 * SIZE + 1))
    waiting, later = (Request(name, prompt, SamplingParams(), kv_transfer_params=params) for name in ("a", "b"))
    for request in (waiting, later):
        request.block_hashes = new_keys(2)
    receiver.request_added(waiting)
    receiver._note_fault("127.0.0.1:1", "it is silent")
    receiver.request_added(later)
    for request in (waiting, later):
        assert receiver.expect(request)
    assert receiver.num_matched(waiting.block_hashes) == 0
    assert receiver.num_matched(later.block_hashes) == 2
    for request in (waiting, later):
        receiver.request_finished(request)
    assert not receiver._added_at
    receiver.close()


def asking(donor, keys):
    """Ask a donor for blocks that it has. Return the connection, and the channel with its answers."""
    connection, channel = connect(donor)
    assert donor.save(keys, contents(keys)) == len(keys)
    ask(channel, direct_messages.encode(ready_for(keys)))
    return connection, channel


def hear_beats(channel, count):
    for _ in range(count):
        channel.receive(direct_messages.Beat)


class Busy:
    """A Mooncake client that has no free area."""

    @contextmanager
    def area(self, _timeout_s):
        raise mooncake_client.BusyError("no area is free")
        yield


@pytest.mark.parametrize("client", [None, Busy()], ids=["not started", "stopped"])
def test_heartbeats_end_if_ready_blocks_are_not_written(donor, monkeypatch, caplog, client):
    monkeypatch.setattr(direct_messages, "BEAT_S", 0.02)
    monkeypatch.setattr(direct_donor, "_STALLED_S", 0.2)
    monkeypatch.setattr(donor._client, "get", lambda *_: time.sleep(0.01) or client)
    connection, channel = asking(donor, new_keys(2))
    with pytest.raises(direct_messages.RefusalError, match=r"has written nothing for 0\.2 s"):
        hear_beats(channel, 1000)
    assert "has written nothing" in caplog.text
    connection.close()


@pytest.mark.turn(8)
def test_heartbeats_continue_while_other_blocks_are_written(donor, monkeypatch):
    monkeypatch.setattr(direct_messages, "BEAT_S", 0.02)
    monkeypatch.setattr(direct_donor, "_STALLED_S", 0.2)

    class Writing(Busy):
        def area(self, timeout_s):
            donor._written_at = time.monotonic()  # as if another connection had written
            return super().area(timeout_s)

    monkeypatch.setattr(donor._client, "get", lambda *_: Writing())
    connection, channel = asking(donor, new_keys(1))
    hear_beats(channel, 30)
    connection.close()


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(
    ("bytes_per_s", "max_silence_s", "max_writes"),
    [(1 << 20, 1.0, 128), (3 << 20, 1.0, 64), (1 << 33, 0.01, 7)],
    ids=["1 MiB/s", "3 MiB/s", "8 GiB/s"],
)
def test_slow_link_does_not_delay_heartbeats(monkeypatch, bytes_per_s, max_silence_s, max_writes):
    """A write of a whole area of 8 MiB would take 8 s, and the donor would count as stalled."""
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    size, clock = 1 << 18, Clock()
    donor = DirectDonor(size, 128 * size, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    keys = new_keys(128)
    assert donor.save(keys, [memoryview(bytes(size))] * len(keys)) == len(keys)
    monkeypatch.setattr(direct_donor, "time", clock)

    def write(_area, _ready, _first, count):
        count = min(count, 31)  # the size of an area
        clock.sleep(count * (size + HEADER_BYTES) / bytes_per_s)
        return count

    monkeypatch.setattr(donor, "_write", write)
    monkeypatch.setattr(donor._client, "get", lambda *_: Areas())
    told = []
    channel = SimpleNamespace(local_host="127.0.0.1", send=lambda message: told.append((clock.now, message)))
    donor._hand_over(channel, ready_for(keys, size))
    times = [1000.0, *(moment for moment, _ in told)]
    assert max(after - before for before, after in itertools.pairwise(times)) <= max_silence_s
    assert len(told) <= max_writes + 1
    assert [each.count for _, each in told[-2:-1]] == [128]
    donor.close()


def test_heartbeats_continue_during_prefill(donor, monkeypatch):
    monkeypatch.setattr(direct_messages, "BEAT_S", 0.02)
    monkeypatch.setattr(direct_donor, "_STALLED_S", 0.1)
    params = KVTransferParams("t", is_prefill=True)
    donor.request_added(Request("p", [1], SamplingParams(), kv_transfer_params=params))
    connection, channel = connect(donor)
    ask(channel, direct_messages.encode(ready_for(new_keys(1))))
    hear_beats(channel, 20)
    connection.close()


def test_unanswered_ping_blocks_reuse_of_area(monkeypatch):
    monkeypatch.setattr(mooncake_client, "PING_S", 0.05)
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    area = mooncake_client.Area(ours, memoryview(bytearray(BLOCK_BYTES)), BLOCK_BYTES)
    assert not area.ping()
    assert json.loads(theirs.recv_bytes()) == ["ping", []]
    assert not area.is_free(time.monotonic())
    theirs.send_bytes(b"[]")
    monkeypatch.setattr(mooncake_client, "REST_S", 0.0)
    assert area.is_free(time.monotonic())
    theirs.send_bytes(b"[]")
    assert area.ping()
    theirs.close()
    assert not area.ping()


# --- as a store -------------------------------------------------------------------------------------------------------


def test_donor_segment_restores_evicted_blocks(donor):
    keys = new_keys(4)
    assert donor.lacks(keys) == set(keys)
    assert donor.save(keys[:3], contents(keys[:3])) == 3
    assert (donor.num_matched(keys), donor.lacks(keys)) == (3, {keys[3]})
    blocks = room(keys)
    assert donor.load(keys, blocks) == 3
    assert [bytes(block) for block in blocks[:3]] == [content(key) for key in keys[:3]]
    donor.forget(keys[1:2])
    assert donor.num_matched(keys) == 1
    more = new_keys(9)
    assert donor.save(more, contents(more)) == 9
    stats = donor.stats()
    assert (stats.num_blocks, stats.num_bytes, stats.max_bytes, stats.num_evicted) == (
        8, 8 * BLOCK_BYTES, 8 * BLOCK_BYTES, 3
    )  # fmt: skip
    assert donor.num_matched(more[1:]) == 8


def test_blocks_being_read_are_not_evicted(donor):
    keys = new_keys(9)
    segment = donor._segment
    seen = []

    def read_all(index):
        if index == 8:
            assert donor.save(keys[8:], contents(keys[8:])) == 0  # all blocks are being read
            segment.forget(keys[:1])
            assert donor.save(keys[8:], contents(keys[8:])) == 0  # the dropped block is still being read
        else:
            segment.read(keys[index], lambda block, _: (read_all(index + 1), seen.append(bytes(block))))

    assert donor.save(keys[:8], contents(keys[:8])) == 8
    read_all(0)
    assert seen == [content(key) for key in reversed(keys[:8])]
    assert donor.save(keys[8:], contents(keys[8:])) == 1
    assert len(segment) == 8


def test_receiver_stores_no_blocks(monkeypatch):
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    receiver = DirectReceiver(BLOCK_BYTES, block_size=SIZE, protocol="tcp", secret="s", kv_format=KV_FORMAT)
    keys = new_keys(2)
    assert receiver.lacks(keys) == set()
    assert receiver.save(keys, contents(keys)) == 0
    assert receiver.num_matched(keys) == receiver.load(keys, room(keys)) == 0
    receiver.close()


def test_failed_process_start_is_retried_after_pause(monkeypatch):
    opened = []

    def fail(**options):
        opened.append(options["host"])
        raise StoreError("no library")

    monkeypatch.setattr(direct_client, "MooncakeClient", fail)
    client = direct_client.TransferClient(protocol="tcp", object_bytes=100, num_areas=1)
    for _ in range(3):
        with pytest.raises(StoreError, match="no library"):
            client.get("127.0.0.1", 5)
    assert len(opened) == 1
    client._again_at = 0.0
    with pytest.raises(StoreError, match="no library"):
        client.get("127.0.0.1", 5)
    assert len(opened) == 2
    client.close()
    with pytest.raises(StoreError):
        client.get("127.0.0.1", 5)


def test_transfer_client_address_follows_first_peer(monkeypatch):
    opened = []

    class Client:
        is_alive = True

        def __init__(self, host, **_):
            self.host = host
            opened.append(host)

        def close(self):
            opened.append(f"closed {self.host}")

    monkeypatch.setattr(direct_client, "MooncakeClient", Client)
    monkeypatch.setattr(direct_client, "_usual_address", lambda: "10.0.0.1")
    client = direct_client.TransferClient(protocol="tcp", object_bytes=100, num_areas=1)
    assert client.get("127.0.0.1", 5).host == "10.0.0.1"  # any address works from this machine
    assert client.get("192.168.0.1", 5).host == "192.168.0.1"
    assert client.get("192.168.0.2", 5).host == "192.168.0.1"  # an address that was given to other engines is kept
    client.close()
    assert opened == ["10.0.0.1", "closed 10.0.0.1", "192.168.0.1", "closed 192.168.0.1"]


def test_create_connector_builds_side_of_configured_role(monkeypatch):
    monkeypatch.setattr(direct_client.TransferClient, "_begin", lambda self: None)
    options = {"block_bytes": BLOCK_BYTES, "block_size": SIZE, "secret": "", "kv_format": KV_FORMAT}
    assert create_connector(KVTransferConfig(), **options) is None
    donor = create_connector(KVTransferConfig(role="prefill", direct=True, direct_bytes=BLOCK_BYTES), **options)
    receiver = create_connector(KVTransferConfig(role="decode", direct=True), **options)
    assert (donor.port > 0, receiver.port, NoConnector().port) == (True, None, None)
    assert (type(donor), type(receiver)) == (DirectDonor, DirectReceiver)
    donor.close()
    donor.close()
    receiver.close()
    with pytest.raises(ConfigError, match="kv_direct_bytes is 10, but one block takes 3000"):
        create_connector(KVTransferConfig(role="prefill", direct=True, direct_bytes=10), **options)


def test_decode_ready_accepts_only_ready_to_receive():
    assert isinstance(
        direct_messages.decode_ready(direct_messages.encode(ready_for([]))), direct_messages.ReadyToReceive
    )
    with pytest.raises(msgspec.DecodeError):
        direct_messages.decode_ready(direct_messages.encode(direct_messages.Beat()))
