"""Models with recurrent layers: tokens are `==` in every schedule, and unsupported features are refused or off."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from kernels_available import INSTRUCTION_SETS
from test_exactness import SCHEDULES, Schedule, answers, check, make_engine, make_requests, needs_kernels
from typer.testing import CliRunner

from octavo import (
    LLM,
    CacheConfig,
    LLMEngine,
    ModelConfig,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputsParams,
)
from octavo.assets import built_in_model_path
from octavo.cli import app
from octavo.config import DeviceConfig, EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.startup import recurrent
from octavo.worker import sample_tasks, worker
from octavo.worker.grammar_walks import GrammarWalks

pytestmark = needs_kernels
NUM_TRIED = 12
MODELS = {
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3},
    ),
    "lfm2-moe": ("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}),
    "granite-4-h": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
    ),
    "nemotron-h": ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-ME*E-M", "num_hidden_layers": 8}),
    "nemotron-3-latents": ("NemotronHForCausalLM", {"moe_latent_size": 40}),
}
CHOSEN = {
    "crowd",
    "chunks_of_1",
    "chunks_of_7",
    "blocks_of_32",
    "few_blocks",
    "few_blocks_no_cache",
    "swapped",
    "warm_cache",
    "ahead_few_blocks",
}
SCHEDULES_AND_METHODS = [
    pytest.param(each, method, id=f"{each.name}-{method}")
    for each in SCHEDULES
    for method in ("none", "suffix", "ngram")
    if each.name in CHOSEN and (method == "none" or not each.name.startswith("ahead"))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function from the name in `MODELS` to the checkpoint."""

    @cache
    def write(name):
        family, changes = MODELS[name]
        config = tiny_config(family, vocab_size=1500, **changes)
        return write_checkpoint(tmp_path_factory.mktemp("recurrent") / name, config, std=0.1)

    return write


@pytest.fixture(scope="module")
def checkpoint(models):
    return models("qwen3.5")


@pytest.fixture(scope="module")
def alone(models):
    """Return a function to the answers of requests that run alone."""

    @cache
    def run(name, dtype, isa="auto"):
        schedule = Schedule("alone", max_num_seqs=1, prefix_caching=False)
        return answers(make_engine(models(name), dtype, schedule, "cpu", isa), make_requests()[:NUM_TRIED])

    return run


@pytest.mark.sweep(40)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "bfloat16 with int8 KV"])
@pytest.mark.parametrize(("schedule", "method"), SCHEDULES_AND_METHODS)
def test_recurrent_model_gives_equal_tokens_in_every_schedule(models, alone, schedule, method, dtype, name):
    engine = make_engine(models(name), dtype, replace(schedule, method=method), "cpu")
    stats = engine.core.metrics.stats
    requests = make_requests()[:NUM_TRIED]
    for _ in range(schedule.rounds):
        got = answers(engine, requests)
        for index, (_, params) in enumerate(requests):
            if schedule.rounds == 1 or params.seed is not None or params.is_greedy:  # see `check`
                assert got[index] == alone(name, dtype)[index]
    assert (stats.num_preemptions > 0) == (schedule.num_blocks is not None)
    assert stats.prefix_cache_hits > 0 or schedule.threshold == 1 or not schedule.prefix_caching


@pytest.mark.sweep(8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_recurrent_model_gives_equal_tokens_with_every_instruction_set(models, alone, isa, num_threads, name):
    schedule = Schedule("chunks_of_7", threshold=7, num_threads=num_threads)
    check(make_engine(models(name), "bfloat16", schedule, "cpu", isa), schedule, alone(name, "bfloat16", isa))


def test_postponed_tokens_are_the_tokens_of_an_engine_that_waits(tmp_path, monkeypatch):
    """The row of a postponed token is computed again, and advances the states only once."""
    expected, run, postponed = constrained_tokens(tmp_path), GrammarWalks._run_all, []

    def run_late(self):
        time.sleep(0.02 if len(postponed) % 2 else 0.0)
        run(self)

    monkeypatch.setattr(GrammarWalks, "_run_all", run_late)
    monkeypatch.setattr(sample_tasks, "wait_for", lambda walks, *_args, **_kwargs: postponed.append(len(walks)))
    assert constrained_tokens(tmp_path) == expected
    assert len(expected[0]) > 4
    assert len(postponed) > len(expected[0])


def constrained_tokens(folder):
    path = write_checkpoint(folder / "model", tiny_config("Qwen3_5ForCausalLM", vocab_size=4096), std=0.1)
    llm = LLM(
        str(path), tokenizer=str(built_in_model_path()), max_model_len=128, kv_cache_memory_bytes=4 << 20,
        num_threads=1, packed_cache_bytes=0,
    )  # fmt: skip
    letters = StructuredOutputsParams(regex="[a-z]{5,30}")
    params = SamplingParams(max_tokens=12, temperature=0.0, structured_outputs=letters)
    outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 2, params, use_tqdm=False)
    llm.llm_engine.shutdown()
    return [each.outputs[0].token_ids for each in outputs]


