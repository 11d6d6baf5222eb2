"""Mixtures of experts and latent attention give equal tokens on every schedule, with drafts and over stores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kernels_available import INSTRUCTION_SETS
from pairs import decode, prefill
from scripted_drafts import ScriptedProposer, let_propose, verify_all
from test_exactness import EVERYWHERE, FEW_BLOCKS, Schedule, answers, check, make_engine, make_requests, needs_kernels
from test_kv_stores import count, engine_over, node, settle

from octavo.config import KVTransferConfig
from octavo.data import events
from octavo.data.events import EventLog
from octavo.kv_transfer.memory import GlobalKVPool
from octavo.models.random_weights import tiny_config, write_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from make_expert_gguf import SHAPES, write

pytestmark = needs_kernels
NUM_TRIED = 9
DTYPES = ["bfloat16", "int8", "int4", "bfloat16 with int8 KV"]
FOLDERS = [
    "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Gemma4ForCausalLM",
]  # fmt: skip
FILES = {"Q4_K": "qwen3-30b-a3b", "Q8_0": "olmoe-1b-7b", "MXFP4": "gpt-oss-20b"}  # a file has the experts' type
SMALL = {
    "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "experts": 5, "chosen": 3, "expert": 256,
    "vocabulary": 1500,
}  # fmt: skip
KINDS = [(name, dtype) for name in FOLDERS for dtype in DTYPES] + [(kind, "bfloat16") for kind in FILES]
SCHEDULES = [
    Schedule("chunks_of_1", threshold=1),
    Schedule("chunks_of_7", threshold=7),
    Schedule("warm_cache", rounds=2),
    Schedule("few_blocks", **FEW_BLOCKS, threshold=7),
    EVERYWHERE,
    Schedule("ahead_chunks_of_7", threshold=7, options=(("async_scheduling", True),)),
    Schedule("one_thread", num_threads=1),
    Schedule("three_threads", num_threads=3),
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Write a checkpoint when it is first used; return its path."""
    folder, made = tmp_path_factory.mktemp("experts"), {}

    def path(name):
        if name not in made and name in FILES:
            shape = SHAPES[FILES[name]] | SMALL
            made[name] = write(folder / f"{name}.gguf", shape, layers=2, kind=name)
        elif name not in made:
            made[name] = write_checkpoint(folder / name, tiny_config(name, vocab_size=1500), std=0.1)
        return made[name]

    return path


@pytest.fixture(scope="module")
def alone(paths):
    """Return the answers to each request alone."""
    known = {}

    def run(name, dtype, isa="auto"):
        if (name, dtype, isa) not in known:
            engine = make_engine(
                paths(name), dtype, Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu", isa
            )
            known[name, dtype, isa] = answers(engine, make_requests()[:NUM_TRIED])
        return known[name, dtype, isa]

    return run


@pytest.mark.sweep(152)
@pytest.mark.parametrize(("name", "dtype"), KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_experts_give_equal_tokens_in_every_schedule(paths, alone, schedule, name, dtype):
    check(make_engine(paths(name), dtype, schedule, "cpu"), schedule, alone(name, dtype))


@pytest.mark.sweep(80)
@pytest.mark.parametrize(("name", "dtype"), KINDS)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_experts_give_equal_tokens_with_every_instruction_set(paths, alone, isa, name, dtype):
    check(make_engine(paths(name), dtype, EVERYWHERE, "cpu", isa), EVERYWHERE, alone(name, dtype, isa))


@pytest.mark.sweep(80)
@pytest.mark.parametrize(("name", "dtype"), KINDS)
@pytest.mark.parametrize("schedule", [Schedule("crowd"), EVERYWHERE], ids=lambda schedule: schedule.name)
def test_experts_give_equal_tokens_with_drafts(paths, alone, schedule, name, dtype):
    """Half of the drafts are right, so steps verify rows that are rejected."""
    expected, requests = alone(name, dtype), make_requests()[:NUM_TRIED]
    log = EventLog()
    engine = engine_over(None, paths(name), schedule, dtype, sink=log)
    known = {
        str(i): prompt + list(told[0]) for i, ((prompt, _), told) in enumerate(zip(requests, expected, strict=True))
    }
    let_propose(engine, ScriptedProposer(known, 4, 0.5))
    verify_all(engine)
    assert answers(engine, requests) == expected
    assert count(log, events.DraftsVerified) > 0


@pytest.mark.sweep(48)
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("name", FOLDERS)
def test_kv_of_experts_is_handed_over_and_found_on_disk(tmp_path, paths, alone, name, dtype):
    requests, expected = make_requests()[:NUM_TRIED], alone(name, dtype)
    pool, log = GlobalKVPool(5000), EventLog()
    first = engine_over(node(pool, "prefill"), paths(name), Schedule("crowd"), dtype)
    second = engine_over(node(pool, "decode"), paths(name), Schedule("crowd"), dtype, sink=log)
    prefill(first, requests)
    settle(first)
    assert decode(second, requests)[0] == expected
    assert count(log, events.KVLoadEnded, outcome="done") >= 3
    log = EventLog()
    for sink in (None, log):
        stores = KVTransferConfig(disk_dir=tmp_path / "kv", disk_bytes=1 << 28)
        engine = engine_over(None, paths(name), Schedule("crowd"), dtype, sink, stores)
        assert answers(engine, requests) == expected
        settle(engine)
        engine.core.executor.shutdown()
    assert count(log, events.KVLoadEnded, outcome="done") >= 3
