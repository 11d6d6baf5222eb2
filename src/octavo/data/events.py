"""Every transition as a typed event with request id, step and time. All that octavo says of itself is read from here.

The core writes events into an `EventSink`; metrics, traces, the flight recorder and `explain` are sinks. Nothing else
counts anything, so nothing is counted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping  # noqa: TC003 - msgspec reads these types where events cross to another process
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo.data.kv_tiers import TierMove  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Iterable


class WaitReason(StrEnum):
    """Why the request at the head of the queue could not start in a step."""

    NO_SEAT = "max_num_seqs requests run already"
    NO_BUDGET = "the step's tokens were given away"
    NO_BLOCKS = "too few free blocks"
    NO_RESERVATION = "too few tokens left to reserve"
    GATHERING = "it waits for others to start with"
    PREEMPTING = "somebody was preempted in this step"


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
    """It was accepted and waits behind `num_ahead` others. arrival_time: when it came, before it could be taken in."""

    num_prompt_tokens: int
    priority: int
    tenant: str
    num_ahead: int
    arrival_time: float


@dataclass(frozen=True, slots=True)
class RequestBlocked(RequestEvent):
    """It is at the head of the queue and cannot start; told once, until the reason changes."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class RequestParked(RequestEvent):
    """It left the queue to wait for a block that `owner` is computing right now; None: to hear what a store has."""

    owner: str | None


@dataclass(frozen=True, slots=True)
class RequestUnparked(RequestEvent):
    """It is back at its place in the queue; timed_out: the block did not come in time."""

    timed_out: bool


@dataclass(frozen=True, slots=True)
class RequestStalled(RequestEvent):
    """It runs but got nothing: there are no blocks, and nobody may be preempted for it."""


@dataclass(frozen=True, slots=True)
class RequestOutranked(RequestEvent):
    """Its prompt is half computed and got nothing in this step: it gave way to more important newcomers."""


@dataclass(frozen=True, slots=True)
class KVLoadStarted(RequestEvent):
    """KV of `num_tokens` is being fetched for it from outside."""

    transfer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVLoadEnded(RequestEvent):
    """The transfer is over: `outcome` is done, failed, expired or cancelled.

    num_tokens: whose KV came. seconds: from the order to here. computing_s: what computing them would have taken, as
    measured lately; 0 where it is not known. store: what all tiers together are called; moves: which of them gave how
    many blocks. resumed: whether the request had run before.
    """

    transfer_id: int
    outcome: str
    num_tokens: int
    seconds: float
    computing_s: float
    store: str
    moves: tuple[TierMove, ...]
    resumed: bool


@dataclass(frozen=True, slots=True)
class KVSaveStarted(Event):
    """So many blocks that can be shared by now are being copied to the store outside."""

    transfer_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVSaveEnded(Event):
    """So many of its blocks are in the store: `outcome` is done, failed or expired.

    moves: which of its tiers took how many; one that had a block before did not.
    """

    transfer_id: int
    num_blocks: int
    outcome: str
    moves: tuple[TierMove, ...]


@dataclass(frozen=True, slots=True)
class KVSavesDropped(RequestEvent):
    """The request ended, and `num_blocks` that the store wants are not saved: too many other saves are under way."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreBlocksEvicted(Event):
    """So many blocks made way for others in a tier of the store; told with the next transfer that ends."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenPostponed(RequestEvent):
    """It got no token of a step that others got theirs of: what the choice depends on was still computed."""


