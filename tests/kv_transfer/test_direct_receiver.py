"""A decode engine's side of direct transfers, without sockets and Mooncake: which blocks it expects and accepts."""

from __future__ import annotations

import logging
import socket
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.request import Request
from octavo.data.scheduler_output import KVTransfer, TransferDirection
from octavo.kv_transfer import direct_receiver
from octavo.kv_transfer.direct_messages import (
    BEAT_S,
    VERSION,
    Beat,
    BrokenOffError,
    Challenge,
    End,
    Hello,
    Notice,
    RefusalError,
    Written,
    decode_ready,
    encode,
    header,
    is_proof,
    proof_of,
)
from octavo.kv_transfer.direct_receiver import DirectReceiver, _answers, _connect, _ConnectTimeoutError, _probe
from octavo.kv_transfer.direct_segment import HEADER_BYTES, RECEIVER_AREAS, checksum
from octavo.kv_transfer.interface import StoreError, StoreStats
from octavo.kv_transfer.mooncake_client import OPEN_S, BusyError
from octavo.sampling_params import SamplingParams

BLOCK_BYTES, SIZE = 8, 4
KEYS = [bytes([number]) * 32 for number in range(10)]
KV_FORMAT = {"kv": "bfloat16"}
SOURCE, OTHER_SOURCE = "10.0.0.2:90", "10.0.0.3:90"


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self):
        self.now = 100.0
        self.sleeps = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.sleeps.append(seconds)
        self.now += seconds


class Transfers:
    """A TransferClient without a process: `get` returns `client`."""

    def __init__(self, **options):
        self.options = options
        self.client = Areas()
        self.asked = []
        self.is_closed = False

    def get(self, host, timeout_s):
        self.asked.append((host, timeout_s))
        return self.client

    def close(self):
        self.is_closed = True


class Areas:
    """A Mooncake client with one area for four blocks. busy: functions to call while the area is taken."""

    session, is_alive = "here:1", True
    address = 1000

    def __init__(self):
        self.objects = [memoryview(bytearray(HEADER_BYTES + BLOCK_BYTES)) for _ in range(4)]
        self.busy, self.waits = [], []
        self.num_rests = self.num_pings = 0
        self.answers_pings = True
        self.on_area = lambda: None

    @contextmanager
    def area(self, timeout_s):
        self.waits.append(timeout_s)
        if self.busy:
            self.busy.pop(0)()
            raise BusyError("no area is free")
        self.on_area()
        yield self

    def rest(self):
        self.num_rests += 1

    def ping(self):
        self.num_pings += 1
        return self.answers_pings


class Source:
    """A prefill engine that answers by scripts.

    scripts: per connection, the answers to its questions: a message, an error to raise, or a function of the question.
    """

    def __init__(self, areas):
        self.areas = areas
        self.scripts, self.questions, self.connections = [], [], []

    def connect(self, source, *_):
        self.connections.append(source)
        error = self.scripts[0][0] if self.scripts and self.scripts[0] else None
        if isinstance(error, tuple):
            self.scripts.pop(0)
            raise error[0]
        return SimpleNamespace(close=lambda: self.connections.append("closed"))

    def write(self, ready, number, first=0):
        """Write the block of a question to its expected place."""
        key = ready.keys[number]
        content = memoryview(key[:BLOCK_BYTES])
        stored = self.areas.objects[number - first]
        stored[:] = header(ready.generation, key, checksum(key, content)).ljust(HEADER_BYTES, b"\0") + bytes(content)

    def channel(self, _connection):
        script = self.scripts.pop(0)

        def receive(kind):
            step = script.pop(0)
            if isinstance(step, Exception):
                raise step
            message = step(self.questions[-1]) if callable(step) else step
            assert isinstance(message, kind)
            return message

        return SimpleNamespace(receive=receive)

    def writes(self, count):
        """Return an answer that reports `count` blocks as written, and writes them."""

        def step(ready):
            for number in range(min(count, len(ready.keys))):
                self.write(ready, number)
            return Written(count)

        return step


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(direct_receiver, "time", clock)
    return clock


