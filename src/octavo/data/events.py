"""Typed events for every transition of the core, from which all metrics are counted."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - msgspec reads this type
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

from octavo.data.expert_stats import ExpertLoad  # noqa: TC001 - as above
from octavo.data.kv_tiers import TierMove  # noqa: TC001 - as above
from octavo.data.state_slots import StateSlots  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Iterable


class WaitReason(StrEnum):
    """Why the first request in the queue waits."""

    NO_SEAT = "max_num_seqs requests run already"
    NO_BUDGET = "the step's token budget is used up"
    NO_BLOCKS = "too few free blocks"
    NO_RESERVATION = "too few tokens are free to reserve"
    GATHERING = "it waits so that several requests start together"
    PREEMPTING = "a request was preempted in this step"


class HitLimit(StrEnum):
    """What ended a prefix hit."""

    BLOCKS = "blocks"  # the next block is not cached
    WINDOW = "window"  # blocks of a bounded KV group are missing
    CHECKPOINT = "checkpoint"  # the recurrent state was not saved


@dataclass(frozen=True, slots=True)
class Event:
    """A core event."""

    step: int
    time: float  # seconds on the engine's clock


@dataclass(frozen=True, slots=True)
class RequestEvent(Event):
    """A request's event."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RequestQueued(RequestEvent):
    """The core queued a new request. num_ahead: Requests before it."""

    num_prompt_tokens: int
    priority: int
    tenant: str
    num_ahead: int
    arrival_time: float  # before the core accepted the request


@dataclass(frozen=True, slots=True)
class RequestBlocked(RequestEvent):
    """The first request in the queue cannot start. Emitted again if the request or the reason changes."""

    reason: WaitReason


@dataclass(frozen=True, slots=True)
class RequestParked(RequestEvent):
    """A request was deferred until awaited KV is available."""

    owner: str | None  # request that computes the awaited block; None if a store is awaited


@dataclass(frozen=True, slots=True)
class RequestUnparked(RequestEvent):
    """A deferred request was queued again."""

    timed_out: bool


@dataclass(frozen=True, slots=True)
class RequestStalled(RequestEvent):
    """A running request got no tokens, because blocks are lacking."""


@dataclass(frozen=True, slots=True)
class RequestOutranked(RequestEvent):
    """A running prompt got no tokens, because more important requests wait."""


@dataclass(frozen=True, slots=True)
class KVLoadStarted(RequestEvent):
    """A load from a store was ordered."""

    transfer_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVLoadEnded(RequestEvent):
    """A load from a store ended."""

    transfer_id: int
    outcome: str  # done, failed, expired or cancelled
    num_tokens: int
    seconds: float  # since the order
    computing_s: float  # estimated seconds to compute these tokens; 0 if unknown
    store: str
    moves: tuple[TierMove, ...]  # one for each tier
    resumed: bool  # True after a preemption


@dataclass(frozen=True, slots=True)
class KVSaveStarted(Event):
    """A save to a store was ordered."""

    transfer_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVSaveEnded(Event):
    """A save to a store ended."""

    transfer_id: int
    num_blocks: int
    outcome: str  # done, failed or expired
    moves: tuple[TierMove, ...]  # excluding blocks that a tier already had


@dataclass(frozen=True, slots=True)
class KVSavesDropped(RequestEvent):
    """Blocks are not saved, because too many saves are pending."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreBlocksEvicted(Event):
    """A store's tier evicted blocks. Reported with the next ended transfer."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TokenPostponed(RequestEvent):
    """A request got no token, because its grammar did not determine the allowed tokens in time."""


@dataclass(frozen=True, slots=True)
class DraftsVerified(RequestEvent):
    """A step verified draft tokens, and accepted the first `num_accepted` of them."""

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class DraftsTimed(Event):
    """Duration of a step with drafts, including drafting, and an estimate without drafts.

    Emitted only for steps without prompt tokens, after steps without drafts were measured.
    """

    seconds: float
    seconds_without: float


@dataclass(frozen=True, slots=True)
class RequestAdmitted(RequestEvent):
    """A request starts to run or to load KV."""

    num_cached_tokens: int
    num_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class RequestPreempted(RequestEvent):
    """A request's blocks were released for `beneficiary`, which may be the same request.

    If `swapped`, the KV is in host memory. Otherwise, KV that is no longer cached is computed again.
    """

    beneficiary: str
    num_lost_tokens: int
    swapped: bool
    policy: str  # "" if the preemption was injected or followed a failed step


