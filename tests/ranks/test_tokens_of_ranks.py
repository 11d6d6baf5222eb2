"""Any number of ranks gives the tokens and log probabilities of one process, bit for bit."""

from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from kernels_available import INSTRUCTION_SETS
from rank_threads import RankThread
from test_exactness import (
    EVERYWHERE,
    NUM_REQUESTS_EVERYWHERE,
    Schedule,
    answers,
    check,
    make_engine,
    make_requests,
)

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, EngineDeadError
from octavo.kernels import SamplingRows, ranked
from octavo.kernels.cpu import CpuKernels
from octavo.models import packed_cache
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES
from octavo.ranks import leader

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from make_expert_gguf import SHAPES, write

PROMPTS = [[(7 * i * i + 3 * i + k) % 320 for i in range(n)] for k, n in enumerate((1, 5, 33, 90))]
FORMATS = ["float32", "bfloat16", "int8", "int4", "int4_all"]


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(leader, "start_process", RankThread)


MIXTURES = [
    "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM",
    "GptOssForCausalLM", "Gemma4ForCausalLM",
]  # fmt: skip


def results(path, num_ranks, **options):
    """Return tokens and log probabilities of greedy, sampled and scored requests, and embeddings."""
    llm = LLM(
        str(path), tensor_parallel_size=num_ranks, skip_tokenizer_init=True, max_model_len=160, max_num_seqs=3,
        max_num_batched_tokens=40, kv_cache_memory_bytes=8 << 20, num_threads=1,
        rank_timeout_s=60.0, **{"packed_cache_bytes": 0} | options,
    )  # fmt: skip
    params = [
        SamplingParams(max_tokens=12, temperature=0.0, logprobs=3),
        SamplingParams(max_tokens=12, temperature=0.8, top_k=20, seed=5),
        SamplingParams(max_tokens=6, temperature=0.9, top_p=0.7, seed=6, prompt_logprobs=2),
        SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3),
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in outputs]
    found += [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]
    llm.llm_engine.shutdown()
    del llm
    gc.collect()
    return found


def eight_heads(tmp_path, **more):
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 128,
             "intermediate_size": 288, "vocab_size": 500}  # fmt: skip
    return write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM", **sizes | more), std=0.1)


@pytest.mark.turn(5)
@pytest.mark.parametrize("number_format", FORMATS)
def test_ranks_give_tokens_and_logprobs_of_one_process(number_format, tmp_path):
    path = eight_heads(tmp_path)
    is_dtype = number_format in {"float32", "bfloat16"}
    options = {"dtype": number_format} if is_dtype else {"dtype": "bfloat16", "quantization": number_format}
    expected = results(path, 1, **options)
    for count in (2, 3, 4, 8):
        assert results(path, count, **options) == expected, count


def test_memory_of_all_ranks_is_the_configured_memory(tmp_path):
    """Three ranks divide eight KV heads into 3, 3 and 2."""
    path = eight_heads(tmp_path, num_key_value_heads=8)
    sizes = []
    for count in (1, 3):
        llm = LLM(
            str(path), tensor_parallel_size=count, skip_tokenizer_init=True, max_model_len=160, num_threads=1,
            kv_cache_memory_bytes=3 << 20, max_num_seqs=64, rank_timeout_s=60.0,
        )  # fmt: skip
        sizes.append(llm.llm_engine.core.executor.worker.info.kv_cache_bytes)
        llm.llm_engine.shutdown()
    assert sizes[0] * 0.85 < sizes[1] <= sizes[0]


@pytest.mark.turn(4)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_ranks_give_tokens_of_one_process_with_every_instruction_set(isa, quantization, tmp_path):
    path = eight_heads(tmp_path)
    options = {"dtype": "bfloat16", "quantization": quantization, "isa": isa}
    assert results(path, 2, **options) == results(path, 1, **options)


