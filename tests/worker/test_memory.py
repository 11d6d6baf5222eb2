from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from mooncake_master import needs_mooncake

from octavo.assets import BUILT_IN_DRAFT
from octavo.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from octavo.errors import ConfigError
from octavo.kv_transfer import host_bytes
from octavo.kv_transfer.mooncake_client import AREA_BYTES, PROCESS_BYTES
from octavo.llm import LLMEngine
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_bytes import weight_bytes
from octavo.speculative import create_proposer
from octavo.worker import memory
from octavo.worker import worker as worker_module
from octavo.worker.memory import activation_bytes, block_bytes, decide_kv_size, largest_batch
from octavo.worker.transfer_threads import staging_bytes

MEASURE = """
import json, sys
from pathlib import Path
from octavo import CacheConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import KVTransferConfig, SpeculativeConfig
from octavo.core.transfer_cost import TransferCost

TransferCost.is_worth_loading = lambda *_: True  # on a busy machine, too


def status_bytes(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

before = status_bytes("RssAnon:")
engine = LLMEngine(ModelConfig(model=sys.argv[1], skip_tokenizer_init=True),
                   cache_config=CacheConfig(num_gpu_blocks=128, enable_prefix_caching=False),
                   speculative_config=SpeculativeConfig(method="none"),
                   scheduler_config=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=1024))
open("/proc/self/clear_refs", "w").write("5")  # a new measurement of the peak
params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
# The first step is a whole one, and so many run.
engine.generate_batch([{"prompt_token_ids": list(range(2, 68))} for _ in range(16)], params)
# Pages of files come and go as the system likes; they are no allocation.
print(json.dumps(status_bytes("VmHWM:") - status_bytes("RssFile:") - before))
"""

# The same with a store: prompts are saved one by one, and all loaded at the same time.
MEASURE_STORE = MEASURE[: MEASURE.index("engine = ")] + """
engine = LLMEngine(ModelConfig(model=sys.argv[1], skip_tokenizer_init=True),
                   cache_config=CacheConfig(num_gpu_blocks=224),
                   kv_transfer_config=KVTransferConfig(num_threads=8, disk_dir=Path(sys.argv[2])),
                   speculative_config=SpeculativeConfig(method="none"),
                   scheduler_config=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512,
                                                    kv_lookup_timeout_s=30.0))
params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
prompts = [{"prompt_token_ids": [first, *range(256)]} for first in range(12)]
for part in (*([prompt] for prompt in prompts), prompts):
    outputs = engine.generate_batch(part, params)
    while engine.core.has_work():
        engine.step()
    assert engine.core.scheduler.reset_prefix_cache()
assert [output.num_cached_tokens for output in outputs.values()] == [256] * 12
"""  + MEASURE[MEASURE.index("# Pages of files"):]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config(
        "LlamaForCausalLM", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, head_dim=64,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=32000,
    )  # fmt: skip
    return write_checkpoint(tmp_path_factory.mktemp("memory") / "llama", config)


def measure(program, *arguments):
    """Return the output of a program."""
    # glibc adapts its threshold and keeps large freed blocks (0 to 80 MB here); with a fixed threshold it returns them.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240, env=environment)
    return json.loads(result.stdout)


@pytest.mark.turn(12)
def test_planned_bytes_match_measured_peak(checkpoint):
    architecture = read_architecture(checkpoint)
    weights = weight_bytes(architecture, "float32")
    kv = 128 * block_bytes(architecture, 16, "float32")
    computed = weights + kv + activation_bytes(architecture, 1024, 16, "float32")
    measured = measure(MEASURE, checkpoint)
    # Above: what the first step imports and builds. Below: the bound must not be much too large.
    assert 0.75 * computed < measured < computed + 20e6, (measured / 1e6, computed / 1e6)


