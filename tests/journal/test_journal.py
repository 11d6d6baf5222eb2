"""A recorded run can be repeated, explained and drawn; recording is cheap and the journal has no text."""

from __future__ import annotations

import gc
import itertools
import json
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from kernels_available import COMPILED
from stores import Store

from octavo import CacheConfig, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import EngineConfig, kernels_required
from octavo.core.draft_policy import DraftPolicy
from octavo.data.events import (
    CheckpointEvicted,
    CheckpointSaved,
    ExpertsComputed,
    HostBlocksFound,
    KernelsCompiled,
    RequestQueued,
    StepScheduled,
)
from octavo.data.expert_stats import ExpertLoad
from octavo.data.model_output import ModelOutput
from octavo.data.request import ContentSpan, RequestStatus
from octavo.data.scheduler_output import KVTransfer, TransferDirection
from octavo.errors import ConfigError
from octavo.journal.explain import explain, intervals
from octavo.journal.format import Pseudonyms, checksum, decode_tokens, encode_tokens, read_journal
from octavo.journal.recorder import RecordedClock, RecordingScheduler, describe
from octavo.journal.replay import replay
from octavo.journal.trace import chrome_trace

needs_kernels = pytest.mark.skipif(
    not COMPILED and not kernels_required(), reason="octavo was installed without its compiled kernels"
)
COPIES = ("swap_out", "block_copies", "swap_in")
OPTIONS = [
    {},
    {"policy": "priority"},
    {"policy": "deadline", "ageing_s": 0.5},
    {"policy": "fair"},
    {"admission": "reservation"},
    {"batching": "prefill_first"},
    {"preemption": "swap"},
    {"max_num_preemptions": 1},
    {"mixed_step_ms": 1500.0},
    {"async_scheduling": True},
    {"preemption": "swap", "window": 6, "num_window_blocks": 12},  # few blocks of 4 tokens
    {"num_state_slots": 7},
    {"num_state_slots": 7, "num_host_states": 4, "preemption": "swap"},
    {"num_state_slots": 9, "state_checkpoint_interval": 4, "async_scheduling": True},
]


class Recorded:
    """A core with a journal, and a clock that advances with every call."""

    def __init__(self, make_core, path, **options):
        self.core = make_core(**options)
        scheduler = self.core.scheduler
        self.clock = RecordedClock(scheduler._clock)
        scheduler._clock = self.clock
        self.core.scheduler = RecordingScheduler(scheduler, self.clock, path, describe(scheduler))
        self.path = path

    def close(self):
        self.core.scheduler.close()
        return replay(self.path)


@pytest.fixture
def make_core():
    from core.conftest import Core

    return Core


