"""Write a journal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import secrets
import time
import weakref
from typing import IO, TYPE_CHECKING, Any

from octavo.data.kv_groups import KVGroupSpec
from octavo.data.request import RequestStatus
from octavo.journal.format import (
    REQUEST_DEFAULTS,
    REQUEST_OPTIONS,
    VERSION,
    Pseudonyms,
    checksum,
    encode_tokens,
    hidden,
    open_journal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from octavo.core.scheduler import Scheduler
    from octavo.data.model_output import ModelOutput
    from octavo.data.request import Request
    from octavo.data.scheduler_output import SchedulerOutput
    from octavo.journal.stores import RecordedConnector
    from octavo.outputs import EngineCoreOutput

logger = logging.getLogger(__name__)
FLUSH_EVERY_US = 1_000_000
MAX_LINES = 1000
_encode = json.JSONEncoder(separators=(",", ":")).encode


class RecordedClock:
    """Rounds to whole microseconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.microseconds = round(1e6 * clock())

    def __call__(self) -> float:
        """Return seconds."""
        self.microseconds = round(1e6 * self._clock())
        return self.microseconds / 1e6


@dataclasses.dataclass(slots=True)
class _Unfinished:
    number: int
    request: Request
    pseudonyms: Pseudonyms

    def generated(self) -> str:
        sequence = self.request.sequence
        return encode_tokens(self.pseudonyms.extend(sequence.token_ids[sequence.num_prompt_tokens :]))


