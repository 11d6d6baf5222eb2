"""Chrome's trace format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.data import events
from octavo.journal.explain import intervals

if TYPE_CHECKING:
    from octavo.journal.replay import Replay

_BATCH, _REQUESTS = 1, 2
_FIRST_LANE = 100  # Perfetto shows thread 0 as the main thread, and also a thread with its process's number


def chrome_trace(replay: Replay) -> dict[str, Any]:
    """Return the content of a trace file."""
    stream = replay.log.events
    lives = intervals(stream, replay.end_time)
    starts = [life[0].start for life in lives.values() if life]
    origin = min([stream[0].time, *starts]) if stream else 0.0

    def microseconds(time: float) -> int:
        return round(1e6 * (time - origin))

    def span(pid: int, tid: int, phase: str, start: float, end: float, /, **args: Any) -> dict[str, Any]:
        duration = microseconds(end) - microseconds(start)
        return {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": phase,
            "ts": microseconds(start),
            "dur": max(duration, 1),
            "args": args,
        }

    out: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for pid, name in ((_BATCH, "batch"), (_REQUESTS, "requests"))
    ]
    out.append({"ph": "M", "pid": _BATCH, "tid": _BATCH, "name": "thread_name", "args": {"name": "steps"}})
    open_steps: dict[int, events.StepScheduled] = {}
    last_end = 0.0
    for event in stream:
        if isinstance(event, events.StepScheduled):
            open_steps[event.step] = event
            counts = {"running": event.num_running, "waiting": event.num_waiting}
            out.append({"ph": "C", "pid": _BATCH, "name": "requests", "ts": microseconds(event.time), "args": counts})
            use = {"percent": round(100 * event.kv_cache_usage, 1)}
            out.append({"ph": "C", "pid": _BATCH, "name": "KV cache", "ts": microseconds(event.time), "args": use})
        elif isinstance(event, (events.StepCompleted, events.StepFailed)) and event.step in open_steps:
            begun = open_steps.pop(event.step)
            name, start = f"step {begun.step}: {begun.num_tokens} tokens", max(begun.time, last_end)
            out.append(span(_BATCH, _BATCH, name, start, event.time, tokens=dict(begun.num_scheduled_tokens)))
            last_end = event.time
    for lane, (request_id, life) in enumerate(lives.items(), _FIRST_LANE):
        label = {"name": f"request {request_id}"}
        out.append({"ph": "M", "pid": _REQUESTS, "tid": lane, "name": "thread_name", "args": label})
        out += [span(_REQUESTS, lane, each.phase, each.start, each.end, **each.details) for each in life]
    return {"traceEvents": out, "displayTimeUnit": "ms"}
