"""The keys in pending saves."""

from __future__ import annotations

from octavo.core.pending_keys import PendingKeys


def test_key_in_two_saves_is_pending_until_both_have_ended():
    pending = PendingKeys()
    pending.start([b"a", b"b"])
    pending.start([b"b", b"c"])
    assert (len(pending), pending.lacking([b"a", b"b", b"c", b"d"])) == (4, {b"d"})
    pending.end([b"a", b"b"])
    assert (len(pending), pending.lacking([b"a", b"b", b"c"])) == (2, {b"a"})
    pending.end([b"b", b"c"])
    assert (len(pending), pending.lacking([b"a", b"b", b"c"])) == (0, {b"a", b"b", b"c"})