@pytest.fixture
def receiver(monkeypatch, clock):
    monkeypatch.setattr(direct_receiver, "TransferClient", Transfers)
    monkeypatch.setattr(direct_receiver, "local_address", lambda source: f"route to {source}")
    receiver = DirectReceiver(BLOCK_BYTES, block_size=SIZE, protocol="rdma", secret="s", kv_format=KV_FORMAT)
    yield receiver
    receiver.close()


@pytest.fixture
def source(receiver, monkeypatch):
    source = Source(receiver._client.client)
    monkeypatch.setattr(direct_receiver, "_connect", source.connect)
    monkeypatch.setattr(direct_receiver, "Channel", source.channel)
    monkeypatch.setattr(receiver, "notify_ready_to_receive", lambda _channel, ready: source.questions.append(ready))
    return source


def request(name="r", keys=KEYS[:4], source=SOURCE, **options):
    params = KVTransferParams("t", source=source, **options)
    made = Request(name, list(range(SIZE * len(keys) + 1)), SamplingParams(), kv_transfer_params=params)
    made.block_hashes = list(keys)
    return made


def room(count):
    return [memoryview(bytearray(BLOCK_BYTES)) for _ in range(count)]


def load(receiver, keys):
    """Return the number of blocks that were loaded, after checking each of them."""
    blocks = room(len(keys))
    count = receiver.load(keys, blocks)
    assert [bytes(block) for block in blocks[:count]] == [key[:BLOCK_BYTES] for key in keys[:count]]
    return count


def errors_of(receiver):
    stats = receiver.stats()
    assert stats == StoreStats(0, 0, 0, num_corrupt=stats.num_corrupt, num_errors=stats.num_errors)
    return stats.num_errors, stats.num_corrupt


# --- expected blocks --------------------------------------------------------------------------------------------------


def test_receiver_passes_options_to_transfer_client(receiver):
    assert receiver._client.options == {
        "protocol": "rdma", "object_bytes": HEADER_BYTES + BLOCK_BYTES, "num_areas": RECEIVER_AREAS,
    }  # fmt: skip
    assert (receiver.port, errors_of(receiver)) == (None, (0, 0))


def test_receiver_matches_prompt_blocks_until_forgotten(receiver):
    one = request()
    one.block_hashes = KEYS[:6]  # some of them have tokens after the prompt
    assert receiver.expect(one)
    assert [receiver.num_matched(KEYS[first:]) for first in range(5)] == [4, 3, 2, 1, 0]
    receiver.forget_expected("another")
    assert receiver.num_matched(KEYS) == 4
    receiver.forget_expected("r")
    assert receiver.num_matched(KEYS) == receiver.num_matched([]) == 0


def test_only_decode_request_with_source_expects_blocks(receiver):
    for other in (
        request(source=None),
        request(is_prefill=True),
        Request("r", [1], SamplingParams()),
    ):
        assert not receiver.expect(other)
    assert receiver._expected == {}


def test_source_with_most_blocks_is_chosen(receiver):
    for name, keys in [("a", KEYS[:2]), ("b", KEYS[:4]), ("c", KEYS[:3]), ("d", KEYS[1:8])]:
        receiver.expect(request(name, keys, f"10.0.0.2:{ord(name)}"))
    best, keys = receiver._split(KEYS)
    assert (best.source, keys) == ("10.0.0.2:98", KEYS[:4])
    best, keys = receiver._split(KEYS[:2])
    assert (best.source, keys) == ("10.0.0.2:97", KEYS[:2]), "the first one of equals"
    assert receiver._split([KEYS[9], KEYS[0]]) == (None, [])
    assert receiver._split([]) == (None, [])


def test_expected_blocks_keep_arrival_time_of_request(receiver, clock):
    receiver.request_added(request())
    receiver.request_added(Request("other", [1], SamplingParams()))
    assert receiver._added_at == {"r": 100.0}
    clock.now = 110.0
    receiver.expect(request())
    receiver.expect(request("late"))
    assert [each.since for each in receiver._expected.values()] == [100.0, 110.0]
    receiver.request_finished(request())
    receiver.request_finished(request("never added"))
    assert (receiver._added_at, list(receiver._expected)) == ({}, ["late"])