@pytest.mark.turn(12)
def test_plan_without_tables_matches_measured_peak(tmp_path):
    """The table of per-layer embeddings has 98 MB."""
    config = tiny_config(
        "Gemma4ForCausalLM", hidden_size=512, intermediate_size=1024, num_hidden_layers=6, head_dim=64,
        global_head_dim=128, num_attention_heads=8, num_key_value_heads=4, vocab_size=32000,
        vocab_size_per_layer_input=32000, hidden_size_per_layer_input=128, enable_moe_block=False,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    path = write_checkpoint(tmp_path, config)
    architecture = read_architecture(path)
    computed = weight_bytes(architecture, "float32") + activation_bytes(architecture, 1024, 16, "float32")
    computed += 128 * block_bytes(architecture, 16, "float32")
    assert measure(MEASURE, path) < computed + 20e6


@pytest.mark.turn(12)
def test_planned_bytes_with_store_match_measured_peak(tmp_path):
    config = tiny_config(
        "LlamaForCausalLM", hidden_size=64, intermediate_size=64, num_hidden_layers=8, head_dim=64,
        num_attention_heads=8, num_key_value_heads=8, vocab_size=256,
    )  # fmt: skip
    architecture = read_architecture(write_checkpoint(tmp_path / "llama", config))
    per_block = block_bytes(architecture, 16, "float32")
    of_store = staging_bytes(per_block, 8)
    assert of_store == 9 * 8 << 20
    computed = weight_bytes(architecture, "float32") + 224 * per_block + of_store
    computed += activation_bytes(architecture, 512, 16, "float32")
    measured = measure(MEASURE_STORE, tmp_path / "llama", tmp_path / "kv")
    assert computed - 0.5 * of_store < measured < computed + 20e6, (measured / 1e6, computed / 1e6, of_store / 1e6)


def make_engine(**options):
    """Return an engine of the built-in model, with KV stores as in `KVTransferConfig`."""
    return LLMEngine(
        ModelConfig(dtype="float32"),
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=128),
        cache_config=CacheConfig(block_size=4),
        speculative_config=SpeculativeConfig(method="none"),
        kv_transfer_config=KVTransferConfig(**options),
    )


def test_memory_plan_includes_staging_bytes_of_stores(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 100 << 20)
    without, with_disk = (
        make_engine(**options).core.executor.worker.kv_cache
        for options in ({}, {"disk_dir": tmp_path, "num_threads": 3})
    )
    staging = staging_bytes(without.block_bytes, 3)
    assert 4 * (8 << 20) - staging < 4 * without.block_bytes
    fewer = (without.num_blocks - with_disk.num_blocks) * without.block_bytes
    assert abs(fewer - staging / 2) <= without.block_bytes, "the cache takes half of what is free"


@pytest.mark.turn(12)
@pytest.mark.parametrize("host_stores", [0, 1 << 40])
def test_gpu_plan_includes_staging_bytes_but_no_host_memory(monkeypatch, tmp_path, host_stores):
    monkeypatch.setattr(worker_module, "machine_name", lambda _device: "a GPU")
    worker = make_engine(disk_dir=tmp_path, num_threads=3).core.executor.worker
    host_bytes = worker._store_bytes_of
    # All of the host's memory is free, of the device's much less.
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1 << 60 if device.type == "cpu" else 120 << 20)
    worker._store_bytes_of = lambda block: host_bytes(block) + host_stores
    worker.device = torch.device("cuda")
    worker.plan()
    with_stores, block = worker.info.num_blocks, worker.kv_cache.block_bytes
    worker._staging_bytes_of = lambda _block: 0
    worker.plan()
    fewer = (worker.info.num_blocks - with_stores) * block
    assert abs(fewer - 0.9 * staging_bytes(block, 3)) <= block


@pytest.mark.turn(12)
@needs_mooncake
def test_memory_plan_includes_mooncake_client(monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 100 << 20)
    block = make_engine().core.executor.worker.kv_cache.block_bytes
    lent = KVTransferConfig(mooncake="127.0.0.1:9", mooncake_segment_bytes=1 << 30)
    of_client = host_bytes(lent, block)
    assert abs(of_client - (1 << 30) - PROCESS_BYTES - 4 * AREA_BYTES) < 4 * (block + 128)
    taken = of_client + staging_bytes(block, 2)
    with pytest.raises(ConfigError, match=f"is 0 and KV stores take {taken:,} bytes, but only 104,857,600 bytes"):
        make_engine(mooncake=lent.mooncake)


