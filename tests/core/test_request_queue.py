from __future__ import annotations

import random

import pytest

from octavo.config import SchedulingPolicy
from octavo.core.policy import create_request_queue
from octavo.core.request_queue import FCFSRequestQueue, PriorityRequestQueue
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def make_request(request_id: str, arrival_index: int = 0, priority: int = 0) -> Request:
    request = Request(request_id, [1], SamplingParams(), priority=priority)
    request.arrival_index = arrival_index
    return request


def ids(queue) -> list[str]:
    return [request.request_id for request in queue]


def test_fcfs_queue_pops_in_order_of_arrival():
    queue = FCFSRequestQueue()
    for name in "abc":
        queue.add_request(make_request(name))
    assert len(queue) == 3
    assert bool(queue)
    assert queue.peek_request().request_id == "a"
    assert [queue.pop_request().request_id for _ in range(3)] == ["a", "b", "c"]
    assert not queue


def test_fcfs_queue_puts_prepended_request_first():
    queue = FCFSRequestQueue()
    queue.add_request(make_request("a"))
    queue.prepend_request(make_request("b"))
    assert ids(queue) == ["b", "a"]


def test_fcfs_queue_sorts_prepended_requests_by_arrival():
    queue = FCFSRequestQueue()
    queue.add_request(make_request("new", 9))
    for index in (1, 0, 2, 3):
        queue.prepend_request(make_request(f"back {index}", index))
    assert ids(queue) == ["back 0", "back 1", "back 2", "back 3", "new"]


def test_fcfs_queue_removes_request_only_once():
    queue = FCFSRequestQueue()
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        queue.add_request(request)
    queue.remove_request(requests[1])
    assert ids(queue) == ["a", "c"]
    with pytest.raises(KeyError):
        queue.remove_request(requests[1])


@pytest.mark.parametrize("queue", [FCFSRequestQueue(), PriorityRequestQueue()])
def test_empty_queue_raises_index_error(queue):
    with pytest.raises(IndexError, match="empty queue"):
        queue.peek_request()
    with pytest.raises(IndexError, match="empty queue"):
        queue.pop_request()


def test_priority_queue_sorts_by_priority_then_arrival():
    queue = PriorityRequestQueue()
    for index, (name, priority) in enumerate([("a", 5), ("b", 1), ("c", 5), ("d", 1)]):
        queue.add_request(make_request(name, index, priority))
    assert ids(queue) == ["b", "d", "a", "c"]
    assert [queue.pop_request().request_id for _ in range(4)] == ["b", "d", "a", "c"]


def test_priority_queue_puts_preempted_request_first_in_its_class():
    queue = PriorityRequestQueue()
    queue.add_request(make_request("later", 5, 1))
    queue.add_request(make_request("urgent", 6, 0))
    queue.prepend_request(make_request("preempted", 2, 1))
    assert ids(queue) == ["urgent", "preempted", "later"]


def test_priority_queue_accepts_reused_id_after_removal():
    queue = PriorityRequestQueue()
    first = make_request("a", 0, 9)
    queue.add_request(first)
    queue.add_request(make_request("b", 1, 5))
    queue.remove_request(first)
    queue.add_request(make_request("a", 2, 9))
    assert len(queue) == 2
    assert [queue.pop_request().arrival_index for _ in range(2)] == [1, 2]
    assert not queue


def test_priority_queue_ignores_old_entry_of_reused_id():
    queue = PriorityRequestQueue()
    first = make_request("a", 0, 1)
    queue.add_request(first)
    queue.add_request(make_request("b", 1, 5))
    queue.remove_request(first)
    queue.add_request(make_request("a", 2, 9))
    assert queue.peek_request().request_id == "b"
    assert ids(queue) == ["b", "a"]


@pytest.mark.parametrize("count", [100, 101])
def test_priority_queue_prunes_entries_of_removed_requests(count):
    queue = PriorityRequestQueue()
    requests = [make_request(str(index), index) for index in range(count)]
    for request in requests:
        queue.add_request(request)
    for request in requests[18:]:
        queue.remove_request(request)
        if len(queue) == count - 82:
            assert len(queue._heap) == count
    assert len(queue._heap) == (100 if count == 100 else 18)
    queue.remove_request(requests[0])
    assert len(queue) == 17
    assert len(queue._heap) <= 18
    assert ids(queue) == [request.request_id for request in requests[1:18]]


def test_priority_queue_keeps_order_after_many_removals():
    rng = random.Random(0)
    queue = PriorityRequestQueue()
    requests = [make_request(str(index), index, rng.randrange(1000)) for index in range(300)]
    for request in requests:
        queue.add_request(request)
    leaving = set(rng.sample(range(300), 200))
    for index in sorted(leaving):
        queue.remove_request(requests[index])
    stay = [request for index, request in enumerate(requests) if index not in leaving]
    expected = sorted(stay, key=lambda request: (request.priority, request.arrival_index))
    assert [queue.pop_request() for _ in range(100)] == expected


def test_create_request_queue_returns_queue_of_policy():
    assert isinstance(create_request_queue(SchedulingPolicy.FCFS), FCFSRequestQueue)
    assert isinstance(create_request_queue(SchedulingPolicy.PRIORITY), PriorityRequestQueue)
