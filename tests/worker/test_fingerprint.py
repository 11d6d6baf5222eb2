"""A start that computes other numbers than an earlier one is refused; a start with the same numbers is not."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from alone_and_crowd import needs_kernels
from gguf_files import write_gguf

import octavo
from octavo import LLM, SamplingParams
from octavo.build import build_core, build_engine
from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.data.fingerprint import EngineFingerprint
from octavo.engine import ipc
from octavo.errors import FingerprintError
from octavo.journal.format import read_journal
from octavo.kernels.checksum import digest
from octavo.kv_transfer.memory import GlobalKVPool, MemoryStore
from octavo.models import packed_cache, weight_hashes
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.weight_source import FolderWeights
from octavo.server.api.describing import server_info
from octavo.worker import kept_fingerprints, worker
from octavo.worker.kept_fingerprints import KeptFingerprints

ENGINE = {"model": "a", "kernels": "cpu:portable"}
DRAFT = {"method": "draft_model", "model": "octavo-demo-draft"}
FOUND = EngineFingerprint("cpu:portable", 2, "1" * 16, "2" * 16, "3" * 16)
pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    """Give each test its own cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_config("Qwen2ForCausalLM", attention_bias=True), std=0.1)


def start(path, **options):
    """Start an engine; return its fingerprint."""
    options = {"skip_tokenizer_init": True, "max_model_len": 96} | options
    return LLM(str(path), **options).llm_engine.capacity.fingerprint


def flip_a_bit(data):
    """Change one bit in the middle of a tensor's memory."""
    data.view(-1).view(torch.uint8)[data.nbytes // 2] ^= 4


def unchecked(reading):
    """Return a tensor of a kept file without checking its checksum."""
    for task in reading.tasks:
        task.result()
    return reading.data


def break_loading(monkeypatch, breaks):
    """Make breaks(model) change each model in memory after it is loaded."""
    load = worker.load_model

    def load_broken(*args, **options):
        model = load(*args, **options)
        breaks(model)
        return model

    monkeypatch.setattr(worker, "load_model", load_broken)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int4"},
        {"kv_cache_dtype": "int8"},
        {"load_format": "dummy"},
        {"speculative_config": DRAFT},
    ],
)
def test_every_start_has_same_fingerprint(checkpoint, options):
    path = "octavo-demo" if "speculative_config" in options else checkpoint
    made = [start(path, **options) for _ in range(2)]
    assert made[0] == made[1]
    assert all((made[0].weights, made[0].tables, made[0].logits))
    assert bool(made[0].draft) == ("speculative_config" in options)


def test_threads_and_step_size_do_not_change_fingerprint(checkpoint, cache_home):
    first = start(checkpoint, num_threads=1)
    second = start(checkpoint, num_threads=3, max_num_batched_tokens=64, block_size=32)
    assert not second.differences(first)
    assert (first.num_threads, second.num_threads) == (1, 3)
    assert len(list((cache_home / "fingerprints").iterdir())) == 1


@pytest.mark.parametrize(
    ("breaks", "names"),
    [
        (lambda model: flip_a_bit(model.layers[1].mlp.down.storage.data), {"weights"}),
        (lambda model: flip_a_bit(model.norms[-1].fill_(0.5)), {"weights", "logits"}),
        (lambda model: flip_a_bit(model.layers[0].attention.qkv.bias), {"weights"}),
    ],
)
def test_flipped_bit_in_memory_refuses_start(checkpoint, monkeypatch, breaks, names):
    start(checkpoint)
    with monkeypatch.context() as patch:
        break_loading(patch, breaks)
        with pytest.raises(FingerprintError, match=r"Restart.*fingerprints/") as caught:
            start(checkpoint)
    assert names <= {name for name in ("weights", "tables", "logits") if f"{name} " in str(caught.value)}
    start(checkpoint)


def test_flipped_bit_in_draft_model_refuses_start(monkeypatch):
    start("octavo-demo", speculative_config=DRAFT)
    break_loading(monkeypatch, lambda model: len(model.layers) < 3 and flip_a_bit(model.linears[0].storage.data))
    with pytest.raises(FingerprintError, match="draft "):
        start("octavo-demo", speculative_config=DRAFT)


def test_flipped_bit_in_cached_weights_is_repaired_or_refused(checkpoint, monkeypatch, caplog, cache_home):
    """If the file's own checksum detects the bit, the file is repaired from the checkpoint; otherwise the start is
    refused.
    """
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    first = start(checkpoint, quantization="int8")
    (kept,) = (cache_home / "packed").glob("*.safetensors")
    whole = kept.read_bytes()
    damaged = bytearray(whole)
    damaged[-100] ^= 1
    kept.write_bytes(damaged)
    assert start(checkpoint, quantization="int8") == first
    assert "weights are packed again" in caplog.text
    kept.write_bytes(damaged)
    monkeypatch.setattr(packed_cache._TensorBeingRead, "result", unchecked)
    with pytest.raises(FingerprintError, match=r"weights .*packed"):
        start(checkpoint, quantization="int8")