class RecordingScheduler:
    """Forwards calls to `scheduler`, and records them in a journal.

    header: Result of `describe`. Raises OSError if the file cannot be opened. If writing fails later, the journal ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: RecordedClock,
        path: Path,
        header: dict[str, Any],
        store: RecordedConnector | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._clock = clock
        self._file = open_journal(path, "w")
        self._lines: list[str] = []
        weakref.finalize(self, _finish, self._file, self._lines)
        self._key = secrets.token_bytes(32)
        self._unfinished: dict[str, _Unfinished] = {}
        self._replaced: dict[str, _Unfinished] = {}
        self._num_arrivals = 0
        self._last_time = self._last_flush = clock.microseconds
        self.seconds = 0.0  # CPU time of recording
        self._is_broken = False
        self._write({"journal": VERSION, "start": clock.microseconds, **header})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def add_request(self, request: Request) -> None:
        """See `Scheduler`."""
        total = request.max_total_tokens
        self._scheduler.add_request(request)
        start = time.thread_time()
        pseudonyms = Pseudonyms(self._key)
        prompt = pseudonyms.extend(request.sequence.token_ids)
        if request.request_id in self._unfinished:  # the next result reports the earlier request's end
            self._replaced[request.request_id] = self._unfinished[request.request_id]
        self._unfinished[request.request_id] = _Unfinished(self._num_arrivals, request, pseudonyms)
        options = {name: getattr(request, name) for name in REQUEST_OPTIONS}
        options = {name: value for name, value in options.items() if value != REQUEST_DEFAULTS.get(name, ...)}
        if request.cache_salt is not None:
            options["cache_salt"] = hidden(request.cache_salt, self._key)
        if request.spans:
            options["spans"] = [[each.first, each.end, hidden(each.key, self._key)] for each in request.spans]
        if request.kv_transfer_params is not None:
            options["kv_transfer_params"] = dataclasses.asdict(request.kv_transfer_params)
        self._write(
            ["a", self._elapsed(), self._num_arrivals, request.request_id, encode_tokens(prompt), total, options]
        )
        self._num_arrivals += 1
        self.seconds += time.thread_time() - start

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[EngineCoreOutput]:
        """See `Scheduler`."""
        outputs = self._scheduler.finish_requests(request_ids, status)
        start = time.thread_time()
        self._note_answers()
        if outputs:
            numbers = [self._unfinished[output.request_id].number for output in outputs]
            self._write(["f", self._elapsed(), numbers, status.name])
            self._note_endings(outputs, of_step=False)
        self.seconds += time.thread_time() - start
        return outputs

    def abort_request(self, request_id: str) -> list[EngineCoreOutput]:
        """Abort a request."""
        return self.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> SchedulerOutput:
        """See `Scheduler`. Preemptions by `faults` are recorded, too."""
        to_preempt, known = self._scheduler.faults.to_preempt, self._unfinished
        if to_preempt and self._scheduler.in_flight is None:
            self._write(["p", [known[name].number for name in to_preempt if name in known]])
        scheduled = self._scheduler.schedule()
        start = time.thread_time()
        self._note_answers()
        self._write_line(f'["s",{self._elapsed()},{checksum(scheduled)}]\n')
        self.seconds += time.thread_time() - start
        return scheduled

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelOutput) -> list[EngineCoreOutput]:
        """See `Scheduler`. A stale result is not recorded."""
        is_taken = result.step == scheduled.step and scheduled is self._scheduler.in_flight
        outputs = self._scheduler.update_from_output(scheduled, result)
        if not is_taken:
            return outputs
        start = time.thread_time()
        self._note_answers()
        known = self._unfinished
        rows: list[list[Any]] = [[known[name].number, 0, 0, None, None] for name in result.postponed if name in known]
        has_drafts = bool(scheduled.scheduled_spec_decode_tokens)
        for output in outputs:
            num_accepted, reason = len(output.new_token_ids), output.finish_reason
            if reason is None and num_accepted == 1 and not has_drafts:
                continue  # a replay assumes one token
            num_sampled = len(result.sampled_token_ids.get(output.request_id, ()))
            if reason is not None or num_sampled != 1 or num_accepted != 1:
                name = output.request_id
                number = (self._replaced.get(name) or self._unfinished[name]).number
                rows.append([number, num_sampled, num_accepted, reason, output.error])
        load = result.experts
        if result.drafting_s or result.host_moves or result.draft_token_ids or result.num_compilations or load:
            computed = [known[name].number for name in sorted(result.computed_drafts) if name in known]
            drafts = {known[name].number: len(ids) for name, ids in result.draft_token_ids.items() if name in known}
            seldom = result.drafting_s, result.num_drafting_passes, computed, result.host_moves, drafts
            experts = [] if load is None else [dataclasses.astuple(load)]
            self._write(["u", self._elapsed(), rows, result.kv_transfers, *seldom, result.num_compilations, *experts])
        elif rows or result.kv_transfers:
            self._write(["u", self._elapsed(), rows, result.kv_transfers])
        else:
            self._write_line(f'["u",{self._elapsed()},[],[]]\n')
        if rows:
            self._note_endings(outputs, of_step=True)
        self.seconds += time.thread_time() - start
        return outputs

    def fail_step(self, scheduled: SchedulerOutput, message: str) -> list[EngineCoreOutput]:
        """See `Scheduler`."""
        is_taken = scheduled is self._scheduler.in_flight
        outputs = self._scheduler.fail_step(scheduled, message)
        if not is_taken:
            return outputs
        start = time.thread_time()
        self._note_answers()
        self._write(["x", self._elapsed(), message])
        self._note_endings(outputs, of_step=True)
        self.seconds += time.thread_time() - start
        return outputs

    def reset_prefix_cache(self) -> bool:
        """See `Scheduler`."""
        self._write(["r"])
        return self._scheduler.reset_prefix_cache()

    def get_num_transfers(self) -> int:
        """See `Scheduler`."""
        return self._scheduler.get_num_transfers()

    def has_work(self) -> bool:
        """See `Scheduler`."""
        return self._scheduler.has_work()

    def close(self) -> None:
        """Flush and close."""
        if not self._file.closed:
            self._flush()
            self._file.close()

    def _note_endings(self, outputs: list[EngineCoreOutput], *, of_step: bool) -> None:
        """If an id was reused, a step's output belongs to the earlier request."""
        for output in outputs:
            if output.finish_reason is None:
                continue
            name = output.request_id
            ended = self._replaced.pop(name) if of_step and name in self._replaced else self._unfinished.pop(name)
            self._write(["g", ended.number, ended.generated()])

    def _note_answers(self) -> None:
        if self._store is not None and (answers := self._store.take_answers()):
            self._write(["k", answers])

    def _elapsed(self) -> int:
        elapsed = self._clock.microseconds - self._last_time
        self._last_time = self._clock.microseconds
        return elapsed

    def _write(self, line: Any) -> None:
        self._write_line(_encode(line) + "\n")

    def _write_line(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= MAX_LINES or self._clock.microseconds - self._last_flush > FLUSH_EVERY_US:
            self._flush()

    def _flush(self) -> None:
        self._last_flush = self._clock.microseconds
        if not self._is_broken:
            try:
                _write_out(self._file, self._lines)
            except OSError:  # a full disk must not end the engine
                self._is_broken = True
                logger.exception("writing the journal failed; it ends here")
        self._lines.clear()


def _write_out(file: IO[str], lines: list[str]) -> None:
    file.write("".join(lines))
    lines.clear()
    file.flush()


def _finish(file: IO[str], lines: list[str]) -> None:
    if not file.closed:
        with contextlib.suppress(OSError):
            _write_out(file, lines)
        file.close()


def describe(scheduler: Scheduler, **more: Any) -> dict[str, Any]:
    """Return a header from which a replay creates an equal scheduler. more: Further fields."""
    manager = scheduler.kv_cache_manager
    groups = [KVGroupSpec(group.kind, group.num_blocks) for group in manager.groups]
    if manager.checkpoints is not None:
        groups[-1] = dataclasses.replace(groups[-1], num_host_blocks=manager.checkpoints.host.num_slots)
    return {
        "scheduler": dataclasses.asdict(scheduler.config),
        "kv_groups": [group.to_json() for group in groups],
        "num_host_blocks": manager.host.num_blocks,
        "block_size": manager.block_size,
        "enable_prefix_caching": manager.prefix_cache.is_enabled,
        "state_checkpoint_interval": None if manager.checkpoints is None else manager.checkpoints.interval,
        "cache_decoded_blocks": manager.prefix_cache.cache_decoded_blocks,
        "max_model_len": scheduler.max_model_len,
        "connector": scheduler.transfers.store_name,
        **more,
    }
