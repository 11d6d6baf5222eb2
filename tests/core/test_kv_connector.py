"""Transfers under way, by id, by request and by deadline."""

from __future__ import annotations

from octavo.core.kv_connector import NullConnector, PendingLoads
from octavo.request import Request
from octavo.sampling_params import SamplingParams


def make_request(name):
    return Request(name, [1, 2, 3], SamplingParams())


def test_nothing_is_stored_elsewhere():
    assert NullConnector().get_num_new_matched_tokens(make_request("a"), 0) == 0


def test_a_transfer_ends_once_and_its_id_never_comes_back():
    loads = PendingLoads()
    request = make_request("a")
    first = loads.start(request, 8, 1.0)
    assert (first.request, first.num_tokens, first.deadline) == (request, 8, 1.0)
    assert (len(loads), loads.of_request("a"), loads.requests()) == (1, first.transfer_id, [request])
    assert loads.end(first.transfer_id) is first
    assert loads.end(first.transfer_id) is None
    assert (len(loads), loads.of_request("a"), loads.requests()) == (0, None, [])
    ids = {first.transfer_id, *(loads.start(make_request(name), 8, 1.0).transfer_id for name in "abc")}
    assert len(ids) == 4
    assert loads.end(first.transfer_id) is None
    assert len(loads) == 3


def test_expired_is_whose_deadline_has_come():
    loads = PendingLoads()
    first, second, _ = (loads.start(make_request(name), 8, deadline) for name, deadline in zip("abc", (1.0, 2.0, 3.0), strict=True))
    assert loads.expired(0.9) == []
    assert loads.expired(1.0) == [first]
    assert loads.expired(2.9) == [first, second]