@dataclass(frozen=True, slots=True)
class RequestFinished(RequestEvent):
    """A request ended. Emitted once per queued request."""

    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixCacheQueried(RequestEvent):
    """A request's prefix was looked up at its first admission."""

    num_query_tokens: int
    num_hit_tokens: int
    num_host_tokens: int
    miss: str | None  # why the next full block was not found, or None
    position: int | None  # of the first differing token
    limit: HitLimit | None = None
    num_unusable_tokens: int = 0  # cached tokens after the hit, which are computed again


@dataclass(frozen=True, slots=True)
class BlockCached(Event):
    """A full block was added to the prefix cache."""

    block_id: int


@dataclass(frozen=True, slots=True)
class CheckpointSaved(RequestEvent):
    """A request's recurrent state after `num_tokens` tokens was saved."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class CheckpointEvicted(Event):
    """A saved recurrent state was evicted."""

    block_id: int  # of the first KV group, at whose end the state was


@dataclass(frozen=True, slots=True)
class BlockEvicted(Event):
    """The first KV group evicted a block."""

    block_id: int


@dataclass(frozen=True, slots=True)
class BlockOffloaded(Event):
    """Evicted content is copied to host memory."""

    block_id: int
    host_block_id: int
    groups: tuple[int, ...] = (0,)  # copied KV groups


@dataclass(frozen=True, slots=True)
class HostBlockEvicted(Event):
    """Host memory evicted a block."""

    host_block_id: int


@dataclass(frozen=True, slots=True)
class HostBlocksFound(RequestEvent):
    """A request starts or resumes with KV from host memory."""

    num_blocks: int
    num_tokens: int
    computing_s: float  # as in `KVLoadEnded`
    num_copied: tuple[int, ...] = ()  # blocks by KV group


@dataclass(frozen=True, slots=True)
class HostBlocksCopied(Event):
    """A step began with copies to host memory and back, including KV of preempted requests."""

    saved: TierMove
    loaded: TierMove


@dataclass(frozen=True, slots=True)
class StepScheduled(Event):
    """A step with tokens was decided."""

    num_scheduled_tokens: Mapping[str, int]
    num_tokens: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of held blocks in the first KV group, 0 to 1
    prefill_limit: int = 0  # see `octavo.core.policy.Batching`
    bounded_usage: float = 0.0  # share of held blocks in the fullest bounded group


@dataclass(frozen=True, slots=True)
class StepCompleted(Event):
    """A step ended. num_new_tokens: By request id. state_slots: None without recurrent layers."""

    num_new_tokens: Mapping[str, int]
    state_slots: StateSlots | None = None


@dataclass(frozen=True, slots=True)
class ExpertsComputed(Event):
    """The experts of a mixture computed tokens of a step."""

    load: ExpertLoad


@dataclass(frozen=True, slots=True)
class KernelsCompiled(Event):
    """A step waited for kernels that the warm-up did not compile."""

    num_kernels: int


@dataclass(frozen=True, slots=True)
class StepFailed(Event):
    """A step was not computed.

    After a failure in this step, its requests end with an error. After a failure in an earlier step, they start again.
    """

    message: str


@dataclass(frozen=True, slots=True)
class BlocksQuarantined(Event):
    """Blocks were quarantined, because an invariant did not hold."""

    block_ids: tuple[int, ...]  # of the first KV group
    reason: str


@dataclass(frozen=True, slots=True)
class StaleResultDropped(Event):
    """A late, repeated or unknown result was ignored."""

    detail: str


# `Event.__subclasses__()` would also contain the classes that `slots=True` replaced.
EVENT_TYPES: tuple[type[Event], ...] = tuple(
    kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Event) and kind not in {Event, RequestEvent}
)
EventT = TypeVar("EventT", bound=Event)


class EventSink(Protocol):
    """Receives events."""

    def emit(self, event: Event) -> None:
        """Process an event. Must neither raise nor call the core."""
        ...


class NullSink:
    """Ignores all events."""

    def emit(self, event: Event) -> None:
        """Do nothing."""


class EventLog:
    """Keeps every event in a list."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)

    def of_type(self, kind: type[EventT]) -> list[EventT]:
        """Return all events of a class, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class FanOut:
    """Passes events to several sinks."""

    def __init__(self, sinks: Iterable[EventSink]) -> None:
        self._sinks = tuple(sinks)

    def emit(self, event: Event) -> None:
        """Pass an event to each sink."""
        for sink in self._sinks:
            sink.emit(event)