@dataclass(frozen=True, slots=True)
class DraftsVerified(RequestEvent):
    """Guessed tokens were checked, and so many of them were right."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftsTimed(Event):
    """What a step with drafts took, guessing them included, and what as many tokens take without; in seconds.

    Told of steps in which nothing but answers went on, once it was measured what those without drafts take.
    """

    seconds: float
    seconds_without: float


@dataclass(frozen=True, slots=True)
class RequestAdmitted(RequestEvent):
    """It left the queue and runs. num_cached_tokens were found in the prefix cache."""

    num_cached_tokens: int
    num_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted(RequestEvent):
    """Its blocks were taken for `beneficiary`.

    Its num_lost_tokens were swapped out, or are to be computed again unless still cached. policy: under which it was
    the least important; empty where an operator asked for it.
    """

    beneficiary: str
    num_lost_tokens: int
    swapped: bool
    policy: str


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestEvent):
    """It ended; `reason` is that of RequestStatus. Emitted exactly once for each request that was queued."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQueried(RequestEvent):
    """A request looked its tokens up when it was first admitted: counted once per request, in tokens.

    num_hit_tokens: found on the device and in host memory; num_host_tokens: in host memory. miss: why it found no more,
    None when it found all there was; position: the first token that differs, where known.
    """

    num_query_tokens: int
    num_hit_tokens: int
    num_host_tokens: int
    miss: str | None
    position: int | None


@dataclass(frozen=True, slots=True)
class BlockCached(Event):
    """A full block can be shared from now on."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """A cached block was given to new content."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockOffloaded(Event):
    """The content of a block that is evicted, from any of its KV groups, goes to host memory, where it can be found.

    groups: KV groups whose blocks with this content are copied, the first one always.
    """

    block_id: int
    host_block_id: int
    groups: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class HostBlockEvicted(Event):
    """What could be found in a block of host memory made room for other content."""

    host_block_id: int


@dataclass(frozen=True, slots=True)
class HostBlocksFound(RequestEvent):
    """It starts or goes on with KV of `num_tokens` that comes back from host memory, in so many blocks.

    They are copied in this step. computing_s: the time that computing them would have taken, as measured lately; 0 if
    it is not known. num_copied: for each KV group how many of its blocks are copied.
    """

    num_blocks: int
    num_tokens: int
    computing_s: float
    num_copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostBlocksCopied(Event):
    """Blocks were copied to host memory and back when the step began, those of preempted requests included."""

    saved: TierMove
    loaded: TierMove


@dataclass(frozen=True, slots=True)
class StepScheduled(Event):
    """A step that computes something was decided: who gets how many tokens of it, in the order of the batch.

    prefill_limit: number of prompt tokens that a step with decoding requests may compute; 0 for no limit.
    bounded_usage: share of the blocks that are held in the fullest KV group but the first; 0 if there is no other.
    """

    num_scheduled_tokens: Mapping[str, int]
    num_tokens: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefill_limit: int = 0
    bounded_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class StepCompleted(Event):
    """Its result is taken in: so many new tokens for each request that has news."""

    num_new_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """The worker failed in this step; its requests end with an error each."""

    message: str


@dataclass(frozen=True, slots=True)
class BlocksQuarantined(Event):
    """The books of these blocks are wrong: they are never given out again, and the engine goes on without them."""

    block_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StaleResultDropped(Event):
    """A result came late, twice or for a step nobody asked for, and changed nothing."""

    detail: str


# All that can be emitted. (`Event.__subclasses__()` would also have the classes that `slots=True` made anew.)
EVENT_TYPES: tuple[type[Event], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in {Event, RequestEvent}
)
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
    """The running totals that `Scheduler.get_stats` reports, kept from the stream alone.

    num_scheduled: how often a request got tokens of a step.
    """

    def __init__(self) -> None:
        self.count: Counter[type[Event]] = Counter()
        self.num_scheduled = 0
        self.num_tokens_scheduled = 0
        self.num_tokens_generated = 0
        self.num_swapped = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def emit(self, event: Event) -> None:
        """Count it."""
        self.count[type(event)] += 1
        if isinstance(event, StepScheduled):
            self.num_scheduled += len(event.num_scheduled_tokens)
            self.num_tokens_scheduled += event.num_tokens
        elif isinstance(event, StepCompleted):
            self.num_tokens_generated += sum(event.num_new_tokens.values())
        elif isinstance(event, RequestPreempted):
            self.num_swapped += event.swapped
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
