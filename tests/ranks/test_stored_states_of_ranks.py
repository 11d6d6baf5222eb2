"""Ranks save undivided states, and load them with the tokens and log probabilities of one process."""

from __future__ import annotations

import pytest
import torch
from gguf_files import write_gguf
from mooncake_master import Master, needs_mooncake
from pairs import decode, prefill
from rank_threads import RankThread
from running import wait_until
from test_exactness import Schedule, answers, make_engine, make_requests, needs_kernels
from test_kv_disk import over_disk
from test_kv_stores import SCHEDULES, count, engine_over, node, settle
from test_recurrent_of_ranks import CONV, DELTA, GRANITE, MODELS, NEMOTRON, write
from test_recurrent_stores import GREEDY, await_store, finish, patience, usable_tokens

from octavo import LLM, SamplingParams
from octavo.config import KVTransferConfig
from octavo.data import events
from octavo.data.events import EventLog
from octavo.errors import EngineDeadError
from octavo.kv_transfer.memory import GlobalKVPool
from octavo.models.registry import read_architecture
from octavo.models.share import Share
from octavo.ranks import leader
from octavo.ranks.leader import start_process
from octavo.worker.kv_cache import make_states
from octavo.worker.stored_blocks import HostBuffer

__all__ = ["patience"]  # a fixture
pytestmark = needs_kernels
CHECKSUM_BYTES = 32
NUM_TRIED = 12
KINDS = ["linear_attention", "full_attention", "linear_attention"]
FAMILIES = {
    DELTA: {"num_hidden_layers": 3, "layer_types": KINDS, "linear_num_key_heads": 1, "linear_num_value_heads": 7},
    GRANITE: {"num_hidden_layers": 3, "layer_types": KINDS, "mamba_n_groups": 1},
    NEMOTRON: {"hybrid_override_pattern": "M-ME*E-M", "num_hidden_layers": 8},
    CONV: {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}
LOADING = pytest.mark.parametrize(
    ("family", "num_ranks"), [(DELTA, 2), (DELTA, 4), (NEMOTRON, 2), (GRANITE, 4), (CONV, 2)]
)


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(leader, "start_process", RankThread)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored_states")
    return {family: write(folder / family, family, vocab_size=1500, **each) for family, each in FAMILIES.items()}


@pytest.fixture(scope="module")
def alone(checkpoints):
    known = {}

    def run(family, dtype="bfloat16"):
        if (family, dtype) not in known:
            schedule = Schedule("alone", max_num_seqs=1, prefix_caching=False)
            engine = make_engine(checkpoints[family], dtype, schedule, "cpu")
            known[family, dtype] = answers(engine, make_requests()[:NUM_TRIED])
        return known[family, dtype]

    return run


# --- undivided states


def saved_contents(path, num_ranks, dtype):
    """Return the contents of all blocks and pieces of states that an engine saves."""
    pool = GlobalKVPool(5000)
    engine = engine_over(node(pool), path, dtype=dtype, num_ranks=num_ranks)
    for prompt, _ in make_requests()[:NUM_TRIED]:
        engine.generate({"prompt_token_ids": [token % 300 + 2 for token in prompt]}, GREEDY)
        settle(engine)
    contents = [bytes(block.kv_data[CHECKSUM_BYTES:]) for block in pool._nodes["a"].values()]
    finish(engine)
    return sorted(contents)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_stored_states_are_the_same_for_any_number_of_ranks(model, num_ranks, dtype, tmp_path):
    family, changes = MODELS[model]
    path = write(tmp_path, family, **changes)
    expected = saved_contents(path, 1, dtype)
    assert len(expected) > 20
    assert saved_contents(path, num_ranks, dtype) == expected


@pytest.mark.sweep(2)
@pytest.mark.parametrize("heads", [(1, 6), (3, 9)])
def test_stored_states_of_tiled_heads_are_the_same_for_any_number_of_ranks(heads, tmp_path):
    """A rank may have a key head more than once."""
    sizes = dict(zip(("linear_num_key_heads", "linear_num_value_heads"), heads, strict=True))
    folder = write(tmp_path, DELTA, linear_key_head_dim=32, linear_value_head_dim=32, vocab_size=320, **sizes)
    path = write_gguf(folder, tmp_path / "model.gguf", kind="BF16")
    expected = saved_contents(path, 1, "bfloat16")
    assert saved_contents(path, 4, "bfloat16") == expected


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_states_of_ranks_cover_the_whole_state(model, num_ranks, tmp_path):
    """Each byte of a rank has a place, and each byte of the whole state belongs to a rank. Padding has no place."""
    family, changes = MODELS[model]
    whole, dtype = read_architecture(write(tmp_path, family, **changes)), "bfloat16"
    layout, found = whole.kv_layout, set()
    for rank in range(num_ranks):
        part, own = whole.split(Share(rank, num_ranks)).kv_layout, []
        for run in part.state_runs(layout, dtype):
            own += range(run.own, run.own + run.num_bytes)
            found |= {*range(run.whole, run.whole + run.num_bytes)}
        assert own == used_bytes(part, dtype)
    assert sorted(found) == used_bytes(layout, dtype)


def used_bytes(layout, dtype):
    """Return the places of all bytes of a state that are not padding."""
    memory, views = make_states(layout, 1, 0, getattr(torch, dtype))
    for *parts, _ in views.values():
        for part in parts:
            part.view(torch.uint8).fill_(1)
    return memory[0].nonzero().flatten().tolist()


# --- tokens


def answers_one_by_one(engine):
    """Answer requests one after another, so that no save is dropped because too many are open."""
    found = []
    for request in make_requests()[:NUM_TRIED]:
        found += answers(engine, [request])
        settle(engine)
    return found


@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@LOADING
def test_ranks_load_states_of_other_ranks_from_pool(checkpoints, alone, schedule, family, num_ranks, dtype):
    pool, log = GlobalKVPool(20000), EventLog()
    first, second = (
        engine_over(node(pool, name), checkpoints[family], schedule, dtype, sink=sink, num_ranks=num_ranks)
        for name, sink in (("a", None), ("b", log))
    )
    assert answers_one_by_one(first) == alone(family, dtype)
    assert answers(second, make_requests()[:NUM_TRIED]) == alone(family, dtype)
    finish(first, second)
    least = 1 if schedule.num_blocks == 160 else 4  # saves may pin few blocks and states
    assert count(log, events.KVLoadEnded, outcome="done") >= least


@pytest.mark.sweep(3)
@LOADING
def test_restarted_ranks_load_states_from_disk(tmp_path, checkpoints, alone, family, num_ranks):
    for least in (0, 4):
        log = EventLog()
        engine = over_disk(tmp_path / "kv", checkpoints[family], sink=log, num_ranks=num_ranks)
        assert answers(engine, make_requests()[:NUM_TRIED]) == alone(family)
        finish(engine)
        assert count(log, events.KVLoadEnded, outcome="done") >= least


@pytest.mark.sweep(10)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@LOADING
def test_ranks_start_with_states_of_prefill_ranks(tmp_path, checkpoints, alone, schedule, family, num_ranks):
    requests = make_requests()[:NUM_TRIED]
    first, second = (
        engine_over(
            None, checkpoints[family], schedule, num_ranks=num_ranks,
            stores=KVTransferConfig(role=role, disk_dir=tmp_path / "kv", disk_bytes=1 << 28),
        )
        for role in ("prefill", "decode")
    )  # fmt: skip
    prefill(first, requests)
    settle(first)
    told, num_found = decode(second, requests)
    assert told == alone(family)
    if schedule.name == "crowd":
        assert num_found == [usable_tokens(prompt) for prompt, _ in requests]
    finish(first, second)


@needs_mooncake
def test_ranks_load_states_from_mooncake(checkpoints, alone):
    master, log = Master(), EventLog()
    try:
        stores = KVTransferConfig(mooncake=master.address, mooncake_segment_bytes=64 << 20)
        first = engine_over(None, checkpoints[DELTA], stores=stores, num_ranks=2)
        await_store(first)
        assert answers_one_by_one(first) == alone(DELTA)
        second = engine_over(None, checkpoints[DELTA], stores=stores, num_ranks=2, sink=log)
        await_store(second)
        assert answers(second, make_requests()[:NUM_TRIED]) == alone(DELTA)
        assert count(log, events.KVLoadEnded, outcome="done") >= 4
        finish(first, second)
    finally:
        master.kill()


# --- faults


def make_llm(path, directory):
    return LLM(
        str(path), tensor_parallel_size=2, skip_tokenizer_init=True, max_model_len=160, num_threads=1,
        kv_cache_memory_bytes=4 << 20, kv_disk_dir=directory, min_tokens_to_cache=2, packed_cache_bytes=0,
    )  # fmt: skip


def answer(llm):
    prompt, params = {"prompt_token_ids": [*range(3, 103)]}, SamplingParams(max_tokens=8, temperature=0.0, logprobs=2)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.num_cached_tokens, output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.mark.turn(4)
def test_rank_that_ends_during_the_load_of_a_state_ends_the_engine(checkpoints, tmp_path, monkeypatch):
    path, write_state, ended = checkpoints[DELTA], HostBuffer.write_state, []
    first = make_llm(path, tmp_path / "kv")
    _, *expected = answer(first)
    finish(first.llm_engine)

    with monkeypatch.context() as patched:
        patched.setattr(leader, "start_process", start_process)
        second = make_llm(path, tmp_path / "kv")
        leads = second.llm_engine.core.executor.worker._leader

        def end_rank(buffer, *arguments):
            leads._processes[0].kill()
            ended.append(wait_until(leads.failure, "the end of rank 1 is noticed"))
            write_state(buffer, *arguments)

        patched.setattr(HostBuffer, "write_state", end_rank)
        with pytest.raises(EngineDeadError, match=r"the process of rank 1 ended|rank 1 receives no steps"):
            answer(second)
        second.llm_engine.shutdown()
    assert len(ended) == 1

    third = make_llm(path, tmp_path / "kv")
    assert answer(third) == (96, *expected)
    finish(third.llm_engine)
