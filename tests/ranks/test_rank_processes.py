"""Ranks as processes: their start, their end, and a rank that is killed or suspended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from rank_threads import RankThread

from octavo import LLM, SamplingParams, build
from octavo.config import DeviceConfig, EngineConfig, ModelConfig
from octavo.errors import ConfigError, EngineDeadError, ModelError
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.share import Share
from octavo.models.split import split_layer
from octavo.ranks import follower, leader, messages
from octavo.startup.launch import ServedModel, launch_engine

PROMPT = {"prompt_token_ids": [3, 1, 4, 1, 5, 9, 2, 6]}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"), std=0.1)


def make_llm(path, num_ranks=2, **options):
    return LLM(
        str(path), tensor_parallel_size=num_ranks, skip_tokenizer_init=True, max_model_len=64,
        kv_cache_memory_bytes=4 << 20, num_threads=1, **options,
    )  # fmt: skip


def tokens(llm):
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def processes_of(llm):
    return llm.llm_engine.core.executor.worker._leader._processes


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition):
    while not condition():
        time.sleep(0.02)


def test_processes_give_tokens_of_one_process_and_end_with_the_engine(checkpoint):
    alone = make_llm(checkpoint, 1)
    expected = tokens(alone)
    llm = make_llm(checkpoint)
    assert [tokens(llm), tokens(llm)] == [expected, expected]
    (process,) = processes_of(llm)
    llm.llm_engine.shutdown()
    assert process.poll() is not None


@pytest.mark.turn(2)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank_raises_error_and_leaves_no_process(checkpoint, how):
    llm = make_llm(checkpoint, rank_timeout_s=1.0)
    expected = tokens(llm)
    (process,) = processes_of(llm)
    os.kill(process.pid, how)
    with pytest.raises(EngineDeadError, match="rank 1 "):
        tokens(llm)
    llm.llm_engine.shutdown()
    wait_until(lambda: not is_alive(process.pid))
    assert tokens(make_llm(checkpoint)) == expected


@pytest.mark.turn(4)
@pytest.mark.parametrize("is_loading", [False, True])
def test_rank_ends_with_its_parent(checkpoint, tmp_path, is_loading):
    end = "print(process.pid, flush=True); os._exit(9)"
    script = tmp_path / "parent.py"
    script.write_text(
        "import os\nfrom octavo import LLM\nfrom octavo.ranks import leader\n"
        "start = leader.start_process\n"
        "def started(*arguments):\n    global process\n    process = start(*arguments)\n"
        f"    {end if is_loading else 'return process'}\n"
        "leader.start_process = started\n"
        f"LLM({str(checkpoint)!r}, tensor_parallel_size=2, skip_tokenizer_init=True, max_model_len=64)\n{end}\n"
    )
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 9
    wait_until(lambda: not is_alive(int(done.stdout)))


@pytest.mark.turn(4)
def test_idle_engine_notices_lost_rank(checkpoint):
    llm = make_llm(checkpoint)
    (process,) = processes_of(llm)
    process.kill()
    core = llm.llm_engine.core
    wait_until(lambda: core.executor.worker._leader.failure() is not None)
    with pytest.raises(EngineDeadError, match="rank 1 "):
        core.executor.check()


@pytest.mark.turn(4)
def test_rank_of_another_version_is_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(leader, "__version__", "0.0.1")
    with pytest.raises(ModelError, match=r"rank 1 is octavo .* but rank 0 is 0\.0\.1"):
        make_llm(checkpoint)


def test_rank_that_ends_while_it_starts_is_reported(checkpoint, monkeypatch):
    start = leader.start_process

    def start_and_kill(end, memory):
        process = start(end, memory)
        process.kill()
        return process

    monkeypatch.setattr(leader, "start_process", start_and_kill)
    with pytest.raises(ModelError, match="the process of rank 1 ended while it started") as error:
        make_llm(checkpoint)
    assert error.value.rank == 1


@pytest.mark.turn(4)
@pytest.mark.parametrize("step", ["await_loaded", "allocate", "announce"])
def test_rank_that_ends_during_a_later_part_of_the_start_is_named(checkpoint, monkeypatch, step):
    """Rank 0 notices it in the next part. The third rank ends before an exchange of the warm-up."""
    do = getattr(leader.Leader, step)

    def do_and_kill(self, *args):
        do(self, *args)
        self._processes[0].kill()
        self._processes[0].wait()

    monkeypatch.setattr(leader.Leader, step, do_and_kill)
    reason = "the process of rank 1 ended with status -9|rank 1 receives no steps"
    with pytest.raises(EngineDeadError, match=reason) as error:
        make_llm(checkpoint)
    assert error.value.rank == 1


def rank_1_of(core):
    """Return the process of rank 1 of an engine process, or None if it has not been started."""
    if core.pid is None:
        return None
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(core.pid).children()
        return next((each for each in children if "octavo.ranks.main" in each.cmdline()), None)
    return None


@pytest.mark.turn(8)
def test_rank_failures_are_counted_in_service_and_while_the_engine_process_restarts(checkpoint):
    model = ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=64)
    core = launch_engine(EngineConfig(model=model, device=DeviceConfig(tensor_parallel_size=2, num_threads=1))).client
    rank_1_of(core).kill()
    while core.rank_failures != {1: 1}:
        core.wait()
    while (restarted := rank_1_of(core)) is None:
        core.wait()
    assert not core.is_ready
    restarted.kill()
    while core.rank_failures != {1: 2}:
        core.wait()
    assert core.num_failed_starts == 1
    while not core.is_ready:
        core.wait()
    assert core.rank_failures == {1: 2}
    core.shutdown()


@pytest.mark.parametrize(
    ("slow", "activity"),
    [("load_model", "loading weights"), ("weights_checksum", "allocating KV and checking weights")],
)
def test_wait_for_slow_rank_is_logged_with_its_number(checkpoint, monkeypatch, caplog, slow, activity):
    """The rank is slow until the log names it and no other rank."""
    line, do, serve = f"rank 0 waits for rank 2: {activity}, ", getattr(follower, slow), follower.serve

    def serve_named(end, launch):
        threading.current_thread().name = f"rank {launch.rank}"
        serve(end, launch)

    def do_slowly(*args, **options):
        if threading.current_thread().name == "rank 2":
            wait_until(lambda: line in caplog.text)
        return do(*args, **options)

    monkeypatch.setattr(follower, "serve", serve_named)
    monkeypatch.setattr(follower, slow, do_slowly)
    monkeypatch.setattr(leader, "start_process", RankThread)
    monkeypatch.setattr(leader, "_PROGRESS_S", 0.01)
    with caplog.at_level("INFO", "octavo.ranks.leader"):
        make_llm(checkpoint, 4).llm_engine.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "tensor_parallel_size must be an integer from 1 to 64"),
        ({"num_ranks": 65}, "tensor_parallel_size must be an integer from 1 to 64"),
        ({"num_ranks": 5}, "does not suit a model with 4 query heads and 2 heads"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend ray is not supported yet: choose mp"),
        ({"kernels": "reference"}, "needs the compiled CPU kernels"),
        ({"rank_timeout_s": -1.0}, "rank_timeout_s must be a number of 0 or more"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s must be at least 0.1"),
    ],
)
def test_unsupported_options_are_refused_before_a_process_starts(checkpoint, monkeypatch, options, message):
    monkeypatch.setattr(leader, "start_process", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=message):
        make_llm(checkpoint, **options)


def test_layers_without_a_rule_of_division_are_refused(checkpoint):
    layer = ServedModel.find(ModelConfig(model=str(checkpoint), skip_tokenizer_init=True)).architecture.layers[0]
    with pytest.raises(ConfigError, match="tensor_parallel_size above 1 does not support Mamba"):
        split_layer(replace(layer, attention=type("Mamba", (), {})()), Share(0, 2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_times", [0, 2])
def test_lost_or_doubled_message_ends_all_ranks_without_wrong_token(checkpoint, monkeypatch, num_times):
    expected = tokens(make_llm(checkpoint, 1))
    monkeypatch.setattr(leader, "start_process", RankThread)
    llm = make_llm(checkpoint, rank_timeout_s=1.0, speculative_config={"method": "none"})  # eight steps
    assert tokens(llm) == expected
    send, sent = leader.channel.send, []

    def send_some(end, message):
        sent.append(message)
        for _ in range(num_times if len(sent) == 2 else 1):
            send(end, message)

    monkeypatch.setattr(leader.channel, "send", send_some)
    with pytest.raises(EngineDeadError, match="rank"):
        tokens(llm)
    llm.llm_engine.shutdown()


def test_ranks_that_compute_different_steps_fail(tmp_path):
    """Their results have different sizes, although both wait for the same exchange."""
    from octavo.kernels.ranked import RankedKernels, RankGroup, create_shared_memory

    memory = create_shared_memory()
    ranks = [RankedKernels(RankGroup(memory, rank, 2, 5.0, []), num_threads=1) for rank in (0, 1)]
    errors = []

    def exchange(kernels, rows):
        try:
            kernels.join(torch.zeros(rows, 4), (0, 4, 8))
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=exchange, args=[kernels, 1 + index]) for index, kernels in enumerate(ranks)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors
    assert all("computes another step" in error or "failed" in error for error in errors)
    os.close(memory)


@pytest.mark.turn(4)
def test_long_prompt_does_not_block_rank_0_if_another_rank_is_suspended(tmp_path):
    """The message is larger than the buffer of the socket."""
    config = tiny_config("Qwen3ForCausalLM", max_position_embeddings=400_000, vocab_size=70_000)
    path = write_checkpoint(tmp_path / "model", config, std=0.1)
    llm = LLM(
        str(path), tensor_parallel_size=2, skip_tokenizer_init=True, num_threads=1, rank_timeout_s=1.0,
        kv_cache_memory_bytes=256 << 20,
    )  # fmt: skip
    (process,) = processes_of(llm)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="rank 1 receives no steps"):
        llm.generate([{"prompt_token_ids": [66_000] * 200_000}], GREEDY, use_tqdm=False)
    llm.llm_engine.shutdown()
    assert not is_alive(process.pid)


@pytest.mark.turn(2)
def test_error_names_the_rank_that_ended_first(checkpoint):
    llm = make_llm(checkpoint, 4, rank_timeout_s=5.0)
    processes_of(llm)[1].kill()
    with pytest.raises(EngineDeadError, match="rank 2"):
        tokens(llm)
    llm.llm_engine.shutdown()


def test_failed_start_ends_the_other_ranks(checkpoint, monkeypatch):
    def fail(*_):
        raise ConfigError("the journal cannot be written")

    monkeypatch.setattr(build, "_recorded", fail)
    started, start = [], leader.start_process
    monkeypatch.setattr(leader, "start_process", lambda *args: started.append(start(*args)) or started[-1])
    with pytest.raises(ConfigError, match="journal"):
        make_llm(checkpoint)
    assert started[0].poll() is not None


def test_message_of_decode_step_does_not_grow_with_context(checkpoint, monkeypatch):
    sizes = []
    encode = messages.encode

    def measure(message):
        data = encode(message)
        if isinstance(message, messages.Step) and message.num_scheduled_tokens:
            sizes.append((bool(message.new), len(data)))
        return data

    monkeypatch.setattr(leader, "start_process", RankThread)
    monkeypatch.setattr(messages, "encode", measure)
    llm = make_llm(checkpoint, block_size=4)
    llm.generate([PROMPT], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), use_tqdm=False)
    decodes = [size for is_new, size in sizes if not is_new]
    assert len(decodes) >= 38
    assert max(decodes) - min(decodes) <= 24  # a step may have a new block
