"""Typed events for every transition of the core, with step, time and request id.

The core emits events to an `EventSink`; metrics, traces, snapshots and `explain` read them. All figures are counted
from events, so nothing is counted twice.
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
    """An event in a step. time: seconds of the engine's clock."""

    step: int
    time: float


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """An event of one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestQueued(RequestEvent):
    """The request was accepted and waits after `num_ahead` other requests.

    arrival_time: when it arrived at the engine, before the core accepted it.
    """

    num_prompt_tokens: int
    priority: int
    tenant: str
    num_ahead: int
    arrival_time: float


@dataclass(frozen=True, slots=True)
class RequestBlocked(RequestEvent):
    """The request is the head of the queue and cannot start. Emitted again only if the reason changes."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class RequestParked(RequestEvent):
    """The request was deferred: it waits for a block that request `owner` computes; None: for a lookup in a store."""

    owner: str | None


@dataclass(frozen=True, slots=True)
class RequestUnparked(RequestEvent):
    """The deferred request is back in its place in the queue. timed_out: the block or answer did not come in time."""

    timed_out: bool


@dataclass(frozen=True, slots=True)
class RequestStalled(RequestEvent):
    """The request runs but got no tokens in this step: blocks are lacking, and no request may be preempted for it."""


@dataclass(frozen=True, slots=True)
class RequestOutranked(RequestEvent):
    """The request's prompt is partly computed and got no tokens in this step, because more important requests wait."""


@dataclass(frozen=True, slots=True)
class KVLoadStarted(RequestEvent):
    """A load of the KV of `num_tokens` tokens from an external store was ordered for the request."""

    transfer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVLoadEnded(RequestEvent):
    """The load ended. outcome: done, failed, expired or cancelled.

    num_tokens: number of tokens whose KV arrived. seconds: since the order. computing_s: estimated seconds to compute
    these tokens, from recent steps; 0 if it is not known. store: name of the store with all its tiers. moves: number of
    blocks from each tier. resumed: whether the request had run before.
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
    """A save of `num_blocks` committed blocks to the external store was ordered."""

    transfer_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVSaveEnded(Event):
    """The save ended, and `num_blocks` of its blocks are in the store. outcome: done, failed or expired.

    moves: number of blocks that each tier took. A tier does not take a block that it has already.
    """

    transfer_id: int
    num_blocks: int
    outcome: str
    moves: tuple[TierMove, ...]


@dataclass(frozen=True, slots=True)
class KVSavesDropped(RequestEvent):
    """The request ended, and `num_blocks` blocks that the store wants are not saved: too many saves are pending."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreBlocksEvicted(Event):
    """A tier of the store evicted `num_blocks` blocks. Reported with the next transfer that ends."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenPostponed(RequestEvent):
    """The request got no token of a step in which one was due: its grammar was not walked in time."""


@dataclass(frozen=True, slots=True)
class DraftsVerified(RequestEvent):
    """Drafts of the request were verified: `num_drafted` tokens, of which the first `num_accepted` were right."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftsTimed(Event):
    """The duration of a step with drafts, drafting included, and that of the same number of tokens without drafts.

    In seconds. Emitted only for steps without prompts, once steps without drafts were measured.
    """

    seconds: float
    seconds_without: float


@dataclass(frozen=True, slots=True)
class RequestAdmitted(RequestEvent):
    """The request left the queue and runs. num_cached_tokens: found in the prefix cache."""

    num_cached_tokens: int
    num_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted(RequestEvent):
    """The request was preempted: its blocks were released for request `beneficiary`, possibly itself.

    num_lost_tokens: number of its computed tokens. swapped: whether their KV was swapped out; otherwise it is computed
    again, unless it is still cached. policy: the policy under which the request was the least important; "" if the
    preemption was injected or followed a failed step.
    """

    beneficiary: str
    num_lost_tokens: int
    swapped: bool
    policy: str


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestEvent):
    """The request ended. reason: as of `RequestStatus`. Emitted exactly once for each queued request."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQueried(RequestEvent):
    """The request looked up its prefix when it was first admitted. Emitted at most once per request.

    num_query_tokens: all its tokens. num_hit_tokens: found on the device or in host memory. num_host_tokens: found in
    host memory. miss: why it found no more; None if it found all that could be used. position: of the first token that
    differs from the cached ones, if known.
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
    """The content of a block goes to host memory, because one of its KV groups evicts it. Lookups can find it there.

    groups: indices of the KV groups whose blocks are copied, always including the first.
    """

    block_id: int
    host_block_id: int
    groups: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class HostBlockEvicted(Event):
    """The content of a cached host block was evicted."""

    host_block_id: int


@dataclass(frozen=True, slots=True)
class HostBlocksFound(RequestEvent):
    """The request starts or resumes with the KV of `num_tokens` tokens, found in `num_blocks` host blocks.

    They are copied in this step. computing_s: estimated seconds to compute these tokens, from recent steps; 0 if it is
    not known. num_copied: number of copied blocks of each KV group.
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

    num_scheduled_tokens: number of tokens of each request, in the order of scheduling. num_tokens: their sum.
    num_running, num_waiting: numbers of requests. kv_cache_usage: share of held blocks of the first KV group, 0 to 1.
    prefill_limit: largest number of budget tokens for prompts in a step with decodes; 0 for no limit.
    bounded_usage: share of held blocks in the fullest bounded KV group; 0 if there is none.
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
    """The result of a step was processed. num_new_tokens: of each request that has an output."""

    num_new_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """The step was not computed.

    If the worker failed in it, each of its requests ends with an error. If an earlier step failed, they start again.
    """

    message: str


@dataclass(frozen=True, slots=True)
class BlocksQuarantined(Event):
    """Blocks were quarantined, because an invariant of the core did not hold. The engine continues without them.

    block_ids: of the first KV group.
    """

    block_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StaleResultDropped(Event):
    """The result of a step or of a transfer was ignored, because it came late, twice, or for an unknown one."""

    detail: str


# All events that can be emitted. `Event.__subclasses__()` also has the original classes that `slots=True` replaces.
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
    """Keeps every event, for tests and tools."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)

    def of_type(self, kind: type[EventT]) -> list[EventT]:
        """Return all events of one type, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class EventCounters:
    """The running totals that `Scheduler.get_stats` reports.

    count: number of events by type. num_scheduled: number of requests with tokens, summed over all steps.
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
        """Share of looked-up tokens that were found, 0 to 1. Each request counts once, at its first admission."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


class FanOut:
    """Passes every event to several sinks, in order."""

    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass an event to each sink."""
        for sink in self._sinks:
            sink.emit(event)
