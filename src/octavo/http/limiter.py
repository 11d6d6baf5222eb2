"""Limits on requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from octavo.errors import QueueFullError, RequestError
from octavo.http.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.http.tenants import Tenant

_MINUTE_S = 60.0
_LONGEST_RETRY_S = 60.0
_NUM_ENDINGS = 64


class Bucket:
    """A token bucket. It gains `per_minute` units a minute, and holds at most `per_minute` units.

    The level may be negative, because units may be taken after use.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._time = per_minute, now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` units are available or the bucket is full."""
        missing = min(amount, self.per_minute) - self._fill(now)
        return max(missing, 0.0) * _MINUTE_S / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Take units, even if fewer are available."""
        self._level = self._fill(now) - amount

    def _fill(self, now: float) -> float:
        self._level = min(self._level + (now - self._time) * self.per_minute / _MINUTE_S, self.per_minute)
        self._time = now
        return self._level


class Pool:
    """Counts how many units of a resource each tenant holds.

    If `is_shared`, a tenant that holds units may hold at most its weight times the number of free units. So no tenant
    can exhaust the pool. Source: Choudhury and Hahne, "Dynamic queue length thresholds in a shared-memory packet
    switch", 1998.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.num_held = 0
        self.is_shared = False
        self._held: Counter[str] = Counter()
        self._change = asyncio.Event()

    @property
    def num_free(self) -> float:
        """The free units."""
        return math.inf if self.limit is None else self.limit - self.num_held

    def held_by(self, tenant: Tenant) -> int:
        """Return how many units a tenant holds."""
        return self._held[tenant.name]

    def available(self, tenant: Tenant, *, besides: int = 0) -> float:
        """Return how many units a tenant may take. Negative if the tenant holds too many.

        besides: Number of held units to ignore.
        """
        free, held = self.num_free, self.held_by(tenant) - besides
        return min(free, tenant.weight * free - held) if self.is_shared and held else free

    def share(self, tenant: Tenant) -> float:
        """Return how many units a request that can be served in parts may take.

        If `is_shared`, the tenant then holds at most its weight times the number of units that remain free.
        """
        held = self.held_by(tenant) if self.is_shared else 0
        return min((tenant.weight * self.num_free - held) / (1 + tenant.weight), self.num_free)

    def take(self, tenant: Tenant, amount: int) -> None:
        """Take units unchecked."""
        self._held[tenant.name] += amount
        self.num_held += amount

    def give_back(self, tenant: Tenant, amount: int) -> None:
        """Release units."""
        if not amount:
            return
        self._held[tenant.name] -= amount
        if not self._held[tenant.name]:
            del self._held[tenant.name]
        self.num_held -= amount
        self._change.set()
        self._change = asyncio.Event()

    async def change(self) -> None:
        """Wait until units are released."""
        await self._change.wait()


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for units.

    passed: Units that later requests took while this request was its tenant's first waiter. A unit of another tenant
    counts as this tenant's weight divided by the other's weight.
    """

    tenant: Tenant
    amount: int
    number: int
    granted: asyncio.Future[None]
    passed: float = 0.0

    @property
    def is_next(self) -> bool:
        """True if later requests took at least `amount` units. Free units are then reserved for this request."""
        return self.passed >= self.amount


class WaitingLine:
    """Requests that wait for units of a pool. Requests of one tenant wait in order of arrival.

    Later requests may overtake a tenant's first waiter until they have taken as many units as the waiter needs. Then:

    - No request of the same tenant overtakes the waiter.
    - If the tenant holds no units, other tenants cannot take the units that the waiter needs.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiters: dict[str, deque[_Waiter]] = {}
        self._num_waited = 0

    def take_now(self, tenant: Tenant, amount: int) -> bool:
        """Take units, or return False if the request would have to wait."""
        of_tenant = self._waiters.get(tenant.name)
        if (of_tenant and of_tenant[0].is_next) or not self._may_take(tenant, amount, self._num_waited):
            return False
        self._take(tenant, amount, self._num_waited)
        return True

    async def take(self, tenant: Tenant, amount: int) -> None:
        """Wait for units and take them. A cancelled call takes nothing."""
        waiter = _Waiter(tenant, amount, self._num_waited, asyncio.get_running_loop().create_future())
        self._num_waited += 1
        self._waiters.setdefault(tenant.name, deque()).append(waiter)
        self.serve()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._remove(waiter)
                self.serve()
            else:
                self.give_back(tenant, amount)
            raise

    def give_back(self, tenant: Tenant, amount: int) -> None:
        """Release units."""
        self._pool.give_back(tenant, amount)
        self.serve()

    def serve(self) -> None:
        """Grant free units."""
        while (waiter := next(filter(self._is_served, self._first_waiters()), None)) is not None:
            self._remove(waiter)
            self._take(waiter.tenant, waiter.amount, waiter.number)
            waiter.granted.set_result(None)

    def _first_waiters(self) -> list[_Waiter]:
        return sorted((waiters[0] for waiters in self._waiters.values()), key=lambda waiter: waiter.number)

    def _is_served(self, waiter: _Waiter) -> bool:
        return not waiter.granted.done() and self._may_take(waiter.tenant, waiter.amount, waiter.number)

    def _may_take(self, tenant: Tenant, amount: int, number: int) -> bool:
        if amount > self._pool.available(tenant):
            return False
        num_remaining = self._pool.num_free - amount
        return not any(
            head.is_next and num_remaining < head.amount and not self._pool.held_by(head.tenant)
            for head in self._passed(number)
            if head.tenant.name != tenant.name
        )

    def _take(self, tenant: Tenant, amount: int, number: int) -> None:
        self._pool.take(tenant, amount)
        for head in self._passed(number):
            head.passed += amount * head.tenant.weight / tenant.weight

    def _passed(self, number: int) -> list[_Waiter]:
        return [waiters[0] for waiters in self._waiters.values() if waiters[0].number < number]

    def _remove(self, waiter: _Waiter) -> None:
        waiters = self._waiters[waiter.tenant.name]
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[waiter.tenant.name]


@dataclass(slots=True)
class _Account:
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(slots=True)
class Permit:
    """The output streams that one HTTP request may use.

    is_kept: True if the streamed answer, not the `with` block, releases the permit.
    is_in: True after the first prompt was admitted.
    """

    tenant: Tenant
    num_streams: int
    _limiter: RequestLimiter
    is_kept: bool = False
    is_in: bool = False
    _is_released: bool = False
    _queue: asyncio.Lock = field(default_factory=asyncio.Lock)  # admits one prompt at a time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_kept:
            self.release()

    async def hold_tokens(self, num_tokens: int) -> None:
        """Take tokens for a waiting prompt.

        If too few tokens are free, a request's first prompt raises `QueueFullError`, and its further prompts wait.
        Raises `RequestError` for a prompt that can never be admitted.
        """
        async with self._queue:
            await self._limiter.hold_tokens(self, num_tokens)
            self.is_in = True

    def release_tokens(self, num_tokens: int) -> None:
        """Release the tokens."""
        if num_tokens:
            self._limiter.line.give_back(self.tenant, num_tokens)

    def charge(self, num_tokens: int) -> None:
        """Charge the tenant."""
        self._limiter.charge(self.tenant, num_tokens)

    def release(self) -> None:
        """Release the streams. Later calls do nothing."""
        if not self._is_released:
            self._is_released = True
            self._limiter.release(self)


class RequestLimiter:
    """Limits the open requests of all tenants. Used on one event loop only.

    Methods raise `RequestError` if a request can never be served, and `QueueFullError` if it may be served later.

    waiting_tokens: Counts the prompt tokens of requests without output yet.
    """

    def __init__(
        self,
        max_open: int | None,
        max_num_waiting_tokens: int | None = None,
        max_body_bytes: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.streams, self.waiting_tokens, self.body_bytes = map(
            Pool, (max_open, max_num_waiting_tokens, max_body_bytes)
        )
        self.line = WaitingLine(self.waiting_tokens)
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._endings: deque[tuple[float, int]] = deque(maxlen=_NUM_ENDINGS)  # (time, streams)
        self._has_ended = False

    def begin(self, tenant: Tenant) -> None:
        """Check the limits for a new request, and count the request."""
        account = self._account(tenant)  # first, because a new account reads the clock
        now = self._clock()
        self._check_rate(account.requests, 1.0, "requests", now)
        self._check(tenant, 1, now)
        if account.requests is not None:
            account.requests.take(1, now)

    def enter(self, tenant: Tenant, num_streams: int, *, at_least: int | None = None) -> Permit:
        """Take output streams for a request. Call `begin` before.

        at_least: Number of streams of each part, if the request can be served in parts. The permit has streams for one
        part or more, within the tenant's limit and share. If None, the permit has all `num_streams`.
        """
        least = num_streams if at_least is None else at_least
        self._check(tenant, least, self._clock())
        of_tenant = (
            math.inf if tenant.max_concurrency is None else tenant.max_concurrency - self.streams.held_by(tenant)
        )
        most = min(num_streams, of_tenant, self.streams.share(tenant))
        num_streams = max(int(most // least), 1) * least
        self.streams.take(tenant, num_streams)
        return Permit(tenant, num_streams, self)

    def release(self, place: Permit) -> None:
        """Release a permit."""
        self.streams.give_back(place.tenant, place.num_streams)
        if place.is_in:  # only admitted requests show how fast answers end
            self._endings.append((self._clock(), place.num_streams))
            self._has_ended = True

    async def hold_tokens(self, place: Permit, num_tokens: int) -> None:
        """See `Permit.hold_tokens`."""
        pool = self.waiting_tokens
        if pool.limit is not None and num_tokens > pool.limit:
            raise RequestError(
                f"the prompt, with a prediction, has {num_tokens} tokens; the limit of waiting tokens is {pool.limit}",
                parameter="prompt",
            )
        if place.is_in:
            await self.line.take(place.tenant, num_tokens)
        elif not self.line.take_now(place.tenant, num_tokens):
            why = "; the free part is reserved for other keys" if num_tokens <= pool.num_free else ""
            raise QueueFullError(
                f"the queue is full: {pool.num_held} prompt tokens are waiting, and this request has {num_tokens}; the "
                f"limit is {pool.limit}{why}",
                retry_after_s=self._soon(self._clock(), self.streams.num_held),
            )

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Charge the tenant."""
        tokens = self._account(tenant).tokens
        if tokens is not None:
            tokens.take(num_tokens, self._clock())

    def change(self, tenants: tuple[Tenant, ...]) -> None:
        """Set the tenants. A bucket keeps its level if the rate is unchanged."""
        for pool in (self.streams, self.waiting_tokens, self.body_bytes):
            pool.is_shared = len(tenants) > 1
        self.line.serve()
        for tenant in tenants:
            self._renew(self._account(tenant), tenant)

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            account = self._accounts[tenant.name] = _Account()
            self._renew(account, tenant)
        return account

    def _renew(self, account: _Account, tenant: Tenant) -> None:
        account.requests = self._bucket(account.requests, tenant.requests_per_minute)
        account.tokens = self._bucket(account.tokens, tenant.tokens_per_minute)

    def _bucket(self, present: Bucket | None, per_minute: float | None) -> Bucket | None:
        if per_minute is None:
            return None
        return present if present and present.per_minute == per_minute else Bucket(per_minute, self._clock())

    def _check(self, tenant: Tenant, num_streams: int, now: float) -> None:
        for limit, whose in ((tenant.max_concurrency, "this key"), (self.streams.limit, "this server")):
            if limit is not None and num_streams > limit:
                raise RequestError(f"n is {num_streams}, but {whose} allows {limit} open answers", parameter="n")
        held, limit = self.streams.held_by(tenant), tenant.max_concurrency
        if limit is not None and held + num_streams > limit:
            raise RateLimitError(
                f"this key has {held} open answers, and this request asks for {num_streams}; its limit is {limit}",
                retry_after_s=self._soon(now, 1),
            )
        self._check_rate(self._account(tenant).tokens, 0.0, "tokens", now)
        free = self.streams.num_free
        if num_streams > free:
            raise QueueFullError(
                f"the queue is full: {self.streams.num_held} answers are open, and this request asks for "
                f"{num_streams}; the limit is {self.streams.limit}",
                retry_after_s=self._soon(now, self.streams.num_held),
            )
        if num_streams > self.streams.available(tenant):
            raise QueueFullError(
                f"this key has {held} open answers and may not take more of the {free} free places",
                retry_after_s=self._soon(now, held),
            )

    def _check_rate(self, bucket: Bucket | None, amount: float, unit: str, now: float) -> None:
        if bucket is not None and (wait := bucket.wait_s(amount, now)) > 0:
            raise RateLimitError(f"this key has used its {bucket.per_minute:g} {unit} per minute", retry_after_s=wait)

    def _soon(self, now: float, num_ahead: int) -> float:
        while self._endings and self._endings[0][0] < now - _MINUTE_S:
            self._endings.popleft()
        if len(self._endings) < 2 or now <= self._endings[0][0]:
            return _LONGEST_RETRY_S if self._has_ended else 1.0
        (first, _), *later = self._endings
        rate = sum(num_streams for _, num_streams in later) / (now - first)
        return min(max(math.ceil(num_ahead / rate), 1.0), _LONGEST_RETRY_S)