def test_gguf_file_has_fingerprint(checkpoint, tmp_path, monkeypatch):
    path = write_gguf(checkpoint, tmp_path / "model.gguf")
    first = start(path)
    assert start(path) == first
    break_loading(monkeypatch, lambda model: flip_a_bit(model.norms[0]))
    with pytest.raises(FingerprintError):
        start(path)


def test_nan_logits_have_stable_fingerprint(checkpoint, monkeypatch):
    break_loading(monkeypatch, lambda model: model.norms[-1].fill_(torch.nan))
    first = start(checkpoint)
    assert first.logits == digest([torch.full((1, 512), torch.nan)])
    assert start(checkpoint) == first


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "changed", [{"quantization": "int8"}, {"max_model_len": 64}, {"dtype": "bfloat16"}, {"isa": "portable"}]
)
def test_different_options_have_separate_fingerprints(checkpoint, changed):
    start(checkpoint)
    start(checkpoint, **changed)


def test_replaced_checkpoint_has_separate_fingerprint(checkpoint, tmp_path):
    start(checkpoint)
    other = write_checkpoint(tmp_path / "other", tiny_config("Qwen2ForCausalLM", attention_bias=True), seed=1)
    shutil.copy(other / "model.safetensors", checkpoint / "model.safetensors")
    start(checkpoint)


def num_engines(cache_home):
    return len(list((cache_home / "fingerprints").iterdir()))


@pytest.mark.turn(8)
def test_copy_of_packed_checkpoint_shares_fingerprint(checkpoint, tmp_path, monkeypatch, cache_home):
    """The packed cache knows the hashes of its files, so paths, times and inodes do not matter."""
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(weight_hashes, "_SETTLED_NS", 0)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    for path in (checkpoint, copy, copy):
        start(path, quantization="int8")
    assert num_engines(cache_home) == 1
    break_loading(monkeypatch, lambda model: flip_a_bit(model.norms[0]))
    with pytest.raises(FingerprintError):
        start(shutil.copytree(copy, tmp_path / "third"), quantization="int8")


def test_copy_of_checkpoint_with_shared_kv_shares_fingerprint(checkpoint, tmp_path, monkeypatch, cache_home):
    monkeypatch.setattr(weight_hashes, "_SETTLED_NS", 0)
    for name in ("first", "second"):
        path = shutil.copytree(checkpoint, tmp_path / name)
        model = ModelConfig(model=str(path), skip_tokenizer_init=True, max_model_len=96)
        config = EngineConfig(model=model, cache=CacheConfig(num_gpu_blocks=16))
        core = build_core(config, kv_store=lambda block_bytes: MemoryStore(GlobalKVPool(), "a", block_bytes))
        core.executor.shutdown()
    assert num_engines(cache_home) == 1


def test_copy_of_unhashed_checkpoint_has_separate_fingerprint(checkpoint, tmp_path, cache_home):
    """Reading a large checkpoint only for this would slow down every start."""
    for path in (checkpoint, shutil.copytree(checkpoint, tmp_path / "copy"), checkpoint):
        start(path)
    assert num_engines(cache_home) == 2


