"""A store's blocks of a model with windows are found again, even if window parts were evicted when they were saved."""

from __future__ import annotations

import json
import shutil

import pytest
from test_exactness import Schedule, answers, make_engine, needs_kernels
from test_kv_stores import engine_over, settle

from octavo import SamplingParams
from octavo.config import KVTransferConfig
from octavo.data import events
from octavo.data.events import EventLog
from octavo.kv_transfer import disk_directory
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.kv_plan import KVPlan, KVSize

pytestmark = needs_kernels
KINDS = ["some", "all"]
FEW = Schedule("few", block_size=4, num_blocks=600, budget=64, max_num_seqs=2)
BEGINNING = [7 * i % 1000 + 10 for i in range(160)]  # of all turns of a conversation


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Models with windows of 37 tokens: in some layers, or in all."""
    folder = tmp_path_factory.mktemp("windows")
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    some = tiny_config(
        "Gemma3ForCausalLM", num_hidden_layers=3, layer_types=layer_types, sliding_window=37, vocab_size=1500
    )
    every = tiny_config("MistralForCausalLM", sliding_window=37, vocab_size=1500)
    return {
        "some": write_checkpoint(folder / "some", some, std=0.1),
        "all": write_checkpoint(folder / "all", every, std=0.1),
    }


@pytest.fixture
def few_window_blocks(monkeypatch):
    """Only the blocks that two sequences, a step, and saves of three more need."""

    def with_blocks(plan, num_blocks):
        return KVSize((num_blocks, min(num_blocks, 2 * plan.blocks_of_sequence[0] + 4 * plan.blocks_of_step)))

    monkeypatch.setattr(KVPlan, "with_blocks", with_blocks)


def turn(num_tokens):
    """Return a turn of a conversation: the earlier text and a new part, and its sampling parameters."""
    prompt = BEGINNING + [5 * i % 900 + 11 for i in range(num_tokens)]
    return prompt, SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("few_window_blocks")
def test_blocks_lost_on_disk_are_saved_again_with_window_parts(tmp_path, checkpoints, kind, monkeypatch):
    """The device keeps the blocks, without their window parts; then the engine restarts."""
    monkeypatch.setattr(disk_directory, "_SCAN_SHARE", 1e9)  # always look for removed files, even after a slow look
    stores = KVTransferConfig(disk_dir=tmp_path / "kv", disk_bytes=1 << 28)
    alone = make_engine(checkpoints[kind], "bfloat16", Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    expected = answers(alone, [turn(0), turn(40), turn(80)])
    log, restarted = EventLog(), EventLog()
    engine = engine_over(None, checkpoints[kind], FEW, sink=log, stores=stores)
    assert answers(engine, [turn(0)]) == expected[:1]
    settle(engine)
    manager = engine.core.scheduler.kv_cache_manager
    for block in manager.pool.blocks[:20]:
        assert manager.bounded[0].id_of(block) is not None
        manager.bounded[0].block_forgotten(block)  # as if it were evicted
    for file in (tmp_path / "kv").glob("*.kv"):
        file.unlink()  # evicted, because no request used it
    assert answers(engine, [turn(40)]) == expected[1:2]
    settle(engine)
    engine.core.executor.shutdown()
    engine = engine_over(None, checkpoints[kind], FEW, sink=restarted, stores=stores)
    assert answers(engine, [turn(80)]) == expected[2:]
    settle(engine)
    engine.core.executor.shutdown()
    assert log.of_type(events.PrefixCacheQueried)[-1].num_hit_tokens == 160
    assert [each.num_tokens for each in restarted.of_type(events.KVLoadEnded)] == [200]


@pytest.mark.turn(8)
def test_kv_saved_with_different_windows_never_hits(tmp_path, checkpoints):
    """Then a block has as many bytes, but another layout or other numbers."""
    stores, config = KVTransferConfig(disk_dir=tmp_path / "kv", disk_bytes=1 << 28), checkpoints["some"] / "config.json"
    engine = engine_over(None, checkpoints["some"], FEW, stores=stores)
    answers(engine, [turn(40)])
    settle(engine)
    num_bytes = engine.core.executor.worker.kv_cache.stored_block_bytes
    engine.core.executor.shutdown()
    num_files = len(list((tmp_path / "kv").glob("*.kv")))
    other = tmp_path / "other"
    shutil.copytree(checkpoints["some"], other)
    layer_types = ["sliding_attention", "sliding_attention", "full_attention"]
    for changed in ({"sliding_window": 38}, {"layer_types": layer_types}, {"sliding_window": 512}):
        (other / "config.json").write_text(json.dumps(json.loads(config.read_text()) | changed))
        alone = make_engine(other, "bfloat16", Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
        log = EventLog()
        engine = engine_over(None, other, FEW, sink=log, stores=stores)
        assert engine.core.executor.worker.kv_cache.stored_block_bytes == num_bytes
        assert answers(engine, [turn(80)]) == answers(alone, [turn(80)])
        settle(engine)
        engine.core.executor.shutdown()
        assert log.of_type(events.KVLoadStarted) == []
    assert len(list((tmp_path / "kv").glob("*.kv"))) > num_files > 0
