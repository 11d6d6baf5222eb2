"""Typed events for every transition of the core. All figures are counted from them."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - msgspec reads these types where events cross to another process
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo.data.kv_tiers import TierMove  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Iterable


class WaitReason(StrEnum):
    """Why the queue's head waits."""

    NO_SEAT = "max_num_seqs requests run already"
    NO_BUDGET = "the step's token budget is used up"
    NO_BLOCKS = "too few free blocks"
    NO_RESERVATION = "too few tokens are free to reserve"
    GATHERING = "it waits so that several requests start together"
    PREEMPTING = "a request was preempted in this step"


@dataclass(frozen=True, slots=True)
class Event:
    """A core's event. time: on the engine's clock, in seconds."""

    step: int
    time: float


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """A request's event."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestQueued(RequestEvent):
    """A request waits. arrival_time: before the core accepted it."""

    num_prompt_tokens: int
    priority: int
    tenant: str
    num_ahead: int
    arrival_time: float


@dataclass(frozen=True, slots=True)
class RequestBlocked(RequestEvent):
    """The queue's head cannot start. Emitted again only if the reason changes."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class RequestParked(RequestEvent):
    """A request was deferred. owner: computes the awaited block; None: it waits for a store."""

    owner: str | None


@dataclass(frozen=True, slots=True)
class RequestUnparked(RequestEvent):
    """A deferred request is queued again. timed_out: its wait was in vain."""

    timed_out: bool


@dataclass(frozen=True, slots=True)
class RequestStalled(RequestEvent):
    """A running request got no tokens, because blocks are lacking."""


@dataclass(frozen=True, slots=True)
class RequestOutranked(RequestEvent):
    """A running prompt got no tokens, because more important requests wait."""


@dataclass(frozen=True, slots=True)
class KVLoadStarted(RequestEvent):
    """A load was ordered."""

    transfer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVLoadEnded(RequestEvent):
    """A load ended. outcome: done, failed, expired or cancelled.

    num_tokens: with KV that arrived. seconds: since the order. computing_s: estimated seconds to compute them; 0 if
    unknown. moves: by tier. resumed: after a preemption.
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
    """A save ended. outcome: done, failed or expired.

    moves: blocks that each tier took; none that it had.
    """

    transfer_id: int
    num_blocks: int
    outcome: str
    moves: tuple[TierMove, ...]


@dataclass(frozen=True, slots=True)
class KVSavesDropped(RequestEvent):
    """Blocks are not saved: too many saves are pending."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreBlocksEvicted(Event):
    """A store's tier evicted blocks. Reported with the next ended transfer."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenPostponed(RequestEvent):
    """A request's grammar was not walked in time, so it got no token."""


@dataclass(frozen=True, slots=True)
class DraftsVerified(RequestEvent):
    """The first `num_accepted` drafts were right."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftsTimed(Event):
    """Seconds of a step with drafts, drafting included, and an estimate without drafts.

    Only for steps without prompts, after steps without drafts were measured.
    """

    seconds: float
    seconds_without: float


@dataclass(frozen=True, slots=True)
class RequestAdmitted(RequestEvent):
    """A request runs."""

    num_cached_tokens: int
    num_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted(RequestEvent):
    """A request's blocks were released for `beneficiary`, possibly itself.

    swapped: its KV is in host memory; otherwise it is computed again, unless still cached. policy: "" if the preemption
    was injected or followed a failed step.
    """

    beneficiary: str
    num_lost_tokens: int
    swapped: bool
    policy: str


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestEvent):
    """A request ended. Emitted exactly once for each queued request."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQueried(RequestEvent):
    """A request's first admission looked up its prefix.

    num_host_tokens: hits in host memory. miss: why the next full block was not found; None if no more were useful.
    position: of the first differing token.
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
    """The first KV group evicted a block."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockOffloaded(Event):
    """A KV group's evicted content is copied to host memory. groups: the copied ones."""

    block_id: int
    host_block_id: int
    groups: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class HostBlockEvicted(Event):
    """Host memory evicted a block."""

    host_block_id: int


@dataclass(frozen=True, slots=True)
class HostBlocksFound(RequestEvent):
    """A request starts or resumes with KV from host memory.

    computing_s: as in `KVLoadEnded`. num_copied: by KV group.
    """

    num_blocks: int
    num_tokens: int
    computing_s: float
    num_copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HostBlocksCopied(Event):
    """A step began with copies to host memory and back, preempted requests' included."""

    saved: TierMove
    loaded: TierMove


@dataclass(frozen=True, slots=True)
class StepScheduled(Event):
    """A step with tokens was decided.

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
    """A step's result was processed."""

    num_new_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KernelsCompiled(Event):
    """The step waited for kernels unknown to the warm-up."""

    num_kernels: int


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """A step was not computed.

    If the worker failed in this step, its requests end with an error; if in an earlier step, they start again.
    """

    message: str


@dataclass(frozen=True, slots=True)
class BlocksQuarantined(Event):
    """Blocks of the first KV group were quarantined: an invariant did not hold."""

    block_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StaleResultDropped(Event):
    """A late, repeated or unknown result was ignored."""

    detail: str


# `Event.__subclasses__()` also has the classes that `slots=True` replaces.
EVENT_TYPES: tuple[type[Event], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in {Event, RequestEvent}
)
EventT = TypeVar("EventT", bound=Event)


class EventSink(Protocol):
    """Reads events."""

    def emit(self, event: Event) -> None:
        """Process an event. Must neither raise nor call the core."""
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
        """Return a type's events."""
        return [event for event in self.events if isinstance(event, kind)]


class FanOut:
    """Passes events to several sinks."""

    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass an event on."""
        for sink in self._sinks:
            sink.emit(event)
