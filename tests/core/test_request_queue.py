from __future__ import annotations

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


def test_fcfs_queue_basic():
    queue = FCFSRequestQueue()
    for name in "abc":
        queue.add_request(make_request(name))
    assert len(queue) == 3
    assert bool(queue)
    assert queue.peek_request().request_id == "a"
    assert [queue.pop_request().request_id for _ in range(3)] == ["a", "b", "c"]
    assert not queue


def test_fcfs_queue_prepend():
    queue = FCFSRequestQueue()
    queue.add_request(make_request("a"))
    queue.prepend_request(make_request("b"))
    assert ids(queue) == ["b", "a"]


def test_fcfs_queue_remove():
    queue = FCFSRequestQueue()
    requests = [make_request(name) for name in "abc"]
    for request in requests:
        queue.add_request(request)
    queue.remove_request(requests[1])
    assert ids(queue) == ["a", "c"]
    with pytest.raises(KeyError):
        queue.remove_request(requests[1])


@pytest.mark.parametrize("queue", [FCFSRequestQueue(), PriorityRequestQueue()])
def test_empty_queue(queue):
    with pytest.raises(IndexError):
        queue.peek_request()
    with pytest.raises(IndexError):
        queue.pop_request()


def test_priority_queue_lower_first_then_arrival():
    queue = PriorityRequestQueue()
    for index, (name, priority) in enumerate([("a", 5), ("b", 1), ("c", 5), ("d", 1)]):
        queue.add_request(make_request(name, index, priority))
    assert ids(queue) == ["b", "d", "a", "c"]
    assert [queue.pop_request().request_id for _ in range(4)] == ["b", "d", "a", "c"]


def test_priority_queue_preempted_goes_before_its_class():
    queue = PriorityRequestQueue()
    queue.add_request(make_request("later", 5, 1))
    queue.add_request(make_request("urgent", 6, 0))
    queue.prepend_request(make_request("preempted", 2, 1))
    assert ids(queue) == ["urgent", "preempted", "later"]


def test_priority_queue_remove_and_reuse_of_an_id():
    queue = PriorityRequestQueue()
    first = make_request("a", 0, 9)
    queue.add_request(first)
    queue.add_request(make_request("b", 1, 5))
    queue.remove_request(first)
    queue.add_request(make_request("a", 2, 9))
    assert len(queue) == 2
    assert [queue.pop_request().arrival_index for _ in range(2)] == [1, 2]
    assert not queue


def test_create_request_queue():
    assert isinstance(create_request_queue(SchedulingPolicy.FCFS), FCFSRequestQueue)
    assert isinstance(create_request_queue(SchedulingPolicy.PRIORITY), PriorityRequestQueue)