@pytest.mark.sweep(48)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("suffix", [".journal", ".journal.gz"])
def test_replay_repeats_every_decision(make_core, tmp_path, options, suffix):
    rng = random.Random(str(options))
    others = {"num_host_blocks": 6} if "preemption" in options else {}
    if "mixed_step_ms" in options:
        times = itertools.accumulate(rng.uniform(0.3, 3.0) for _ in itertools.count())
        others = {"clock": lambda: next(times)}
    recorded = Recorded(
        make_core,
        tmp_path / f"run{suffix}",
        num_blocks=14,
        max_num_batched_tokens=24,
        max_num_seqs=5,
        **options,
        **others,
    )
    core = recorded.core
    prefix = [rng.randrange(100) for _ in range(12)]
    for step in range(400):
        if rng.random() < 0.5 and len(core.scheduler.requests) < 12:
            prompt = prefix[: rng.randrange(12)] + [rng.randrange(100) for _ in range(rng.randint(1, 9))]
            core.add(
                f"r{step}",
                prompt,
                max_tokens=rng.randint(1, 20),
                priority=rng.randrange(3),
                tenant=rng.choice("ab"),
                stop_token_ids=[5],
                spans=(ContentSpan(0, 1, rng.choice("xy")),) if rng.random() < 0.3 else (),
                cache_points=(rng.randrange(12),) if "num_state_slots" in options else (),
                deadline=core.scheduler._emitter.now + 30.0 if rng.random() < 0.2 else None,
            )
            core.answers[f"r{step}"] = [rng.choice([7, 8, 9, 9, 5]) for _ in range(20)]
        if core.scheduler.requests and rng.random() < 0.05:
            core.scheduler.abort_request(rng.choice(list(core.scheduler.requests)))
        if core.scheduler.running and rng.random() < 0.05:
            core.scheduler.faults.preempt([core.scheduler.running[0].request_id])
        if rng.random() < 0.02:
            core.scheduler.reset_prefix_cache()
        if core.scheduler.in_flight is None or core.scheduler.may_look_ahead():
            core.scheduler.schedule()
        if core.scheduler.may_look_ahead():
            core.scheduler.schedule()
        scheduled = core.scheduler.in_flight
        if scheduled is None:
            continue
        if rng.random() < 0.02:
            core.scheduler.fail_step(scheduled, "injected")
            continue
        result = compute(core, scheduled, rng)
        if rng.random() < 0.1:
            result = replace(result, draft_token_ids={r.request_id: [9, 9] for r in core.scheduler.running})
        core.scheduler.update_from_output(scheduled, result)
    done = recorded.close()
    assert done.mismatches == []
    assert done.num_steps >= 400
    assert bool(core.log.of_type(HostBlocksFound)) == ("preemption" in options)
    assert done.log.events == core.log.events
    assert bool(core.log.of_type(CheckpointEvicted)) == ("num_state_slots" in options)
    limits = [event.prefill_limit for event in core.log.of_type(StepScheduled)]
    moves = {(after > before) - (after < before) for before, after in itertools.pairwise(limits)}
    assert moves == ({-1, 0, 1} if "mixed_step_ms" in options else {0})


def compute(core, scheduled, rng):
    """Sample tokens, verify drafts at random, and add an error now and then."""
    result = core.compute(scheduled)
    for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
        result.sampled_token_ids[request_id] = [9] * (1 + rng.randint(0, len(drafts)))
    may_postpone = not core.scheduler.config.async_scheduling  # then only if they wait for each result
    for request_id in [each for each in result.sampled_token_ids if may_postpone and rng.random() < 0.05]:
        del result.sampled_token_ids[request_id]
        result.postponed.add(request_id)
    if result.sampled_token_ids and rng.random() < 0.02:
        request_id = next(iter(result.sampled_token_ids))
        return replace(result, errors={request_id: "NaN"})
    return result


def test_replay_repeats_number_of_verified_drafts(make_core, tmp_path, monkeypatch):
    """It depends on step times, and nothing else in a journal does so here."""
    rng = random.Random(5)
    times = itertools.accumulate(rng.choice([0.001, 0.02, 0.5]) for _ in itertools.count())
    recorded = Recorded(make_core, tmp_path / "run.journal", clock=lambda: next(times))
    core, num_guessed, num_verified = recorded.core, 0, 0
    for step in range(300):
        if step % 60 < 5:
            core.add(f"r{step}", 5, max_tokens=60)
        scheduled = core.scheduler.schedule()
        num_guessed += 3 * len(scheduled.num_scheduled_tokens)
        num_verified += sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        if scheduled.is_empty:
            continue
        drafts = {r.request_id: [9, 9, 9] for r in core.scheduler.running}
        result = replace(compute(core, scheduled, rng), draft_token_ids=drafts)
        core.scheduler.update_from_output(scheduled, result)
    assert 0.1 * num_guessed < num_verified < 0.9 * num_guessed
    done = recorded.close()
    assert done.mismatches == []
    assert done.log.events == core.log.events
    monkeypatch.setattr(DraftPolicy, "learn", lambda *_args: None)
    assert replay(recorded.path).mismatches


