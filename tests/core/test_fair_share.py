"""Service counters of tenants, and the request queue that is ordered by them."""

from __future__ import annotations

import pytest

from octavo.core.fair_share import FairRequestQueue, ServiceCounters
from octavo.data.request import Request
from octavo.sampling_params import SamplingParams


def make_request(name, tenant="x", priority=0, arrival_index=0):
    request = Request(name, [1], SamplingParams(), tenant=tenant, priority=priority)
    request.arrival_index = arrival_index
    return request


def ids(requests):
    return [request.request_id for request in requests]


def test_service_is_weighted_and_summed():
    counters = ServiceCounters()
    counters.charge_input("x", 3)
    counters.charge_output("x", 4)
    counters.charge_input("x", 1)
    counters.charge_output("y", 1)
    assert (counters.served("x"), counters.served("y"), counters.served("z")) == (12.0, 2.0, 0.0)
    counters = ServiceCounters(5.0, 7.0)
    counters.charge_input("x", 2)
    counters.charge_output("x", 1)
    assert counters.served("x") == 17.0


def test_service_counter_is_lifted_but_never_lowered():
    counters = ServiceCounters()
    counters.lift("x", 5.0)
    counters.lift("x", 3.0)
    assert counters.served("x") == 5.0
    assert counters.num_restarts == 0
    counters.forget_all()
    assert (counters.served("x"), counters.num_restarts) == (0.0, 1)


def test_service_bound_is_one_admission_plus_running_outputs():
    counters = ServiceCounters(3.0, 5.0)
    assert counters.bound(7, 11, 2) == 3 * 7 + 5 * 11 * 2
    assert counters.bound(7, 11, 2, least_weight=2.0) == (3 * 7 + 5 * 11 * 2) / 2


def test_empty_fair_queue_raises_index_error():
    queue = FairRequestQueue()
    assert not queue
    with pytest.raises(IndexError, match="empty queue"):
        queue.peek_request()
    request = make_request("a")
    queue.add_request(request)
    assert queue
    assert len(queue) == 1
    assert queue.pop_request() is request
    assert not queue
    assert len(queue) == 0
    with pytest.raises(IndexError, match="empty queue"):
        queue.pop_request()


def test_least_served_tenant_is_next_and_its_order_is_kept():
    counters = ServiceCounters()
    queue = FairRequestQueue(counters, lambda request: (request.priority,))
    for index, (name, tenant, priority) in enumerate([("x0", "x", 1), ("x1", "x", 0), ("y0", "y", 0), ("z0", "z", 0)]):
        queue.add_request(make_request(name, tenant, priority, index))
    counters.charge_output("x", 1)
    counters.charge_output("z", 3)
    assert ids(queue) == ["y0", "x1", "x0", "z0"]
    taken = []
    while queue:
        taken.append(queue.peek_request().request_id)
        assert queue.pop_request().request_id == taken[-1]
        counters.charge_output(taken[-1][0], 1)
    assert taken == ["y0", "x1", "x0", "z0"]


def test_fair_queue_counts_prepended_and_removed_requests():
    queue = FairRequestQueue()
    first, second = make_request("a", arrival_index=0), make_request("b", arrival_index=1)
    queue.add_request(second)
    queue.prepend_request(first)
    assert (len(queue), ids(queue)) == (2, ["a", "b"])
    queue.remove_request(first)
    assert (len(queue), ids(queue)) == (1, ["b"])
    assert queue.peek_request() is second


def test_new_tenant_is_lifted_to_least_service_of_waiting_tenants():
    counters = ServiceCounters()
    queue = FairRequestQueue(counters)
    queue.add_request(make_request("a", "busy"))
    queue.add_request(make_request("b", "busier"))
    counters.charge_output("busy", 10)
    counters.charge_output("busier", 20)
    queue.add_request(make_request("c", "new"))
    assert counters.served("new") == counters.served("busy") == 20.0
    queue.add_request(make_request("d", "new", arrival_index=1))
    assert counters.served("new") == 20.0


def test_new_tenant_in_empty_queue_is_lifted_to_last_waiting_tenant():
    counters = ServiceCounters()
    queue = FairRequestQueue(counters)
    queue.add_request(make_request("a", "busy"))
    counters.charge_output("busy", 10)
    queue.pop_request()
    queue.add_request(make_request("b", "new"))
    assert counters.served("new") == 20.0
    queue.pop_request()
    counters.forget_all()
    queue.add_request(make_request("c", "newer"))
    assert counters.served("newer") == 0.0  # no tenant is owed service any more
    counters.charge_output("newer", 4)
    queue.pop_request()
    queue.add_request(make_request("d", "newest"))
    assert counters.served("newest") == 8.0  # service after that counts again


def test_returning_tenant_is_ranked_by_its_service():
    counters = ServiceCounters()
    queue = FairRequestQueue(counters)
    first = make_request("a", "x")
    queue.add_request(first)
    queue.add_request(make_request("b", "y"))
    queue.remove_request(first)
    counters.charge_output("x", 5)
    assert queue.peek_request().request_id == "b"
    queue.add_request(make_request("c", "x", arrival_index=2))
    counters.charge_output("y", 1)
    assert queue.peek_request().request_id == "b"
    counters.charge_output("y", 9)
    assert ids([queue.pop_request(), queue.pop_request()]) == ["c", "b"]
    queue.add_request(make_request("d", "y"))
    queue.add_request(make_request("e", "x"))
    assert ids([queue.pop_request(), queue.pop_request()]) == ["e", "d"]


def test_tenant_has_one_heap_entry_after_repeated_requests():
    queue = FairRequestQueue()
    queue.add_request(make_request("stays", "a"))
    for index in range(5):
        request = make_request(f"r{index}", "x", arrival_index=index)
        queue.add_request(request)
        queue.remove_request(request)
    assert len(queue._heap) == 2
    queue.pop_request()
    queue.add_request(make_request("new", "z"))
    assert len(queue._heap) == 1  # no request waits: other tenants are forgotten
