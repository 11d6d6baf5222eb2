"""Typed events for every transition of the core.

All figures are counted from events, so nothing is counted twice.
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
    """Why the head of the queue could not start."""

    NO_SEAT = "max_num_seqs requests run already"
    NO_BUDGET = "the step's tokens were given away"
    NO_BLOCKS = "too few free blocks"
    NO_RESERVATION = "too few tokens left to reserve"
    GATHERING = "it waits for others to start with"
    PREEMPTING = "somebody was preempted in this step"


@dataclass(frozen=True, slots=True)
class Event:
    """An event in a step. time: seconds of the engine's clock."""

    step: int
    time: float


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """An event of one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestQueued(RequestEvent):
    """The request waits. arrival_time: at the engine, before the core accepted it."""

    num_prompt_tokens: int
    priority: int
    tenant: str
    num_ahead: int
    arrival_time: float


@dataclass(frozen=True, slots=True)
class RequestBlocked(RequestEvent):
    """The head of the queue cannot start. Emitted again only if the reason changes."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class RequestParked(RequestEvent):
    """The request was deferred: for a block that `owner` computes, or, if None, for a lookup in a store."""

    owner: str | None


@dataclass(frozen=True, slots=True)
class RequestUnparked(RequestEvent):
    """The deferred request is queued again. timed_out: it waited in vain."""

    timed_out: bool


@dataclass(frozen=True, slots=True)
class RequestStalled(RequestEvent):
    """The running request got no tokens, because blocks are lacking."""


@dataclass(frozen=True, slots=True)
class RequestOutranked(RequestEvent):
    """The running prompt got no tokens, because more important requests wait."""


@dataclass(frozen=True, slots=True)
class KVLoadStarted(RequestEvent):
    """A load was ordered."""

    transfer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVLoadEnded(RequestEvent):
    """The load ended. outcome: done, failed, expired or cancelled.

    num_tokens: with KV that arrived. seconds: since the order. computing_s: estimate of computing them; 0 if unknown.
    moves: from each tier. resumed: whether the request had run before.
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
    """A save was ordered."""

    transfer_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVSaveEnded(Event):
    """The save ended. outcome: done, failed or expired.

    num_blocks: now in the store. moves: blocks that each tier took; it takes none that it has already.
    """

    transfer_id: int
    num_blocks: int
    outcome: str
    moves: tuple[TierMove, ...]


@dataclass(frozen=True, slots=True)
class KVSavesDropped(RequestEvent):
    """An ended request's blocks are not saved: too many saves are pending."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreBlocksEvicted(Event):
    """A tier of the store evicted blocks. Reported with the next transfer that ends."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenPostponed(RequestEvent):
    """The request's token was postponed: its grammar was not walked in time."""


@dataclass(frozen=True, slots=True)
class DraftsVerified(RequestEvent):
    """The first `num_accepted` drafts were right."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftsTimed(Event):
    """Seconds of a step with drafts, drafting included, and of as many tokens without drafts.

    Emitted only for steps without prompts, once steps without drafts were measured.
    """

    seconds: float
    seconds_without: float


@dataclass(frozen=True, slots=True)
class RequestAdmitted(RequestEvent):
    """The request runs from now on."""

    num_cached_tokens: int
    num_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted(RequestEvent):
    """The request's blocks were released for `beneficiary`, possibly itself.

    num_lost_tokens: computed ones. swapped: otherwise their KV is computed again, unless it is still cached. policy: ""
    if the preemption was injected or followed a failed step.
    """

    beneficiary: str
    num_lost_tokens: int
    swapped: bool
    policy: str


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestEvent):
    """The request ended. Emitted exactly once for each queued request."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQueried(RequestEvent):
    """The request looked up its prefix when it was first admitted.

    num_host_tokens: hits in host memory. miss: why no more were found, if more were useful. position: of the first
    differing token, if known.
    """

    num_query_tokens: int
    num_hit_tokens: int
    num_host_tokens: int
    miss: str | None
    position: int | None


@dataclass(frozen=True, slots=True)
class BlockCached(Event):
    """A full block became findable."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """A cached block of the first KV group was evicted."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockOffloaded(Event):
    """A block's content goes to host memory, because one of its KV groups evicts it. groups: which are copied."""

    block_id: int
    host_block_id: int
    groups: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class HostBlockEvicted(Event):
    """A cached host block was evicted."""

    host_block_id: int


@dataclass(frozen=True, slots=True)
class HostBlocksFound(RequestEvent):
    """The request starts or resumes with KV from host memory, copied in this step.

    computing_s: estimate of computing it; 0 if unknown. num_copied: blocks of each KV group.
    """

    num_blocks: int
    num_tokens: int
    computing_s: float
    num_copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostBlocksCopied(Event):
    """The step began with copies to host memory and back, including those of preempted requests."""

    saved: TierMove
    loaded: TierMove


@dataclass(frozen=True, slots=True)
class StepScheduled(Event):
    """A step with tokens to compute was decided.

    num_scheduled_tokens: in the order of scheduling. kv_cache_usage: share of held blocks of the first KV group, 0 to
    1; bounded_usage: of the fullest bounded group. prefill_limit: see `octavo.core.policy.Batching`.
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
    """A step's result was processed. num_new_tokens: of requests with an output."""

    num_new_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """The step was not computed.

    If the worker failed in it, its requests end with an error. If an earlier step failed, they start again.
    """

    message: str


@dataclass(frozen=True, slots=True)
class BlocksQuarantined(Event):
    """Blocks of the first KV group were quarantined, because an invariant did not hold."""

    block_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StaleResultDropped(Event):
    """A late, repeated or unknown result was ignored."""

    detail: str


# `Event.__subclasses__()` would also have the original classes that `slots=True` replaces.
EVENT_TYPES: tuple[type[Event], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in {Event, RequestEvent}
)
EventT = TypeVar("EventT", bound=Event)


class EventSink(Protocol):
    """A reader of the event stream."""

    def emit(self, event: Event) -> None:
        """Process an event. Must not raise, and must not call the core."""
        ...


class NullSink:
    """Ignores all events."""

    def emit(self, event: Event) -> None:
        """Do nothing."""


class EventLog:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)

    def of_type(self, kind: type[EventT]) -> list[EventT]:
        """Return all events of a type."""
        return [event for event in self.events if isinstance(event, kind)]


class EventCounters:
    """The totals that `Scheduler.get_stats` reports. num_scheduled: requests, summed over all steps."""

    def __init__(self) -> None:
        self.count: Counter[type[Event]] = Counter()
        self.num_scheduled = 0
        self.num_tokens_scheduled = 0
        self.num_tokens_generated = 0
        self.num_swapped = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    def emit(self, event: Event) -> None:
        """Count an event."""
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
        """Share of looked-up tokens that were found, 0 to 1."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


class FanOut:
    """Passes every event to several sinks."""

    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass an event to each sink."""
        for sink in self._sinks:
            sink.emit(event)
