"""Explains how a request spent its time."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.data import events
from octavo.data.draft_stats import DraftStats
from octavo.data.expert_stats import ExpertStats
from octavo.data.kv_tier_figures import shares_of
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from octavo.data.events import Event

ARRIVING = "on its way to the queue"
QUEUED = "waiting in the queue"
DEFERRED = "waiting for a block that another request computed"
LOADING = "waiting for KV from outside"
PROMPT = "computing the prompt"
GENERATING = "generating"
PREEMPTED = "preempted, waiting to continue"
PHASES = (ARRIVING, QUEUED, DEFERRED, LOADING, PROMPT, GENERATING, PREEMPTED)
_WHY_UNUSABLE = {
    events.HitLimit.WINDOW: "some of their window blocks were missing",
    events.HitLimit.CHECKPOINT: "the recurrent state after them was not saved",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """A time span in one phase."""

    phase: str
    start: float
    end: float
    details: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Explanation:
    """A request's phases and their reasons."""

    request_id: str
    intervals: list[Interval] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    ending: str = "it has not ended"

    @property
    def wall_s(self) -> float:
        """Seconds from arrival to end."""
        return self.intervals[-1].end - self.intervals[0].start if self.intervals else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        total: dict[str, float] = defaultdict(float)
        for each in self.intervals:
            total[each.phase] += each.end - each.start
        return {phase: total[phase] for phase in PHASES if phase in total}

    def text(self) -> str:
        """Return several lines."""
        lines = [f"request {self.request_id}: {self.wall_s:.3f} s, {self.ending}"]
        for phase, seconds in self.seconds.items():
            share = 100 * seconds / self.wall_s if self.wall_s else 0.0
            lines.append(f"  {seconds:9.3f} s  {share:5.1f} %  {phase}")
        return "\n".join([*lines, *(f"  - {reason}" for reason in self.reasons)])


def explain(log: Iterable[Event], request_id: str, end_time: float | None = None) -> Explanation:
    """Explain how the first request with this id spent its time. Raises `ConfigError` for unknown ids.

    end_time: End of an unfinished request's last phase, by default the last event's time.
    """
    stream = list(log)
    start = next((i for i, e in enumerate(stream) if _is(e, events.RequestQueued, request_id)), None)
    if start is None:
        known = [e.request_id for e in stream if isinstance(e, events.RequestQueued)]
        raise ConfigError(f"no request {request_id!r} is recorded; the journal has {', '.join(known[:10]) or 'none'}")
    end = next((i for i in range(start, len(stream)) if _is(stream[i], events.RequestFinished, request_id)), None)
    life = stream[start : len(stream) if end is None else end + 1]
    explainer = _Explainer(request_id, stream[: start + 1])
    for event in life:
        explainer.take(event)
    return explainer.finish(life[-1].time if end is not None or end_time is None else end_time)


def intervals(log: Iterable[Event], end_time: float) -> dict[str, list[Interval]]:
    """Return the phases of all requests by id, in order of arrival. A reused id gets the suffix "'"."""
    explainers: dict[str, _Explainer] = {}
    done: dict[str, list[Interval]] = {}
    for event in log:
        if isinstance(event, events.RequestQueued):
            name = event.request_id
            while name in done:
                name += "'"
            explainers[event.request_id] = _Explainer(event.request_id, [event])
            done[name] = explainers[event.request_id].result.intervals
        if isinstance(event, events.StepCompleted):
            for request_id in event.num_new_tokens:
                if request_id in explainers:
                    explainers[request_id].note_tokens(event)
        elif isinstance(event, events.RequestEvent) and event.request_id in explainers:
            explainers[event.request_id].note_event(event)
            if isinstance(event, events.RequestFinished):
                explainers.pop(event.request_id).enter(None, event.time)
    for explainer in explainers.values():
        explainer.enter(None, end_time)
    return done


def _is(event: Event, kind: type[events.RequestEvent], request_id: str) -> bool:
    return isinstance(event, kind) and event.request_id == request_id


