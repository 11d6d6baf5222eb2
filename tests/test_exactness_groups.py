"""Tokens of a model with three KV groups are `==` to those of each request alone with all layers in one group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_exactness import SCHEDULES, Schedule, answers, make_engine, make_requests, needs_kernels
from test_kv_stores import count, engine_over, node, settle

from octavo.core.invariants import check
from octavo.data import events
from octavo.data.events import EventLog
from octavo.data.kv_groups import FullAttention, SlidingWindow
from octavo.kv_transfer.memory import GlobalKVPool
from octavo.models import ministral
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.kv_plan import KVPlan, KVSize

pytestmark = needs_kernels
NUM_TRIED = 16
WINDOWS = [32, None, 64]
DTYPES = ["float32", "bfloat16 with int8 KV"]


@pytest.fixture(scope="module", autouse=True)
def three_kinds():
    """No family has two windows, so its reader of windows is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ministral, "_read_windows", lambda _config: WINDOWS)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config("MinistralForCausalLM", num_hidden_layers=len(WINDOWS), vocab_size=1500)
    return write_checkpoint(tmp_path_factory.mktemp("groups"), config, std=0.1)


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Answers to each request alone, from an engine with one KV group."""
    known = {}

    def run(dtype):
        if dtype not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(KVShape, "kind", FullAttention())
                schedule = Schedule("alone", max_num_seqs=1, prefix_caching=False)
                engine = make_engine(checkpoint, dtype, schedule, "cpu")
                assert len(engine.core.executor.worker.kv_cache.groups) == 1
                known[dtype] = answers(engine, make_requests()[:NUM_TRIED])
        return known[dtype]

    return run


@pytest.fixture
def few_blocks(monkeypatch):
    """The bounded groups have only the blocks that a single sequence needs."""

    def with_blocks(plan, num_blocks):
        needed = [each + plan.blocks_of_step for each in plan.blocks_of_sequence]
        return KVSize((num_blocks, *(min(num_blocks, each) for each in needed)))

    monkeypatch.setattr(KVPlan, "with_blocks", with_blocks)


@pytest.mark.sweep(96)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.usefixtures("few_blocks")
def test_three_kv_groups_give_tokens_of_single_group(checkpoint, alone, schedule, dtype):
    engine = make_engine(checkpoint, dtype, schedule, "cpu")
    cache = engine.core.executor.worker.kv_cache
    assert [group.kind for group in cache.groups] == [FullAttention(), SlidingWindow(32), SlidingWindow(64)]
    assert engine.core.executor.worker.runner.forward_pass.recorded is not None
    requests = make_requests()[:NUM_TRIED]
    assert answers(engine, requests) == alone(dtype)
    for index, answer in enumerate(answers(engine, requests) if schedule.rounds > 1 else []):
        # A request without a seed gets one from its number, which a second round does not repeat.
        if requests[index][1].seed is not None or requests[index][1].is_greedy:
            assert answer == alone(dtype)[index]
    assert check(engine.core.scheduler) == []


def test_reading_block_table_of_wrong_group_changes_tokens(checkpoint, alone, monkeypatch):
    monkeypatch.setattr(KVLayout, "group_indices", (2, 0, 1))
    schedule = next(each for each in SCHEDULES if each.name == "crowd")
    engine = make_engine(checkpoint, "float32", schedule, "cpu")
    assert answers(engine, make_requests()[:NUM_TRIED]) != alone("float32")


def test_second_engine_gives_equal_tokens_with_kv_of_first(checkpoint, alone):
    pool, log = GlobalKVPool(5000), EventLog()
    requests, expected = make_requests()[:NUM_TRIED], alone("bfloat16 with int8 KV")
    for name, sink in (("a", None), ("b", log)):
        schedule = replace(next(each for each in SCHEDULES if each.name == "crowd"), rounds=1)
        engine = engine_over(node(pool, name), checkpoint, schedule, "bfloat16 with int8 KV", sink=sink)
        assert answers(engine, requests) == expected
        settle(engine)
        engine.core.executor.shutdown()
    assert count(log, events.KVLoadEnded, outcome="done") >= 4
