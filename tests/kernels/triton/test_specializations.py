"""What kernels are compiled for: not for a number of rows, and for nothing after the warm-up."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gguf_files import write_gguf
from paged_batches import paged_batch

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.config import SpeculativeConfig
from octavo.kernels import SamplingRows
from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.operations.add import add
from octavo.kernels.operations.add_experts import add_experts
from octavo.kernels.operations.choose_experts import choose_experts
from octavo.kernels.operations.copy_rows import copy_rows
from octavo.kernels.operations.divide import divide
from octavo.kernels.operations.gated_delta import gated_delta
from octavo.kernels.operations.gated_norm import gated_norm
from octavo.kernels.operations.keep_rows import keep_rows
from octavo.kernels.operations.log_softmax import log_softmax
from octavo.kernels.operations.mamba2 import mamba2
from octavo.kernels.operations.multiply import multiply
from octavo.kernels.operations.relu_squared import relu_squared
from octavo.kernels.operations.rope_and_write_latents import rope_and_write_latents
from octavo.kernels.operations.short_conv import short_conv
from octavo.kernels.operations.sigmoid_gate import sigmoid_gate
from octavo.kernels.operations.soft_cap import soft_cap
from octavo.kernels.operations.sort_by_expert import sort_by_expert
from octavo.kernels.quantization import quantize_int4, quantize_int8
from octavo.kernels.state_batch import StateBatch, matrix_states
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import FAMILIES
from octavo.worker.local_executor import LocalExecutor
from octavo.worker.step_modes import LaunchesAhead

triton = pytest.importorskip("triton")

from triton_launches import launches  # noqa: E402  once there is Triton

from octavo.kernels.triton.compilations import Compilations, compiled_kernels  # noqa: E402
from octavo.kernels.triton.rejection import rejection_sample  # noqa: E402

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 199, 522, 4, 1, 20  # rows of odd lengths, and more than a partition's
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 530,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "dtype": "bfloat16",
}
WAYS = [
    {"temperature": 0.0},
    {"seed": 1},
    {"top_k": 5, "logprobs": 3},
    {"top_p": 0.9, "temperature": 0.7, "prompt_logprobs": 2},
    {"min_p": 0.1, "repetition_penalty": 1.2},
    {"frequency_penalty": 1.0, "logprobs": 0},
    {"typical_p": 0.5, "top_p": 0.5},
    {"logit_bias": {3: 1.0}, "min_tokens": 2},
]


@pytest.fixture(autouse=True)
def _on_cpu(device):
    if device.type != "cpu":
        pytest.skip("kernels are compiled here")


def rows_of(name, num_rows, kernels, generator):
    """Launch an operation on `num_rows` rows of odd lengths."""
    x, hidden = torch.empty(num_rows, WIDTH), torch.empty(num_rows, WIDTH, dtype=torch.bfloat16)
    if name in {"add", "divide", "log_softmax", "soft_cap"}:
        add(kernels, x, x, 0.5)
        divide(kernels, x, 2.0)
        log_softmax(kernels, x)
        soft_cap(kernels, x, 2.0)
    elif name == "norms":
        kernels.add_rms_norm(hidden, hidden, hidden[0], 1e-6)
        heads = torch.empty(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM).split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
        for each in heads:
            kernels.rms_norm(each, each[0, 0], 1e-6)
    elif name == "attention":
        lengths = [(num_rows + 300, num_rows)]
        batch, *caches = paged_batch(lengths, 16, KV_HEADS, HEAD_DIM, torch.bfloat16, generator)
        fused = torch.empty(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        q, k, v = fused.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
        for norm in (None, q[0, 0]):
            kernels.rope_and_write_kv(
                q, k, v, torch.empty(400, HEAD_DIM), batch, *caches, q_norm=norm, k_norm=norm, eps=1e-6
            )
        kernels.paged_attention(q, *caches, batch, 0.2, None)
    elif name == "experts":
        ids, weights, numbers = torch.zeros(num_rows, 3, dtype=torch.int32), torch.empty(num_rows, 3), torch.empty(8)
        choose_experts(kernels, torch.empty(num_rows, 8), numbers, numbers, ids, weights, 1, 4, 2, False, 0.0, 1.0)
        sources, starts = torch.empty(3 * num_rows, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
        sort_by_expert(kernels, ids, sources, torch.empty_like(ids), starts)
        packed = kernels.pack_groups([kernels.pack_linear(torch.empty(VOCAB, WIDTH))] * 8)
        outputs = kernels.grouped_linear(x, packed, starts, sources=sources)
        out = torch.empty(num_rows, VOCAB, dtype=torch.bfloat16)
        add_experts(kernels, outputs, ids, ids, weights, outputs[:num_rows], weights[:, :1].contiguous(), out, 8)
    elif name == "latents":
        batch, cache, _ = paged_batch([(num_rows + 300, num_rows)], 16, 1, 576, torch.bfloat16, generator)
        fused, q = (torch.empty(num_rows, width, dtype=torch.bfloat16) for width in (2112, 3 * 192))
        queries, weights = torch.empty(num_rows, 3, 576, dtype=torch.bfloat16), torch.empty(3, 512, 128)
        plain, rotated = q.view(num_rows, 3, 192).split_with_sizes((128, 64), 2)
        packed = kernels.pack_groups([kernels.pack_linear(each.bfloat16()) for each in weights])
        kernels.head_linear(plain, packed, queries[..., :512])
        rope_and_write_latents(
            kernels, rotated, fused[:, 1536:], fused[0, :512], 1e-6, torch.empty(400, 64), True, batch.positions,
            batch.slot_mapping, cache, queries,
        )  # fmt: skip
        kernels.paged_attention(queries, cache, cache[..., :512], batch, 0.2, None)
    elif name == "tokens":
        ids = torch.zeros(num_rows, dtype=torch.int64)
        numbers, parameters = ids.int(), torch.ones(num_rows)
        kernels.sample(x, SamplingRows(parameters, numbers, parameters, parameters, ids, numbers, numbers))
        kernels.top_tokens(x, 1 + num_rows % 20)
        kernels.take_rows(x, ids)
        kernels.embedding(ids, kernels.pack_linear(torch.empty(VOCAB, WIDTH)), torch.bfloat16)
        kernels.gate(x)
        rejection_sample(ids, ids, torch.arange(num_rows + 1, dtype=torch.int32), 8 + num_rows % 8)
    else:
        weight = {
            "float32": lambda: torch.empty(VOCAB, WIDTH),
            "bfloat16": lambda: torch.empty(VOCAB, WIDTH, dtype=torch.bfloat16),
            "int8": lambda: quantize_int8(torch.ones(VOCAB, WIDTH)),
            "int4": lambda: quantize_int4(torch.ones(VOCAB, WIDTH), 32),
            "blocks": lambda: [random_blocks(generator, BlockKind.Q5_1, VOCAB, 544)],
        }[name]()
        x = {"blocks": torch.empty(num_rows, 544), "bfloat16": hidden}.get(name, x)
        kernels.linear(x, kernels.pack_linear(weight, torch.empty(VOCAB)))


def states_of(num_rows, kernels):
    """Launch the operations of recurrent layers on `num_rows` rows of as many sequences, with other numbers of saved
    and kept rows.
    """
    starts, others = torch.arange(num_rows + 1, dtype=torch.int32), torch.zeros(num_rows % 3, dtype=torch.int32)
    batch = replace(StateBatch.plain(starts, starts[:-1], starts[:-1]), saved_rows=others, saved_slots=others)
    batch = replace(batch, keep_from=starts[:-1], keep_to=starts[:-1])
    hidden, kept, rates = (torch.empty(num_rows, width, dtype=torch.bfloat16) for width in (WIDTH, 2 * WIDTH, 6))
    numbers, x, a = torch.empty(3), hidden[:, 58:], rates[:, 3:]
    for bias in (numbers[:0], torch.empty(464)):
        short_conv(
            kernels, x, x, torch.empty(4, 464), bias, torch.empty(9, 3, 464).bfloat16(), batch, True, hidden[:, :464]
        )
    states, delta = matrix_states(9, 3, 20, 32), hidden[:, : 2 * 20 + 96]
    gated_delta(kernels, delta, a, a, delta, a, a, numbers, numbers, states, batch, 1, False, hidden[:, :96])
    mamba2(kernels, delta, a, delta, a, numbers, numbers, numbers, 0.0, 1.0, states, batch, 1, hidden[:, :96])
    keep_rows(kernels, hidden, hidden[:, :7], rates, kept, batch)
    gated_norm(kernels, x, x, torch.empty(58), 1e-6, 58, True, hidden[:, :464])
    multiply(kernels, x, hidden[:, :464])
    relu_squared(kernels, hidden)
    heads = hidden.view(num_rows, 3, -1)
    sigmoid_gate(kernels, heads[:, 1:2], heads[:, :1])
    copy_rows(kernels, heads[:, 1:2], heads[:, :1])


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "name",
    [
        "add",
        "norms",
        "attention",
        "experts",
        "latents",
        "states",
        "tokens",
        "float32",
        "bfloat16",
        "int8",
        "int4",
        "blocks",
    ],
)
def test_rows_select_only_tiles(name, kernels, generator):
    """So no number of rows has machine code of its own, and the warm-up needs one number for each choice of tiles."""
    of_tilings = [[1409, 2000, 4096], [4097, 5000]] if name in {"float32", "bfloat16", "int8"} else []
    for same in ([1, 2, 15, 16], [17, 32, 63, 64], [65, 70, 80, 1025], *of_tilings):
        keys = []
        for num_rows in same:
            with launches() as launched:
                if name == "states":
                    states_of(num_rows, kernels)
                else:
                    rows_of(name, num_rows, kernels, generator)
            keys.append(launched)
        assert keys[0]
        assert all(each == keys[0] for each in keys)


def make_engine(model, *, graphs=0, cache=None, quantization=None, speculative=None, **options):
    scheduler = {"max_num_seqs": 70, "max_num_batched_tokens": 512, "mixed_step_ms": 0.0} | options
    return LLMEngine(
        ModelConfig(model=str(model), skip_tokenizer_init=True, max_model_len=400, quantization=quantization),
        cache_config=CacheConfig(**{"block_size": 16, "num_gpu_blocks": 90} | (cache or {})),
        scheduler_config=SchedulerConfig(**scheduler),
        device_config=DeviceConfig(device="cpu", kernels="triton", max_cudagraph_capture_size=graphs),
        speculative_config=speculative or SpeculativeConfig(method="none"),
    )


def serve(engine):
    """Serve batches of 1 to 70 requests of all kinds, and an embedding."""
    rng = random.Random(3)
    for count, lengths in (
        [1, [1]],
        [1, [399]],
        [3, [15, 16, 17]],
        [16, [2]],
        [17, [1]],
        [70, [1, 2, 40]],
        [2, [300, 70]],
    ):
        prompts = [[rng.randrange(2, VOCAB) for _ in range(lengths[index % len(lengths)])] for index in range(count)]
        ways = [WAYS[(index + count) % len(WAYS)] for index in range(count)]
        params = [SamplingParams(max_tokens=3, ignore_eos=True, **way) for way in ways]
        engine.generate_batch([{"prompt_token_ids": prompt} for prompt in prompts], params)
    engine.generate_batch([{"prompt_token_ids": [3] * 70}], [SamplingParams(max_tokens=1, pooling="mean")])


def qwen(folder):
    return write_checkpoint(folder, tiny_config("Qwen3ForCausalLM", num_hidden_layers=1, **SIZES))


def windows(folder):
    return write_checkpoint(folder, tiny_config("Gemma2ForCausalLM", **SIZES))


def blocks(folder):
    sizes = {"hidden_size": 544, "intermediate_size": 544, "num_hidden_layers": 1, "head_dim": 32, "vocab_size": 300}
    checkpoint = write_checkpoint(folder / "checkpoint", tiny_config("Qwen3ForCausalLM", **SIZES | sizes))
    return write_gguf(checkpoint, folder / "model.gguf", kind="Q4_0", kinds={"attn_v": "Q5_1", "ffn_down": "Q8_0"})


def drafting(folder, method="draft_model", **options):
    """Return speculation: with a model of other sizes, unless another method is given."""
    if method == "draft_model":
        sizes = SIZES | {"head_dim": 24, "vocab_size": 300, "num_hidden_layers": 1}
        options["model"] = str(write_checkpoint(folder / "draft", tiny_config("LlamaForCausalLM", **sizes)))
    return SpeculativeConfig(method=method, num_speculative_tokens=3, **options)


# (model, its speculation, further options)
CASES = {
    "graphs, steps launched ahead": (qwen, None, {"graphs": 4, "async_scheduling": True}),
    "graphs of more rows than the warm-up's steps": (qwen, {"method": "ngram"}, {"graphs": 70}),
    "lookups, int4": (qwen, {"method": "ngram"}, {"quantization": "int4", "max_num_batched_tokens": 80}),
    "windows, int8, swaps": (
        windows,
        None,
        {
            "quantization": "int8",
            "cache": {"kv_cache_dtype": "fp8", "num_gpu_blocks": 30, "swap_space_bytes": 1 << 20},
            "preemption": "swap",
        },
    ),
    "GGUF, a drafting model, rejection sampling": (blocks, {"verification": "rejection"}, {"graphs": 8}),
    "few rows in a step, a drafting model": (blocks, {}, {"max_num_seqs": 3, "max_num_batched_tokens": 33}),
}


def made(folder, case, **more):
    model, speculation, options = CASES[case]
    speculative = None if speculation is None else drafting(folder, **speculation)
    engine = make_engine(model(folder / "model"), speculative=speculative, **options, **more)
    if options.get("async_scheduling"):
        worker = engine.core.executor.worker
        engine.core.executor.shutdown()
        engine.core.executor = LocalExecutor(worker, mode=LaunchesAhead)
    return engine


@pytest.mark.sweep(32)
@pytest.mark.parametrize("case", CASES)
def test_serving_compiles_nothing_after_warm_up(case, tmp_path):
    with launches() as launched:
        engine = made(tmp_path, case)
        at_start = set(launched)
        serve(engine)
    assert sorted(launched - at_start) == []
    assert engine.core.metrics.stats.num_compilations == 0


@pytest.mark.turn(4)
@pytest.mark.parametrize("is_warm", [True, False])
def test_warm_up_compiles_all_tiles_of_products(tmp_path, monkeypatch, is_warm):
    """With 30 processors, only 129 to 256 rows have small tiles in a product whose K is not divided."""
    if not is_warm:
        monkeypatch.setattr("octavo.kernels.triton.backend.rows_of_tilings", lambda *_arguments: ())
    with launches() as launched:
        monkeypatch.setattr("octavo.kernels.triton.matmul._INTERPRETED_PROCESSORS", 30)
        engine = make_engine(write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM", num_hidden_layers=2, **SIZES)))
        at_start = set(launched)
        engine.generate_batch([{"prompt_token_ids": [3] * 200}], [SamplingParams(max_tokens=1)])
        serve(engine)
    assert {key.partition("(")[0] for key in launched - at_start} == (set() if is_warm else {"_matmul"})
    assert {"BLOCK_M: constexpr 64", "BLOCK_M: constexpr 128"} <= {
        part for key in launched if key.startswith("_matmul(") for part in key.split(", ")
    }


@pytest.mark.turn(8)
def test_compilations_while_serving_are_counted_and_logged(tmp_path, monkeypatch, caplog):
    """Without the first steps, a request of another shape waits for kernels."""
    monkeypatch.setattr("octavo.kernels.triton.backend.WARM_UP_ROWS", ())
    with launches() as launched:
        engine = made(tmp_path, "lookups, int4")
        at_start = set(launched)
        serve(engine)
    late = launched - at_start
    assert {"_choose", "_matmul_int4", "_merge_partitions", "_rank"} <= {key.partition("(")[0] for key in late}
    assert engine.core.metrics.stats.num_compilations == len(late)
    logged = [record.getMessage() for record in caplog.records if "waited for a kernel" in record.getMessage()]
    assert len(logged) == len(late)
    assert all(any(key in message for message in logged) for key in late)


@pytest.mark.sweep(112)
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", None), ("bfloat16", "int8"), ("bfloat16", "fp8")])
@pytest.mark.parametrize("name", FAMILIES)
def test_serving_every_family_compiles_nothing(name, dtype, quantization, tmp_path):
    model = write_checkpoint(tmp_path, tiny_config(name, **SIZES | {"dtype": dtype, "head_dim": 24}))
    with launches() as launched:
        engine = make_engine(model, quantization=quantization)
        at_start = set(launched)
        serve(engine)
    assert sorted(launched - at_start) == []


def test_compilation_calls_earlier_hook(monkeypatch):
    seen = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **compilation: seen.append(compilation))
    compiled_kernels.cache_clear()
    try:
        made, other = Compilations(), Compilations()
        triton.knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="_add"), key="i32")
        assert made.take() == ["_add for i32"]
        assert made.take() == []
        assert other.take() == ["_add for i32"]
        assert [each["key"] for each in seen] == ["i32"]
    finally:
        compiled_kernels.cache_clear()