class _Explainer:
    def __init__(self, request_id: str, before: list[Event]) -> None:
        self.request_id = request_id
        self.result = Explanation(request_id)
        self.queued = {e.request_id: e for e in before if isinstance(e, events.RequestQueued)}
        self.phase: str | None = None
        self.since = 0.0
        self.has_output = False
        self.num_steps = self.num_chunks = self.num_tokens = self.num_stalled = self.num_outranked = 0
        self.num_postponed = 0
        self.shared: Counter[str] = Counter()
        self.drafts = DraftStats()
        self.drafted_step = -1
        self.experts = ExpertStats()
        self.own_steps = deque[int](maxlen=2)  # steps in flight
        self.rivals: list[str] = []
        self.held_up: dict[events.WaitReason, float] = defaultdict(float)
        self.blocked: tuple[events.RequestBlocked, float] | None = None
        self.found_in_host: events.HostBlocksFound | None = None  # reset by `HostBlocksCopied` of the same step
        self.tokens_while_queued: Counter[str] = Counter()
        for event in before:
            self._note_blocked(event)

    def take(self, event: Event) -> None:
        """Process an event."""
        self._note_blocked(event)
        if isinstance(event, events.StepScheduled):
            self._note_step(event)
        elif isinstance(event, events.StepCompleted):
            self.note_tokens(event)
        elif isinstance(event, events.RequestQueued):
            self.queued[event.request_id] = event
        elif isinstance(event, events.DraftsVerified) and event.request_id == self.request_id:
            self.drafts.add(event)
            self.drafted_step = event.step
        elif isinstance(event, events.DraftsTimed) and event.step == self.drafted_step:
            self.drafts.add(event)
        elif isinstance(event, events.ExpertsComputed):
            if event.step in self.own_steps:
                self.experts.add(event.load)
        elif isinstance(event, events.TokenPostponed):
            self.num_postponed += event.request_id == self.request_id
        elif isinstance(event, events.HostBlocksFound | events.HostBlocksCopied):
            self._note_host(event)
        if isinstance(event, events.RequestEvent) and event.request_id == self.request_id:
            self.note_event(event)

    def finish(self, end: float) -> Explanation:
        """Complete the explanation."""
        self.enter(None, end)
        result = self.result
        result.reasons[:0] = list(self._why_queued())
        if self.num_stalled:
            what = "no block was free, and no request could be preempted for it"
            result.reasons.append(f"it got nothing in {self.num_stalled} steps: {what}")
        if self.num_outranked:
            what = "more important requests came before its prompt"
            result.reasons.append(f"it got nothing in {self.num_outranked} steps: {what}")
        if self.num_postponed:
            what = "the tokens that its grammar allows were not computed in time"
            result.reasons.append(f"it got no token in {self.num_postponed} steps: {what}")
        if self.num_chunks > 1:
            result.reasons.append(f"its prompt was computed in {self.num_chunks} chunks, in steps with other requests")
        if self.num_tokens:
            result.reasons.append(f"it took part in {self.num_steps} steps and generated {self.num_tokens} tokens")
        if self.drafts.num_drafts:
            result.reasons.append(_describe_drafts(self.drafts))
        if self.experts.num_steps:
            result.reasons.append(_describe_experts(self.experts))
        others = [f"{name} ({count} tokens)" for name, count in self.shared.most_common(3)]
        if others:
            result.reasons.append(f"the other requests with the most tokens in its steps: {', '.join(others)}")
        return result

    def enter(self, phase: str | None, time: float, details: dict[str, str] | None = None) -> None:
        """Enter a phase. details: Of the phase that ends."""
        if self.phase is not None and time > self.since:
            self.result.intervals.append(Interval(self.phase, self.since, time, details or {}))
        if self.phase == QUEUED and self.blocked is not None:
            self.held_up[self.blocked[0].reason] += time - max(self.blocked[1], self.since)
        self.phase, self.since = phase, time

    def _note_blocked(self, event: Event) -> None:
        now_blocked: tuple[events.RequestBlocked, float] | None = None
        if isinstance(event, (events.RequestAdmitted, events.RequestParked, events.RequestFinished)):
            if self.blocked is None or event.request_id != self.blocked[0].request_id:
                return
        elif isinstance(event, events.RequestBlocked):
            now_blocked = (event, event.time)
        else:
            return
        if self.phase == QUEUED and self.blocked is not None:
            self.held_up[self.blocked[0].reason] += event.time - max(self.blocked[1], self.since)
        self.blocked = now_blocked

    def _note_host(self, event: events.HostBlocksFound | events.HostBlocksCopied) -> None:
        reasons = self.result.reasons
        if isinstance(event, events.HostBlocksFound):
            if event.request_id == self.request_id:
                self.found_in_host = event
                reasons.append(_describe_copy(event))
            return
        found = self.found_in_host
        if found is None or found.step > event.step:
            return
        self.found_in_host = None
        if found.step == event.step:
            took_s = event.loaded.seconds * found.num_blocks / event.loaded.num_blocks
            reasons[reasons.index(_describe_copy(found))] = _describe_copy(found, took_s)

    def _note_step(self, event: events.StepScheduled) -> None:
        if self.phase == QUEUED:
            self.tokens_while_queued.update(event.num_scheduled_tokens)
        if self.request_id not in event.num_scheduled_tokens:
            return
        self.own_steps.append(event.step)
        self.rivals = list(event.num_scheduled_tokens)
        self.num_steps += 1
        self.num_chunks += not self.has_output
        self.shared.update({name: n for name, n in event.num_scheduled_tokens.items() if name != self.request_id})

    def note_tokens(self, event: events.StepCompleted) -> None:
        """Count new tokens."""
        count = event.num_new_tokens.get(self.request_id, 0)
        self.num_tokens += count
        if count and not self.has_output:
            self.has_output = True
            if self.phase == PROMPT:
                self.enter(GENERATING, event.time)

    def note_event(self, event: events.RequestEvent) -> None:
        """Process an event."""
        reasons = self.result.reasons
        if isinstance(event, events.RequestQueued):
            self.enter(ARRIVING, event.arrival_time)
            self.enter(QUEUED, event.time)
        elif isinstance(event, events.RequestParked):
            self.enter(DEFERRED, event.time)
            what = (
                "the answer of an external KV store"
                if event.owner is None
                else f"{event.owner}, which was computing the same prefix"
            )
            reasons.append(f"it waited for {what}")
        elif isinstance(event, events.RequestUnparked):
            self.enter(QUEUED, event.time)
        elif isinstance(event, events.RequestAdmitted):
            self.enter(GENERATING if self.has_output else PROMPT, event.time)
        elif isinstance(event, events.KVLoadStarted):
            self.enter(LOADING, event.time)
        elif isinstance(event, events.KVLoadEnded):
            continues = event.num_tokens > 0
            self.enter(
                (GENERATING if self.has_output else PROMPT) if continues else QUEUED, event.time, _by_tier(event)
            )
            reasons.append(_describe_load(event))
        elif isinstance(event, events.RequestPreempted):
            self.enter(PREEMPTED, event.time)
            reasons.append(self._why_preempted(event))
        elif isinstance(event, events.RequestStalled):
            self.num_stalled += 1
        elif isinstance(event, events.RequestOutranked):
            self.num_outranked += 1
        elif isinstance(event, events.PrefixCacheQueried):
            reasons.append(_describe_found(event))
        elif isinstance(event, events.RequestFinished):
            self.num_tokens = event.num_output_tokens
            self.result.ending = f"ended with {event.reason!r} after {event.num_output_tokens} tokens"

    def _why_preempted(self, event: events.RequestPreempted) -> str:
        queued_event = self.queued[self.request_id]
        rivals = [self.queued[name] for name in (event.beneficiary, *self.rivals) if name in self.queued]
        better = next((other for other in rivals if other.priority < queued_event.priority), None)
        if not event.policy:
            why = "an operator asked for it"
        elif event.beneficiary == self.request_id:
            why = f"no block was free for it, and it was the least important one (policy {event.policy})"
        else:
            why = f"{event.beneficiary} needed its blocks, and it was the least important one (policy {event.policy})"
        if better is not None and event.policy == "priority":
            why += (
                f"; {better.request_id} is more important (priority {better.priority} against {queued_event.priority})"
            )
        cost = "swapped to host memory" if event.swapped else "computed again unless cached"
        return f"it was preempted: {why}; {event.num_lost_tokens} tokens were {cost}"

    def _why_queued(self) -> Iterator[str]:
        queued_event = self.queued[self.request_id]
        queued_s = self.result.seconds.get(QUEUED, 0.0)
        if queued_event.num_ahead and queued_s:
            yield f"it queued after {queued_event.num_ahead} other request{'s' if queued_event.num_ahead > 1 else ''}"
        for reason, seconds in sorted(self.held_up.items(), key=lambda each: -each[1]):
            if seconds > 0:
                yield f"for {seconds:.3f} s the head of the queue could not start: {reason}"
        if queued_s and self.tokens_while_queued:
            total = sum(self.tokens_while_queued.values())
            name, most = self.tokens_while_queued.most_common(1)[0]
            tenants = {each: self.queued[each].tenant for each in self.tokens_while_queued if each in self.queued}
            yield f"while it queued, {most} of {total} computed tokens went to {name}"
            others = sum(
                n
                for each, n in self.tokens_while_queued.items()
                if tenants.get(each, queued_event.tenant) != queued_event.tenant
            )
            if others:
                yield f"while it queued, {others} of {total} computed tokens went to other tenants"