def test_ended_load_is_no_longer_expected(receiver):
    receiver.expect(request())
    receiver.transfer_ordered(KVTransfer(0, TransferDirection.LOAD, KEYS[:4], [[1, 2, 3, 4]], "r"))
    receiver.transfer_ended(KVTransfer(0, TransferDirection.SAVE, KEYS[:4], [[1, 2, 3, 4]]))
    assert list(receiver._expected) == ["r"]
    receiver.transfer_ended(KVTransfer(0, TransferDirection.LOAD, KEYS[:4], [[1, 2, 3, 4]], "r"))
    assert list(receiver._expected) == []


def test_requests_before_source_failure_match_no_blocks(receiver, clock):
    receiver.expect(request("before"))
    clock.now = 110.0
    receiver.expect(request("at", KEYS[4:6]))
    receiver.expect(request("other", KEYS[6:8], OTHER_SOURCE))
    receiver._note_fault(SOURCE, "gone")
    clock.now = 110.5
    receiver.expect(request("after", KEYS[8:]))
    matched = [receiver.num_matched(keys) for keys in (KEYS[:4], KEYS[4:6], KEYS[6:8], KEYS[8:])]
    assert matched == [0, 0, 2, 2]
    waits = {name: receiver._may_wait(each) for name, each in receiver._expected.items()}
    assert waits == {"before": False, "at": False, "other": True, "after": True}
    assert all(map(receiver._is_wanted, receiver._expected.values()))


def test_request_near_clock_zero_has_no_failed_source(receiver, clock):
    clock.now = 0.5
    receiver.expect(request())
    assert receiver.num_matched(KEYS) == 4


def test_closed_receiver_expects_no_blocks(receiver):
    receiver.expect(request())
    [one] = receiver._expected.values()
    assert receiver._is_wanted(one)
    receiver.close()
    assert not receiver._is_wanted(one)
    assert (receiver._expected, receiver._client.is_closed) == ({}, True)
    receiver.expect(request())
    assert not receiver._may_wait(*receiver._expected.values())


# --- faults -----------------------------------------------------------------------------------------------------------


def test_fault_is_counted_and_logged_once_per_source(receiver, caplog):
    receiver._note_fault(SOURCE, "gone")
    receiver._note_fault(SOURCE, "still gone", is_down=False)
    receiver._note_fault(OTHER_SOURCE, "other bytes", is_corrupt=True)
    assert errors_of(receiver) == (3, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"prefill engine {SOURCE}: gone; KV that did not arrive is computed here",
        f"prefill engine {OTHER_SOURCE}: other bytes; KV that did not arrive is computed here",
    ]
    assert receiver._failed_at == {SOURCE: 100.0}


def test_connection_fault_does_not_mark_source_down(receiver):
    receiver._note_fault(SOURCE, "reset", is_down=False)
    assert receiver._failed_at == {}
    assert receiver._failing == {SOURCE}


def test_remembered_sources_are_limited(receiver, monkeypatch):
    monkeypatch.setattr(direct_receiver, "_MAX_SOURCES", 2)
    monkeypatch.setattr(direct_receiver, "RECEIVER_AREAS", 3)
    for port in range(1, 5):
        receiver._note_fault(f"10.0.0.2:{port}", "gone")
    assert (len(receiver._failed_at), len(receiver._failing)) == (1, 4)
    receiver._note_fault("10.0.0.2:5", "gone")
    assert (len(receiver._failed_at), len(receiver._failing)) == (2, 1)


# --- transfers --------------------------------------------------------------------------------------------------------