def test_default_kv_cache_size_is_4_gib_or_half_free_memory(checkpoint, monkeypatch):
    architecture = read_architecture(checkpoint)
    scheduler = SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=1024)
    per_block = block_bytes(architecture, 16, "float32")

    def decide(free: int, cache: CacheConfig = CacheConfig()) -> int:  # noqa: B008
        monkeypatch.setattr(memory, "free_bytes", lambda _device: free)
        size = decide_kv_size(
            architecture, cache, scheduler, dtype="float32", kv_dtype="float32", max_model_len=100_000,
            device=torch.device("cpu"),
        )  # fmt: skip
        assert len(size.blocks_of_groups) == 1
        return size.num_blocks

    step = activation_bytes(architecture, 1024, 1024, "float32")
    assert decide(64 << 30) == (4 << 30) // per_block
    assert decide(6 << 30) == ((3 << 30) - step) // per_block
    assert decide(6 << 30, CacheConfig(num_gpu_blocks=7)) == 7
    assert decide(6 << 30, CacheConfig(kv_cache_memory_bytes=10 * per_block + 1)) == 10
    for cache in (CacheConfig(kv_cache_memory_bytes=1000), CacheConfig(num_gpu_blocks=10**9)):
        with pytest.raises(ConfigError):
            decide(6 << 30, cache)
    with pytest.raises(ConfigError, match="free"):
        decide(100 << 20)


def test_cgroup_limits_free_memory(tmp_path, monkeypatch):
    for name, text in (("memory.max", "1000\n"), ("memory.current", "700\n"), ("memory.stat", "inactive_file 50\n")):
        (tmp_path / name).write_text(text)
    files = [(tmp_path / "memory.max", tmp_path / "memory.current", tmp_path / "memory.stat")]
    monkeypatch.setattr(memory, "_cgroup_files", lambda: files)
    assert memory.free_bytes(torch.device("cpu")) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) > 1000


def test_largest_batch_lowers_step_to_fit_kv_cache(checkpoint, monkeypatch):
    architecture = read_architecture(checkpoint)
    cpu = torch.device("cpu")
    formats = {"dtype": "float32", "kv_dtype": "float32", "device": cpu}
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 1 << 30)

    def find(cache: CacheConfig, most: int) -> int:
        scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=most)
        return largest_batch(architecture, cache, scheduler, **formats, scratch_bytes=lambda count: 1000 * count)

    assert find(CacheConfig(), 512) == 512
    found = find(CacheConfig(), 10**6)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=found)
    sizes = {"max_model_len": 10**6, "scratch_bytes": 1000 * found}
    num_blocks = decide_kv_size(architecture, CacheConfig(), scheduler, **formats, **sizes).num_blocks
    assert found <= 16 * num_blocks < 1.02 * found  # the cache holds a whole step, and not one token more
    asked = CacheConfig(kv_cache_memory_bytes=900 << 20)  # this size is kept, and a step gets the rest
    found = find(asked, 10**6)
    step = activation_bytes(architecture, found, 8, "float32") + 1000 * found
    assert 0 <= (1 << 30) - (900 << 20) - step < 100_000
    assert find(CacheConfig(num_gpu_blocks=10**9), 512) == 8  # at least one token per request; the error:
    with pytest.raises(ConfigError, match="only 1,073,741,824 are free"):
        decide_kv_size(architecture, CacheConfig(num_gpu_blocks=10**9), scheduler, **formats, **sizes)


@pytest.mark.turn(12)
def test_memory_plan_includes_draft_rows_and_proposer(checkpoint, monkeypatch):
    architecture = read_architecture(checkpoint)
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 700 << 20)

    def find(speculative: SpeculativeConfig) -> int:
        engine = LLMEngine(
            ModelConfig(model=str(checkpoint), skip_tokenizer_init=True),
            SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=256),
            cache_config=CacheConfig(block_size=1),
            speculative_config=speculative,
        )
        return engine.core.executor.worker.kv_cache.num_blocks

    of_cache = block_bytes(architecture, 1, "float32")
    without = find(SpeculativeConfig(method="none"))
    for method, num_drafts, num_rows in (("ngram", 2, 64 * 3), ("suffix", 7, 256)):  # at most as many rows as tokens
        speculative = SpeculativeConfig(method=method, num_speculative_tokens=num_drafts)
        sizes = {"max_num_seqs": 64, "max_model_len": architecture.max_context_tokens}
        needed = create_proposer(speculative, **sizes).num_bytes
        needed += activation_bytes(architecture, 256, num_rows, "float32")
        needed -= activation_bytes(architecture, 256, 64, "float32")
        assert abs((without - find(speculative)) * of_cache - needed) <= of_cache


