"""The whole engine with the Triton kernels, in its interpreter or on a GPU: tokens are `==` alone and in a batch."""

from __future__ import annotations

import functools
import random

import pytest
from alone_and_crowd import alone, crowd, has_swapped
from gguf_files import write_gguf
from late_queue import LateQueue
from scripted_drafts import ScriptedProposer, let_propose, verify_all
from triton_interpreter import interpreted_kernels, kernels_device

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.assets import built_in_model_path
from octavo.config import SpeculativeConfig
from octavo.data.events import DraftsVerified
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker import model_runner
from octavo.worker.host_copies import PinnedMemory
from octavo.worker.local_executor import LocalExecutor
from octavo.worker.step_modes import LaunchesAhead

pytest.importorskip("triton")

WAYS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 8},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2, "seed": 9},
]


@pytest.fixture(scope="module", autouse=True)
def _interpreter():
    with interpreted_kernels():
        yield


def make_engine(model, max_cudagraph_capture_size=0, speculative=None, *, quantization=None, cache=None, **options):
    scheduler = {"max_num_seqs": 20, "max_num_batched_tokens": 64, "mixed_step_ms": 0.0, **options}
    return LLMEngine(
        ModelConfig(model=str(model), skip_tokenizer_init=True, max_model_len=320, quantization=quantization),
        cache_config=CacheConfig(**{"block_size": 16, "num_gpu_blocks": 120} | (cache or {})),
        scheduler_config=SchedulerConfig(**scheduler),
        device_config=DeviceConfig(
            device=str(kernels_device()), kernels="triton", max_cudagraph_capture_size=max_cudagraph_capture_size
        ),
        speculative_config=speculative or SpeculativeConfig(method="none"),
    )


def make_requests(lengths, vocab_size, max_tokens):
    rng = random.Random(1)
    prefix = [rng.randrange(2, vocab_size) for _ in range(max(lengths))]
    requests = []
    for index, length in enumerate(lengths):
        shared = length // 2 if index % 3 == 0 else 0
        prompt = prefix[:shared] + [rng.randrange(2, vocab_size) for _ in range(length - shared)]
        logprobs = 2 if index % 2 else None  # without logprobs, the kernel alone samples
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, **WAYS[index % len(WAYS)])
        requests.append((prompt, params))
    return requests


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    config = tiny_config(
        "Qwen3ForCausalLM", hidden_size=32, intermediate_size=48, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=1, vocab_size=96, torch_dtype="bfloat16",
    )  # fmt: skip
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", config, std=0.2)


def watch_sizes(graphs):
    """Return a list that receives the graph sizes of all further steps."""
    size_for, sizes = graphs.size_for, []
    graphs.size_for = lambda batch: sizes.append(size_for(batch)) or sizes[-1]
    return sizes


def watch_mixed(graphs):
    """Return a list that receives the numbers of rows and sequences of further steps by graphs."""
    size_for, steps = graphs.size_for, []

    def watch(batch):
        size = size_for(batch)
        if size is not None:
            steps.append((len(batch.positions), len(batch.seq_lens)))
        return size

    graphs.size_for = watch
    return steps


@pytest.mark.turn(16)
def test_draft_and_verify_steps_use_graphs_with_equal_tokens(tiny_model):
    """The model drafts for itself, so all drafts are accepted: its next pass has two tokens of a request to compute."""
    requests = make_requests([3, 5], 96, 6)
    expected = alone(make_engine(tiny_model), requests)
    drafts = SpeculativeConfig(method="draft_model", model=str(tiny_model), num_speculative_tokens=2)
    engine = make_engine(tiny_model, 2, drafts, max_num_seqs=2)
    verify_all(engine)
    runner = engine.core.executor.worker.runner
    graphs, of_drafts = runner.forward_pass.recorded, runner.draft_runner.forward_pass.recorded
    assert (graphs.sizes, of_drafts.sizes) == ({1: [1, 2], 3: [1, 2]}, {1: [1, 2], 2: [1, 2]})
    verified, guessed = watch_sizes(graphs), watch_sizes(of_drafts)
    assert crowd(engine, requests) == expected
    assert (3, 2) in verified
    assert {(1, 2), (2, 2)} <= set(guessed)


