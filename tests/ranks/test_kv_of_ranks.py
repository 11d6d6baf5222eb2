"""Ranks save undivided blocks, and load them with the tokens and log probabilities of one process."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from rank_threads import RankThread
from test_exactness import answers, make_engine, make_requests, needs_kernels
from test_kv_stores import DTYPES, NUM_TRIED, SCHEDULES, Schedule, alone, checkpoint, count, engine_over, node, settle

from octavo import LLM, SamplingParams
from octavo.data import events
from octavo.data.events import EventLog
from octavo.data.scheduler_output import CachedRequestData, KVTransfer, SchedulerOutput, TransferDirection
from octavo.errors import EngineDeadError
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.kv_transfer.tiers import TieredStore
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.share import Share
from octavo.ranks import leader, messages, shared_kv
from octavo.ranks.shared_kv import BlocksOfRanks, SharedKV
from octavo.worker.host_copies import Passed
from octavo.worker.kv_cache import PagedKVCache
from octavo.worker.transfer_threads import KVTransferThreads

__all__ = ["alone", "checkpoint"]  # fixtures
pytestmark = needs_kernels
CHECKSUM_BYTES = 32


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(leader, "start_process", RankThread)


def saved_contents(path, num_ranks, dtype):
    """Return the contents of all blocks that an engine saves."""
    pool = GlobalKVPool(5000)
    engine = engine_over(node(pool), path, dtype=dtype, num_ranks=num_ranks)
    answers(engine, make_requests()[:NUM_TRIED])
    settle(engine)
    engine.core.executor.shutdown()
    return {bytes(block.kv_data[CHECKSUM_BYTES:]) for block in pool._nodes["a"].values()}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Qwen3ForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 4}),
        ("Qwen3ForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 1}),
        ("Gemma3ForCausalLM", {}),
        ("Gemma4ForCausalLM", {}),
        ("DeepseekV3ForCausalLM", {}),
    ],
)
def test_stored_blocks_are_the_same_for_any_number_of_ranks(family, sizes, num_ranks, dtype, tmp_path):
    config = tiny_config(family, vocab_size=1500, **sizes)
    path = write_checkpoint(tmp_path / "model", config, std=0.1)
    if config.get("num_key_value_heads", num_ranks) == 2 and num_ranks == 3:
        num_ranks = 2
    expected = saved_contents(path, 1, dtype)
    assert len(expected) > 20
    assert saved_contents(path, num_ranks, dtype) == expected


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_ranks_give_equal_tokens_with_pool_kv_of_other_ranks(checkpoint, alone, schedule, num_ranks, dtype):
    pool, log = GlobalKVPool(5000), EventLog()
    requests, expected = make_requests()[:NUM_TRIED], alone(dtype)
    for name, sink in (("a", None), ("b", log)):
        engine = engine_over(node(pool, name), checkpoint, schedule, dtype, sink=sink, num_ranks=num_ranks)
        assert answers(engine, requests) == expected
        settle(engine)
        engine.core.executor.shutdown()
    assert count(log, events.KVLoadEnded, outcome="done") >= 4


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    "family", ["Gemma3ForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"]
)
def test_ranks_of_other_families_give_equal_tokens_with_pool_kv(family, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config(family, vocab_size=1500), std=0.1)
    requests = make_requests()[:NUM_TRIED]
    single = make_engine(path, "bfloat16", Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    expected, pool, log = answers(single, requests), GlobalKVPool(5000), EventLog()
    for sink in (None, log):
        engine = engine_over(node(pool), path, sink=sink, num_ranks=2)
        assert answers(engine, requests) == expected
        settle(engine)
        engine.core.executor.shutdown()
    assert count(log, events.KVLoadEnded, outcome="done") >= 4


@pytest.mark.turn(4)
def test_processes_of_ranks_start_again_with_kv_on_disk(tmp_path, monkeypatch):
    monkeypatch.undo()
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"), std=0.1)
    prompt = {"prompt_token_ids": [*range(3, 103)]}
    found = []
    for num_ranks, directory in ((1, None), (2, tmp_path / "kv"), (2, tmp_path / "kv")):
        llm = LLM(
            str(path), tensor_parallel_size=num_ranks, skip_tokenizer_init=True, max_model_len=160, num_threads=1,
            kv_cache_memory_bytes=4 << 20, kv_disk_dir=directory, min_tokens_to_cache=2, packed_cache_bytes=0,
        )  # fmt: skip
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, logprobs=2), use_tqdm=False)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
        if directory is not None:
            settle(llm.llm_engine)
        llm.llm_engine.shutdown()
    assert found[1:] == [found[0]] * 2
    assert output.num_cached_tokens >= 80


class Ranks:
    """Blocks of two ranks without processes, and their leader."""

    def __init__(self, path):
        whole = read_architecture(path).within(64)
        shares = [whole.split(Share(rank, 2)) for rank in (0, 1)]
        self.cache = PagedKVCache(
            shares[0].kv_layout, num_blocks=[5], block_size=4, dtype=torch.bfloat16, device=torch.device("cpu")
        )
        self.memory = shared_kv.create_kv_memory()
        own = self.memory, shares[1].kv_layout, [5], 4, "bfloat16", "bfloat16"
        self.rank, self.seen = SharedKV.of(*own), SharedKV.of(*own)
        self.num_steps, self.error, self.timeout_s, self.dead = 0, None, 60.0, []
        self.blocks = BlocksOfRanks(shares[0], self.cache, [self.seen], self)

    def end_of_steps(self):
        return self.error

    def declare_dead(self, rank):
        self.dead.append(rank)
        return EngineDeadError(f"rank {rank} is dead", rank=rank)


@pytest.fixture
def ranks(tmp_path):
    return Ranks(write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"), std=0.1))


def test_rank_0_writes_into_the_memory_of_rank_1(ranks):
    buffer = ranks.blocks.make_buffer(2)
    for view in buffer.views(2):
        view[:] = bytes(range(256)) * (len(view) // 256)
    ranks.rank.groups[0][:] = 0
    buffer.write([[1, 3]], Passed())
    of_blocks = ranks.rank.groups[0].reshape(5, -1)
    assert [bool(block.any()) for block in of_blocks] == [False, True, False, True, False]
    assert np.array_equal(of_blocks[1], of_blocks[3])


def test_transfer_waits_for_block_copies_of_rank_1(ranks):
    ranks.num_steps = 7
    mark, is_over = ranks.blocks.mark(), threading.Event()
    ranks.num_steps = 8
    ranks.rank.note_copied(6)
    waiting = threading.Thread(target=lambda: (mark.synchronize(), is_over.set()))
    waiting.start()
    assert not is_over.wait(0.05)
    ranks.rank.note_copied(7)
    waiting.join()
    assert is_over.is_set()


def test_rank_that_copies_no_blocks_is_declared_dead(ranks):
    """A step with transfers only has no exchange, whose deadline would end the wait."""
    ranks.num_steps, ranks.timeout_s = 1, 0.05
    with pytest.raises(EngineDeadError, match="rank 1 is dead"):
        ranks.blocks.wait(ranks.blocks.mark())
    assert ranks.dead == [1]


@pytest.mark.parametrize("method", ["read", "write"])
def test_transfer_ends_if_a_rank_fails(ranks, method):
    ranks.num_steps, ranks.error = 1, EngineDeadError("rank 1 failed", rank=1)
    buffer = ranks.blocks.make_buffer(1)
    with pytest.raises(EngineDeadError, match="rank 1"):
        getattr(buffer, method)([[0]], ranks.blocks.mark())


def test_transfer_ends_after_shutdown(checkpoint):
    """A rank may be killed before it has read the newest step."""
    engine = engine_over(node(GlobalKVPool(100)), checkpoint, num_ranks=2)
    worker = engine.core.executor.worker
    blocks = worker._leader.blocks_of_ranks(worker.model.architecture, worker.kv_cache)
    worker._leader.num_steps += 1
    mark = blocks.mark()
    engine.core.executor.shutdown()
    with pytest.raises(EngineDeadError, match="the ranks have ended"):
        mark.synchronize()


def test_cancel_does_not_wait_for_block_copies_of_another_rank(ranks):
    """It holds up the step that rank 0 is about to send."""
    ranks.num_steps, ended = 1, queue.SimpleQueue()
    store = MemoryStore(GlobalKVPool(10), "a", ranks.blocks.block_bytes)
    threads = KVTransferThreads(ranks.blocks, TieredStore([store]), ended.put, num_threads=1)
    order = KVTransfer(1, TransferDirection.SAVE, [bytes(32)], [[2]])
    scheduled = SchedulerOutput(1, [], CachedRequestData.make_empty(), {}, 0, kv_transfers=[order], kv_cancels=[1])
    waits, wait = threading.Event(), ranks.blocks.wait
    ranks.blocks.wait = lambda mark: (waits.set(), wait(mark))
    threads.begin(scheduled)
    waits.wait()
    threads.cancel(scheduled)
    ranks.rank.note_copied(1)
    threads.shutdown()
    assert ended.empty()
    assert store.stats().num_blocks == 0


def test_transfers_are_cancelled_before_other_ranks_start_the_step(checkpoint, monkeypatch):
    """Another rank may write blocks of a cancelled load as soon as it has the step."""
    order = []
    engine = engine_over(node(GlobalKVPool(100)), checkpoint, num_ranks=2)
    runner = engine.core.executor.worker.runner
    cancel, encode = runner.kv_mover.cancel, messages.encode
    monkeypatch.setattr(runner.kv_mover, "cancel", lambda step: (order.append("cancelled"), cancel(step)))
    monkeypatch.setattr(messages, "encode", lambda message: (order.append("sent"), encode(message))[1])
    engine.add_request("r", {"prompt_token_ids": [*range(2, 40)]}, SamplingParams(max_tokens=3))
    submit = engine.core.executor.submit
    engine.core.executor.submit = lambda scheduled: submit(replace(scheduled, kv_cancels=[77]))
    engine.step()
    assert order[:2] == ["cancelled", "sent"]
    engine.core.executor.shutdown()