def _describe_drafts(drafts: DraftStats) -> str:
    rates = ", ".join(f"{100 * rate:.0f} %" for rate in drafts.acceptance_rate_per_pos)
    return (
        f"{drafts.num_accepted_tokens} of {drafts.num_draft_tokens} draft tokens were accepted (by position in the "
        f"draft: {rates}); it got {drafts.tokens_per_step:.2f} tokens per step with drafts"
    ) + (
        ""
        if drafts.speed_up is None
        else f"; these steps were {drafts.speed_up:.2f} times as fast as steps without drafts, over all requests in "
        "them"
    )


def _describe_experts(experts: ExpertStats) -> str:
    return (
        f"on average a step read {experts.read_bytes / experts.num_steps / 2**20:,.1f} MiB of experts' weights; an "
        f"expert that was read computed {experts.tokens_per_read:.2f} tokens; a layer's busiest expert had "
        f"{experts.imbalance / experts.num_steps:.2f} times the mean"
    )


def _by_tier(event: events.KVLoadEnded) -> dict[str, str]:
    return {each.move.tier: f"{each.num_tokens:,} tokens, {_ms(each.move.seconds)}" for each in shares_of(event)}


def _describe_load(event: events.KVLoadEnded) -> str:
    took = _ms(event.seconds)
    if not event.num_tokens:
        return f"fetching its KV from {event.store} took {took} and brought no KV: {event.outcome}"
    shares = list(shares_of(event))
    if len(shares) > 1:
        parts = [f"{each.num_tokens:,} tokens from {each.move.tier} ({_ms(each.move.seconds)})" for each in shares]
        given, took = f"{', '.join(parts[:-1])} and {parts[-1]}", f"{took} in all"
    else:
        given = f"{event.num_tokens:,} tokens from {shares[0].move.tier if shares else event.store}"
    less = "" if event.outcome == "done" else "; the other tokens did not arrive"
    return f"{given}, {took}{_instead_of(event.computing_s)}{less}"


def _describe_copy(found: events.HostBlocksFound, took_s: float | None = None) -> str:
    took = "" if took_s is None else f", {_ms(took_s)}"
    return f"{found.num_tokens:,} tokens from host memory{took}{_instead_of(found.computing_s)}"


def _instead_of(computing_s: float) -> str:
    return f", instead of about {_ms(computing_s)} of computing" if computing_s else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.001 else f"{1e3 * seconds:.1f} ms"


def _describe_found(event: events.PrefixCacheQueried) -> str:
    found = f"{event.num_hit_tokens} of its {event.num_query_tokens} tokens were found in the prefix cache"
    if event.num_unusable_tokens and event.limit is not None:
        return f"{found}; {event.num_unusable_tokens} more were cached, but {_WHY_UNUSABLE[event.limit]}"
    if event.miss is None:
        return found
    where = "" if event.position is None else f" at position {event.position}"
    return f"{found}; the rest was not found: {event.miss}{where}"