def test_load_receives_blocks_as_source_writes_them(receiver, source):
    receiver.expect(request())
    source.scripts = [[source.writes(1), Beat(), source.writes(3), source.writes(4), End()]]
    assert load(receiver, KEYS[:4]) == 4
    [ready] = source.questions
    assert (ready.transfer_id, ready.keys, ready.block_bytes, ready.kv_format) == ("t", KEYS[:4], 8, KV_FORMAT)
    assert (ready.session, ready.address, len(ready.generation)) == ("here:1", 1000, 16)
    areas = receiver._client.client
    assert (receiver._client.asked, areas.waits) == ([(f"route to {SOURCE}", OPEN_S)], [BEAT_S])
    assert (errors_of(receiver), areas.num_rests, areas.num_pings) == ((0, 0), 0, 0)
    assert source.connections == [SOURCE, "closed"]


def test_load_is_partial_if_source_ends_early(receiver, source):
    receiver.expect(request())
    source.scripts = [[source.writes(2), End()]]
    assert load(receiver, KEYS[:4]) == 2
    assert (errors_of(receiver), len(source.questions)) == ((0, 0), 1)


def test_blocks_above_area_size_are_requested_in_parts(receiver, source):
    receiver.expect(request(keys=KEYS))
    source.scripts = [[source.writes(4), End()], [source.writes(4), End()], [source.writes(2), End()]]
    assert load(receiver, KEYS) == 10
    assert [ready.keys for ready in source.questions] == [KEYS[:4], KEYS[4:8], KEYS[8:]]
    assert len({ready.generation for ready in source.questions}) == 3
    receiver.expect(request(keys=KEYS))
    source.scripts = [[source.writes(4), End()], [source.writes(3), End()]]
    assert load(receiver, KEYS) == 7


def test_load_continues_with_next_source(receiver, source):
    receiver.expect(request("a", KEYS[:2]))
    receiver.expect(request("b", KEYS[2:5], OTHER_SOURCE))
    source.scripts = [[source.writes(2), End()], [source.writes(3), End()]]
    assert load(receiver, KEYS[:6]) == 5
    assert source.connections[::2] == [SOURCE, OTHER_SOURCE]
    source.scripts = [[source.writes(1), End()]]
    assert load(receiver, KEYS[:6]) == 1, "no other source has the second block"


def test_reported_count_above_requested_blocks_is_capped(receiver, source):
    receiver.expect(request(keys=KEYS[:3]))
    source.scripts = [[source.writes(2), lambda ready: (source.write(ready, 2), Written(9))[1], End()]]
    assert load(receiver, KEYS[:3]) == 3


def test_lower_reported_count_is_ignored(receiver, source):
    receiver.expect(request(keys=KEYS[:3]))
    source.scripts = [[source.writes(2), Written(1), Beat(), End()]]
    assert load(receiver, KEYS[:3]) == 2


def test_corrupt_block_counts_as_source_fault(receiver, source, caplog):
    receiver.expect(request())

    def lie(ready):
        source.write(ready, 0)
        source.write(ready, 1)
        source.areas.objects[1][-1] ^= 1
        return Written(2)

    source.scripts = [[lie]]
    assert load(receiver, KEYS[:4]) == 1
    assert (errors_of(receiver), source.areas.num_rests, source.areas.num_pings) == ((1, 1), 1, 0)
    assert f"{SOURCE}: the received bytes differ from the announced ones" in caplog.text
    assert receiver.num_matched(KEYS) == 4, "wrong bytes stop no other request"


def test_recovered_source_is_logged_again_on_next_fault(receiver, source, caplog):
    receiver._note_fault(SOURCE, "gone", is_down=False)
    receiver.expect(request())
    source.scripts = [[source.writes(4), End()]]
    load(receiver, KEYS[:4])
    receiver._note_fault(SOURCE, "gone", is_down=False)
    assert len(caplog.records) == 2


def test_request_ended_during_load_releases_area_to_rest(receiver, source):
    receiver.expect(request())
    source.scripts = [[source.writes(1), lambda _: (receiver.forget_expected("r"), Beat())[1]]]
    assert load(receiver, KEYS[:4]) == 1
    assert (errors_of(receiver), source.areas.num_rests) == ((0, 0), 1)
    assert source.connections == [SOURCE, "closed"]


