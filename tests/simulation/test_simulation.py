"""The simulation itself: worlds without a wrong token, worlds that failed once, and proof that it detects faults."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from mutation.mutator import Module

from simulation import exhaustive
from simulation.campaign import Run, RunFile, run_seed
from simulation.shrink import shrink
from simulation.world import (
    FEATURES,
    SimulationError,
    WorldConfig,
    draw_async,
    draw_config,
    draw_recurrent,
    draw_stored,
    draw_stored_states,
    draw_two_windows,
    draw_windowed,
    run_world,
)

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "corpus.jsonl").read_text().splitlines()]


@pytest.mark.sweep(32)
@pytest.mark.parametrize("seed", range(8))
def test_random_worlds_have_no_wrong_token_or_leak(seed):
    run = run_seed(seed, 2500, 1, RunFile(None))
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert totals.tokens > 1000
    assert min(totals.preemptions, totals.swaps, totals.evictions, totals.hits, totals.copies) > 0
    assert min(totals.offloads, totals.host_hits, totals.host_evictions) > 0
    assert 0 < totals.accepted < totals.drafted
    assert totals.withheld > 0
    assert totals.postponed > 0
    assert min(totals.passes, totals.bounded) > 0
    assert len(totals.faults) >= 10


@pytest.mark.turn(8)
@pytest.mark.sweep(32)
@pytest.mark.parametrize("seed", range(8))
def test_sliding_window_worlds_have_no_wrong_token_or_leak(seed):
    is_stored = seed % 2 > 0
    run = run_seed(f"windows {seed}", 5000, 1, RunFile(None), draw_stored if is_stored else draw_windowed)
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert min(totals.behind_window, totals.window_hits, totals.window_copies) > 0
    assert min(totals.window_swaps_out, totals.window_swaps_in, totals.window_loads, totals.window_saves) > 0
    assert not is_stored or min(totals.parts_saved, totals.parts_loaded, totals.dropped_saves) > 0


@pytest.mark.turn(8)
@pytest.mark.sweep(32)
@pytest.mark.parametrize("seed", range(8))
def test_worlds_with_stored_states_have_no_wrong_token_or_leak(seed):
    run = run_seed(f"stored states {seed}", 5000, 1, RunFile(None), draw_stored_states)
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert min(totals.stored_states, totals.loaded_states, totals.state_evictions, totals.state_hits) > 0


@pytest.mark.sweep(32)
@pytest.mark.parametrize("seed", range(8))
def test_two_window_worlds_have_no_wrong_token_or_leak(seed):
    run = run_seed(f"two windows {seed}", 2500, 1, RunFile(None), draw_two_windows)
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert min(totals.behind_window, totals.window_hits, totals.window_copies) > 0
    assert min(totals.window_swaps_in, totals.window_loads, totals.window_saves) > 0


@pytest.mark.turn(8)
@pytest.mark.sweep(32)
@pytest.mark.parametrize("seed", range(8))
def test_async_scheduling_worlds_have_no_wrong_token_or_leak(seed):
    run = run_seed(f"async {seed}", 3500, 1, RunFile(None), draw_async)
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert totals.ahead > 500
    assert min(totals.ahead_with_newcomers, totals.in_vain, totals.given_back, totals.preemptions, totals.swaps) > 0


@pytest.mark.turn(8)
@pytest.mark.sweep(32)
@pytest.mark.parametrize("seed", range(8))
def test_recurrent_worlds_have_no_wrong_token_or_leak(seed):
    run = run_seed(f"recurrent {seed}", 6000, 1, RunFile(None), draw_recurrent)
    totals = run.totals
    assert run.failed is None
    assert (totals.wrong_tokens, totals.leaked_blocks, totals.unfinished) == (0, 0, 0)
    assert min(totals.state_saves, totals.state_evictions, totals.state_hits) > 0
    assert min(totals.preemptions, totals.accepted, totals.postponed, totals.ahead) > 0


def draw_crowded(rng):
    """Draw a world with many preemptions of both kinds, and many hits in the store and in host memory."""
    return replace(
        draw_config(rng),
        preemption="auto",
        max_num_preemptions=8,
        preempt_rate=0.2,
        num_host_blocks=rng.randint(1, 12),
        enable_prefix_caching=True,
        hash_bits=None,
        remote_rate=1.0,
        neighbour_rate=0.5,
        min_tokens_to_cache=1,
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_three_features_occur_together(seed):
    """Few of the drawn worlds have a store, host memory and both kinds of preemption."""
    counts = dict.fromkeys(itertools.combinations(FEATURES, 3), 0)
    for num_steps, draw in ((25_000, draw_config), (15_000, draw_crowded)):
        run = run_seed(f"coverage {seed}", num_steps, 2, RunFile(None), draw)
        assert run.failed is None
        for triple in counts:
            counts[triple] += run.totals.combinations[triple]
    assert min(counts.values()) >= 1, sorted(counts.items(), key=lambda each: each[1])[:5]


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["name"])
def test_previously_failing_worlds_pass(case):
    run_world(case["seed"], WorldConfig(**case["config"]))


@pytest.mark.turn(12)
def test_interrupted_run_resumes_with_equal_totals(tmp_path):
    path = tmp_path / "runs.json"
    run_seed(3, 200, 1, RunFile(path))
    done = run_seed(3, 700, 1, RunFile(path))
    assert Run.from_json(json.loads(json.dumps(done.to_json()))) == done
    whole = run_seed(3, 700, 1, RunFile(None))
    assert (done.totals, done.num_worlds) == (whole.totals, whole.num_worlds)
    assert RunFile(path).runs[3] == done
    assert run_seed(3, 700, 1, RunFile(path)) == done
    path.write_text(path.read_text().replace(RunFile(None).digest, "other"))
    with pytest.raises(SystemExit, match="other code"):
        RunFile(path)


def test_same_seed_produces_same_trace():
    config = draw_config(random.Random("trace"))
    first, second = run_world("trace", config), run_world("trace", config)
    assert first == second


@pytest.mark.turn(12)
@pytest.mark.sweep(28)
@pytest.mark.parametrize("config", range(len(exhaustive.CONFIGS)))
def test_small_worlds_pass_exhaustive_check(config):
    assert exhaustive.run_all(num_arrival_steps=2, num_abort_steps=2, max_length=2, configs=[config]) == 1110


@pytest.mark.slow
@pytest.mark.parametrize("part", range(9))
@pytest.mark.parametrize("config", range(len(exhaustive.CONFIGS)))
def test_all_small_worlds_pass_exhaustive_check(config, part):
    assert exhaustive.run_all(configs=[config], part=(part, 9)) == 745_560 // (9 * len(exhaustive.CONFIGS))


FAULTS = [
    ("kv.manager", "KVCacheManager.free", "self.release(request)", "pass"),
    ("kv.prefix_cache", "PrefixCache._find_partial", "return partial.block if is_covered and partial.content == content else None", "return partial.block if is_covered else None"),
    ("kv.content_pool", "ContentPool.find", "if found is None or (found.token_ids, found.parent, found.extra_keys) != (token_ids, parent, extra_keys):", "if found is None:"),
]  # fmt: skip


FAULTS_AHEAD = [
    ("steps_in_flight", "StepsInFlight.leave", "step.ended_ids.add(request_id)", "pass"),
    ("steps_in_flight", "StepsInFlight.forget", "request.sequence.token_ids.pop()", "pass"),
    ("steps_in_flight", "StepsInFlight.expect", "token_ids.append(UNKNOWN_TOKEN)", "pass"),
    ("steps_in_flight", "StepsInFlight.expect", "ending.add(request.request_id)", "pass"),
    ("steps_in_flight", "StepInFlight.is_foreseeable", "if request.awaits_results or request.spec_token_ids:", "if request.spec_token_ids:"),
    ("result_processor", "ResultProcessor.fail", "self._preempt_all(each)", "pass"),
]  # fmt: skip

FAULTS_OF_SPANS = [
    ("kv.block_chains", "BlockChain.keys", "met = (each for each in self.spans if each.first < end and each.end > start)", "met = (each for each in self.spans if not (each.first < end and each.end > start))"),
    ("kv.block_chains", "BlockChain.keys", "if not self.spans and self.positions is None:", "if self.positions is None:"),
]  # fmt: skip


def draw_spans(rng):
    """Draw a world with many prompts that differ only in the content of their spans."""
    return replace(draw_config(rng, 150), block_size=3, hash_bits=None, enable_prefix_caching=True, span_rate=1.0)


def draw_short(rng):
    """Draw a world of short prompts, with only two possible block hashes."""
    return replace(draw_config(rng, 100), block_size=7, hash_bits=1, short_prompt_rate=0.7)


def draw_short_async(rng):
    return draw_async(rng, 100)


def fails(name, draw):
    try:
        run_world(name, draw(random.Random(name)))
    except SimulationError:
        return True
    return False


@pytest.mark.sweep(16)
@pytest.mark.parametrize(
    ("draw", "module", "function", "before", "after"),
    [
        *((draw_short, *each) for each in FAULTS),
        *((draw_short_async, *each) for each in FAULTS_AHEAD),
        *((draw_spans, *each) for each in FAULTS_OF_SPANS),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else value.__name__,
)
def test_simulation_detects_core_mutants(monkeypatch, draw, module, function, before, after):
    mutants = Module(f"octavo.core.{module}").mutants()
    mutant = next(each for each in mutants if (each.function, each.before, each.after) == (function, before, after))
    original = mutant.function_object()
    monkeypatch.setattr(original, "__code__", original.__code__)  # restored after the test
    mutant.patch()
    assert any(fails(f"fault:{index}", draw) for index in range(40))


def test_failing_world_is_shrunk(monkeypatch):
    from octavo.core.kv.block_pool import BlockPool

    monkeypatch.setattr(BlockPool, "touch", lambda _self, _blocks: None)
    config = draw_config(random.Random("0:3"))
    for index in range(20):
        config = draw_config(random.Random(f"shrink:{index}"))
        try:
            run_world(f"shrink:{index}", config)
        except SimulationError:
            smaller, error = shrink(f"shrink:{index}", config)
            assert smaller.num_steps < config.num_steps
            assert error
            return
    pytest.fail("no world saw it")
