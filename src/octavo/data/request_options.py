"""Options of a request, except sampling parameters."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, TypedDict

from octavo.data.kv_transfer_params import KVTransferParams  # noqa: TC001 - msgspec reads this type
from octavo.errors import RequestError
from octavo.sampling_params import plain_number

MAX_CACHE_SALT_CHARS = 1024


class OptionFields(TypedDict, total=False):
    """`RequestOptions` as keyword arguments."""

    priority: int
    cache_salt: str | None
    tenant: str
    tenant_weight: float
    timeout_s: float | None
    kv_transfer_params: KVTransferParams | None
    cache_points: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options for scheduling and sharing KV. They never change a generated token.

    Numbers may be numpy numbers. Raises `RequestError` with the name of an invalid field.

    Attributes:
        priority: Integer of 64 bits. Under the priority policy, lower numbers come first.
        cache_salt: Only requests with the same salt share cached KV.
        tenant: Name of a tenant. The fair policy divides service between tenants.
        tenant_weight: Number above 0. Under the fair policy, weight 2 gets twice the share of weight 1.
        timeout_s: Seconds after arrival at which the request ends with an error, or None for no limit.
        kv_transfer_params: None if this engine computes both prompt and answer.
        cache_points: Numbers of prompt tokens after which later requests probably differ: integers of at least 0, in
            any order. Models with recurrent layers save their states there. Numbers beyond the prompt are ignored.
    """

    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    tenant_weight: float = 1.0
    timeout_s: float | None = None
    kv_transfer_params: KVTransferParams | None = None
    cache_points: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str):
            raise RequestError(f"tenant must be a text, got {self.tenant!r:.100}", parameter="tenant")
        check_salt(self.cache_salt)
        if self.cache_points != ():
            object.__setattr__(self, "cache_points", _whole_points(self.cache_points))
        if type(self.priority) is not int or not -(2**63) <= self.priority < 2**63:
            object.__setattr__(self, "priority", _whole_priority(self.priority))
        for name, what in (("tenant_weight", "a number"), ("timeout_s", "a number of seconds")):
            value = plain_number(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is None and name == "timeout_s":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise RequestError(f"{name} must be {what} above 0, got {value!r}", parameter=name)


def check_salt(salt: object) -> None:
    """Raise `RequestError` unless the salt is None, or 1 to 1024 characters that UTF-8 can encode."""
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_CACHE_SALT_CHARS:
        limit = MAX_CACHE_SALT_CHARS
        raise RequestError(f"cache_salt must be a text of 1 to {limit} characters", parameter="cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError:
        raise RequestError("cache_salt is not valid Unicode", parameter="cache_salt") from None


def _whole_priority(priority: Any) -> int:
    try:
        value = operator.index(priority)
    except TypeError:
        value = 2**63
    if not -(2**63) <= value < 2**63:
        raise RequestError(f"priority must be an integer of 64 bits, got {priority!r:.100}", parameter="priority")
    return value


def _whole_points(points: Any) -> tuple[int, ...]:
    try:
        values = tuple(map(operator.index, points)) if isinstance(points, (list, tuple)) else (-1,)
    except TypeError:
        values = (-1,)
    if min(values, default=0) < 0 or any(isinstance(point, bool) for point in points):
        message = f"cache_points must be a tuple of integers of at least 0, got {points!r:.100}"
        raise RequestError(message, parameter="cache_points")
    return values


NO_OPTIONS = RequestOptions()
