"""Tokens and bytes of experts: counted by hand, equal in recorded and plain passes, and absent without experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from alone_and_crowd import needs_kernels
from late_queue import LateQueue

from octavo import LLMEngine, SamplingParams
from octavo.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig
from octavo.data.events import ExpertsComputed
from octavo.data.expert_stats import ExpertLoad, ExpertTokens
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.worker.expert_tally import ExpertTally
from octavo.worker.host_copies import PinnedMemory, SharedMemory

CPU = torch.device("cpu")
NUM_EXPERTS, NUM_CHOSEN = 4, 2
BOTH = pytest.mark.parametrize("kernels", ["reference", pytest.param("cpu", marks=needs_kernels)])


def layer(num_experts: int, num_bytes: int, num_chosen: int = 1) -> Any:
    config = SimpleNamespace(router=SimpleNamespace(num_experts=num_experts, num_chosen=num_chosen))
    return SimpleNamespace(config=config, bytes_per_expert=num_bytes, starts=None)


def fill(layers: list[Any], counts: list[list[int]]) -> None:
    for each, row in zip(layers, counts, strict=True):
        each.starts.copy_(torch.tensor([0, *row]).cumsum(0))


def totals(tokens: ExpertTokens) -> list[list[int]]:
    return np.frombuffer(tokens.counts, dtype=np.int64).reshape(-1, tokens.num_experts).tolist()


def test_counts_of_layers_with_different_experts() -> None:
    layers = [layer(4, 1000), layer(2, 50), layer(4, 1000)]
    tally, copies = ExpertTally(layers, CPU), SharedMemory()
    fill(layers, [[0, 3, 1, 0], [1, 3], [0, 0, 0, 4]])
    # Read: 2, 2 and 1 experts. Busiest: 3 + 3 + 4 tokens; means: 1 + 2 + 1 tokens.
    assert tally.read(tally.take(copies)) == ExpertLoad(12, 5, 2 * 1000 + 2 * 50 + 1000, 2.5)
    fill(layers, [[1, 0, 0, 0], [1, 0], [0, 1, 0, 0]])
    assert tally.read(tally.take(copies)) == ExpertLoad(3, 3, 2050, 3.0)
    assert totals(tally.tokens) == [[1, 3, 1, 0], [0, 0, 2, 3], [0, 1, 0, 4]], "fewer experts are in the last columns"
    tally.reset()
    assert not any(tally.tokens.counts)


def test_step_of_one_row_reads_each_chosen_expert() -> None:
    layers = [layer(8, 1000, 2), layer(4, 50, 1)]
    tally, expected = ExpertTally(layers, CPU), ExpertLoad(3, 3, 2050, 4.0)  # busiest: 1 + 1; means: 2 / 8 + 1 / 4
    for _ in range(2):
        fill(layers, [[0, 1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 0]])
        assert tally.read(tally.take(SharedMemory())) == expected
    tally._num_chosen = []  # counted like other steps
    assert tally.read(tally.take(SharedMemory())) == expected
    assert totals(tally.tokens) == [[0, 3, 0, 0, 0, 0, 3, 0], [0, 0, 0, 0, 0, 0, 3, 0]]


def test_counts_are_read_on_device_that_copies_late() -> None:
    layers, queue = [layer(4, 10)], LateQueue()
    tally, copies = ExpertTally(layers, CPU), PinnedMemory(CPU, queue)
    copies.begin()
    fill(layers, [[0, 0, 5, 1]])
    starts, end = tally.take(copies), copies.mark()
    fill(layers, [[9, 9, 9, 9]])  # a later step
    end.synchronize()
    assert tally.read(starts) == ExpertLoad(6, 2, 20, 3.333)


def test_all_starts_have_same_alignment() -> None:
    """Triton compiles another kernel for a tensor with another alignment."""
    layers = [layer(6, 1) for _ in range(5)]
    ExpertTally(layers, CPU)
    assert len({each.starts.data_ptr() % 16 for each in layers}) == 1


def test_nothing_is_counted_without_tokens() -> None:
    tally = ExpertTally([layer(4, 10)], CPU)
    assert tally.read(tally.take(SharedMemory())) is None


# --- steps of a model -------------------------------------------------------------------------------------------------


def make_engine(path: Any, kernels: str = "auto") -> LLMEngine:
    return LLMEngine(
        ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True, max_model_len=64),
        cache_config=CacheConfig(num_gpu_blocks=32, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        device_config=DeviceConfig(device="cpu", kernels=kernels),
    )


def steps(engine: LLMEngine) -> list[ExpertLoad]:
    """Answer a prompt of 21 tokens, which is computed in two steps, and one of 3 tokens; return each step's load."""
    for name, count in (("a", 21), ("b", 3)):
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": list(range(7, 7 + count))}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return [each.load for each in engine.core.recent.since(0) if isinstance(each, ExpertsComputed)]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = tiny_config("MixtralForCausalLM", num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOSEN)
    return write_checkpoint(tmp_path_factory.mktemp("experts") / "mixtral", config, std=0.3)


@BOTH
def test_equal_logits_choose_first_experts(tmp_path: Any, kernels: str) -> None:
    """All weights are 0, so each token chooses experts 0 and 1. The last layer computes only rows with outputs."""
    config = tiny_config("MixtralForCausalLM", num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOSEN)
    engine = make_engine(write_checkpoint(tmp_path / "zeros", config, std=0.0), kernels)
    first, last = engine.core.executor.worker.runner.model.experts
    num_bytes = 3 * config["hidden_size"] * config["intermediate_size"] * 4  # gate, up and down in float32
    assert num_bytes <= first.bytes_per_expert == last.bytes_per_expert < 1.1 * num_bytes
    # Steps: 16 tokens of a; 5 of a and 3 of b; two with one token of each. The first step has no output row.
    num_tokens = [16 * 2, (5 + 3 + 2) * 2, 4 * 2, 4 * 2]
    num_reads = [2, 4, 4, 4]
    imbalance = NUM_EXPERTS / NUM_CHOSEN
    assert steps(engine) == [
        ExpertLoad(tokens, reads, reads * first.bytes_per_expert, imbalance)
        for tokens, reads in zip(num_tokens, num_reads, strict=True)
    ]
    tokens = engine.core.metrics.stats.expert_tokens
    assert tokens is not None
    assert totals(tokens) == [[28, 28, 0, 0], [6, 6, 0, 0]]


@needs_kernels
def test_recorded_and_plain_passes_give_equal_counts(mixture: Any) -> None:
    recorded, plain = make_engine(mixture, "cpu"), make_engine(mixture, "cpu")
    forward_pass = recorded.core.executor.worker.runner.forward_pass
    assert "sort_by_expert" in forward_pass.recorded.calls
    plain.core.executor.worker.runner.forward_pass.recorded = None
    loads = steps(recorded)
    assert loads == steps(plain)
    assert recorded.core.metrics.stats.expert_tokens == plain.core.metrics.stats.expert_tokens
    stats = recorded.core.metrics.stats.experts
    assert (stats.num_steps, stats.num_tokens) == (len(loads), sum(each.num_tokens for each in loads))
    assert len({each.imbalance for each in loads}) > 1, "the router decides"


def test_dense_model_counts_no_experts(tmp_path: Any) -> None:
    engine = make_engine(write_checkpoint(tmp_path / "dense", tiny_config("Qwen3ForCausalLM")))
    assert steps(engine) == []
    assert engine.core.metrics.stats.expert_tokens is None
