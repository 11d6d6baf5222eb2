"""Who is let in, on a clock of the test's own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from octavo.errors import QueueFullError
from octavo.server.admission import Admission, Bucket
from octavo.server.errors import RateLimitError
from octavo.server.tenants import EVERYBODY, Tenant


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_bucket_fills_at_its_rate() -> None:
    bucket = Bucket(60, now=0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 1.0) == 0
    assert bucket.wait_s(100, 1000.0) == 0  # more than it holds asks for a full one
    bucket.take(100, 1000.0)
    assert bucket.wait_s(0, 1000.0) == pytest.approx(40.0)  # what it owes is waited for


def test_more_than_the_limit_is_refused_and_places_come_back(clock: Clock) -> None:
    admission = Admission(4, clock=clock)
    first = admission.enter(EVERYBODY, 3)
    with pytest.raises(QueueFullError, match="the limit is 4"):
        admission.enter(EVERYBODY, 2)
    assert admission.num_open == 3
    admission.enter(EVERYBODY, 1)
    first.leave()
    first.leave()  # once is enough
    assert admission.num_open == 1
    with admission.enter(EVERYBODY, 3), pytest.raises(QueueFullError):
        admission.enter(EVERYBODY, 1)
    assert admission.num_open == 1


def test_a_place_that_a_stream_keeps_outlives_its_block(clock: Clock) -> None:
    admission = Admission(4, clock=clock)
    with admission.enter(EVERYBODY, 1) as place:
        place.is_kept = True
    assert admission.num_open == 1
    place.leave()
    assert admission.num_open == 0


def test_the_time_to_wait_is_that_of_the_queue(clock: Clock) -> None:
    admission = Admission(10, clock=clock)
    places = [admission.enter(EVERYBODY, 1) for _ in range(10)]
    with pytest.raises(QueueFullError) as error:
        admission.enter(EVERYBODY, 1)
    assert error.value.retry_after_s == 1  # nothing is known yet
    for place in places[:4]:
        clock.now += 2.0
        place.leave()
        admission.enter(EVERYBODY, 1)
    with pytest.raises(QueueFullError) as error:
        admission.enter(EVERYBODY, 1)
    assert 10 <= error.value.retry_after_s <= 20  # ten are open; one ends every two seconds
    clock.now += 3600
    with pytest.raises(QueueFullError) as error:
        admission.enter(EVERYBODY, 1)
    assert error.value.retry_after_s == 60


def test_limits_of_a_key(clock: Clock) -> None:
    admission = Admission(None, clock=clock)
    tenant = Tenant(name="a", max_concurrency=2, requests_per_minute=6, tokens_per_minute=100)
    admission.change((tenant,))
    places = [admission.enter(tenant, 1), admission.enter(tenant, 1)]
    with pytest.raises(RateLimitError, match="2 answers open"):
        admission.enter(tenant, 1)
    admission.enter(EVERYBODY, 100)  # others have their own
    for place in places:
        place.leave()
    for _ in range(4):
        admission.enter(tenant, 1).leave()
    with pytest.raises(RateLimitError, match="6 requests a minute") as error:
        admission.enter(tenant, 1)
    assert error.value.retry_after_s == pytest.approx(10.0)
    clock.now += 60
    place = admission.enter(tenant, 1)
    place.charge(150)
    place.leave()
    with pytest.raises(RateLimitError, match="100 tokens a minute") as error:
        admission.enter(tenant, 1)
    assert error.value.retry_after_s == pytest.approx(30.0)
    clock.now += 30
    admission.enter(tenant, 1).leave()


def test_new_limits_hold_for_what_is_open(clock: Clock) -> None:
    admission = Admission(None, clock=clock)
    admission.change((Tenant(name="a"),))
    admission.enter(Tenant(name="a"), 3)
    strict = Tenant(name="a", max_concurrency=3)
    admission.change((strict,))
    with pytest.raises(RateLimitError):
        admission.enter(strict, 1)


def test_a_flood_leaves_room_for_others(clock: Clock) -> None:
    admission = Admission(100, clock=clock)
    flood, small, heavy = Tenant(name="flood"), Tenant(name="small"), Tenant(name="heavy", weight=2.0)
    admission.change((flood, small, heavy))
    num_flooding = fill(admission, flood)
    assert num_flooding == 50  # half, as much as it leaves
    assert fill(admission, heavy) == 34  # twice as much as it leaves
    assert fill(admission, small) > 5
    assert admission.num_open <= 100


def test_alone_a_key_may_take_all(clock: Clock) -> None:
    admission = Admission(100, clock=clock)
    admission.change((Tenant(name="only"),))
    assert fill(admission, Tenant(name="only")) == 100


def fill(admission: Admission, tenant: Tenant) -> int:
    for count in range(1000):
        try:
            admission.enter(tenant, 1)
        except QueueFullError:
            return count
    raise AssertionError("nothing is refused")


def test_waiting_tokens_have_room_of_their_own(clock: Clock) -> None:
    admission = Admission(None, 1000, clock=clock)
    flood, small = Tenant(name="flood"), Tenant(name="small")
    place = admission.enter(EVERYBODY, 1)
    place.hold_tokens(1000)
    with pytest.raises(QueueFullError, match="the limit is 1000"):
        admission.enter(EVERYBODY, 1).hold_tokens(1)
    place.start()  # they run: others may wait
    assert admission.num_waiting_tokens == 0
    place.leave()
    admission.change((flood, small))
    admission.enter(flood, 1).hold_tokens(500)
    with pytest.raises(QueueFullError):
        admission.enter(flood, 1).hold_tokens(100)
    place = admission.enter(small, 1)
    place.hold_tokens(400)
    place.leave()
    assert admission.num_waiting_tokens == 500


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_the_open_places(clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    tenants = [
        Tenant(name=name, weight=rng.choice([0.5, 1, 3]), max_concurrency=rng.choice([None, 5])) for name in "abc"
    ]
    admission = Admission(rng.choice([1, 7, 20]), clock=clock)
    admission.change(tuple(tenants))
    places = []
    refusals = []
    for _ in range(500):
        clock.now += rng.random()
        if places and rng.random() < 0.45:
            places.pop(rng.randrange(len(places))).leave()
            continue
        before = admission.num_open
        try:
            places.append(admission.enter(rng.choice(tenants), rng.randint(1, 3)))
        except QueueFullError as error:
            refusals.append((admission.num_open == before, error.retry_after_s))
    per_tenant = Counter()
    for place in places:
        per_tenant[place.tenant.name] += place.num_streams
    assert admission.num_open == sum(per_tenant.values())
    assert admission.max_open is not None
    assert admission.num_open <= admission.max_open
    assert refusals
    assert all(is_unchanged and 0 < seconds <= 60 for is_unchanged, seconds in refusals)
    for place in places:
        place.leave()
    assert admission.num_open == 0