def test_config_and_code_are_identified_by_content(tmp_path, monkeypatch):
    def code(name, text):
        (tmp_path / name / "kernels").mkdir(parents=True)
        (tmp_path / name / "kernels" / "a.py").write_text(text)
        monkeypatch.setattr(octavo, "__file__", str(tmp_path / name / "__init__.py"))
        return kept_fingerprints.describe_installation()["code"]

    assert code("first", "a = 1") == code("second", "a = 1") != code("third", "a = 2")

    def configs(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
        weights, hashes = FolderWeights(tmp_path / name), weight_hashes.FileHashes(tmp_path / "hashes.json")
        return kept_fingerprints.describe_model(weights, "architecture", hashes, seed=0)

    assert configs("a", "{}") == configs("b", "{}") != configs("c", "{ }")


def test_removed_checkpoint_starts_with_warning(checkpoint, monkeypatch, caplog):
    break_loading(monkeypatch, lambda _model: (checkpoint / "config.json").unlink())
    assert start(checkpoint).logits
    assert "cannot be compared" in caplog.text


def test_no_fingerprint_is_stored_if_packed_cache_is_disabled(checkpoint, cache_home):
    assert start(checkpoint, packed_cache_bytes=0).logits
    assert not (cache_home / "fingerprints").exists()


def test_reference_kernels_have_no_checksums(checkpoint, cache_home):
    assert start(checkpoint, kernels="reference") == EngineFingerprint("reference", torch.get_num_threads())
    assert not (cache_home / "fingerprints").exists()


@pytest.mark.turn(8)
def test_engines_share_kv_only_with_equal_fingerprint_tables(checkpoint, monkeypatch):
    """Block keys depend on the tables: another engine with a different table does not find the blocks."""
    pool, prompt = GlobalKVPool(), list(range(5, 70))

    def loaded(name, max_model_len=96):
        config = EngineConfig(
            model=ModelConfig(
                model=str(checkpoint), skip_tokenizer_init=True, max_model_len=max_model_len, packed_cache_bytes=0
            ),
            cache=CacheConfig(num_gpu_blocks=16),
            scheduler=SchedulerConfig(min_tokens_to_cache=2, kv_lookup_timeout_s=20.0),
        )
        engine = build_engine(config, kv_store=lambda block_bytes: MemoryStore(pool, name, block_bytes))
        engine.add_request("a", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=2, detokenize=False))
        while engine.has_unfinished_requests() or engine.core.has_work():
            engine.step()
        return engine.core.metrics.stats.kv_loads["done"]

    assert loaded("first") == 0
    assert loaded("same") == 1
    assert loaded("long", 300) == 1
    break_loading(monkeypatch, lambda model: flip_a_bit(model.norms[0]))
    assert loaded("other") == 0


@pytest.mark.parametrize(("model_len", "row"), [(96, 48), (900, 450), (2048, 1024)])
def test_wrong_rotary_table_row_refuses_first_start(checkpoint, monkeypatch, model_len, row):
    """KV keys cover only the first rows, so an engine with a wrong later row must not start."""
    break_loading(monkeypatch, lambda model: flip_a_bit(model.layers[0].attention.cos_sin))
    with pytest.raises(FingerprintError, match=f"row {row} of a rotary table with {model_len} rows.*: restart"):
        start(checkpoint, max_model_len=model_len, packed_cache_bytes=0)


def test_wrong_query_scale_refuses_first_start(monkeypatch, tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32}
    config = tiny_config("Ministral3ForCausalLM", rope_parameters=rope | {"llama_4_scaling_beta": 0.1})
    path = write_checkpoint(tmp_path / "scaled", config)
    start(path, max_model_len=96)
    break_loading(monkeypatch, lambda model: flip_a_bit(model.layers[0].attention.query_scale))
    with pytest.raises(FingerprintError, match="row 48 of a table of query scales"):
        start(path, max_model_len=96)


def test_reference_kernels_check_rotary_table(checkpoint, monkeypatch):
    break_loading(monkeypatch, lambda model: flip_a_bit(model.layers[0].attention.cos_sin))
    with pytest.raises(FingerprintError, match="rotary table"):
        start(checkpoint, kernels="reference")


def test_wrong_rotary_table_of_draft_model_refuses_start(monkeypatch):
    break_loading(monkeypatch, lambda model: len(model.layers) < 3 and flip_a_bit(model.layers[0].attention.cos_sin))
    with pytest.raises(FingerprintError, match="rotary table"):
        start("octavo-demo", speculative_config=DRAFT)


def test_server_info_and_journal_contain_fingerprint(checkpoint, tmp_path):
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=96),
        cache=CacheConfig(num_gpu_blocks=16),
        record=tmp_path / "journal",
    )
    core = build_core(config)
    core.scheduler.close()
    made = core.capacity.fingerprint
    assert made.weights
    assert read_journal(tmp_path / "journal")[0]["fingerprint"] == made.to_json()
    service = SimpleNamespace(
        engine=SimpleNamespace(client=SimpleNamespace(capacity=core.capacity)),
        model_names=["a"],
        model_info=SimpleNamespace(max_model_len=96),
        settings={},
    )
    response = asyncio.run(server_info.handler(service, None))
    assert json.loads(response.body)["fingerprint"] == made.to_json()
    assert ipc.error_of(ipc.failure(FingerprintError("a"))).__class__ is FingerprintError
    core.executor.shutdown()


def test_first_fingerprint_is_stored_and_compared(tmp_path):
    kept = KeptFingerprints(tmp_path / "new")
    kept.check(ENGINE, FOUND)
    kept.check(ENGINE, FOUND)
    kept.check(ENGINE | {"model": "b"}, EngineFingerprint("cpu:portable", 2, "4" * 16))
    with pytest.raises(FingerprintError) as caught:
        kept.check(ENGINE, EngineFingerprint("cpu:portable", 2, "1" * 16, "5" * 16, "3" * 16))
    assert f"tables {'2' * 16} then, {'5' * 16} now" in str(caught.value)
    assert str(kept.path(ENGINE)) in str(caught.value)
    kept.path(ENGINE).unlink()  # as the message says
    kept.check(ENGINE, EngineFingerprint("cpu:portable", 2, "1" * 16, "5" * 16, "3" * 16))


