"""Engines with KV on disk give the tokens and logprobs of one without: warm, killed, full, shared, other models."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_exactness import answers, make_requests, needs_kernels
from test_kv_stores import DTYPES, NUM_TRIED, SCHEDULES, alone, checkpoint, count, engine_over, node, settle

from octavo import LLM, SamplingParams
from octavo.config import KVTransferConfig
from octavo.data import events
from octavo.data.events import EventLog
from octavo.errors import ConfigError
from octavo.kv_transfer import create_store
from octavo.kv_transfer.disk import DiskStore
from octavo.kv_transfer.memory import GlobalKVPool
from octavo.models.random_weights import tiny_config, write_checkpoint

__all__ = ["alone", "checkpoint"]  # fixtures
pytestmark = needs_kernels


def over_disk(directory, checkpoint, dtype="bfloat16", sink=None, **options):
    stores = KVTransferConfig(disk_dir=directory, disk_bytes=1 << 28)
    return engine_over(None, checkpoint, SCHEDULES[0], dtype, sink, stores, **options)


def asked(engine, dtype_answers):
    """Answer all requests and compare with an engine without a store; then shut down."""
    assert answers(engine, make_requests()[:NUM_TRIED]) == dtype_answers
    settle(engine)
    engine.core.executor.shutdown()


@pytest.mark.sweep(8)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_restarted_engine_loads_kv_from_disk(tmp_path, checkpoint, alone, dtype):
    asked(over_disk(tmp_path / "kv", checkpoint, dtype), alone(dtype))
    log = EventLog()
    asked(over_disk(tmp_path / "kv", checkpoint, dtype, sink=log), alone(dtype))
    assert count(log, events.KVLoadEnded, outcome="done") >= 4


def test_two_running_engines_share_kv_disk_directory(tmp_path, checkpoint, alone):
    log = EventLog()
    first, second = over_disk(tmp_path / "kv", checkpoint), over_disk(tmp_path / "kv", checkpoint, sink=log)
    asked(first, alone("bfloat16"))
    asked(second, alone("bfloat16"))
    assert count(log, events.KVLoadEnded, outcome="done") >= 4


def test_kv_loaded_from_disk_is_saved_to_shared_pool(tmp_path, checkpoint, alone):
    pool, of_disk, of_pool = GlobalKVPool(5000), EventLog(), EventLog()
    asked(over_disk(tmp_path / "kv", checkpoint), alone("bfloat16"))
    stores = KVTransferConfig(disk_dir=tmp_path / "kv")
    asked(engine_over(node(pool, "a"), checkpoint, sink=of_disk, stores=stores), alone("bfloat16"))
    asked(engine_over(node(pool, "b"), checkpoint, sink=of_pool), alone("bfloat16"))
    loaded, again = (
        sum(each.num_tokens for each in log.events if isinstance(each, events.KVLoadEnded))
        for log in (of_disk, of_pool)
    )
    assert again >= loaded > 100


def fail(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_disk_write_errors_fail_no_request(tmp_path, checkpoint, alone, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", fail(number))
    asked(over_disk(tmp_path / "kv", checkpoint), alone("bfloat16"))
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["lock"]


@pytest.mark.parametrize(("call", "number"), [("preadv", errno.EIO), ("scandir", errno.EACCES)])
def test_disk_read_errors_fail_no_request(tmp_path, checkpoint, alone, monkeypatch, call, number):
    asked(over_disk(tmp_path / "kv", checkpoint), alone("bfloat16"))
    log = EventLog()
    monkeypatch.setattr(os, call, fail(number))
    asked(over_disk(tmp_path / "kv", checkpoint, sink=log), alone("bfloat16"))
    assert count(log, events.KVLoadEnded, outcome="done") == 0
    assert (count(log, events.KVLoadStarted) > 0) == (call == "preadv")


def test_impossible_kv_disk_directory_fails_no_request(tmp_path, checkpoint, alone, caplog):
    (tmp_path / "file").touch()
    asked(over_disk(tmp_path / "file" / "kv", checkpoint), alone("bfloat16"))
    assert "not used for a while, then retried" in caplog.text


def test_corrupt_kv_files_are_set_aside_and_recomputed(tmp_path, checkpoint, alone):
    asked(over_disk(tmp_path / "kv", checkpoint), alone("bfloat16"))
    files = list((tmp_path / "kv").glob("*.kv"))
    for path in files:
        with path.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte ^ 4]))
    asked(over_disk(tmp_path / "kv", checkpoint), alone("bfloat16"))
    assert list((tmp_path / "kv").glob("*.bad"))


def test_kv_on_disk_of_different_model_never_hits(tmp_path, checkpoint, alone):
    config = tiny_config(
        "Qwen3ForCausalLM", hidden_size=192, intermediate_size=320, head_dim=48, num_hidden_layers=3, vocab_size=1500
    )
    other = write_checkpoint(tmp_path / "other", config, std=0.1, seed=1)
    engine = over_disk(tmp_path / "kv", other)
    answers(engine, make_requests()[:NUM_TRIED])
    settle(engine)
    engine.core.executor.shutdown()
    assert list((tmp_path / "kv").glob("*.kv"))
    log = EventLog()
    asked(over_disk(tmp_path / "kv", checkpoint, sink=log), alone("bfloat16"))
    assert count(log, events.KVLoadEnded) == 0


@pytest.mark.parametrize(
    ("name", "older"), [("startup.identity.__version__", "0.1.0"), ("worker.worker.LAYOUT_VERSION", 0)]
)
def test_kv_on_disk_of_older_version_never_hits(tmp_path, checkpoint, alone, monkeypatch, name, older):
    """It had the same weights and requests; its results may be other numbers, or have another layout."""
    with monkeypatch.context() as patch:
        patch.setattr(f"octavo.{name}", older)
        asked(over_disk(tmp_path / "kv", checkpoint), alone("bfloat16"))
    num_files = len(list((tmp_path / "kv").glob("*.kv")))
    log = EventLog()
    asked(over_disk(tmp_path / "kv", checkpoint, sink=log), alone("bfloat16"))
    assert count(log, events.KVLoadStarted) == 0
    assert len(list((tmp_path / "kv").glob("*.kv"))) > num_files > 0


KILLED = """
import sys
from pathlib import Path
from test_kv_disk import over_disk
from test_exactness import answers, make_requests, needs_kernels
engine = over_disk(Path(sys.argv[1]), Path(sys.argv[2]))
print("ready", flush=True)
while True:
    answers(engine, make_requests())
    engine.core.scheduler.reset_prefix_cache()
