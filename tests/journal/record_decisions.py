"""Record journals together with the decisions of the scheduler that wrote them.

    cd tests
    python -m journal.record_decisions FOLDER               # all scenarios
    python -m journal.record_decisions FOLDER swap store    # some of them

For each scenario FOLDER gets NAME.journal.gz, written by the recorder of the imported octavo, and NAME.decisions.gz,
one row per step (see `decisions`). The requests, the sampled tokens and the store are made up from a seed. Raises
`RecordingError` if the events that a scenario is for happened too seldom.
"""

from __future__ import annotations

import gzip
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from journal.decisions import WatchedScheduler, write_rows
from journal.key_store import Store
from journal.scenarios import BLOCK_SIZE, SCENARIOS, Scenario

from octavo.config import CacheConfig, SchedulerConfig
from octavo.core.scheduler import Scheduler
from octavo.data import events
from octavo.data.events import EventLog
from octavo.data.kv_groups import NO_BLOCK, KVGroupSpec, SlidingWindow
from octavo.data.kv_tiers import EndedTransfer, TierMove
from octavo.data.kv_transfer_params import KVTransferParams
from octavo.data.model_output import ModelOutput
from octavo.data.request import Request, RequestStatus
from octavo.errors import RequestError
from octavo.journal.recorder import RecordedClock, RecordingScheduler, describe
from octavo.journal.stores import RecordedConnector
from octavo.sampling_params import SamplingParams

STOP_TOKEN = 5
STEP_BASE_S = 0.004
MAX_CONVERSATIONS, MAX_PROMPTS = 8, 4
COUNTED = {  # events by name: an older octavo may lack some
    "BlockEvicted": "evicted",
    "RequestParked": "parked",
    "HostBlocksFound": "host hits",
    "HostBlockEvicted": "host evicted",
    "BlockOffloaded": "offloaded",
    "RequestOutranked": "outranked",
    "RequestStalled": "stalled",
    "TokenPostponed": "postponed",
    "StaleResultDropped": "stale results",
    "KVSavesDropped": "saves dropped",
}


class RecordingError(Exception):
    """An event of a scenario happened too seldom."""


def make_scheduler(scenario: Scenario, clock: RecordedClock, log: EventLog, store: Any) -> Scheduler:
    """Make the scheduler of a scenario."""
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "min_tokens_to_cache": 1, **scenario.scheduler}
    if store is not None:
        options |= {"kv_lookup_timeout_s": 0.2, "kv_transfer_timeout_s": 0.5}
    windows = [KVGroupSpec(SlidingWindow(scenario.window), scenario.num_window_blocks)]
    return Scheduler(
        SchedulerConfig(**options),
        CacheConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=scenario.enable_prefix_caching,
            cache_decoded_blocks=scenario.cache_decoded_blocks,
        ),
        num_blocks=scenario.num_blocks,
        num_host_blocks=scenario.num_host_blocks,
        bounded_groups=windows if scenario.window else [],
        max_model_len=400,
        clock=clock,
        sink=log,
        connector=store,
    )


