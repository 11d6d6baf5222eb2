"""Messages between prefill and decode engines: frames, limits, time-outs, proofs and headers."""

from __future__ import annotations

import hashlib
import hmac
from types import SimpleNamespace

import pytest

from octavo.kv_transfer import direct_messages
from octavo.kv_transfer.direct_messages import (
    BEAT_S,
    SEND_S,
    SILENT_S,
    Beat,
    BrokenOffError,
    Challenge,
    Channel,
    End,
    Hello,
    Notice,
    ReadyToReceive,
    RefusalError,
    Refused,
    Written,
    differences,
    encode,
    header,
    header_in,
    is_proof,
    proof_of,
)

MOST_BYTES = 1 << 20


class Connection:
    """A socket that has received some bytes, and returns at most `most` of them per call."""

    def __init__(self, received=b"", most=1 << 30):
        self.received, self.most = received, most
        self.sent = b""
        self.timeouts, self.wanted = [], []
        self.after_each = lambda: None

    def settimeout(self, seconds):
        self.timeouts.append(seconds)

    def sendall(self, data):
        self.sent += data

    def recv(self, count):
        self.wanted.append(count)
        count = min(count, self.most)
        part, self.received = self.received[:count], self.received[count:]
        self.after_each()
        return part

    def getsockname(self):
        return "::ffff:10.0.0.1", 80, 0, 0

    def getpeername(self):
        return "10.0.0.2", 90


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(direct_messages, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def framed(message):
    encoded = encode(message)
    return len(encoded).to_bytes(4, "little") + encoded


def notice_of(num_bytes):
    """Return a message that has `num_bytes` bytes when encoded."""
    return Notice(bytes(num_bytes - len(encode(Notice(bytes(70_000), b""))) + 70_000), b"")


@pytest.mark.parametrize(
    "message",
    [
        Hello(2, b"n"), Challenge(b"n", b"p"), ReadyToReceive("t", [], 8, {}, "s", 0, b"g"), Notice(b"r", b"p"),
        Written(1), Beat(), Refused("r"), End(),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_messages_are_immutable(message):
    for field in message.__struct_fields__:
        with pytest.raises(AttributeError, match="immutable type"):
            setattr(message, field, None)
    if not message.__struct_fields__:
        assert hash(message) == hash(type(message)())


def test_message_is_sent_with_length_prefix():
    connection = Connection()
    Channel(connection).send(Written(3))
    assert (connection.sent, connection.timeouts) == (framed(Written(3)), [SEND_S])


def test_ipv4_mapped_addresses_are_unmapped():
    channel = Channel(Connection())
    assert (channel.local_host, channel.peer_host) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize("most", [1, 3, 1 << 30])
def test_message_is_assembled_from_partial_reads(most):
    connection = Connection(framed(Challenge(b"n", b"p")) + framed(Beat()), most)
    channel = Channel(connection)
    assert channel.receive(Challenge) == Challenge(b"n", b"p")
    assert channel.receive((Written, Beat)) == Beat()
    assert connection.received == b""


def test_timeout_covers_whole_message(clock):
    connection = Connection(framed(Beat()), 2)

    def pass_time():
        clock.now += 0.6

    connection.after_each = pass_time
    Channel(connection).receive(Beat, 1.0)
    assert connection.timeouts == [pytest.approx(1.0), pytest.approx(0.4), *[0.001] * (len(connection.timeouts) - 2)]
    assert connection.wanted[:3] == [4, 2, len(encode(Beat()))]


def test_receive_timeout_defaults_to_silence_limit(clock):
    connection = Connection(framed(Beat()))
    Channel(connection).receive(Beat)
    assert connection.timeouts == [SILENT_S, SILENT_S]
    assert 2 * BEAT_S < SEND_S < SILENT_S


def test_closed_connection_raises_broken_off_error():
    for received in (b"", framed(Beat())[:-1]):
        with pytest.raises(BrokenOffError, match=r"^it closed the connection$"):
            Channel(Connection(received)).receive(Beat)


def test_message_above_size_limit_is_refused():
    message = notice_of(MOST_BYTES)
    assert len(encode(message)) == MOST_BYTES
    assert Channel(Connection(framed(message))).receive(Notice) == message
    connection = Connection(framed(notice_of(MOST_BYTES + 1)))
    with pytest.raises(
        ConnectionError, match=f"^a message of {MOST_BYTES + 1} bytes exceeds the limit of {MOST_BYTES} bytes$"
    ):
        Channel(connection).receive(Notice)
    assert connection.wanted == [4]


def test_unexpected_or_invalid_message_raises_connection_error():
    with pytest.raises(ConnectionError, match=r"^unexpected message Beat$"):
        Channel(Connection(framed(Beat()))).receive((Written, Challenge))
    with pytest.raises(ConnectionError, match=r"^invalid message: "):
        Channel(Connection(b"\x01\0\0\0\xc1")).receive(Beat)


def test_refusal_reason_is_printable_and_truncated():
    for reason, told in [("no\nway", "no?way"), ("a" * 500, "a" * 500), ("a" * 501, "a" * 500)]:
        with pytest.raises(RefusalError, match=f"^it sends no KV: {told.replace('?', '[?]')}$"):
            Channel(Connection(framed(Refused(reason)))).receive(Refused)


def test_differences_name_both_engines_in_key_order():
    assert differences({"b": "1", "a": "1", "c": "3"}, {"b": "2", "c": "3", "d": "4"}) == (
        "a is '1' in the prefill engine and 'unknown' in the decode engine; "
        "b is '1' in the prefill engine and '2' in the decode engine; "
        "d is 'unknown' in the prefill engine and '4' in the decode engine"
    )
    assert differences({"a": "1"}, {"a": "1"}) == ""


def test_proof_depends_on_secret_role_and_each_part():
    expected = hmac.new(b"s", b"donor\x01\0\0\0a\x02\0\0\0bc", "sha256").digest()
    assert proof_of("s", "donor", b"a", b"bc") == expected
    assert is_proof(expected, "s", "donor", b"a", b"bc")
    for secret, role, parts in [
        ("t", "donor", (b"a", b"bc")),
        ("s", "b", (b"a", b"bc")),
        ("s", "donor", (b"ab", b"c")),
    ]:
        assert not is_proof(expected, secret, role, *parts)


def test_header_round_trips():
    checksum = hashlib.sha256(b"block").digest()
    expected = b"octavoD\x02" + b"g" * 16 + b"k" * 32 + checksum
    assert header(b"g" * 16, b"k" * 32, checksum) == expected
    assert header_in(memoryview(expected + bytes(40))) == expected