"""


@pytest.mark.turn(12)
def test_kv_of_killed_engine_on_disk_is_usable(tmp_path, checkpoint, alone):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "kv"), str(checkpoint)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        end = time.monotonic() + 30
        while not list((tmp_path / "kv").glob("*.kv")) and time.monotonic() < end:
            time.sleep(0.01)  # until it has saved a block
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert list((tmp_path / "kv").glob("*.kv"))
    asked(over_disk(tmp_path / "kv", checkpoint), alone("bfloat16"))
    assert (list((tmp_path / "kv").glob("*.tmp")), list((tmp_path / "kv").glob("*.bad"))) == ([], [])


def test_invalid_kv_disk_options_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv_disk_bytes is 5, but kv_disk_dir is not set"):
        KVTransferConfig(disk_bytes=5)
    with pytest.raises(ConfigError, match="is not a directory"):
        KVTransferConfig(disk_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="the size of a file with one block"):
        create_store(KVTransferConfig(disk_dir=tmp_path / "kv", disk_bytes=100), 2048)


IDS = [(7 * index) % 250 + 1 for index in range(480)]
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def offline(directory, checkpoint):
    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=512,
        num_gpu_blocks_override=512,
        device="cpu",
        kv_disk_dir=str(directory),
        kv_disk_bytes=1 << 28,
    )


def test_generate_saves_blocks_of_last_step_before_it_returns(tmp_path, checkpoint):
    llm = offline(tmp_path / "kv", checkpoint)
    [answer] = llm.generate({"prompt_token_ids": IDS}, ONE_TOKEN, use_tqdm=False)
    assert not llm.llm_engine.core.has_work()
    assert llm.reset_prefix_cache()
    other = offline(tmp_path / "kv", checkpoint)
    [again] = other.generate({"prompt_token_ids": IDS}, ONE_TOKEN, use_tqdm=False)
    assert again.num_cached_tokens == len(IDS) - 1
    assert again.outputs[0].token_ids == answer.outputs[0].token_ids
    for each in (llm, other):
        each.llm_engine.shutdown()


def test_shutdown_saves_blocks_of_last_step(tmp_path, checkpoint):
    engine = offline(tmp_path / "kv", checkpoint).llm_engine
    engine.add_request("r", {"prompt_token_ids": IDS}, ONE_TOKEN)
    while not any(output.finished for output in engine.step()):
        pass
    engine.shutdown()
    engine.shutdown()
    other = offline(tmp_path / "kv", checkpoint)
    [again] = other.generate({"prompt_token_ids": IDS}, ONE_TOKEN, use_tqdm=False)
    assert again.num_cached_tokens == len(IDS) - 1
    other.llm_engine.shutdown()


def test_hanging_store_delays_no_answer(tmp_path, checkpoint, monkeypatch, caplog):
    """Each wait for saves has a limit: generate, reset_prefix_cache and shutdown return."""
    monkeypatch.setattr("octavo.engine.local_core._SAVING_S", 0.05)
    may_go_on, save = threading.Event(), DiskStore.save

    def hang(*args):
        may_go_on.wait(60)
        return save(*args)

    monkeypatch.setattr(DiskStore, "save", hang)
    llm = offline(tmp_path / "kv", checkpoint)
    [answer] = llm.generate({"prompt_token_ids": IDS}, ONE_TOKEN, use_tqdm=False)
    assert answer.finished
    assert "no transfer of KV ended within" in caplog.text
    assert not llm.reset_prefix_cache()
    may_go_on.set()
    monkeypatch.setattr("octavo.engine.local_core._SAVING_S", 60.0)
    assert llm.reset_prefix_cache(), "it is finished later"
    llm.llm_engine.shutdown()


def test_shutdown_aborts_unfinished_requests_and_saves_finished_ones(tmp_path, checkpoint):
    engine = offline(tmp_path / "kv", checkpoint).llm_engine
    engine.add_request("open", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=400, ignore_eos=True))
    engine.add_request("r", {"prompt_token_ids": IDS}, ONE_TOKEN)
    while not any(output.finished for output in engine.step()):
        pass
    engine.shutdown()
    other = offline(tmp_path / "kv", checkpoint)
    [again] = other.generate({"prompt_token_ids": IDS}, ONE_TOKEN, use_tqdm=False)
    assert again.num_cached_tokens == len(IDS) - 1
    other.llm_engine.shutdown()


def test_reset_prefix_cache_waits_for_saves_of_failed_batch(tmp_path, checkpoint):
    llm = offline(tmp_path / "kv", checkpoint)

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.llm_engine.generate_batch([{"prompt_token_ids": IDS}], ONE_TOKEN, on_output=interrupt)
    assert llm.reset_prefix_cache()
    llm.llm_engine.shutdown()
