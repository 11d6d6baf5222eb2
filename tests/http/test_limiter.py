"""Limits on open requests, rates and waiting tokens, with a fake clock."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from octavo.errors import QueueFullError, RequestError
from octavo.http.errors import RateLimitError
from octavo.http.limiter import Bucket, Permit, Pool, RequestLimiter, WaitingLine
from octavo.http.tenants import EVERYBODY, Tenant


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_bucket_refills_at_its_rate() -> None:
    bucket = Bucket(60, now=0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 1.0) == 0
    assert bucket.wait_s(100, 1000.0) == 0  # an amount above the capacity needs a full bucket
    bucket.take(100, 1000.0)
    assert bucket.wait_s(0, 1000.0) == pytest.approx(40.0)  # the debt has to be refilled first


def test_limiter_refuses_streams_over_limit_and_frees_permits(clock: Clock) -> None:
    limiter = RequestLimiter(4, clock=clock)
    first = limiter.enter(EVERYBODY, 3)
    with pytest.raises(QueueFullError, match="the limit is 4"):
        limiter.enter(EVERYBODY, 2)
    assert limiter.streams.num_held == 3
    limiter.enter(EVERYBODY, 1)
    first.release()
    first.release()  # a second call changes nothing
    assert limiter.streams.num_held == 1
    with limiter.enter(EVERYBODY, 3), pytest.raises(QueueFullError):
        limiter.enter(EVERYBODY, 1)
    assert limiter.streams.num_held == 1


def test_kept_permit_outlives_its_with_block(clock: Clock) -> None:
    limiter = RequestLimiter(4, clock=clock)
    with limiter.enter(EVERYBODY, 1) as place:
        place.is_kept = True
    assert limiter.streams.num_held == 1
    place.release()
    assert limiter.streams.num_held == 0


def test_retry_after_follows_drain_rate_of_queue(clock: Clock) -> None:
    limiter = RequestLimiter(10, clock=clock)
    places = [limiter.enter(EVERYBODY, 1) for _ in range(10)]
    with pytest.raises(QueueFullError) as error:
        limiter.enter(EVERYBODY, 1)
    assert error.value.retry_after_s == 1  # no rate is known yet
    for place in places[:4]:
        clock.now += 2.0
        place.is_in = True
        place.release()
        limiter.enter(EVERYBODY, 1)
    with pytest.raises(QueueFullError) as error:
        limiter.enter(EVERYBODY, 1)
    assert 10 <= error.value.retry_after_s <= 20  # ten are open; one ends every two seconds
    clock.now += 3600
    with pytest.raises(QueueFullError) as error:
        limiter.enter(EVERYBODY, 1)
    assert error.value.retry_after_s == 60


def test_only_admitted_streams_count_for_drain_rate(clock: Clock) -> None:
    """Refused requests and requests without waiting tokens end immediately, so they do not count.

    A request with n streams counts as n endings.
    """
    limiter = RequestLimiter(10, 1000, clock=clock)
    first, second = limiter.enter(EVERYBODY, 3), limiter.enter(EVERYBODY, 4)
    asyncio.run(first.hold_tokens(10))
    asyncio.run(second.hold_tokens(10))

    def wait() -> float:
        with pytest.raises(QueueFullError) as error:
            limiter.enter(EVERYBODY, 11 - limiter.streams.num_held)
        return error.value.retry_after_s

    for _ in range(20):
        clock.now += 0.1
        limiter.enter(EVERYBODY, 1).release()
    assert wait() == 1  # no rate is known yet
    first.release()
    clock.now += 4.0
    assert wait() == 60  # all endings so far have the same time, so no rate is known
    second.release()
    places = [limiter.enter(EVERYBODY, 1) for _ in range(5)]
    assert wait() == 5  # five are open, and four have ended in four seconds
    for place in places:
        place.release()


def test_tenant_over_its_limits_is_refused(clock: Clock) -> None:
    limiter = RequestLimiter(None, clock=clock)
    tenant = Tenant(name="a", max_concurrency=2, requests_per_minute=6, tokens_per_minute=100)
    limiter.change((tenant,))
    places = [limiter.enter(tenant, 1), limiter.enter(tenant, 1)]
    with pytest.raises(RateLimitError, match="2 open answers"):
        limiter.enter(tenant, 1)
    limiter.enter(EVERYBODY, 100)  # another tenant is not affected
    for place in places:
        place.release()
    for _ in range(6):
        limiter.begin(tenant)
    with pytest.raises(RateLimitError, match="6 requests per minute") as error:
        limiter.begin(tenant)
    assert error.value.retry_after_s == pytest.approx(10.0)
    clock.now += 60
    place = limiter.enter(tenant, 1)
    place.charge(150)
    place.release()
    with pytest.raises(RateLimitError, match="100 tokens per minute") as error:
        limiter.enter(tenant, 1)
    assert error.value.retry_after_s == pytest.approx(30.0)
    clock.now += 30
    limiter.enter(tenant, 1).release()


def test_reload_of_unchanged_keys_keeps_rate_debt(clock: Clock) -> None:
    limiter = RequestLimiter(None, clock=clock)
    tenant = Tenant(name="a", requests_per_minute=2, tokens_per_minute=100)
    limiter.change((tenant,))
    for _ in range(2):
        limiter.begin(tenant)
    limiter.charge(tenant, 150)
    limiter.change((Tenant(name="a", requests_per_minute=2, tokens_per_minute=100), Tenant(name="b")))
    with pytest.raises(RateLimitError, match="2 requests per minute"):
        limiter.begin(tenant)
    with pytest.raises(RateLimitError, match="100 tokens per minute") as error:
        limiter.enter(tenant, 1)
    assert error.value.retry_after_s == pytest.approx(30.0)


def test_reload_resets_only_rate_with_changed_limit(clock: Clock) -> None:
    limiter = RequestLimiter(None, clock=clock)
    limiter.change((Tenant(name="a", requests_per_minute=1, tokens_per_minute=100),))
    limiter.begin(old := Tenant(name="a", requests_per_minute=1, tokens_per_minute=100))
    limiter.charge(old, 150)
    new = Tenant(name="a", requests_per_minute=2, tokens_per_minute=100)
    limiter.change((new,))
    with pytest.raises(RateLimitError, match="100 tokens per minute"):
        limiter.begin(new)
    clock.now += 60
    for _ in range(2):
        limiter.begin(new)
    with pytest.raises(RateLimitError, match="2 requests per minute"):
        limiter.begin(new)


def test_reloaded_limit_counts_already_open_streams(clock: Clock) -> None:
    limiter = RequestLimiter(None, clock=clock)
    limiter.change((Tenant(name="a"),))
    limiter.enter(Tenant(name="a"), 3)
    strict = Tenant(name="a", max_concurrency=3)
    limiter.change((strict,))
    with pytest.raises(RateLimitError):
        limiter.enter(strict, 1)


def test_flooding_tenant_cannot_take_capacity_of_other_tenants(clock: Clock) -> None:
    limiter = RequestLimiter(100, clock=clock)
    flood, small, heavy = Tenant(name="flood"), Tenant(name="small"), Tenant(name="heavy", weight=2.0)
    limiter.change((flood, small, heavy))
    num_flooding = fill(limiter, flood)
    assert num_flooding == 50  # half: a tenant may hold as much as stays free
    assert fill(limiter, heavy) == 34  # weight 2: twice as much as stays free
    assert fill(limiter, small) > 5
    assert limiter.streams.num_held <= 100


def test_sole_tenant_may_use_all_capacity(clock: Clock) -> None:
    limiter = RequestLimiter(100, clock=clock)
    limiter.change((Tenant(name="only"),))
    assert fill(limiter, Tenant(name="only")) == 100


def fill(limiter: RequestLimiter, tenant: Tenant) -> int:
    for count in range(1000):
        try:
            limiter.enter(tenant, 1)
        except QueueFullError:
            return count
    raise AssertionError("nothing is refused")


def test_request_that_never_fits_gets_no_queue_full_error(clock: Clock) -> None:
    """A client that was asked to retry would retry forever."""
    limiter = RequestLimiter(8, 1000, clock=clock)
    tenant = Tenant(name="a", max_concurrency=3)
    for whose, num_streams, limit in ((EVERYBODY, 9, 8), (tenant, 4, 3)):
        for at_least in (None, num_streams):
            with pytest.raises(RequestError, match=f"{limit} open answers") as error:
                limiter.enter(whose, num_streams, at_least=at_least)
            assert error.value.parameter == "n"
            assert not isinstance(error.value, QueueFullError)
    with pytest.raises(RequestError, match="1000") as error:
        asyncio.run(limiter.enter(EVERYBODY, 1).hold_tokens(1001))
    assert not isinstance(error.value, QueueFullError)


def test_batch_of_prompts_takes_at_most_half_of_free_streams(clock: Clock) -> None:
    limiter = RequestLimiter(100, clock=clock)
    batch = limiter.enter(EVERYBODY, 2048, at_least=1)
    assert batch.num_streams == 50
    assert limiter.enter(EVERYBODY, 64, at_least=8).num_streams == 24  # three prompts with eight choices each
    few = Tenant(name="few", max_concurrency=5)
    assert limiter.enter(few, 64, at_least=2).num_streams == 4
    assert limiter.enter(few, 64, at_least=1).num_streams == 1  # the last of its five places
    assert limiter.enter(EVERYBODY, 19, at_least=19).num_streams == 19
    assert limiter.enter(EVERYBODY, 3, at_least=2).num_streams == 2  # half would be one, so at_least applies
    with pytest.raises(QueueFullError):
        limiter.enter(EVERYBODY, 10, at_least=1)
    batch.release()
    limiter.change((few, Tenant(name="b"), heavy := Tenant(name="heavy", weight=3.0)))
    assert limiter.enter(heavy, 1000, at_least=1).num_streams == 37  # three times the 13 that remain
    with pytest.raises(QueueFullError):
        limiter.enter(heavy, 10, at_least=3)


def test_pool_share_excludes_amount_already_held_by_request() -> None:
    pool, light = Pool(1000), Tenant(name="light", weight=0.05)
    pool.is_shared = True
    pool.take(light, 60)
    assert pool.available(light) < 0
    assert pool.available(light, besides=60) == 940
    assert pool.available(light, besides=20) == pytest.approx(0.05 * 940 - 40)


def test_pool_wakes_waiters_only_if_amount_is_returned() -> None:
    async def wait() -> None:
        pool = Pool(10)
        pool.take(EVERYBODY, 4)
        waiter = asyncio.create_task(pool.change())
        await asyncio.sleep(0)
        pool.give_back(EVERYBODY, 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiter.done()
        pool.give_back(EVERYBODY, 4)
        await waiter

    asyncio.run(wait())


def test_waiting_tokens_are_limited_and_shared_between_tenants(clock: Clock) -> None:
    async def run() -> None:
        limiter = RequestLimiter(None, 1000, clock=clock)
        flood, small = Tenant(name="flood"), Tenant(name="small")
        place = limiter.enter(EVERYBODY, 1)
        await place.hold_tokens(1000)
        with pytest.raises(QueueFullError, match=r"the limit is 1000$"):
            await limiter.enter(EVERYBODY, 1).hold_tokens(1)
        place.release_tokens(1000)  # the prompts run, so later requests may wait for room
        assert limiter.waiting_tokens.num_held == 0
        limiter.change((flood, small))
        await limiter.enter(flood, 1).hold_tokens(500)
        with pytest.raises(QueueFullError, match="reserved for other keys"):
            await limiter.enter(flood, 1).hold_tokens(100)
        await limiter.enter(small, 1).hold_tokens(400)
        assert limiter.waiting_tokens.num_held == 900

    asyncio.run(run())


def test_prompts_of_admitted_request_wait_in_order_for_token_capacity(clock: Clock) -> None:
    async def run() -> None:
        limiter = RequestLimiter(None, 1000, clock=clock)
        place = limiter.enter(EVERYBODY, 3)
        held: list[int] = []

        async def hold(num_tokens: int) -> None:
            await place.hold_tokens(num_tokens)
            held.append(num_tokens)

        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(hold(num_tokens)) for num_tokens in (600, 700, 300)]
            for _ in range(5):
                await asyncio.sleep(0)
            assert held == [600]  # the third would fit, but waits for its turn
            place.release_tokens(600)
            await asyncio.gather(*waiting)
        assert held == [600, 700, 300]
        waiter = asyncio.create_task(hold(1))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert limiter.waiting_tokens.num_held == 1000

    asyncio.run(run())


class Waiting:
    """Requests of the given tenants that share room for 1000 waiting tokens; a request without room waits."""

    def __init__(self, *tenants: Tenant) -> None:
        self.limiter = RequestLimiter(None, 1000)
        self.limiter.change(tenants)

    async def begin(self, tenant: Tenant = EVERYBODY) -> Permit:
        place = self.limiter.enter(tenant, 1)
        await place.hold_tokens(1)
        place.release_tokens(1)
        return place

    async def passing(self, tenant: Tenant, num_tokens: int) -> int:
        """Send requests one after the other. Return the tokens that were accepted before one was refused."""
        for passed in range(0, 10_000, num_tokens):
            guest = self.limiter.enter(tenant, 1)
            try:
                await guest.hold_tokens(num_tokens)
            except QueueFullError:
                return passed
            guest.release_tokens(num_tokens)
        raise AssertionError("nobody is refused")

    @staticmethod
    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def test_small_prompts_do_not_starve_large_prompt() -> None:
    """Small prompts always fit, and arrive without end. The large one still gets its turn, and they get theirs."""

    async def run() -> None:
        waiting = Waiting()
        holds, early, late = [await waiting.begin() for _ in range(3)]
        await holds.hold_tokens(400)
        large = asyncio.create_task(early.hold_tokens(900))
        await waiting.settle()
        small = asyncio.create_task(late.hold_tokens(100))
        await waiting.settle()
        assert not small.done()  # it would fit, but came later
        assert await waiting.passing(EVERYBODY, 100) == 900
        holds.release_tokens(400)
        await asyncio.wait_for(large, 5)
        await asyncio.wait_for(small, 5)

    asyncio.run(run())


def test_requests_of_one_key_are_admitted_fcfs() -> None:
    async def run() -> None:
        waiting = Waiting()
        holds = await waiting.begin()
        others = [await waiting.begin() for _ in range(4)]
        await holds.hold_tokens(600)
        served, tasks = [], []

        async def hold(place: Permit, num_tokens: int) -> None:
            await place.hold_tokens(num_tokens)
            served.append(num_tokens)

        for place, num_tokens in zip(others, (700, 10, 20, 30), strict=True):
            tasks.append(asyncio.create_task(hold(place, num_tokens)))
            await waiting.settle()
        assert served == []
        holds.release_tokens(600)
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert served == [700, 10, 20, 30]

    asyncio.run(run())


def test_cancelled_waiter_blocks_no_other_waiter() -> None:
    """The waiter ends by its deadline or by cancellation, also in the moment in which its turn comes."""

    async def run() -> None:
        waiting = Waiting()
        holds, late = await waiting.begin(), await waiting.begin()
        large, last = await waiting.begin(), await waiting.begin()
        await holds.hold_tokens(600)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await large.hold_tokens(900)
        front = asyncio.create_task(large.hold_tokens(900))
        await waiting.settle()
        small = asyncio.create_task(late.hold_tokens(300))
        await waiting.settle()
        assert not small.done()
        front.cancel()
        await asyncio.wait_for(small, 5)
        assert waiting.limiter.waiting_tokens.num_held == 900
        granted = asyncio.create_task(last.hold_tokens(500))
        await waiting.settle()
        holds.release_tokens(600)
        granted.cancel()  # it has been granted room, but has not run yet
        await asyncio.gather(granted, return_exceptions=True)
        late.release_tokens(300)
        assert waiting.limiter.waiting_tokens.num_held == 0
        await waiting.limiter.enter(EVERYBODY, 1).hold_tokens(1000)

    asyncio.run(run())


def test_overtaking_by_other_key_is_limited_to_its_share() -> None:
    """A waiter of weight 1 is passed by twice its tokens of a key of weight 2. After that, room is kept for it."""

    async def run() -> None:
        heavy, large, third = Tenant(name="heavy", weight=2.0), Tenant(name="large"), Tenant(name="third")
        waiting = Waiting(heavy, large, third)
        holds = await waiting.begin(third)
        await holds.hold_tokens(500)
        waits = await waiting.begin(large)
        task = asyncio.create_task(waits.hold_tokens(600))
        await waiting.settle()
        assert await waiting.passing(heavy, 300) == 1200
        holds.release_tokens(500)
        await asyncio.wait_for(task, 5)
        await waiting.limiter.enter(heavy, 1).hold_tokens(300)

    asyncio.run(run())


def test_tenant_over_its_share_does_not_block_other_tenants() -> None:
    async def run() -> None:
        flood, small = Tenant(name="flood"), Tenant(name="small")
        waiting = Waiting(flood, small)
        place = await waiting.begin(flood)
        other = await waiting.begin(flood)
        await place.hold_tokens(500)
        task = asyncio.create_task(other.hold_tokens(500))
        await waiting.settle()
        for _ in range(50):
            guest = waiting.limiter.enter(small, 1)
            await guest.hold_tokens(300)
            guest.release_tokens(300)
        assert not task.done()
        place.release_tokens(500)
        await asyncio.wait_for(task, 5)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_limiter_counts_equal_open_permits(clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    tenants = [
        Tenant(name=name, weight=rng.choice([0.5, 1, 3]), max_concurrency=rng.choice([None, 5])) for name in "abc"
    ]
    limiter = RequestLimiter(rng.choice([3, 7, 20]), clock=clock)
    limiter.change(tuple(tenants))
    places = []
    refusals = []
    for _ in range(500):
        clock.now += rng.random()
        if places and rng.random() < 0.45:
            places.pop(rng.randrange(len(places))).release()
            continue
        before = limiter.streams.num_held
        try:
            places.append(limiter.enter(rng.choice(tenants), rng.randint(1, 3)))
        except QueueFullError as error:
            refusals.append((limiter.streams.num_held == before, error.retry_after_s))
    per_tenant = Counter()
    for place in places:
        per_tenant[place.tenant.name] += place.num_streams
    assert limiter.streams.num_held == sum(per_tenant.values())
    assert all(limiter.streams.held_by(tenant) == per_tenant[tenant.name] for tenant in tenants)
    assert limiter.streams.num_free >= 0
    assert refusals
    assert all(is_unchanged and 0 < seconds <= 60 for is_unchanged, seconds in refusals)
    for place in places:
        place.release()
    assert limiter.streams.num_held == 0


@pytest.mark.parametrize("per_minute", [1, 30, 60, 600])
def test_bucket_capacity_is_one_minute_of_its_rate(per_minute: float) -> None:
    bucket = Bucket(per_minute, now=100.0)
    bucket.take(per_minute, 100.0)
    assert bucket.wait_s(per_minute, 100.0) == pytest.approx(60.0)
    assert bucket.wait_s(per_minute, 115.0) == pytest.approx(45.0)
    assert bucket.wait_s(per_minute / 2, 130.0) == 0
    bucket.take(per_minute / 2, 130.0)
    assert bucket.wait_s(per_minute, 10_000.0) == 0
    bucket.take(per_minute, 10_000.0)
    assert bucket.wait_s(per_minute, 10_000.0) == pytest.approx(60.0)


def test_key_without_rates_is_never_limited(clock: Clock) -> None:
    limiter = RequestLimiter(None, clock=clock)
    tenant = Tenant(name="a")
    for _ in range(100):
        limiter.begin(tenant)
        limiter.charge(tenant, 10**9)
    limiter.enter(tenant, 1)


def test_begin_charges_request_rate_only_if_stream_is_free(clock: Clock) -> None:
    limiter = RequestLimiter(2, clock=clock)
    tenant = Tenant(name="a", requests_per_minute=2)
    held = limiter.enter(EVERYBODY, 2)
    with pytest.raises(QueueFullError, match="2 answers are open, and this request asks for 1"):
        limiter.begin(tenant)  # and no rate is charged
    held.release()
    limiter.begin(tenant)
    limiter.begin(tenant)
    with pytest.raises(RateLimitError) as error:
        limiter.begin(tenant)
    assert error.value.retry_after_s == pytest.approx(30.0)


def test_reload_adds_and_removes_rates_of_key(clock: Clock) -> None:
    limiter = RequestLimiter(None, clock=clock)
    limiter.change((Tenant(name="a"),))
    new = Tenant(name="a", requests_per_minute=1, tokens_per_minute=1)
    limiter.begin(new)
    limiter.change((new,))
    limiter.begin(new)
    with pytest.raises(RateLimitError):
        limiter.begin(new)
    limiter.change((Tenant(name="a"),))
    limiter.begin(Tenant(name="a"))


@pytest.mark.parametrize(("num_tenants", "is_shared"), [(0, False), (1, False), (2, True), (3, True)])
def test_pools_are_shared_only_with_several_keys(clock: Clock, num_tenants: int, is_shared: bool) -> None:
    limiter = RequestLimiter(10, 10, 10, clock=clock)
    limiter.change(tuple(Tenant(name=str(index)) for index in range(num_tenants)))
    pools = (limiter.streams, limiter.waiting_tokens, limiter.body_bytes)
    assert [pool.is_shared for pool in pools] == [is_shared] * 3


def test_reload_admits_waiters_that_fit_new_shares() -> None:
    async def run() -> None:
        flood = Tenant(name="flood")
        waiting = Waiting(flood, Tenant(name="other"))
        first, second = await waiting.begin(flood), await waiting.begin(flood)
        await first.hold_tokens(500)
        task = asyncio.create_task(second.hold_tokens(400))
        await waiting.settle()
        assert not task.done()
        waiting.limiter.change((flood,))
        await waiting.settle()
        assert task.done()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("endings", "num_ahead", "seconds"),
    [
        ([], 10, 1.0),
        ([(0.0, 1)], 10, 60.0),
        ([(0.0, 1), (0.0, 5)], 10, 60.0),
        ([(-10.0, 9), (0.0, 5)], 10, 20.0),
        ([(-10.0, 9), (-5.0, 1), (0.0, 4)], 10, 20.0),
        ([(-10.0, 9), (0.0, 100)], 10, 1.0),
        ([(-10.0, 9), (0.0, 1)], 10, 60.0),
        ([(-60.0, 9), (0.0, 60)], 7, 7.0),
        ([(-61.0, 9), (0.0, 60)], 7, 60.0),
        ([(-10.0, 1), (0.0, 3)], 1, 4.0),
    ],
)
def test_retry_after_uses_endings_of_last_minute(
    clock: Clock, endings: list[tuple[float, int]], num_ahead: int, seconds: float
) -> None:
    """endings: (time in seconds, number of streams). The first one only starts the counting."""
    limiter = RequestLimiter(None, clock=clock)
    now = clock.now
    for moment, num_streams in endings:
        clock.now = now + moment
        place = limiter.enter(EVERYBODY, num_streams)
        place.is_in = True
        place.release()
    assert limiter._soon(now, num_ahead) == seconds


def test_drain_rate_uses_only_last_64_endings(clock: Clock) -> None:
    limiter = RequestLimiter(None, clock=clock)
    for _ in range(100):
        clock.now += 0.5
        place = limiter.enter(EVERYBODY, 1)
        place.is_in = True
        place.release()
    assert len(limiter._endings) == 64
    assert limiter._soon(clock.now, 10) == 5.0


def test_retry_after_counts_endings_that_request_needs(clock: Clock) -> None:
    """The wait is for as many endings as the request needs.

    These are: the places that the key lacks at its own limit; all open answers if the server is full; the key's own
    open answers if the key exceeds its share.
    """
    limiter = RequestLimiter(10, 1000, clock=clock)
    asked: list[int] = []
    limiter._soon = lambda _, num_ahead: asked.append(num_ahead) or 7.0  # type: ignore[assignment]
    few, flood = Tenant(name="few", max_concurrency=2), Tenant(name="flood")
    limiter.change((few, flood))
    limiter.enter(few, 2)
    limiter.enter(flood, 4)
    with pytest.raises(RateLimitError, match="has 2 open answers, and this request asks for 1; its limit is 2"):
        limiter.enter(few, 1)
    with pytest.raises(QueueFullError, match="the limit is 10") as error:
        limiter.enter(flood, 5)
    assert error.value.retry_after_s == 7.0
    with pytest.raises(QueueFullError, match="4 open answers and may not take more of the 4 free places"):
        limiter.enter(flood, 1)
    assert asked == [1, 6, 4]


def test_overtaking_of_waiter_is_bounded_by_tenant_weights() -> None:
    """The overtaking units count by weight: half a unit for a tenant of weight 2, one for weight 1."""

    async def run() -> None:
        heavy, light = Tenant(name="heavy", weight=2.0), Tenant(name="light", weight=0.5)
        pool = Pool(100)
        line = WaitingLine(pool)
        pool.take(EVERYBODY, 60)
        waits = asyncio.ensure_future(line.take(light, 50))
        await asyncio.sleep(0)
        (head,) = line._first_waiters()
        assert (head.tenant, head.amount, head.number, head.passed) == (light, 50, 0, 0.0)
        assert line.take_now(heavy, 40)
        assert head.passed == 10.0
        line.give_back(heavy, 40)
        assert line.take_now(EVERYBODY, 40)
        assert (head.passed, head.is_next) == (30.0, False)
        line.give_back(EVERYBODY, 40)
        assert line.take_now(EVERYBODY, 40)
        assert (head.passed, head.is_next) == (50.0, True)
        line.give_back(EVERYBODY, 40)
        assert not line.take_now(EVERYBODY, 1), "its room is kept now"
        assert not line.take_now(light, 1), "nor does its own key pass"
        line.give_back(EVERYBODY, 60)
        await waits
        assert pool.held_by(light) == 50
        assert line._first_waiters() == []

    asyncio.run(run())


def test_line_serves_tenants_in_order_of_their_first_waiter() -> None:
    async def run() -> None:
        pool = Pool(10)
        line = WaitingLine(pool)
        pool.take(EVERYBODY, 10)
        served: list[str] = []

        async def take(tenant: Tenant) -> None:
            await line.take(tenant, 10)
            served.append(tenant.name)
            line.give_back(tenant, 10)

        names = ["c", "a", "b"]
        # The first waiter of "z" is cancelled. So the key's place in the line is that of its second waiter.
        first = asyncio.ensure_future(line.take(Tenant(name="z"), 10))
        await asyncio.sleep(0)
        tasks = [asyncio.ensure_future(take(Tenant(name=name))) for name in [*names, "z"]]
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert [head.tenant.name for head in line._first_waiters()] == [*names, "z"]
        line.give_back(EVERYBODY, 10)
        await asyncio.gather(*tasks)
        assert served == [*names, "z"]

    asyncio.run(run())