@pytest.mark.sweep(8)
@pytest.mark.parametrize("method", ["draft_model", "quantized"])
def test_memory_plan_includes_draft_model(monkeypatch, caplog, method):
    """Its keys and values for each block, also on the host, its scratch blocks, and the memory of its passes."""
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 80 << 20)
    caplog.set_level("INFO")

    def make(speculative: SpeculativeConfig, **cache: int):
        engine = LLMEngine(
            ModelConfig(dtype="float32"),
            SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=128),
            cache_config=CacheConfig(block_size=4, **cache),
            speculative_config=speculative,
        )
        return engine.core.executor.worker

    model = BUILT_IN_DRAFT if method == "draft_model" else None
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=6, model=model)
    without = make(SpeculativeConfig(method="none"), swap_space_bytes=1 << 20)
    worker = make(speculative, swap_space_bytes=1 << 20)
    target, drafter = without.model.architecture, worker.draft.model.architecture
    of_target, of_draft = (block_bytes(each, 4, "float32") for each in (target, drafter))
    own, scratch = of_draft if method == "draft_model" else 0, 64 * 2 * of_draft
    passes = activation_bytes(drafter, 128, 64, "float32") + worker.kernels.scratch_bytes(
        num_heads=drafter.layers[0].attention.num_heads,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=1536,
        max_seq_len=2048,
        max_tokens=128,
    )
    logits = activation_bytes(target, 128, 128, "float32") - activation_bytes(target, 128, 64, "float32")
    left = without.kv_cache.num_blocks * of_target - scratch - passes - logits
    assert abs(worker.kv_cache.num_blocks - left / (of_target + own)) <= 1
    assert worker.kv_cache.num_host_blocks == (1 << 20) // (of_target + own)
    assert (
        worker.runner.draft_runner.kv.cache.groups[0].blocks.nbytes == worker.kv_cache.num_blocks * of_draft + scratch
    )
    told = next(message for message in caplog.messages if "drafts with" in message)
    assert f"{drafter.num_parameters:,} parameters" in told
    assert f"{weight_bytes(drafter, 'float32', quantization=worker.draft.checkpoint.quantization):,} bytes" in told
    assert f"{scratch + own * worker.kv_cache.num_blocks:,} bytes of keys and values" in told
    with pytest.raises(ConfigError, match=f"the KV cache would take {(of_target + own) * 10**5:,} bytes"):
        make(speculative, num_gpu_blocks=10**5)


@pytest.mark.parametrize(("free", "is_lowered"), [(4 << 30, False), (300 << 20, True)])
def test_default_step_of_gpu_is_planned_or_lowered(checkpoint, monkeypatch, free, is_lowered):
    architecture = read_architecture(checkpoint)
    monkeypatch.setattr(memory, "free_bytes", lambda _device: free)
    formats = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "device": torch.device("cuda")}
    scheduler = SchedulerConfig().resolved("cuda")
    found = largest_batch(architecture, CacheConfig(), scheduler, **formats, scratch_bytes=lambda _count: 0)
    assert 256 < found <= 8192
    assert (found < 8192) == is_lowered
    lowered = replace(scheduler, max_num_batched_tokens=found)
    size = decide_kv_size(architecture, CacheConfig(), lowered, **formats, max_model_len=10**6)
    block = block_bytes(architecture, 16, "bfloat16")
    left = int(0.9 * free) - size.num_blocks * block - activation_bytes(architecture, found, 256, "bfloat16")
    assert 0 <= left < block


@pytest.mark.turn(12)
def test_oversized_max_num_batched_tokens_is_lowered_with_warning(checkpoint, caplog, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 100 << 20)
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=256),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=10**9),
    )
    [warning] = [record.message for record in caplog.records if "lowered" in record.message]
    found = engine.core.capacity.max_num_batched_tokens
    assert warning == (
        f"max_num_batched_tokens is lowered from 1000000000 to {found}: free memory does not allow a larger step"
    )
    assert engine.core.scheduler.config.max_num_batched_tokens == found < 10**9