class Run:
    """A scheduler, its journal, and requests that arrive, end and share prefixes."""

    def __init__(self, scenario: Scenario, path: Path) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.name)
        self.now = 0.0
        self.count: Counter[str] = Counter()
        self.log = EventLog()
        self.store = Store(random.Random(scenario.name + " store")) if scenario.has_store else None
        recorded = None if self.store is None else RecordedConnector(self.store)
        clock = RecordedClock(lambda: self.now)
        scheduler = make_scheduler(scenario, clock, self.log, recorded)
        self.watched = WatchedScheduler(scheduler, self.log)
        self.scheduler = RecordingScheduler(self.watched, clock, path, describe(scheduler), recorded)
        self.prefixes = [[self.rng.randrange(1000) for _ in range(24)] for _ in range(2)]
        self.conversations: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.open: dict[str, Request] = {}
        self.num_added = 0

    def run(self) -> None:
        """Run all steps, then until no work remains."""
        for step in range(self.scenario.num_steps + 2000):
            is_over = step >= self.scenario.num_steps
            if is_over and not self.scheduler.has_work():
                break
            if not is_over:
                self._disturb()
            self._step(is_over=is_over)
        else:
            raise RecordingError(f"{self.scenario.name}: requests do not finish: {list(self.scheduler.requests)}")
        self.scheduler.close()
        self.watched.end()
        self._count_events()
        seldom = {name: (self.count[name], least) for name, least in self.scenario.shows.items()}
        if seldom := {name: counts for name, counts in seldom.items() if counts[0] < counts[1]}:
            raise RecordingError(f"{self.scenario.name}: too seldom (times, least): {seldom}; all: {dict(+self.count)}")

    # --- requests from outside ----------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        self.now += rng.random() * 0.01
        if rng.random() < 0.3 and len(scheduler.requests) < self.scenario.most_open:
            prompt = self._prompt()
            for _ in range(rng.choice([1, 1, 1, 2])):  # several answers to one prompt
                self._add(prompt)
        if scheduler.requests and rng.random() < 0.03:
            scheduler.abort_request(rng.choice(list(scheduler.requests)))
        if scheduler.requests and rng.random() < 0.005:
            scheduler.finish_requests([next(iter(scheduler.requests))], RequestStatus.FINISHED_ERROR)
        if scheduler.running and rng.random() < 0.03:
            scheduler.faults.preempt([rng.choice(scheduler.running).request_id])
        if rng.random() < 0.005:
            scheduler.reset_prefix_cache()

    def _prompt(self) -> list[int]:
        """Return a prompt: an earlier one, or one that continues a common prefix, a conversation or nothing."""
        rng, draw = self.rng, self.rng.random()
        if self.prompts and rng.random() < 0.25:
            return rng.choice(self.prompts)
        if draw < 0.5:
            beginning = rng.choice(self.prefixes)[: rng.randrange(8, 25)]
        elif draw < 0.8 and self.conversations:
            beginning = rng.choice(self.conversations)
        else:
            beginning = []
        own = [rng.randrange(1000) for _ in range(rng.choice([1, 3, rng.randint(1, 16)]))]
        prompt = [*beginning[:40], *own]
        self.prompts = [*self.prompts, prompt][-MAX_PROMPTS:]
        return prompt

    def _add(self, prompt: list[int]) -> None:
        rng = self.rng
        name = f"r{self.num_added}"
        self.num_added += 1
        max_tokens, pair = rng.choice([1, rng.randint(2, 12), rng.randint(10, 50)]), None
        if self.scenario.pair_rate and rng.random() < self.scenario.pair_rate:
            self.count["pairs"] += 1
            pair = KVTransferParams(name, is_prefill=rng.random() < 0.5)
            max_tokens = 1 if pair.is_prefill else max_tokens
        request = Request(
            name,
            list(prompt),
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
            stop_token_ids=frozenset({STOP_TOKEN}),
            arrival_time=self.now - rng.random() * 0.01,
            priority=rng.randrange(3),
            cache_salt=rng.choice([None, None, None, "a"]),
            adapter=rng.choice([None, None, None, "x"]),
            tenant=rng.choice("xyz"),
            tenant_weight=rng.choice([1.0, 1.0, 2.0]),
            deadline=self.now + rng.uniform(0.1, 5.0) if rng.random() < 0.2 else None,
            kv_transfer_params=pair,
        )
        try:
            self.scheduler.add_request(request)
        except RequestError:
            self.count["refused"] += 1
            return
        self.open[name] = request

    # --- steps --------------------------------------------------------------------------------------------------------

    def _step(self, *, is_over: bool) -> None:
        rng, scheduler = self.rng, self.scheduler
        if scheduler.in_flight is None:
            self._decide()
        if scheduler.may_look_ahead():
            self.count["ahead"] += 1
            self._decide()
        scheduled = scheduler.in_flight
        if scheduled is None:
            self.now += 0.05  # waits for a lookup or for memory in use
            return
        self.now += STEP_BASE_S + self.scenario.token_s * scheduled.total_num_scheduled_tokens * rng.uniform(0.8, 1.2)
        transfers = [] if self.store is None else self.store.run(scheduled)
        if not is_over and rng.random() < 0.01:
            scheduler.fail_step(scheduled, "injected")
            self.count["failed steps"] += 1
            return
        scheduler.update_from_output(scheduled, self._result(scheduled, transfers, is_over=is_over))
        for name, request in list(self.open.items()):
            if name not in scheduler.requests:
                del self.open[name]
                is_failed = request.status is RequestStatus.FINISHED_ERROR
                self.count["expired"] += is_failed and request.deadline is not None and self.now >= request.deadline
                self.conversations = [*self.conversations, list(request.sequence.token_ids)][-MAX_CONVERSATIONS:]

    def _decide(self) -> None:
        scheduled = self.scheduler.schedule()
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            self.count["chunks"] += request.num_computed_tokens + count < request.num_prompt_tokens
        row, self.count["steps"] = self.watched.rows[-1], self.count["steps"] + 1
        for place, group in zip(("", "window "), row.get("copies", ()), strict=False):
            for what, count in zip(("swapped out", "copied", "swapped in"), group, strict=True):
                self.count[place + what] += count
        for order in scheduled.kv_transfers:
            what = f"{order.direction.value}s"
            self.count[what] += 1
            parts = [block_id != NO_BLOCK for ids in order.block_ids[1:] for block_id in ids]
            self.count[f"window {what}"] += any(parts) and bool(self.scenario.window)
            self.count["in part"] += not all(parts)
        self.count["bounded"] += len(scheduled.max_drafts)

    def _result(self, scheduled: Any, transfers: list[EndedTransfer], *, is_over: bool) -> ModelOutput:
        """Sample tokens if all known tokens of a request are computed; verify drafts; fail or postpone some
        requests.
        """
        rng, sampled = self.rng, dict[str, list[int]]()
        for name, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(name)
            if request is None or request.num_computed_tokens + count < len(request.sequence.token_ids):
                continue
            drafts = scheduled.scheduled_spec_decode_tokens.get(name, [])
            num_accepted = rng.randint(0, len(drafts))
            token = STOP_TOKEN if rng.random() < 0.03 else rng.randrange(10, 1000)
            sampled[name] = [*drafts[:num_accepted], token]
        result = ModelOutput(scheduled.step, sampled, kv_transfers=transfers)
        may_postpone = not self.scheduler.config.async_scheduling
        for name in [each for each in sampled if may_postpone and rng.random() < 0.02]:
            del sampled[name]
            result.postponed.add(name)
        if sampled and not is_over and rng.random() < 0.01:
            result.errors[rng.choice(list(sampled))] = "logits that are no numbers"
        if scheduled.copies and self.scenario.num_host_blocks and rng.random() < 0.5:
            result.host_moves.append(TierMove("host", 2, 200, 0.25))
            result.host_moves.append(TierMove("host", 1, 100, 0.125))
        result = replace(result, draft_token_ids=self._propose(scheduled))
        names = frozenset(name for name in sampled if self.scenario.draft_rate and rng.random() < 0.8)
        if not names:
            return result
        num_passes = rng.randint(1, 4)
        return replace(result, drafting_s=0.0002 * num_passes, num_drafting_passes=num_passes, computed_drafts=names)

    def _propose(self, scheduled: Any) -> dict[str, list[int]]:
        """Return drafts for the running requests, as many as the scheduler allows."""
        rng, drafts = self.rng, dict[str, list[int]]()
        if rng.random() >= self.scenario.draft_rate:
            return drafts
        for request in self.scheduler.running:
            most = min(scheduled.max_drafts.get(request.request_id, 4), 4)
            if count := rng.randint(min(1, most), most):
                drafts[request.request_id] = [rng.randrange(10, 1000) for _ in range(count)]
        return drafts

    # --- counts -------------------------------------------------------------------------------------------------------

    def _count_events(self) -> None:
        """Count events of the event stream."""
        count = self.count
        count["late lookups"] = 0 if self.store is None else self.store.num_late
        for event in self.log.events:
            match event:
                case events.RequestPreempted():
                    count["preempted"] += 1
                    count["swapped"] += event.swapped
                case events.PrefixCacheQueried():
                    count["hits"] += event.num_hit_tokens > 0
                case events.RequestFinished():
                    count["aborted"] += event.reason == "abort"
                    count["finished: " + event.reason] += 1
                case events.DraftsVerified():
                    count["accepted"] += event.num_accepted
                    count["rejected"] += event.num_drafted - event.num_accepted
                case events.KVLoadEnded():
                    count["failed loads"] += event.outcome == "failed"
                    count["expired loads"] += event.outcome == "expired"
                case events.RequestBlocked():
                    count[f"blocked: {event.reason.value}"] += 1
                case _:
                    count[COUNTED.get(type(event).__name__, "others")] += 1


def record(scenario: Scenario, folder: Path) -> Counter[str]:
    """Record one scenario into a folder; return the number of occurrences of each event. Raises `RecordingError`."""
    path = folder / f"{scenario.name}.journal.gz"
    run = Run(scenario, path)
    run.run()
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 9, mtime=0))
    write_rows(folder / f"{scenario.name}.decisions.gz", run.watched.rows)
    return +run.count


def main() -> None:
    """Record the named scenarios, or all."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for scenario in SCENARIOS:
        if not names or scenario.name in names:
            counts = record(scenario, folder)
            sys.stdout.write(f"{scenario.name}: {', '.join(f'{name} {n}' for name, n in sorted(counts.items()))}\n")


if __name__ == "__main__":
    main()