@pytest.fixture
def next_process(monkeypatch):
    """Return a function that makes the next start look like one of another process."""
    names = iter(range(100))

    def begin():
        name = str(next(names))
        monkeypatch.setattr(kept_fingerprints, "_process", lambda _pid: name)

    return begin


def test_two_equal_starts_replace_faulty_first_fingerprint(tmp_path, caplog, next_process):
    kept, right = KeptFingerprints(tmp_path), replace(FOUND, tables="5" * 16)
    next_process()
    kept.check(ENGINE, FOUND)
    next_process()
    with pytest.raises(FingerprintError, match="Restart"):
        kept.check(ENGINE, right)
    with pytest.raises(FingerprintError):
        kept.check(ENGINE, right)  # a fault may last as long as its process
    assert not caplog.records
    next_process()
    kept.check(ENGINE, right)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"tables {'2' * 16} then, {'5' * 16} now" in record.getMessage()
    assert str(kept.path(ENGINE)) in record.getMessage()
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    next_process()
    kept.check(ENGINE, right)
    with pytest.raises(FingerprintError):
        kept.check(ENGINE, FOUND)


def test_starts_with_different_fingerprints_are_refused(tmp_path, next_process):
    kept = KeptFingerprints(tmp_path)
    kept.check(ENGINE, FOUND)
    for digit in "565":
        next_process()
        with pytest.raises(FingerprintError):
            kept.check(ENGINE, replace(FOUND, tables=digit * 16))


def test_matching_start_discards_refused_fingerprint(tmp_path, next_process):
    """Two faulty starts with a correct one between them do not replace the kept fingerprint."""
    kept, wrong = KeptFingerprints(tmp_path), replace(FOUND, tables="5" * 16)
    for found in (FOUND, wrong, FOUND, wrong, FOUND):
        next_process()
        if found is wrong:
            with pytest.raises(FingerprintError):
                kept.check(ENGINE, found)
        else:
            kept.check(ENGINE, found)


def test_damaged_file_of_refused_start_is_replaced(tmp_path, next_process):
    kept, right = KeptFingerprints(tmp_path), replace(FOUND, tables="5" * 16)
    kept.check(ENGINE, FOUND)
    kept.path(ENGINE).with_suffix(".other").write_text("{")
    for _ in range(2):
        next_process()
        with suppress(FingerprintError):
            kept.check(ENGINE, right)
    kept.check(ENGINE, right)


def test_start_stays_refused_if_it_cannot_be_recorded(tmp_path, monkeypatch, caplog):
    kept = KeptFingerprints(tmp_path)
    kept.check(ENGINE, FOUND)
    monkeypatch.setattr(kept_fingerprints, "written_whole", lambda path: path.open("rb"))
    with pytest.raises(FingerprintError):
        kept.check(ENGINE, replace(FOUND, tables="5" * 16))
    assert "cannot be used" in caplog.text


def test_every_process_has_unique_stable_name():
    assert kept_fingerprints._process(1) == kept_fingerprints._process(1)
    assert kept_fingerprints._process(1) != kept_fingerprints._process(2)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"fingerprint": {}}', b"\xff"])
def test_damaged_fingerprint_file_is_replaced(tmp_path, caplog, content):
    kept = KeptFingerprints(tmp_path)
    kept.path(ENGINE).write_bytes(content)
    kept.check(ENGINE, FOUND)
    assert "is damaged" in caplog.text
    assert json.loads(kept.path(ENGINE).read_text())["fingerprint"]["tables"] == "2" * 16


def test_flipped_bit_in_stored_fingerprint_does_not_refuse_start(tmp_path, caplog):
    kept = KeptFingerprints(tmp_path)
    kept.check(ENGINE, FOUND)
    kept.path(ENGINE).write_text(kept.path(ENGINE).read_text().replace("2" * 16, "2" * 15 + "3"))
    kept.check(ENGINE, FOUND)
    assert "is damaged" in caplog.text


def test_unwritable_fingerprint_directory_logs_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        KeptFingerprints(tmp_path / "file" / "fingerprints").check(ENGINE, FOUND)
    assert "cannot be compared" in caplog.text


def test_oldest_fingerprint_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_fingerprints, "MAX_FILES", 3)
    kept = KeptFingerprints(tmp_path)
    for index in range(5):
        kept.check(ENGINE | {"model": index}, FOUND)
    assert len(list(Path(tmp_path).iterdir())) == 3
    assert kept.path(ENGINE | {"model": 4}).exists()