@pytest.mark.turn(8)
def test_replay_repeats_number_of_computed_drafts(make_core, tmp_path, monkeypatch):
    """It also depends on the times of the draft model."""
    rng = random.Random(6)
    times = itertools.accumulate(rng.choice([0.01, 0.02, 0.03]) for _ in itertools.count())
    recorded = Recorded(make_core, tmp_path / "run.journal", clock=lambda: next(times))
    core, bounds = recorded.core, Counter()
    for step in range(340):
        if step % 60 < 5 and step < 300:
            core.add(f"r{step}", 5, max_tokens=60)
        scheduled = core.scheduler.schedule()
        if scheduled.is_empty:
            continue
        result = compute(core, scheduled, rng)
        guesses = {name: [9, 9, 9][: scheduled.max_drafts.get(name, 3)] for name in result.sampled_token_ids}
        bounds.update(map(len, guesses.values()))
        if num_passes := max(map(len, guesses.values()), default=0):
            drafting_s = rng.choice([0.0001, 0.002, 0.007]) * num_passes
            names = frozenset(guesses)
            result = replace(result, drafting_s=drafting_s, num_drafting_passes=num_passes, computed_drafts=names)
        drafts = {name: drafts for name, drafts in guesses.items() if drafts}
        core.scheduler.update_from_output(scheduled, replace(result, draft_token_ids=drafts))
    assert min(bounds[count] for count in range(4)) > 0
    done = recorded.close()
    assert done.mismatches == []
    assert done.log.events == core.log.events
    monkeypatch.setattr(DraftPolicy, "_learn_passes", lambda *_args: None)
    assert replay(recorded.path).mismatches


def test_replay_repeats_compilations(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal")
    core = recorded.core
    core.add("a", 5, max_tokens=2)
    for num_compilations in (3, 0):
        scheduled = core.scheduler.schedule()
        core.scheduler.update_from_output(
            scheduled, ModelOutput(scheduled.step, {"a": [7]}, num_compilations=num_compilations)
        )
    done = recorded.close()
    assert [event.num_kernels for event in done.log.of_type(KernelsCompiled)] == [3]
    assert done.log.events == core.log.events


def test_replay_repeats_work_of_experts(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal")
    core, load = recorded.core, ExpertLoad(48, 40, 1 << 40, 2.125)
    core.add("a", 5, max_tokens=3)
    for experts in (load, None, replace(load, num_tokens=4)):
        scheduled = core.scheduler.schedule()
        core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {"a": [7]}, experts=experts))
    done = recorded.close()
    assert [event.load.num_tokens for event in done.log.of_type(ExpertsComputed)] == [48, 4]
    assert done.log.events == core.log.events


@pytest.mark.parametrize("interval", [None, 8])
@pytest.mark.parametrize("points", [(), (13, 21)])
def test_replay_repeats_saves_of_states(make_core, tmp_path, interval, points):
    recorded = Recorded(make_core, tmp_path / "run.journal", num_state_slots=9, state_checkpoint_interval=interval)
    core = recorded.core
    core.add("a", list(range(40)), max_tokens=3, cache_points=points)
    core.add("b", [*range(22), *[1] * 18], max_tokens=3)
    core.run()
    header, lines = read_journal(recorded.path) if recorded.close() else ({}, [])
    assert header["state_checkpoint_interval"] == interval
    arrivals = [line[-1] for line in lines if line[0] == "a"]
    assert [options.get("cache_points", []) for options in arrivals] == [list(points), []]
    done = replay(recorded.path)
    saved = [event.num_tokens for event in done.log.of_type(CheckpointSaved) if event.request_id == "a"]
    of_interval = [8, 16, 24, 32] if interval else [20]
    assert saved == sorted({*of_interval, *((12, 20) if points else ()), 36, 40})
    assert done.log.events == core.log.events
    assert done.mismatches == []


