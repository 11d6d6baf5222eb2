"""Requests that wait in the queue, deferred requests, and when the latter return."""

from __future__ import annotations

from functools import partial

import pytest

from octavo.core.request_queue import FCFSRequestQueue
from octavo.core.waiting_requests import WaitingRequests
from octavo.data.request import Request
from octavo.errors import QueueFullError
from octavo.sampling_params import SamplingParams


@pytest.fixture
def room():
    return WaitingRequests(FCFSRequestQueue())


def add(room, name, num_tokens=3):
    request = Request(name, [1] * num_tokens, SamplingParams())
    request.arrival_index = len(room)
    room.add(request)
    return request


def ids(room):
    return [request.request_id for request in room]


def test_num_tokens_counts_queued_and_deferred_requests(room):
    first, second = add(room, "a", 3), add(room, "b", 5)
    assert room.num_tokens == 8
    assert room.defer(b"block", 0) is first
    assert (room.num_tokens, room.num_deferred, len(room), ids(room)) == (8, 1, 2, ["a", "b"])
    assert room.take() is second
    assert room.num_tokens == 3
    room.put_back(second)
    room.remove(first)
    assert (room.num_tokens, room.num_deferred, ids(room)) == (5, 0, ["b"])
    room.remove(second)
    assert (room.num_tokens, len(room), room.num_records) == (0, 0, 0)


def test_put_back_request_is_first_in_queue(room):
    first = add(room, "a")
    add(room, "b")
    assert room.take() is first
    room.put_back(first)
    assert ids(room) == ["a", "b"]


def test_deferred_requests_resume_in_order_once_block_is_not_pending(room):
    requests = [add(room, name) for name in "abc"]
    for is_pending in (False, True, False):
        room.defer(partial(bool, is_pending), 0)
    late = add(room, "late")
    assert room.resume_deferred(1) == [(requests[2], False), (requests[0], False)]
    assert list(room.queue) == [requests[0], requests[2], late]
    assert room.num_deferred == 1
    assert all(room.may_defer(request) for request in requests)


def test_request_is_deferred_once_for_at_most_16_steps(room):
    request = add(room, "a")
    room.defer(lambda: True, 100)
    assert room.resume_deferred(115) == []
    assert room.resume_deferred(116) == [(request, True)]
    assert not room.may_defer(request)
    assert (ids(room), room.num_deferred, room.num_records) == (["a"], 0, 2)
    room.remove(request)
    assert room.num_records == 1
    room.forget(request)
    assert room.num_records == 0
    assert room.may_defer(request)


def test_queue_limits_requests_and_tokens(room):
    add(room, "a", 3)
    room.defer(b"x", 0)
    add(room, "b", 4)  # 2 requests, 7 tokens
    newcomer = Request("c", [1] * 5, SamplingParams())
    room.check_limits(newcomer, None, None)
    room.check_limits(newcomer, 3, 12)
    with pytest.raises(QueueFullError, match=r"2 requests are waiting, which is the limit \(max_num_waiting\)"):
        room.check_limits(newcomer, 2, None)
    with pytest.raises(QueueFullError, match=r"7 tokens .* has 5; the limit is 11 \(max_num_waiting_tokens\)"):
        room.check_limits(newcomer, 3, 11)