@pytest.mark.parametrize(
    ("error", "is_probed"),
    [
        (ConnectionResetError("reset"), True),
        (ConnectionAbortedError("aborted"), True),
        (BrokenPipeError("pipe"), True),
        (BrokenOffError("it closed the connection"), True),
        (_ConnectTimeoutError("the connection timed out"), True),
        (RefusalError("it sends no KV"), False),
        (TimeoutError("timed out"), False),
        (ConnectionRefusedError("refused"), False),
    ],
)
@pytest.mark.parametrize("answers", [True, False])
def test_connection_fault_marks_source_down_unless_probe_succeeds(
    receiver, source, monkeypatch, error, is_probed, answers
):
    probed = []
    monkeypatch.setattr(direct_receiver, "_answers", lambda source: (probed.append(source), answers)[1])
    receiver.expect(request())
    source.scripts = [[source.writes(1), error]]
    assert load(receiver, KEYS[:4]) == 1
    assert probed == ([SOURCE] if is_probed else [])
    assert receiver.num_matched(KEYS) == (4 if is_probed and answers else 0)
    assert (errors_of(receiver), source.areas.num_rests, source.areas.num_pings) == ((1, 0), 1, 1)


def test_error_without_message_is_logged_by_type(receiver, source, caplog):
    receiver.expect(request())
    source.scripts = [[(TimeoutError(),)]]
    assert load(receiver, KEYS[:4]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"prefill engine {SOURCE}: TimeoutError; KV that did not arrive is computed here"
    ]


def test_unanswered_ping_is_logged(receiver, source, caplog):
    source.areas.answers_pings = False
    receiver.expect(request())
    source.scripts = [[OSError("gone")]]
    assert load(receiver, KEYS[:4]) == 0
    assert [record.getMessage() for record in caplog.records][1:] == [
        "the process for direct transfers of KV does not answer; it is replaced if it does not recover"
    ]


def test_unreachable_source_counts_as_fault(receiver, source, monkeypatch):
    def local_address(source):
        raise StoreError(f"{source} cannot be reached")

    monkeypatch.setattr(direct_receiver, "local_address", local_address)
    receiver.expect(request())
    assert load(receiver, KEYS[:4]) == 0
    assert (errors_of(receiver), receiver._client.asked) == ((1, 0), [])
    assert receiver.num_matched(KEYS) == 0


def test_missing_transfer_process_raises_store_error(receiver, source):
    receiver._client.client = None
    receiver.expect(request())
    message = r"^the process for direct transfers of KV has not started within 15 s$"
    with pytest.raises(StoreError, match=message):
        load(receiver, KEYS[:4])


# --- areas ------------------------------------------------------------------------------------------------------------


def test_load_waits_for_free_area(receiver, source, clock):
    source.areas.busy = [lambda: None] * 3
    receiver.expect(request())
    source.scripts = [[source.writes(4), End()]]
    assert load(receiver, KEYS[:4]) == 4
    assert clock.sleeps == [direct_receiver._BUSY_PAUSE_S] * 3


@pytest.mark.parametrize("end", ["process", "request", "source", "store"])
def test_load_stops_waiting_for_area_after_abort_or_failure(receiver, source, clock, end):
    receiver.expect(request())
    ends = {
        "process": lambda: setattr(source.areas, "is_alive", False),
        "request": lambda: receiver.forget_expected("r"),
        "source": lambda: receiver._note_fault(SOURCE, "gone"),
        "store": receiver.close,
    }
    source.areas.busy = [ends[end]]
    assert load(receiver, KEYS[:4]) == 0
    assert (clock.sleeps, source.connections) == ([], [])