@pytest.mark.turn(8)
def test_triton_kernels_give_equal_tokens_alone_and_batched(tiny_model, monkeypatch):
    """Prompts are cut, and share steps with decodes; steps of few rows use graphs.

    Steps are launched before the previous ones are collected.
    """
    requests = make_requests([3, 40, 17], 96, 2)
    expected = alone(make_engine(tiny_model), requests)
    if kernels_device().type == "cpu":
        monkeypatch.setattr(model_runner, "create_host_copies", lambda device: PinnedMemory(device, LateQueue()))
    engine = make_engine(
        tiny_model, 12, long_prefill_token_threshold=9, max_num_batched_tokens=24, async_scheduling=True
    )
    worker = engine.core.executor.worker
    assert worker.kernels.name == "triton"
    graphs = worker.runner.forward_pass.recorded
    assert graphs.sizes == {1: [1, 2, 4, 8, 12]}
    by_graph, mixed = watch_sizes(graphs), watch_mixed(graphs)
    engine.core.executor.shutdown()
    engine.core.executor = LocalExecutor(worker, mode=LaunchesAhead)
    launch, num_awaited = worker.launch, []

    def watch(scheduled):
        launched = launch(scheduled)
        num_awaited.append(worker.runner.batch.num_awaited.sum())
        return launched

    monkeypatch.setattr(worker, "launch", watch)
    assert crowd(engine, requests) == expected
    assert sum(num_awaited) > 0, "what was sampled is fed on the device"
    assert None in by_graph
    assert (9, 1) in mixed, "a chunk"
    assert any(rows > seqs > 1 for rows, seqs in mixed), "a chunk and a decode"


@pytest.mark.turn(8)
def test_fp8_weights_and_kv_give_equal_tokens_alone_and_batched(tiny_model):
    """FP8 weights and KV. One prompt is cut; a victim is swapped out and back in."""
    rng, params = random.Random(2), SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, logprobs=1)
    requests = [([rng.randrange(2, 96) for _ in range(length)], params) for length in (3, 7)]
    options = {"quantization": "fp8", "max_num_seqs": 2, "max_num_batched_tokens": 8}
    cache = {"kv_cache_dtype": "fp8", "block_size": 4, "num_gpu_blocks": 4, "swap_space_bytes": 1 << 16}
    expected = alone(make_engine(tiny_model, **options, cache=cache | {"num_gpu_blocks": 9}), requests)
    engine = make_engine(tiny_model, **options, cache=cache, long_prefill_token_threshold=4, preemption="swap")
    assert crowd(engine, requests) == expected
    assert engine.core.metrics.stats.num_preemptions > 0