@pytest.mark.turn(4)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_ranks_with_own_experts_give_tokens_of_one_process_with_every_instruction_set(isa, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3MoeForCausalLM", vocab_size=500), std=0.1)
    options = {"dtype": "bfloat16", "isa": isa}
    assert results(path, 2, enable_expert_parallel=True, **options) == results(path, 1, **options)


@pytest.mark.turn(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", ["Qwen2MoeForCausalLM", "Olmo2ForCausalLM"])
def test_exchanges_in_pieces_of_few_rows_give_tokens_of_one_process(family, num_ranks, tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "model", tiny_config(family, vocab_size=500), std=0.1)
    expected = results(path, 1, dtype="bfloat16")
    monkeypatch.setattr(ranked, "AREA_BYTES", 4096)
    by_expert = family.startswith("Qwen2Moe")
    assert results(path, num_ranks, dtype="bfloat16", enable_expert_parallel=by_expert) == expected


def test_packed_weights_and_fingerprints_of_both_divisions_of_experts_are_apart(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3MoeForCausalLM", vocab_size=500), std=0.1)
    options = {"dtype": "bfloat16", "quantization": "int8", "packed_cache_bytes": 1 << 30}
    expected = results(path, 1, **options)
    for by_expert in (False, True, False, True):
        assert results(path, 2, enable_expert_parallel=by_expert, **options) == expected
    assert not [each for each in caplog.records if each.levelname in {"WARNING", "ERROR"}]
    assert len(list((tmp_path / "cache").rglob("*.packed.safetensors"))) == 5


@pytest.mark.sweep(16)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_of_every_family_give_tokens_of_one_process(family, count, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config(family, vocab_size=500), std=0.1)
    options = {"dtype": "bfloat16"}
    assert results(path, count, **options) == results(path, 1, **options)


@pytest.mark.turn(4)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "family", ["Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "OlmoeForCausalLM"]
)
def test_ranks_of_quantized_experts_give_tokens_of_one_process(family, quantization, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config(family, vocab_size=500), std=0.1)
    options = {"dtype": "bfloat16", "quantization": quantization}
    assert results(path, 2, **options) == results(path, 1, **options)


@pytest.mark.turn(4)
@pytest.mark.parametrize("number_format", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", MIXTURES)
def test_ranks_with_own_experts_give_tokens_of_one_process(family, number_format, tmp_path):
    """Among seven experts, ranks have 3 and 4, or 1, 2, 2 and 2."""
    config = tiny_config(family, vocab_size=500)
    config |= {name: 7 for name in ("num_experts", "n_routed_experts", "num_local_experts") if name in config}
    config |= {"n_group": 1, "topk_group": 1} if "n_group" in config else {}
    path = write_checkpoint(tmp_path / "model", config, std=0.1)
    is_dtype = number_format in {"float32", "bfloat16"}
    options = {"dtype": number_format} if is_dtype else {"dtype": "bfloat16", "quantization": number_format}
    expected = results(path, 1, **options)
    for count in (2, 4):
        assert results(path, count, enable_expert_parallel=True, **options) == expected, count


@pytest.mark.turn(4)
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_ranks_with_own_experts_give_tokens_of_one_process_from_gguf(kind, tmp_path):
    shape = SHAPES["qwen3-30b-a3b"] | {
        "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "experts": 7, "chosen": 3, "expert": 256,
        "vocabulary": 320,
    }  # fmt: skip
    path = write(tmp_path / "model.gguf", shape, layers=2, kind=kind)
    assert results(path, 2, enable_expert_parallel=True) == results(path, 1)


@pytest.mark.turn(2)
def test_ranks_with_own_experts_make_the_random_weights_of_one_process(tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3MoeForCausalLM", vocab_size=500), std=0.1)
    options = {"dtype": "bfloat16", "load_format": "dummy"}
    assert results(path, 2, enable_expert_parallel=True, **options) == results(path, 1, **options)


@pytest.mark.parametrize(
    ("family", "count", "message"),
    [
        ("DeepseekV3ForCausalLM", 3, "divides .* experts by halving: set tensor_parallel_size to a power of two"),
        ("MixtralForCausalLM", 4, "divides 2 experts by halving: set tensor_parallel_size to a power of two up to 2"),
        ("Qwen3ForCausalLM", 2, "needs a mixture of experts"),
        ("Qwen3MoeForCausalLM", 1, "enable_expert_parallel needs ranks"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused_before_ranks_start(family, count, message, tmp_path):
    config = tiny_config(family, vocab_size=500)
    config |= {"num_local_experts": 2, "num_experts_per_tok": 2} if family.startswith("Mixtral") else {}
    path = write_checkpoint(tmp_path / "model", config, std=0.1)
    with pytest.raises(ConfigError, match=message):
        results(path, count, enable_expert_parallel=True)


@pytest.mark.turn(4)
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "Q6_K", "Q4_0"])
def test_ranks_give_tokens_of_one_process_from_gguf(kind, tmp_path):
    """19 superblocks of 256 values are no multiple of the number of ranks."""
    sizes = {"hidden_size": 256, "intermediate_size": 19 * 256, "head_dim": 64, "vocab_size": 320}
    folder = write_checkpoint(tmp_path / "folder", tiny_config("Qwen2ForCausalLM", **sizes), std=0.1)
    path = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
    expected = results(path, 1)
    for count in (2, 4):
        assert results(path, count) == expected, count


@pytest.mark.turn(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bfloat16 with int8 KV"])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_give_equal_tokens_with_chunks_swaps_and_preemptions(dtype, count, tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM", vocab_size=1500), std=0.1)
    alone = make_engine(path, dtype, Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    expected = answers(alone, make_requests()[:NUM_REQUESTS_EVERYWHERE])
    schedule = replace(EVERYWHERE, device=(("tensor_parallel_size", count), ("rank_timeout_s", 60.0)))
    engine = make_engine(path, dtype, schedule, "cpu")
    check(engine, schedule, expected)
    engine.shutdown()


@pytest.mark.turn(4)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_ranks_with_own_experts_give_equal_tokens_with_chunks_swaps_and_preemptions(family, count, tmp_path):
    path = write_checkpoint(tmp_path, tiny_config(family, vocab_size=1500), std=0.1)
    alone = make_engine(path, "bfloat16", Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    expected = answers(alone, make_requests()[:NUM_REQUESTS_EVERYWHERE])
    device = (("tensor_parallel_size", count), ("enable_expert_parallel", True), ("rank_timeout_s", 60.0))
    schedule = replace(EVERYWHERE, device=device)
    engine = make_engine(path, "bfloat16", schedule, "cpu")
    check(engine, schedule, expected)
    engine.shutdown()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_sample_from_their_own_columns_as_one_process_does(isa, num_ranks, monkeypatch):
    """With ties, -inf and NaN in some columns, and more rows than an exchange can have."""
    monkeypatch.setattr(ranked, "AREA_BYTES", 448)
    borders, count = ((0, 320, 500), (0, 64, 320, 500))[num_ranks - 2], 60
    logits = (torch.randn(count, 500, generator=torch.Generator().manual_seed(0)) * 3).round()
    logits[10:20, 64:] = -torch.inf
    logits[20:22], logits[30, 70], logits[31, 499] = -torch.inf, torch.nan, torch.nan
    rows = SamplingRows(
        torch.arange(count) % 3 * 0.7, torch.zeros(count, dtype=torch.int32), torch.ones(count), torch.zeros(count),
        torch.arange(count) * 7, torch.arange(count, dtype=torch.int32) % 2, torch.arange(count, dtype=torch.int32),
    )  # fmt: skip
    expected = CpuKernels(isa, 1).sample(logits, rows).tolist()
    assert expected[20:22] == expected[30:32] == [-1, -1]
    memory = ranked.create_shared_memory()
    own, found = pairwise(borders), {}

    def sample(rank, first, end):
        kernels = ranked.RankedKernels(ranked.RankGroup(memory, rank, num_ranks, 60.0, []), isa, 1)
        found[rank] = kernels.sample_columns(logits[:, first:end].contiguous(), rows, borders).tolist()

    threads = [threading.Thread(target=sample, args=[rank, *columns]) for rank, columns in enumerate(own)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    os.close(memory)
    assert found[0] == expected


@pytest.mark.turn(2)
def test_drafts_of_ranks_do_not_change_tokens(tmp_path):
    path = eight_heads(tmp_path)
    repeated = {"prompt_token_ids": [5, 6, 7, 8] * 8}
    found = []
    for count, method in ((1, "none"), (2, "ngram")):
        llm = LLM(
            str(path), tensor_parallel_size=count, skip_tokenizer_init=True, max_model_len=160, num_threads=1,
            kv_cache_memory_bytes=8 << 20, speculative_config={"method": method}, rank_timeout_s=60.0,
        )  # fmt: skip
        found.append(llm.generate([repeated], SamplingParams(max_tokens=40, temperature=0.0), use_tqdm=False))
        if count == 2:
            assert llm.llm_engine.core.metrics.stats.drafts.num_draft_tokens > 0
        llm.llm_engine.shutdown()
    assert found[0][0].outputs[0].token_ids == found[1][0].outputs[0].token_ids


@pytest.mark.turn(2)
@pytest.mark.parametrize(
    ("family", "options", "of_ranks"),
    [
        ("Qwen3ForCausalLM", {}, {}),
        ("Qwen3ForCausalLM", {"kv_cache_dtype": "int8", "quantization": "int8"}, {}),
        ("Gemma3ForCausalLM", {}, {}),
        ("DeepseekV3ForCausalLM", {}, {}),
        ("Qwen3MoeForCausalLM", {}, {"enable_expert_parallel": True}),
        ("Qwen3_5ForCausalLM", {}, {}),
        ("NemotronHForCausalLM", {}, {}),
    ],
)
def test_ranks_draft_with_the_quantized_model_as_one_process_does(family, options, of_ranks, tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_config(family, vocab_size=500), std=0.1)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=3) for temperature in (0.0, 0.7, 0.0, 1.0)]
    found, proposed = [], []
    for count in (1, 2, 4):
        llm = LLM(
            str(path), tensor_parallel_size=count, skip_tokenizer_init=True, max_model_len=160, max_num_seqs=3,
            block_size=4, kv_cache_memory_bytes=8 << 20, num_threads=1, dtype="bfloat16", rank_timeout_s=60.0,
            speculative_config={"method": "quantized", "num_speculative_tokens": 5}, packed_cache_bytes=0,
            **options | (of_ranks if count > 1 else {}),
        )  # fmt: skip
        proposed.append(watch_drafts(llm))
        found.append([each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)])
        llm.llm_engine.shutdown()
    assert found[1:] == [found[0]] * 2
    expected = proposed[0]
    for drafts in proposed[1:]:
        both = [text for text in drafts if text in expected]  # how many tokens are drafted depends on measured times
        assert sum(min(len(drafts[text]), len(expected[text])) for text in both) > 20
        for text in both:
            most = min(len(drafts[text]), len(expected[text]))
            assert drafts[text][:most] == expected[text][:most]


def watch_drafts(llm):
    """Return a dictionary that gets the drafts after each text."""
    proposer, drafts = llm.llm_engine.core.executor.worker.runner.drafting.proposer, {}
    propose = proposer.propose

    def record(tasks):
        texts = [tuple(task.token_ids.tolist()) for task in tasks]
        result = propose(tasks)
        drafts.update(zip(texts, result, strict=True))
        return result

    proposer.propose = record
    return drafts


@pytest.mark.parametrize("part", ["gather", "sampling"])
def test_fault_in_a_pass_of_drafts_ends_all_ranks(part, tmp_path, monkeypatch):
    """Without an end, rank 0's next step would meet the other ranks' pass of drafts, which has the same sizes."""
    path = write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM", vocab_size=500), std=0.1)
    llm = LLM(
        str(path), tensor_parallel_size=2, skip_tokenizer_init=True, max_model_len=160, kv_cache_memory_bytes=8 << 20,
        num_threads=1, rank_timeout_s=2.0, speculative_config={"method": "quantized"}, packed_cache_bytes=0,
    )  # fmt: skip
    runner = llm.llm_engine.core.executor.worker.runner.draft_runner

    def fail(*_args, **_options):
        raise MemoryError("no memory for drafts")

    target, name = (runner._tasks, "make_for_drafts") if part == "sampling" else (runner, "_choose_after")
    monkeypatch.setattr(target, name, fail)
    with pytest.raises(EngineDeadError, match="rank 0 failed in a step: MemoryError"):
        llm.generate([{"prompt_token_ids": PROMPTS[2]}], SamplingParams(max_tokens=24, top_p=0.9), use_tqdm=False)
    llm.llm_engine.shutdown()


@pytest.mark.turn(4)
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_that_draft_give_equal_tokens_with_chunks_swaps_and_preemptions(count, tmp_path):
    path = write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM", vocab_size=1500), std=0.1)
    alone = make_engine(path, "bfloat16", Schedule("alone", max_num_seqs=1, prefix_caching=False), "cpu")
    expected = answers(alone, make_requests()[:18])
    device = (("tensor_parallel_size", count), ("rank_timeout_s", 60.0))
    schedule = replace(EVERYWHERE, device=device, method="quantized")
    engine = make_engine(path, "bfloat16", schedule, "cpu")
    check(engine, schedule, expected)
    engine.shutdown()