def test_gpu_needs_kernels_of_triton(checkpoint, monkeypatch):
    """No GPU is needed: the check precedes everything else."""
    monkeypatch.setattr(recurrent, "resolve_device", torch.device)
    architecture = read_architecture(checkpoint)

    def check(kernels):
        config = EngineConfig(
            model=ModelConfig(model=str(checkpoint)), device=DeviceConfig(device="cuda", kernels=kernels)
        )
        recurrent.check_recurrent_layers(config, architecture)

    for kernels in ("auto", "reference"):
        with pytest.raises(ConfigError, match="recurrent layers need Triton's kernels: choose kernels triton"):
            check(kernels)
    check("triton")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_direct_handover_is_refused(checkpoint, role):
    model, stores = ModelConfig(model=str(checkpoint)), KVTransferConfig(role=role, direct=True)
    with pytest.raises(ConfigError, match="kv_direct does not work with recurrent layers"):
        recurrent.check_recurrent_layers(EngineConfig(model=model, kv_transfer=stores), read_architecture(checkpoint))


def test_allocated_states_have_the_planned_size(checkpoint):
    engine = LLMEngine(
        ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=64, dtype="bfloat16"),
        cache_config=CacheConfig(num_gpu_blocks=8),
    )
    worker = engine.core.executor.worker
    layout, states = worker.model.architecture.kv_layout, worker.kv_cache.groups[-1]
    assert list(layout.states) == [0, 2]
    assert states.blocks.nbytes == states.num_blocks * layout.state_bytes("bfloat16")
    assert states.num_blocks == worker.scheduler_config.max_num_seqs + saved_states_of(worker, 8)


def saved_states_of(worker, num_blocks):
    """The states that a prefix cache saves take as much memory as all blocks."""
    layout, size = worker.model.architecture.kv_layout, worker.cache_config.block_size
    return min(num_blocks * sum(layout.block_bytes(size, "bfloat16")) // layout.state_bytes("bfloat16"), num_blocks)


def test_models_command_shows_the_state_of_a_request(checkpoint):
    shown = CliRunner().invoke(app, ["models", str(checkpoint)]).output
    assert re.search(r"state +[\d.]+ KiB for each running request", shown)


def test_model_with_recurrent_layers_cannot_draft(checkpoint, tmp_path):
    target = write_checkpoint(
        tmp_path / "target", tiny_config("Qwen3ForCausalLM", vocab_size=1500, num_hidden_layers=9)
    )
    with pytest.raises(ConfigError, match="has recurrent layers, and octavo cannot draft with them yet"):
        LLM(
            str(target),
            skip_tokenizer_init=True,
            max_model_len=64,
            speculative_config={"method": "draft_model", "model": str(checkpoint)},
        )


def test_fewer_requests_run_if_their_states_do_not_fit(checkpoint, monkeypatch, caplog):
    layout = read_architecture(checkpoint).kv_layout
    size = layout.state_bytes("float32") + layout.kept_bytes("float32")
    monkeypatch.setattr(worker, "free_bytes", lambda _: 10 * size)
    engine = engine_with(checkpoint)
    assert engine.core.executor.worker.scheduler_config.max_num_seqs == 5
    assert "max_num_seqs is lowered from 64 to 5" in caplog.text
    monkeypatch.setattr(worker, "free_bytes", lambda _: size)
    with pytest.raises(ConfigError, match="no free memory for the states of a request"):
        engine_with(checkpoint)


def engine_with(checkpoint):
    return LLMEngine(
        ModelConfig(model=str(checkpoint), skip_tokenizer_init=True, max_model_len=64),
        cache_config=CacheConfig(num_gpu_blocks=8),
        speculative_config=SpeculativeConfig(method="none"),
    )


def test_state_that_would_get_a_token_twice_fails_the_step(checkpoint):
    """No path of the scheduler does this; the check keeps wrong tokens from a later one."""
    engine = engine_with(checkpoint)
    batch = engine.core.executor.worker.runner.batch
    engine.add_request("r", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    row = np.array([batch.requests["r"].row])
    with pytest.raises(AssertionError, match="a state would get a token twice"):
        batch._states.arrays(row, np.array([1]), np.array([1]), np.array([4]), np.array([0]), [])


@pytest.mark.parametrize("num_tokens", range(21, 29, 2))
def test_next_turn_starts_with_state_of_answer_with_accepted_drafts(checkpoint, num_tokens):
    """Accepted drafts fill a block, and the answer ends some steps later, before the next block is full."""
    prompt, engine = [*range(5, 25)], make_engine(checkpoint, "float32", Schedule("drafts", method="suffix"), "cpu")
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    other = make_engine(checkpoint, "float32", Schedule("alone", prefix_caching=False), "cpu")
    answer = other.generate({"prompt_token_ids": prompt}, params).outputs[0].token_ids
    output = engine.generate({"prompt_token_ids": prompt, "predicted_token_ids": answer}, params)
    assert output.outputs[0].token_ids == answer
    assert output.metrics.num_accepted_tokens > 0
    following = engine.generate({"prompt_token_ids": [*prompt, *answer, 7]}, params)
    assert following.num_cached_tokens == 32
