"""Every transition as a typed event with request id, step and time. All that octavo says of itself is read from here.

The core writes events into an `EventSink`; metrics, traces, the flight recorder and `explain` are sinks. Nothing else
counts anything, so nothing is counted twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a step. time: seconds of the engine's clock."""

    step: int
    time: float


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """Something that happened to one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestQueued(RequestEvent):
    """It was accepted and waits."""

    num_prompt_tokens: int
    priority: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted(RequestEvent):
    """It left the queue and runs. num_cached_tokens were found in the prefix cache."""

    num_cached_tokens: int
    num_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class TokensScheduled(RequestEvent):
    """It got `num_tokens` of this step, from position `num_computed_tokens` on."""

    num_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class TokensGenerated(RequestEvent):
    """It produced this many tokens; the first ones when `is_first`."""

    num_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted(RequestEvent):
    """Its blocks were taken for `beneficiary`; num_lost_tokens are to be computed again unless still cached."""

    beneficiary: str
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestEvent):
    """It ended; `reason` is that of RequestStatus. Emitted exactly once for each request that was queued."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQueried(RequestEvent):
    """A request looked its tokens up when it was first admitted: counted once per request, in tokens."""

    num_query_tokens: int
    num_hit_tokens: int


@dataclass(frozen=True, slots=True)
class BlockCached(Event):
    """A full block can be shared from now on."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """A cached block was given to new content."""

    block_id: int


@dataclass(frozen=True, slots=True)
class StepScheduled(Event):
    """A step that computes something was decided."""

    num_requests: int
    num_tokens: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """The worker failed in this step; its requests end with an error each."""

    message: str


@dataclass(frozen=True, slots=True)
class StaleResultDropped(Event):
    """A result came late, twice or for a step nobody asked for, and changed nothing."""

    detail: str


EventT = TypeVar("EventT", bound=Event)


class EventSink(Protocol):
    """Anything that reads the stream."""

    def emit(self, event: Event) -> None:
        """Take one event; must not raise and must not call back."""
        ...


class NullSink:
    """Reads nothing."""

    def emit(self, event: Event) -> None:
        """Do nothing."""


class EventLog:
    """Keeps every event, for tests and tools."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append it."""
        self.events.append(event)

    def of_type(self, kind: type[EventT]) -> list[EventT]:
        """All events of one type, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class EventCounters:
    """The running totals that `Scheduler.get_stats` reports, kept from the stream alone."""

    def __init__(self) -> None:
        self.count: Counter[type[Event]] = Counter()
        self.tokens: Counter[type[Event]] = Counter()
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def emit(self, event: Event) -> None:
        """Count it."""
        kind = type(event)
        self.count[kind] += 1
        if isinstance(event, (TokensScheduled, TokensGenerated)):
            self.tokens[kind] += event.num_tokens
        elif isinstance(event, PrefixCacheQueried):
            self.prefix_query_tokens += event.num_query_tokens
            self.prefix_hit_tokens += event.num_hit_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of looked-up tokens that were found, each admission counted once."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


class FanOut:
    """Hands every event to several sinks, in order."""

    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass it on."""
        for sink in self._sinks:
            sink.emit(event)
