"""Options that the configuration does not set are chosen for the model and the machine."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from kernels_available import INSTRUCTION_SETS

from octavo import LLM, build
from octavo.build import build_core, build_engine, fit_reservation, resolve_scheduler
from octavo.cli.engine_options import EngineOptions
from octavo.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from octavo.core.kv.block_hash import hash_block_tokens
from octavo.data.capacity import EngineCapacity
from octavo.kernels import attention_slowness
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.stored_quantization import StoredLayout, StoredQuantization
from octavo.startup import engine_main


@pytest.fixture(scope="module")
def architecture(tmp_path_factory):
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, '
        '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}'
    )
    return read_architecture(directory)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, 100.0),
        ({"max_num_mixed_prefill_tokens": 64}, 100.0),
        ({"mixed_step_ms": 50.0}, 50.0),
        ({"mixed_step_ms": 0.0}, 0.0),
        ({"batching": "prefill_first"}, 0.0),
    ],
)
def test_mixed_step_ms_defaults_to_100_ms(architecture, options, found):
    assert resolve_scheduler(SchedulerConfig(**options).resolved(), architecture, None).mixed_step_ms == found


@pytest.mark.parametrize("isa", ["amx", "avx512_bf16", "avx2", None])
def test_attention_cost_depends_on_quantization_isa_and_windows(architecture, isa):
    costs = {
        q: resolve_scheduler(SchedulerConfig().resolved(), architecture, q, isa).attention_cost_tokens
        for q in (None, "int4", "int4_all", "int8")
    }
    assert 0 < costs[None] < costs["int8"]  # int8 multiplies faster, so attention has a larger share of a step
    assert costs["int8"] / costs["int4"] == pytest.approx(
        attention_slowness(isa, 8) / attention_slowness(isa, 4), abs=0.01
    )
    assert costs["int4_all"] == costs["int4"]  # the vocabulary has no effect
    stored = StoredQuantization(layout=StoredLayout.GPTQ, bits=4, group_size=32, has_zeros=True)
    stored_as_int4 = dataclasses.replace(architecture, stored=stored)
    assert (
        resolve_scheduler(SchedulerConfig().resolved(), stored_as_int4, None, isa).attention_cost_tokens
        == costs["int4"]
    )
    far, attention = architecture.layers[0], architecture.layers[0].attention
    near = dataclasses.replace(far, attention=dataclasses.replace(attention, window=16))
    one_layer_sees_all = dataclasses.replace(architecture, layers=(far, near))
    half = resolve_scheduler(SchedulerConfig().resolved(), one_layer_sees_all, "int8", isa).attention_cost_tokens
    assert half == pytest.approx(costs["int8"] / 2, abs=1e-3)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="the kernels were not compiled")
def test_block_hashes_differ_between_kernels_and_instruction_sets(tmp_path):
    """Instruction sets differ in the last bits, so their KV blocks must have different keys."""
    checkpoint = write_checkpoint(tmp_path / "qwen3", tiny_config("Qwen3ForCausalLM"))
    config = EngineConfig(
        model=ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=64),
        cache=CacheConfig(num_gpu_blocks=8),
    )
    kernels = [("reference", "auto"), *(("cpu", isa) for isa in INSTRUCTION_SETS)]
    found = []
    for backend, isa in [*kernels, kernels[-1]]:
        device = DeviceConfig(device="cpu", kernels=backend, isa=isa, num_threads=1)
        core = build.build_core(dataclasses.replace(config, device=device))
        found.append(hash_block_tokens(None, [1, 2, 3], core.scheduler.kv_cache_manager.prefix_cache.chains.extra_keys))
        core.executor.shutdown()
    assert len(set(found)) == len(kernels)
    assert found[-1] == found[-2]


def test_engine_process_reads_grammar_vocabulary_before_ready(monkeypatch):
    monkeypatch.setattr(
        engine_main, "permanent_generation", contextlib.nullcontext
    )  # this process continues with other tests
    config = EngineConfig(cache=CacheConfig(num_gpu_blocks=8))
    later = build.build_core(config)
    assert later.executor.worker.grammars._tokenizer is None
    now = engine_main.build(config, lambda _done, _total: None)
    assert now.executor.worker.grammars._tokenizer is not None
    for core in (later, now):
        core.executor.shutdown()


def test_explicit_scheduler_options_are_kept(architecture):
    asked = SchedulerConfig(mixed_step_ms=0.0, max_num_mixed_prefill_tokens=7, attention_cost_tokens=0.0).resolved()
    assert resolve_scheduler(asked, architecture, "int8") == asked
    uncut = SchedulerConfig(enable_chunked_prefill=False).resolved()
    assert resolve_scheduler(uncut, architecture, "int8") == uncut


@pytest.mark.turn(12)
@pytest.mark.parametrize(
    ("device_type", "expected", "offline"), [("cpu", (64, 512, False), 1024), ("cuda", (256, 8192, True), 8192)]
)
def test_limits_of_step_follow_device(tmp_path, monkeypatch, device_type, expected, offline):
    """`build` takes the CPU for a GPU, the worker does not."""
    monkeypatch.setattr(build, "resolve_device", lambda _name: torch.device(device_type))
    model = str(write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM")))
    options = {"model": model, "skip_tokenizer_init": True, "max_model_len": 64}
    few_blocks = {"num_gpu_blocks_override": 8}
    command = EngineOptions(model=model, max_model_len=64, **few_blocks)
    config = EngineConfig(model=ModelConfig(**options), cache=CacheConfig(num_gpu_blocks=8))
    drafting = dataclasses.replace(config, speculative=SpeculativeConfig(method="ngram"))
    cores = {
        "engine": build_core(config),
        "command": build_core(dataclasses.replace(config, scheduler=command.config().scheduler)),
        "bench": build_core(dataclasses.replace(config, scheduler=command.config(is_offline=True).scheduler)),
        "drafting": build_core(drafting),
        "LLM": LLM(**options, **few_blocks).llm_engine.core,
    }
    found = {}
    for name, core in cores.items():
        limits = core.capacity, core.scheduler.config, core.executor.worker.scheduler_config
        [found[name]] = {(each.max_num_seqs, each.max_num_batched_tokens, each.async_scheduling) for each in limits}
        core.executor.shutdown()
    num_seqs, num_tokens, ahead = expected
    assert found == {
        "engine": expected,
        "command": expected,
        "bench": (num_seqs, offline, ahead),
        "drafting": (num_seqs, num_tokens, False),
        "LLM": (num_seqs, offline, ahead),
    }
    assert cores["drafting"].capacity.speculative_method == "ngram"


@pytest.mark.parametrize(
    ("device", "kernels", "dtype", "counts"),
    [("cpu", "auto", "bfloat16", True), ("cpu", "reference", "bfloat16", False), ("cpu", "auto", "float32", False)],
)
def test_instruction_set_matters_only_for_compiled_bfloat16_kernels(monkeypatch, device, kernels, dtype, counts):
    monkeypatch.setattr("octavo.build.default_instruction_set", lambda: "amx")
    for isa, expected in (("auto", "amx"), ("avx2", "avx2")):
        found = build._instruction_set(DeviceConfig(device=device, kernels=kernels, isa=isa), dtype)
        assert found == (expected if counts else None)
    monkeypatch.setattr("octavo.build.default_instruction_set", lambda: None)
    assert build._instruction_set(DeviceConfig(device=device, kernels=kernels), dtype) is None


def test_reservation_limits_above_capacity_are_lowered_with_warning(caplog):
    config = SchedulerConfig(
        admission="reservation", max_batch_total_tokens=5000, max_batch_prefill_tokens=900, max_num_batched_tokens=512
    ).resolved()
    lowered = fit_reservation(config, 4096)
    assert (lowered.max_batch_total_tokens, lowered.max_batch_prefill_tokens) == (4096, 512)
    assert [record.message for record in caplog.records] == [
        "max_batch_total_tokens is lowered from 5000 to 4096: the KV cache is not larger",
        "max_batch_prefill_tokens is lowered from 900 to 512: a step computes at most max_num_batched_tokens tokens",
    ]
    caplog.clear()
    assert fit_reservation(lowered, 4096) == lowered
    assert fit_reservation(SchedulerConfig(admission="reservation").resolved(), 10).max_batch_total_tokens is None
    assert not caplog.records


@pytest.mark.parametrize(("total", "used"), [(None, 640), (100, 100), (10**6, 640)])
def test_engine_reports_and_logs_its_capacity(tmp_path, caplog, total, used):
    caplog.set_level("INFO", logger="octavo.build")
    config = EngineConfig(
        model=ModelConfig(model=str(write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM")))),
        cache=CacheConfig(num_gpu_blocks=40),
        scheduler=SchedulerConfig(admission="reservation", max_batch_total_tokens=total, max_num_batched_tokens=256),
    )
    engine = build_engine(
        dataclasses.replace(config, model=dataclasses.replace(config.model, skip_tokenizer_init=True))
    )
    assert engine.capacity.kv_cache_tokens == 640
    assert engine.capacity.max_batch_total_tokens == engine.core.scheduler.admission.max_total_tokens == used
    assert engine.capacity.max_batch_prefill_tokens == 256
    roomy = dataclasses.replace(config.scheduler, max_num_batched_tokens=5000)
    assert (
        EngineCapacity.of(roomy.resolved(), config.cache, num_blocks=40).max_batch_prefill_tokens == 640
    )  # cache size
    [line] = [record.message for record in caplog.records if record.message.startswith("KV cache: 40 blocks")]
    assert f"kv_cache_tokens 640, max_batch_total_tokens {used}, max_batch_prefill_tokens 256" in line
