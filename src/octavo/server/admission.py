"""How much is taken in: who is let through at once, and when to come back who is not.

The place of a request is taken before anything is done for it, and given back when its answer is over.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from octavo.errors import QueueFullError
from octavo.server.errors import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from octavo.server.tenants import Tenant

_MINUTE_S = 60.0
_LONGEST_RETRY_S = 60.0
_NUM_ENDINGS = 64


class Bucket:
    """So many units a minute, and at most a minute's worth at once. It may go into debt, for what is counted later."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._time = per_minute, now

    def wait_s(self, amount: float, now: float) -> float:
        """Return how long until `amount` can be taken, 0 for now; more than a minute's worth waits for a full one."""
        missing = min(amount, self.per_minute) - self._fill(now)
        return max(missing, 0.0) * _MINUTE_S / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Take it, whatever is there."""
        self._level = self._fill(now) - amount

    def _fill(self, now: float) -> float:
        self._level = min(self._level + (now - self._time) * self.per_minute / _MINUTE_S, self.per_minute)
        self._time = now
        return self._level


@dataclass(slots=True)
class _Account:
    """What a tenant has in use."""

    requests: Bucket | None
    tokens: Bucket | None
    num_open: int = 0
    num_waiting_tokens: int = 0


@dataclass(slots=True)
class Place:
    """The place of one HTTP request: so many output streams of a tenant. Given back once, however often it is left."""

    tenant: Tenant
    num_streams: int
    _admission: Admission
    is_kept: bool = False
    num_waiting_tokens: int = 0
    _is_left: bool = False

    def __enter__(self) -> Self:
        """Give it back when the block ends, unless a stream keeps it (`is_kept`), whose duty it is then."""
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_kept:
            self.leave()

    def hold_tokens(self, num_tokens: int) -> None:
        """Take room for tokens that wait, until `start`. Raises `QueueFullError` where there is none."""
        self._admission.hold_tokens(self, num_tokens)
        self.num_waiting_tokens += num_tokens

    def start(self) -> None:
        """Give the room of its prompts back: they do not wait any more."""
        self._admission.release_tokens(self)
        self.num_waiting_tokens = 0

    def charge(self, num_tokens: int) -> None:
        """Count tokens that were read or written for it."""
        self._admission.charge(self.tenant, num_tokens)

    def leave(self) -> None:
        """Give it back."""
        if not self._is_left:
            self._is_left = True
            self.start()
            self._admission.leave(self)


class Admission:
    """Counts what is open; belongs to the event loop.

    max_open: output streams that may run and wait, in all; max_waiting_tokens: tokens of prompts of which nothing is
    generated yet; None for no limit. Where several tenants share the server, one may hold at most its weight times as
    many of either as are free: after Choudhury and Hahne, "Dynamic queue length thresholds in a shared-memory packet
    switch" (1998), so a flood of one always leaves room for the others.
    """

    def __init__(
        self,
        max_open: int | None,
        max_waiting_tokens: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_open, self.max_waiting_tokens = max_open, max_waiting_tokens
        self.num_open = self.num_waiting_tokens = 0
        self.is_shared = False
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._endings: deque[float] = deque(maxlen=_NUM_ENDINGS)
        self._has_ended = False

    def enter(self, tenant: Tenant, num_streams: int) -> Place:
        """Take places, all or none. Raises `RateLimitError` and `QueueFullError`, with the seconds to wait."""
        account = self._account(tenant)  # perhaps a new one, whose times begin now
        now = self._clock()
        self._check(tenant, account, num_streams, now)
        if account.requests is not None:
            account.requests.take(1, now)
        account.num_open += num_streams
        self.num_open += num_streams
        return Place(tenant, num_streams, self)

    def check(self, tenant: Tenant, num_streams: int) -> None:
        """Raise what `enter` would raise now, and take nothing."""
        self._check(tenant, self._account(tenant), num_streams, self._clock())

    def leave(self, place: Place) -> None:
        """Give places back."""
        self._account(place.tenant).num_open -= place.num_streams
        self.num_open -= place.num_streams
        self._endings.append(self._clock())
        self._has_ended = True

    def hold_tokens(self, place: Place, num_tokens: int) -> None:
        """Count tokens that wait. Raises `QueueFullError` for more than there is room for."""
        account, limit = self._account(place.tenant), self.max_waiting_tokens
        if limit is not None:
            free: float = limit - self.num_waiting_tokens
            if self.is_shared and account.num_waiting_tokens:
                free = min(free, place.tenant.weight * free - account.num_waiting_tokens)
            if num_tokens > free:
                raise QueueFullError(
                    f"the queue is full: {self.num_waiting_tokens} tokens of prompts wait, and this request has "
                    f"{num_tokens}; the limit is {limit}",
                    retry_after_s=self._soon(self._clock(), self.num_open),
                )
        account.num_waiting_tokens += num_tokens
        self.num_waiting_tokens += num_tokens

    def release_tokens(self, place: Place) -> None:
        """Count a place's tokens no more."""
        self._account(place.tenant).num_waiting_tokens -= place.num_waiting_tokens
        self.num_waiting_tokens -= place.num_waiting_tokens

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Count a tenant's tokens."""
        tokens = self._account(tenant).tokens
        if tokens is not None:
            tokens.take(num_tokens, self._clock())

    def change(self, tenants: tuple[Tenant, ...]) -> None:
        """Go on with these tenants; what they have open stays counted, their rates begin anew where they changed."""
        self.is_shared = len(tenants) > 1
        for tenant in tenants:
            account = self._account(tenant)
            account.requests = self._bucket(account.requests, tenant.requests_per_minute)
            account.tokens = self._bucket(account.tokens, tenant.tokens_per_minute)

    def _account(self, tenant: Tenant) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            requests, tokens = tenant.requests_per_minute, tenant.tokens_per_minute
            account = _Account(self._bucket(None, requests), self._bucket(None, tokens))
            self._accounts[tenant.name] = account
        return account

    def _bucket(self, present: Bucket | None, per_minute: float | None) -> Bucket | None:
        if per_minute is None:
            return None
        return present if present and present.per_minute == per_minute else Bucket(per_minute, self._clock())

    def _check(self, tenant: Tenant, account: _Account, num_streams: int, now: float) -> None:
        self._check_tenant(tenant, account, num_streams, now)
        self._check_room(tenant, account, num_streams, now)

    def _check_tenant(self, tenant: Tenant, account: _Account, num_streams: int, now: float) -> None:
        limit = tenant.max_concurrency
        if limit is not None and account.num_open + num_streams > limit:
            raise RateLimitError(
                f"this key has {account.num_open} answers open, and this request asks for {num_streams}; its limit is "
                f"{limit} at once",
                retry_after_s=self._soon(now, 1),
            )
        for bucket, amount, unit in ((account.requests, 1.0, "requests"), (account.tokens, 0.0, "tokens")):
            wait = 0.0 if bucket is None else bucket.wait_s(amount, now)
            if bucket is not None and wait > 0:
                raise RateLimitError(
                    f"this key has used up its {bucket.per_minute:g} {unit} a minute", retry_after_s=wait
                )

    def _check_room(self, tenant: Tenant, account: _Account, num_streams: int, now: float) -> None:
        if self.max_open is None:
            return
        free = self.max_open - self.num_open
        if num_streams > free:
            raise QueueFullError(
                f"the queue is full: {self.num_open} answers are open, and this request asks for {num_streams}; the "
                f"limit is {self.max_open}",
                retry_after_s=self._soon(now, self.num_open),
            )
        if self.is_shared and account.num_open and account.num_open + num_streams > tenant.weight * free:
            raise QueueFullError(
                f"this key has {account.num_open} answers open and may not take more of the {free} places that are "
                "left for all",
                retry_after_s=self._soon(now, account.num_open),
            )

    def _soon(self, now: float, num_ahead: int) -> float:
        """Return when so many of what is open will have ended, at the rate of the last minute's endings."""
        while self._endings and self._endings[0] < now - _MINUTE_S:
            self._endings.popleft()
        if len(self._endings) < 2 or now <= self._endings[0]:
            return _LONGEST_RETRY_S if self._has_ended else 1.0
        rate = len(self._endings) / (now - self._endings[0])
        return min(max(math.ceil(num_ahead / rate), 1.0), _LONGEST_RETRY_S)
