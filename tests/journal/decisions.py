"""The decisions of a scheduler, step by step, as rows that can be stored as JSON and compared with `==`.

Rows hold no block ids, because these may change from version to version.
`held` and `moved` are the only functions that read how the KV cache is laid out.
"""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

from octavo.data import events
from octavo.data.kv_groups import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from octavo.core.scheduler import Scheduler
    from octavo.data.events import EventLog
    from octavo.data.scheduler_output import SchedulerOutput

NO_PART = -1  # in a transfer's list: this block is moved without its window part

Row = dict[str, Any]


def held(scheduler: Scheduler) -> list[int]:
    """Return how many blocks are in use: one number per KV group (full attention first), then the host blocks."""
    manager = scheduler.kv_cache_manager
    in_use = [group.num_blocks - group.num_free_blocks for group in manager.groups]
    return [*in_use, manager.host.num_blocks - manager.host.num_free_blocks]


def moved(scheduled: SchedulerOutput) -> Row:
    """Return how many blocks a step moves.

    copies: one list [swapped out, copied, swapped in] per KV group; last groups that copy nothing are omitted.
    transfers: one list [id, direction, request, number of blocks per KV group] per transfer.
    """
    copies = scheduled.copies
    of_groups = map(copies.of_group, range(2))
    per_group = [[len(each.swap_out), len(each.block_copies), len(each.swap_in)] for each in of_groups]
    while per_group and not any(per_group[-1]):
        per_group.pop()
    transfers = []
    for each in scheduled.kv_transfers:
        counts = [sum(block_id != NO_BLOCK for block_id in ids) for ids in each.block_ids]
        transfers.append([each.transfer_id, each.direction.value, each.request_id, counts])
    return {"copies": per_group, "transfers": transfers}


def decision(scheduled: SchedulerOutput) -> Row:
    """Return the tokens of a step by request, its endings, drafts and moves. Empty columns are omitted."""
    new = [[each.request_id, each.num_computed_tokens] for each in scheduled.scheduled_new_reqs]
    row = {
        "step": scheduled.step,
        "tokens": [list(each) for each in scheduled.num_scheduled_tokens.items()],
        "new": new,
        "preempted": sorted(scheduled.preempted_req_ids),
        "forgotten": sorted(scheduled.finished_req_ids),
        "drafts": [[name, len(each)] for name, each in scheduled.scheduled_spec_decode_tokens.items()],
        "max_drafts": sorted(map(list, scheduled.max_drafts.items())),
        "cancels": list(scheduled.kv_cancels),
        **moved(scheduled),
    }
    return {name: value for name, value in row.items() if value}


class WatchedScheduler:
    """Pass every call on to a scheduler, and append a row for each step that it decides.

    log: the sink of the scheduler's events. A row also has, since the row before: the requests that finished, with
    their reasons, and the requests that were preempted, with their tokens and whether they were swapped, both in
    order. `held` has the blocks in use before and after the decision.
    """

    def __init__(self, scheduler: Scheduler, log: EventLog) -> None:
        self.scheduler = scheduler
        self.log = log
        self.rows: list[Row] = []
        self._num_read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def schedule(self) -> SchedulerOutput:
        """Decide a step and append its row."""
        before = held(self.scheduler)
        scheduled = self.scheduler.schedule()
        self.rows.append({**decision(scheduled), **self._news(), "held": [before, held(self.scheduler)]})
        return scheduled

    def end(self) -> None:
        """Append a last row: what happened after the last step was decided."""
        self.rows.append({"step": 0, **self._news(), "held": [held(self.scheduler)]})

    def _news(self) -> Row:
        fresh, self._num_read = self.log.events[self._num_read :], len(self.log.events)
        finished = [[each.request_id, each.reason] for each in fresh if isinstance(each, events.RequestFinished)]
        preempted = [
            [each.request_id, each.num_lost_tokens, each.swapped]
            for each in fresh
            if isinstance(each, events.RequestPreempted)
        ]
        news = {"finished": finished, "preemptions": preempted}
        return {name: value for name, value in news.items() if value}


def as_stored(rows: list[Row]) -> list[Row]:
    """Return rows as they come back from a file: lists for tuples."""
    return json.loads(json.dumps(rows))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as lines of JSON, compressed; equal rows make equal files."""
    lines = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


def read_rows(path: Path) -> list[Row]:
    """Read the rows that `write_rows` wrote."""
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def differences(recorded: list[Row], decided: list[Row]) -> Iterator[str]:
    """Yield a message for each column that differs, the first step first."""
    for index, (old, new) in enumerate(zip(recorded, decided, strict=False)):
        for name in [*old, *(each for each in new if each not in old)]:
            if old.get(name) != new.get(name):
                place = f"step {old['step']}" if old["step"] else f"after the last step (row {index})"
                yield f"{place}: {name} was {old.get(name)}, and is {new.get(name)}"
    if len(recorded) != len(decided):
        yield f"{len(recorded)} rows were recorded, and there are {len(decided)} now"