def test_area_obtained_after_source_failure_is_not_used(receiver, source):
    source.areas.on_area = lambda: receiver._note_fault(SOURCE, "gone")
    receiver.expect(request())
    assert load(receiver, KEYS[:4]) == 0
    assert source.connections == []


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_secret", [True, False])
def test_transfer_request_is_sent_only_after_valid_peer_proof(receiver, knows_secret):
    said = []

    def challenge(kind):
        assert kind is Challenge
        [hello] = said
        return Challenge(b"m" * 16, proof_of("s" if knows_secret else "t", "donor", hello.nonce, b"m" * 16))

    ready = SimpleNamespace(send=said.append, receive=challenge)
    question = direct_receiver.messages.ReadyToReceive("t", KEYS[:1], 8, KV_FORMAT, "here:1", 0, b"g" * 16)
    if not knows_secret:
        with pytest.raises(ConnectionError, match=r"^it has another OCTAVO_KV_SECRET$"):
            receiver.notify_ready_to_receive(ready, question)
    else:
        receiver.notify_ready_to_receive(ready, question)
    hello, *notices = said
    assert hello == Hello(VERSION, hello.nonce)
    assert len(hello.nonce) == 16
    assert len(notices) == knows_secret
    for notice in notices:
        assert notice == Notice(encode(question), notice.proof)
        assert decode_ready(notice.ready) == question
        assert is_proof(notice.proof, "s", "receiver", hello.nonce, b"m" * 16, notice.ready)


def test_slow_connect_raises_connect_timeout_error(monkeypatch):
    asked, errors = [], [None, TimeoutError(), ConnectionRefusedError()]

    def create_connection(*args):
        asked.append(args)
        if (error := errors.pop(0)) is not None:
            raise error
        return "connection"

    monkeypatch.setattr(socket, "create_connection", create_connection)
    assert _connect("[::1]:90") == "connection"
    with pytest.raises(_ConnectTimeoutError, match=r"^the connection timed out$"):
        _connect("10.0.0.2:91", 1.0)
    with pytest.raises(ConnectionRefusedError):
        _connect("host:92")
    assert asked == [(("::1", 90), 2.0), (("10.0.0.2", 91), 1.0), (("host", 92), 2.0)]


@pytest.mark.parametrize(
    ("answers", "is_there", "after_s"),
    [((True, True), True, [0.0, 0.1]), ((True, False), False, [0.0, 0.1]), ((False, True), False, [0.0])],
)
def test_source_is_alive_only_after_two_successful_probes(monkeypatch, answers, is_there, after_s):
    left, pauses = list(answers), []
    monkeypatch.setattr(direct_receiver, "_probe", lambda _, after_s=0.0: (pauses.append(after_s), left.pop(0))[1])
    assert _answers(SOURCE) is is_there
    assert pauses == after_s


@pytest.mark.parametrize(
    ("error", "is_there"),
    [
        (None, True),
        (TimeoutError(), False),
        (BrokenOffError("it closed the connection"), True),
        (ConnectionResetError(), True),
        (RefusalError("another version"), True),
    ],
)
def test_probe_succeeds_on_any_reply_and_fails_on_timeout(monkeypatch, clock, error, is_there):
    said, timeouts, connections = [], [], []

    def connect(*args):
        connections.append(args)
        clock.now += 0.3
        return SimpleNamespace(close=lambda: connections.append("closed"))

    def receive(kind, timeout_s):
        assert kind is Challenge
        timeouts.append(timeout_s)
        if error is not None:
            raise error

    monkeypatch.setattr(direct_receiver, "_connect", connect)
    monkeypatch.setattr(direct_receiver, "Channel", lambda _: SimpleNamespace(send=said.append, receive=receive))
    assert _probe(SOURCE, after_s=0.25) is is_there
    assert (clock.sleeps, connections) == ([0.25], [(SOURCE, 1.0), "closed"])
    assert timeouts == [pytest.approx(0.7)]
    assert said == [Hello(VERSION, said[0].nonce)]
    assert len(said[0].nonce) == 16


def test_probe_fails_if_connection_is_refused(monkeypatch, clock):
    def connect(*_):
        raise ConnectionRefusedError

    monkeypatch.setattr(direct_receiver, "_connect", connect)
    assert not _probe(SOURCE)
    assert clock.sleeps == [0.0]


def test_fault_is_logged_as_warning(receiver, caplog):
    receiver._note_fault(SOURCE, "gone")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