def test_step_checksum_covers_saves_of_states(make_core):
    core = make_core(num_state_slots=9)
    core.add("a", 9)
    scheduled = core.scheduler.schedule()
    assert scheduled.state_saves == {"a": [(8, 1)]}
    sums = {checksum(replace(scheduled, state_saves=saves)) for saves in ({}, {"a": [(8, 1)]}, {"a": [(8, 2)]})}
    assert len(sums) == 3


def test_journal_of_later_version_is_refused(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal")
    recorded.core.add("a", 3)
    recorded.close()
    header, *lines = recorded.path.read_text().splitlines()
    changed = json.loads(header)
    changed["scheduler"]["clairvoyance"] = 1
    recorded.path.write_text("\n".join([json.dumps(changed), *lines, ""]))
    with pytest.raises(ConfigError, match="clairvoyance"):
        replay(recorded.path)


def test_step_checksum_covers_window_blocks_and_copies(make_core):
    core = make_core(window=6, num_window_blocks=60, num_host_blocks=9, connector=Store(num_tokens=0, wants=True))
    core.add("a", 40)
    scheduled = core.step()
    [new], copies = scheduled.scheduled_new_reqs, scheduled.copies
    scheduled.kv_transfers.append(KVTransfer(0, TransferDirection.SAVE, [b""], [[0], [0]]))
    [transfer] = scheduled.kv_transfers
    others = [
        replace(
            scheduled, scheduled_new_reqs=[replace(new, block_ids=[new.block_ids[0], [*new.block_ids[1][:-1], 59]])]
        ),
        replace(scheduled, scheduled_cached_reqs=replace(scheduled.scheduled_cached_reqs, new_block_ids=[[], [[3]]])),
        *(replace(scheduled, copies=replace(copies, **{name: [(1, 0, 1)]})) for name in COPIES),
        replace(scheduled, kv_transfers=[replace(transfer, block_ids=[[0], [1]])]),
    ]
    assert len({checksum(each) for each in [scheduled, *others]}) == 7


def test_replay_reports_step_of_different_decision(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal", max_num_seqs=4)
    for index in range(6):
        recorded.core.add(f"r{index}", 5, max_tokens=3)
    recorded.core.run()
    assert recorded.close().mismatches == []
    header, *lines = recorded.path.read_text().splitlines()
    changed = json.loads(header)
    changed["scheduler"]["max_num_seqs"] = 3
    recorded.path.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
    assert replay(recorded.path).mismatches[0].step == 1


def test_pseudonyms_are_equal_for_common_token_prefix():
    def names(key, *parts):
        pseudonyms = Pseudonyms(key)
        return decode_tokens(encode_tokens(b"".join(pseudonyms.extend(part) for part in parts)))

    first, second = names(b"1", [1, 2, 3, 4]), names(b"1", [1, 2, 9, 4])
    assert len(first) == 4 == len({*first})
    assert first[:2] == second[:2]
    assert not {*first[2:]} & {*second[2:]}
    assert names(b"2", [1, 2, 3, 4]) != first
    assert names(b"1", [1], [2, 3], [], [4]) == first
    assert all(0 <= name < 1 << 31 for name in first)


@pytest.mark.parametrize("text", ["", "{}\n", "nonsense\n", '{"journal": 99}\n'])
def test_invalid_journal_file_raises_config_error(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match="journal"):
        read_journal(path)


def test_truncated_journal_replays_its_complete_records(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal")
    recorded.core.add("a", 5, max_tokens=9)
    recorded.core.run()
    recorded.core.scheduler.close()
    text = recorded.path.read_text()
    recorded.path.write_text(text[: len(text) * 3 // 4])
    assert replay(recorded.path).mismatches == []


# --- a real run -------------------------------------------------------------------------------------------------------


def real_run(path, num_requests):
    """Run requests on the built-in model with little memory, some of them aborted; return CPU seconds of the steps."""
    from octavo.build import build_engine

    config = EngineConfig(
        model=ModelConfig(skip_tokenizer_init=True),
        cache=CacheConfig(num_gpu_blocks=24),  # so few that some requests are preempted however long steps take
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
        record=path,
    )
    engine = build_engine(config)
    rng = random.Random(4)
    prefix = [rng.randrange(10, 1000) for _ in range(40)]
    sent, seconds = 0, 0.0
    while sent < num_requests or engine.has_unfinished_requests():
        for _ in range(rng.randint(0, 3)):
            if sent < num_requests:
                own = [rng.randrange(10, 1000) for _ in range(rng.randint(1, 60))]
                params = SamplingParams(max_tokens=rng.randint(1, 80), temperature=1.0, ignore_eos=True)
                engine.add_request(str(sent), {"prompt_token_ids": prefix[: rng.randrange(40)] + own}, params)
                sent += 1
        if rng.random() < 0.05:
            engine.abort_request(str(rng.randrange(sent or 1)))
        start = time.process_time()
        engine.step()
        seconds += time.process_time() - start
    stats = engine.core.metrics.stats
    recording = engine.core.scheduler.seconds
    engine.core.scheduler.close()
    return stats, seconds, recording


@pytest.mark.turn(8)
@needs_kernels
@pytest.mark.parametrize("num_requests", [70, pytest.param(1000, marks=pytest.mark.slow)])
def test_journal_of_real_engine_run_replays(tmp_path, num_requests, record_testsuite_property):
    path = tmp_path / "run.journal"
    gc.collect()
    gc.disable()  # collections happen at random, in steps or in recording
    try:
        stats, seconds, recording = real_run(path, num_requests)
    finally:
        gc.enable()
    assert stats.num_preemptions > 0
    done = replay(path)
    assert done.mismatches == []
    assert done.num_requests == num_requests
    ends = [e for e in done.log.events if type(e).__name__ == "RequestFinished"]
    assert len(ends) == num_requests
    assert {e.reason for e in ends} >= {"length", "abort"}
    size = path.stat().st_size
    record_testsuite_property("journal_bytes_a_request", round(size / num_requests))
    record_testsuite_property("recording_share_of_cpu", round(recording / seconds, 4))
    assert size / num_requests < 2000
    assert recording < 0.1 * seconds  # the exact share is measured by benchmarks/recording.py
    for life in intervals(done.log.events, done.end_time).values():
        assert all(a.end == b.start for a, b in itertools.pairwise(life))


def test_request_id_reused_before_reported_expiry_replays(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal")
    core = recorded.core
    core.add("other", 3, max_tokens=6)
    core.add("a", [1, 2, 3], deadline=0.5, max_tokens=6)
    scheduled = core.scheduler.schedule()  # "a" expires: its end is reported with the result
    assert "a" not in core.scheduler.requests
    core.add("a", [4, 5, 6, 7], max_tokens=3)
    core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    core.add("b", 4, deadline=0.5)
    scheduled = core.scheduler.schedule()
    core.add("b", 5, max_tokens=3)
    core.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)  # the second one
    core.scheduler.update_from_output(scheduled, core.compute(scheduled))
    core.run()
    assert recorded.close().mismatches == []
    endings = [line for line in read_journal(recorded.path)[1] if line[0] == "g"]
    assert sorted(line[1] for line in endings) == [0, 1, 2, 3, 4]


def test_journal_contains_no_tokens_and_no_cache_salt(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal")
    prompt = [111_111, 222_222, 333_333, 444_444, 555_555]
    recorded.core.answers["a"] = [666_666, 777_777]
    recorded.core.add("a", prompt, max_tokens=2, cache_salt="a very secret salt")
    recorded.core.run()
    assert recorded.close().mismatches == []
    text = recorded.path.read_text()
    assert "secret" not in text
    assert not [token for token in (*prompt, 666_666, 777_777) if str(token) in text]
    assert not any(encode_tokens(token.to_bytes(4, "little"))[:5] in text for token in prompt)


def test_full_disk_stops_journal_but_not_engine(make_core, tmp_path, caplog):
    recorded = Recorded(make_core, tmp_path / "run.journal")

    def write(_text):
        raise OSError("no space left on device")

    recorded.core.scheduler._file.close()
    recorded.core.scheduler._file = type("Full", (), {"write": staticmethod(write), "flush": write})()
    recorded.core.add("a", 5, max_tokens=4)
    recorded.core.run()
    assert recorded.core.finished == {"a": "length"}
    assert caplog.text.count("writing the journal failed") == 1


# --- explanations -----------------------------------------------------------------------------------------------------


def explained(core, request_id):
    result = explain(core.log.events, request_id)
    assert sum(result.seconds.values()) == pytest.approx(result.wall_s, rel=0.01)
    assert result.text().startswith(f"request {request_id}: ")
    return result.text()


def test_explain_names_long_prompt_that_delayed_request(make_core):
    core = make_core(max_num_batched_tokens=10)
    core.add("long", 80, max_tokens=2)
    core.add("short", 3, max_tokens=2)
    core.run()
    text = explained(core, "short")
    assert "queued after 1 other request" in text
    assert "the step's token budget is used up" in text
    assert "of 80 computed tokens went to long" in text


def test_explain_includes_time_before_queue(make_core):
    ticks = itertools.count(10)
    core = make_core(clock=lambda: float(next(ticks)))
    core.add("late", 5, max_tokens=3, arrival_time=7.5)
    core.run()
    log = core.log.events
    queued, last = core.log.of_type(RequestQueued)[0], log[-1].time
    result = explain(log, "late")
    assert result.seconds["on its way to the queue"] == queued.time - 7.5 > 0
    assert result.wall_s == last - 7.5
    assert intervals(log, last)["late"] == result.intervals


def test_explain_reports_draft_acceptance(make_core):
    core = make_core(clock=lambda: 0.0)
    core.add("guessed", 4, max_tokens=8)
    core.add("plain", 4, max_tokens=8)
    core.step()
    for drafts, num_right in (([7, 7, 8], 2), ([8], 0)):
        core.guess({"guessed": drafts})
        scheduled = core.scheduler.schedule()
        sampled = {"guessed": [7] * (num_right + 1), "plain": [7]}
        core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, sampled))
    core.run()
    text = explained(core, "guessed")
    assert "2 of 4 draft tokens were accepted (by position in the draft: 50 %, 100 %, 0 %)" in text
    assert "it got 2.00 tokens per step with drafts" in text
    assert "draft tokens" not in explained(core, "plain")


def test_explain_reports_experts_of_own_steps(make_core):
    """The result of a step arrives after the next step was decided."""
    core = make_core(async_scheduling=True, clock=lambda: 0.0)
    core.add("first", 4, max_tokens=2)
    loads = [ExpertLoad(16, 8, 8 << 20, 1.0), ExpertLoad(12, 4, 4 << 20, 1.5), ExpertLoad(90, 80, 80 << 20, 3.0)]
    scheduled = [core.scheduler.schedule(), core.scheduler.schedule()]
    core.add("second", 4, max_tokens=1)
    for load in loads:
        core.scheduler.update_from_output(scheduled[0], replace(core.compute(scheduled.pop(0)), experts=load))
        if core.scheduler.in_flight is None or core.scheduler.may_look_ahead():
            scheduled.append(core.scheduler.schedule())
    assert [each.step for each in core.log.of_type(ExpertsComputed)] == [1, 2, 3]
    told = explained(core, "first")
    assert "a step read 6.0 MiB of experts' weights; an expert that was read computed 2.33 tokens" in told
    assert "busiest expert had 1.25 times the mean" in told
    assert "a step read 80.0 MiB" in explained(core, "second")


def test_explain_reports_tokens_postponed_by_grammar(make_core):
    core = make_core()
    core.add("structured", 4, max_tokens=2)
    for _ in range(3):
        scheduled = core.scheduler.schedule()
        core.scheduler.update_from_output(scheduled, ModelOutput(scheduled.step, {}, postponed={"structured"}))
    core.run()
    assert "it got no token in 3 steps: the tokens that its grammar allows were not computed in time" in explained(
        core, "structured"
    )


def test_explain_reports_speedup_from_drafts(make_core):
    now = [0.0]
    core = make_core(clock=lambda: now[0])
    core.add("guessed", 4, max_tokens=8)
    for drafts, num_right in (([], 0), ([], 0), ([7, 7, 8], 2)):
        core.guess({"guessed": drafts})
        scheduled = core.scheduler.schedule()
        now[0] += 2.0
        result = ModelOutput(scheduled.step, {"guessed": [7] * (num_right + 1)}, drafting_s=0.5)
        core.scheduler.update_from_output(scheduled, result)
    core.run()
    told = explained(core, "guessed")
    assert "it got 3.00 tokens per step with drafts; " in told
    assert "these steps were 2.25 times as fast as steps without drafts, over all requests in them" in told


def test_explain_reports_wait_for_max_num_seqs(make_core):
    core = make_core(max_num_seqs=1)
    core.add("first", 3, max_tokens=20)
    core.add("second", 3)
    core.run()
    assert "max_num_seqs requests run already" in explained(core, "second")


def test_explain_reports_preemption_by_priority(make_core):
    core = make_core(num_blocks=8, policy="priority")
    core.add("humble", 6, max_tokens=20, priority=7)
    core.step()
    core.add("important", 6, max_tokens=24, priority=1)
    core.run()
    text = explained(core, "humble")
    assert "important is more important (priority 1 against 7)" in text
    assert "preempted, waiting to continue" in text


def test_explain_reports_swap_to_host_memory(make_core):
    core = make_core(num_host_blocks=4)
    core.add("a", 9, max_tokens=9)
    core.step()
    core.scheduler.faults.preempt(["a"])
    core.run()
    assert "9 tokens were swapped to host memory" in explained(core, "a")


def test_explain_reports_evicted_prefix(make_core):
    core = make_core(num_blocks=12, max_num_seqs=1)
    for name, prompt in (("first", list(range(9))), ("large", list(range(100, 146))), ("again", list(range(9)))):
        core.add(name, prompt, max_tokens=1)
    core.run()
    assert "0 of its 9 tokens were found in the prefix cache; the rest was not found: evicted" in explained(
        core, "again"
    )


def test_explain_reports_prefix_hits_from_host_memory(make_core):
    core = make_core(num_blocks=600, num_host_blocks=600, max_num_seqs=1, max_num_batched_tokens=4000)
    for name, prompt in (("first", range(2049)), ("large", range(5000, 7399)), ("again", range(2049))):
        core.add(name, list(prompt), max_tokens=1)
    core.run()
    text = explained(core, "again")
    assert "2048 of its 2049 tokens were found in the prefix cache" in text
    assert "2,048 tokens from host memory" in text
    assert "host memory" not in explained(core, "large")


def test_explain_reports_prefix_miss_by_other_salt(make_core):
    core = make_core()
    core.add("theirs", list(range(9)), max_tokens=1, cache_salt="theirs")
    core.run()
    core.add("mine", list(range(9)), max_tokens=1, cache_salt="mine")
    core.run()
    assert "the rest was not found: other salt" in explained(core, "mine")


def test_explain_reports_cached_tokens_without_saved_state(make_core):
    core = make_core(num_state_slots=9)
    core.add("a", list(range(40)), max_tokens=1)
    core.run()
    core.add("b", [*range(30), 99], max_tokens=1)
    core.run()
    text = explained(core, "b")
    assert "20 of its 31 tokens were found in the prefix cache; 8 more were cached, but the recurrent state" in text
    assert "after them was not saved" in text


def test_explain_reports_cached_tokens_without_window_blocks(make_core):
    core = make_core(window=8, num_window_blocks=12, max_num_batched_tokens=8, max_num_seqs=1)
    for name, prompt in (("first", range(60)), ("large", range(100, 160)), ("again", [*range(40), 7])):
        core.add(name, list(prompt), max_tokens=1)
        core.run()
    told = "0 of its 41 tokens were found in the prefix cache; 40 more were cached, but some of their window blocks"
    assert told in explained(core, "again")


def test_explain_reports_first_differing_prefix_token(make_core):
    core = make_core()
    core.add("a", list(range(9)), max_tokens=1)
    core.run()
    core.add("b", [0, 1, 2, 3, 4, 99, 6, 7, 8], max_tokens=1)
    core.run()
    assert (
        "4 of its 9 tokens were found in the prefix cache; the rest was not found: different token at position 5"
        in (explained(core, "b"))
    )


def test_explain_reports_wait_for_prefix_of_other_request(make_core):
    core = make_core()
    for name in ("first", "second"):
        core.add(name, [*range(20), ord(name[0])], max_tokens=2)
    core.run()
    text = explained(core, "second")
    assert "it waited for first, which was computing the same prefix" in text
    assert "waiting for a block that another request computed" in text


def test_explain_reports_too_few_blocks_or_tokens_to_reserve(make_core):
    core = make_core(num_blocks=6)
    core.add("a", 12, max_tokens=8)
    core.add("b", 12)
    core.run()
    assert "too few free blocks" in explained(core, "b")
    core = make_core(admission="reservation", max_batch_total_tokens=30)
    core.add("a", 12, max_tokens=8)
    core.add("b", 12, max_tokens=8)
    core.run()
    assert "too few tokens are free to reserve" in explained(core, "b")


def test_explain_reports_tokens_given_to_other_tenants(make_core):
    core = make_core(max_num_seqs=1, policy="fair")
    core.add("theirs", 9, max_tokens=9, tenant="them")
    core.step()
    core.add("mine", 3, tenant="me")
    core.run()
    assert "computed tokens went to other tenants" in explained(core, "mine")


def test_explain_ignores_obstacles_before_arrival(make_core):
    core = make_core(max_num_seqs=1)
    core.add("first", 3, max_tokens=3)
    core.add("second", 3, max_tokens=3)
    core.run()
    core.add("late", 3, max_tokens=3)
    core.run()
    assert "could not start" in explained(core, "second")
    assert "could not start" not in explained(core, "late")


def test_explain_of_unknown_request_lists_known_ids(make_core):
    core = make_core()
    core.add("a", 3)
    with pytest.raises(ConfigError, match="the journal has a"):
        explain(core.log.events, "b")


def test_chrome_trace_has_one_lane_per_request(make_core, tmp_path):
    recorded = Recorded(make_core, tmp_path / "run.journal", max_num_seqs=2)
    for index in range(4):
        recorded.core.add(f"r{index}", 5, max_tokens=3)
    recorded.core.run()
    recorded.core.scheduler.finish_requests([], RequestStatus.FINISHED_ABORTED)
    trace = chrome_trace(recorded.close())
    lanes = {e["args"]["name"]: (e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(lanes) == {"steps", "request r0", "request r1", "request r2", "request r3"}
    assert len(set(lanes.values())) == 5
    for pid, tid in list(lanes.values())[1:]:
        assert tid not in {0, pid}  # Perfetto merges these lanes with the main thread of a process
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in spans)
    assert sum(e["name"].startswith("step") for e in spans) == len(recorded.core.log.of_type(StepScheduled)) > 0
    json.dumps(trace)
