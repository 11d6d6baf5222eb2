"""Typed events for every transition of the core.

All figures of the engine are counted from these events, so nothing is counted twice.
"""

from __future__ import annotations

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
    NO_BUDGET = "the step's token budget is used up"
    NO_BLOCKS = "too few free blocks"
    NO_RESERVATION = "too few tokens are free to reserve"
    GATHERING = "it waits so that several requests start together"
    PREEMPTING = "a request was preempted in this step"


@dataclass(frozen=True, slots=True)
class Event:
    """An event in a step. step: the step's number. time: seconds of the engine's clock."""

    step: int
    time: float


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """An event of one request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestQueued(RequestEvent):
    """The request waits. arrival_time: when it came to the engine, before the core accepted it."""

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
    """The request was deferred. owner: the request that computes the block it waits for; None: it waits for a store."""

    owner: str | None


@dataclass(frozen=True, slots=True)
class RequestUnparked(RequestEvent):
    """The deferred request is queued again. timed_out: whether its wait ended without the block or the answer."""

    timed_out: bool


@dataclass(frozen=True, slots=True)
class RequestStalled(RequestEvent):
    """The running request got no tokens in this step, because blocks are lacking."""


@dataclass(frozen=True, slots=True)
class RequestOutranked(RequestEvent):
    """The running prompt got no tokens in this step, because more important requests wait."""


@dataclass(frozen=True, slots=True)
class KVLoadStarted(RequestEvent):
    """A load of KV from a store was ordered."""

    transfer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVLoadEnded(RequestEvent):
    """The load ended. outcome: done, failed, expired or cancelled.

    num_tokens: number of tokens with KV that arrived. seconds: since the order. computing_s: estimated seconds to
    compute these tokens; 0 if unknown. moves: blocks from each tier. resumed: whether the request was preempted before.
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
    """A save of KV to a store was ordered."""

    transfer_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVSaveEnded(Event):
    """The save ended. outcome: done, failed or expired.

    num_blocks: those that are now in the store. moves: blocks that each tier took; a tier takes none that it has.
    """

    transfer_id: int
    num_blocks: int
    outcome: str
    moves: tuple[TierMove, ...]


@dataclass(frozen=True, slots=True)
class KVSavesDropped(RequestEvent):
    """`num_blocks` blocks of an ended request are not saved, because too many saves are pending."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreBlocksEvicted(Event):
    """A tier of the store evicted blocks. Reported with the next transfer that ends."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenPostponed(RequestEvent):
    """The request got no token in this step, because its grammar was not walked in time. A later step samples it."""


@dataclass(frozen=True, slots=True)
class DraftsVerified(RequestEvent):
    """Drafts of the request were verified. The first `num_accepted` of them were right."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftsTimed(Event):
    """Seconds of a step with drafts, drafting included, and estimated seconds of as many tokens without drafts.

    Emitted only for steps without prompts, and only after steps without drafts were measured.
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

    num_lost_tokens: its computed tokens. swapped: True if their KV is in host memory; otherwise it is computed again,
    unless it is still cached. policy: "" if the preemption was injected or followed a failed step.
    """

    beneficiary: str
    num_lost_tokens: int
    swapped: bool
    policy: str


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestEvent):
    """The request ended. reason: its finish reason. Emitted exactly once for each queued request."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQueried(RequestEvent):
    """The request looked up its prefix when it was first admitted.

    num_host_tokens: hits in host memory, a part of `num_hit_tokens`. miss: why the next full block was not found; None
    if no more blocks were useful. position: of the first differing token, if known.
    """

    num_query_tokens: int
    num_hit_tokens: int
    num_host_tokens: int
    miss: str | None
    position: int | None


@dataclass(frozen=True, slots=True)
class BlockCached(Event):
    """Lookups can find a full block from now on."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """A cached block of the first KV group was evicted."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockOffloaded(Event):
    """A block is copied to host memory, because a KV group evicts its content. groups: indices of the copied groups."""

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

    computing_s: estimated seconds to compute this KV; 0 if unknown. num_copied: number of blocks of each KV group.
    """

    num_blocks: int
    num_tokens: int
    computing_s: float
    num_copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostBlocksCopied(Event):
    """The step began with copies to host memory and back, including KV of preempted requests."""

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
    """A step's result was processed. num_new_tokens: number of new tokens of each request with an output."""

    num_new_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KernelsCompiled(Event):
    """The step waited until kernels were compiled, because the warm-up did not launch them."""

    num_kernels: int


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """The step was not computed.

    If the worker failed in this step, its requests end with an error. If an earlier step failed, they start again.
    """

    message: str


@dataclass(frozen=True, slots=True)
class BlocksQuarantined(Event):
    """Blocks of the first KV group were quarantined, because an invariant did not hold."""

    block_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StaleResultDropped(Event):
    """A late, repeated or unknown result of a step or a transfer was ignored."""

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


class FanOut:
    """Passes every event to several sinks."""

    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass an event to each sink."""
        for sink in self._sinks:
            sink.emit(event)