@pytest.mark.turn(8)
def test_triton_gguf_weights_give_equal_tokens_alone_and_batched(tmp_path):
    """Blocks of several types, a prompt that is cut, and decodes with graphs."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "num_hidden_layers": 1}
    config = tiny_config("Qwen3ForCausalLM", hidden_size=64, head_dim=16, vocab_size=96, **sizes)
    folder = write_checkpoint(tmp_path / "folder", config, std=0.2)
    kinds = {"attn_v": "Q5_1", "ffn_down": "Q8_0"}
    model = write_gguf(folder, tmp_path / "model.gguf", kind="Q4_0", kinds=kinds)
    requests = make_requests([2, 7], 96, 2)
    expected = alone(make_engine(model), requests)
    engine = make_engine(model, 2, max_num_seqs=2, long_prefill_token_threshold=4)
    graphs = engine.core.executor.worker.runner.forward_pass.recorded
    by_graph = watch_sizes(graphs)
    assert crowd(engine, requests) == expected
    assert {size for size in by_graph if size}


# The interpreter's time grows with heads and rows, so there are few of them.
_MAMBA = {"mamba_n_heads": 2, "mamba_d_state": 8, "num_local_experts": 0}
_DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "head_dim": 16}
_NEMOTRON = {"mamba_num_heads": 2, "ssm_state_size": 8, "n_groups": 1, "n_routed_experts": 4, "num_hidden_layers": 4}
RECURRENT = {
    "Qwen3_5ForCausalLM": _DELTA | {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_experts": 4},
    "GraniteMoeHybridForCausalLM": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "NemotronHForCausalLM": _NEMOTRON | {"hybrid_override_pattern": "M*E-"},
}
SCHEDULES = {
    "chunks": {"long_prefill_token_threshold": 3, "max_num_batched_tokens": 20},
    "few blocks": {"cache": {"num_gpu_blocks": 5}},
    "swaps": {"cache": {"num_gpu_blocks": 5, "swap_space_bytes": 1 << 20}, "preemption": "swap"},
    "ahead": {"async_scheduling": True, "long_prefill_token_threshold": 5},
    "drafts": {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2)},
    "own drafts": {"speculative": SpeculativeConfig(method="quantized", num_speculative_tokens=2)},
}


@pytest.fixture(scope="module")
def recurrent_model(tmp_path_factory):
    """Return a function that writes a tiny model of a family."""

    @functools.cache
    def write(family):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "torch_dtype": "bfloat16"}
        config = tiny_config(family, **{"num_hidden_layers": 2} | sizes | RECURRENT[family])
        return write_checkpoint(tmp_path_factory.mktemp("models") / family, config, std=0.2)

    return write


@pytest.mark.turn(4)
@pytest.mark.sweep(24)
@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recurrent_layers_give_equal_tokens_alone_and_batched(recurrent_model, family, schedule, monkeypatch):
    """About half of the drafts are right. The second round reads states that the first one saved."""
    model, options = recurrent_model(family), SCHEDULES[schedule]
    requests = make_requests([9, 2, 7, 6], 96, 4)
    cache = {"block_size": 4} | options.get("cache", {})
    expected = alone(make_engine(model, cache={"enable_prefix_caching": False}), requests)
    if kernels_device().type == "cpu":
        monkeypatch.setattr(model_runner, "create_host_copies", lambda device: PinnedMemory(device, LateQueue()))
    engine = make_engine(model, **options | {"cache": cache})
    worker, stats = engine.core.executor.worker, engine.core.metrics.stats
    if schedule == "ahead":
        engine.core.executor.shutdown()
        engine.core.executor = LocalExecutor(worker, mode=LaunchesAhead)
    if "drafts" in schedule:
        verify_all(engine)
    if schedule == "drafts":
        known = {str(index): prompt + list(expected[index % 4][0]) for index, (prompt, _) in enumerate(requests * 2)}
        let_propose(engine, ScriptedProposer(known, 2, 0.5))
    for _ in range(2):
        assert crowd(engine, requests) == expected
    verified = [event for event in engine.core.recent.since(0) if isinstance(event, DraftsVerified)]
    assert bool(verified) == ("drafts" in schedule)
    if schedule == "drafts":
        assert 0 < sum(each.num_accepted for each in verified) < sum(each.num_drafted for each in verified)
    assert (stats.num_preemptions > 0) == (schedule in {"few blocks", "swaps"})
    assert has_swapped(engine) == (schedule == "swaps")
    assert stats.prefix_cache_hits > 0 or schedule == "few blocks"
    assert not worker.kernels._warned_of, "all operations have kernels"


@pytest.mark.slow
def test_built_in_model_with_triton_gives_equal_tokens_alone_and_batched():
    requests = make_requests([1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 4, 6, 2, 3, 10, 20, 1, 5, 33, 40], 1536, 3)
    model = built_in_model_path()
    expected = alone(make_engine(model), requests)
    assert crowd(make_engine(model, 20, long_prefill_token_threshold=7), requests) == expected
    assert len({tuple(tokens) for tokens, _ in expected}) > 10
