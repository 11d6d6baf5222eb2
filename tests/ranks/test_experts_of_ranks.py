"""Mixtures of experts on ranks: checkpoints of all formats, and the counted bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from quantized_files import (
    awq_checkpoint,
    block_checkpoint,
    fp8,
    gptq_checkpoint,
    plain_checkpoint,
    reordered_checkpoint,
    rewritten,
    store_as_mxfp4,
)
from rank_threads import RankThread
from test_tokens_of_ranks import PROMPTS, results

from octavo import LLM, SamplingParams
from octavo.data.events import ExpertsComputed
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.ranked import RankedKernels
from octavo.models import expert_layer
from octavo.models.quantize_checkpoint import quantize_checkpoint
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.ranks import leader

ROUTERS = ["mlp.gate", "mlp.shared_expert_gate"]
BOTH_DIVISIONS = pytest.mark.parametrize("by_expert", [False, True], ids=["features", "experts"])


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch):
    monkeypatch.setattr(leader, "start_process", RankThread)


# --- checkpoints of other programs


def mixture(path, family="Qwen3MoeForCausalLM", **changes):
    """Write a checkpoint whose experts have widths that formats can divide into groups."""
    sizes = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 64, "vocab_size": 500}
    known = tiny_config(family)
    sizes = {name: size for name, size in sizes.items() if name in known}
    return plain_checkpoint(path, family, **sizes | changes)


def write_gptq(path, write, **config):
    """Write int4. The configuration does not list the routers, which are floats."""
    gptq_checkpoint(path, torch.Generator().manual_seed(3), write=write, **config)


def write_act_order(path, write):
    reordered_checkpoint(path, torch.Generator().manual_seed(3), write=write)


def write_awq(path, write):
    awq_checkpoint(path, torch.Generator().manual_seed(3), write=write, modules_to_not_convert=ROUTERS)


def write_compressed(path, write, precision):
    """Write integers in the format of compressed-tensors."""
    write(path.with_name("plain"))
    quantize_checkpoint(path.with_name("plain"), path, precision)


def write_fp8_in_blocks(path, write):
    """Write FP8 as DeepSeek does. The blocks cross the borders of ranks."""
    block_checkpoint(path, (24, 40), write=write, modules_to_not_convert=ROUTERS)


def write_fp8_by_row(path, write):
    """Write FP8 in the format of compressed-tensors."""

    def store(weight, _):
        values, scales, meant = fp8(weight, (1, None))
        return {"weight": values, "weight_scale": scales}, meant

    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": activations}},
        "ignore": ["lm_head", *ROUTERS],
    }
    rewritten(path, config, store, write=write)


def write_mxfp4(path, write):
    write(path)
    store_as_mxfp4(path)


FORMATS = {
    "gptq": write_gptq,
    "gptq symmetric": partial(write_gptq, sym=True),
    "gptq act-order": write_act_order,
    "awq": write_awq,
    "compressed-tensors int4": partial(write_compressed, precision="int4"),
    "compressed-tensors int8": partial(write_compressed, precision="int8"),
    "compressed-tensors fp8": write_fp8_by_row,
    "fp8 in blocks": write_fp8_in_blocks,
    "mxfp4": write_mxfp4,
}


@pytest.mark.turn(4)
@BOTH_DIVISIONS
@pytest.mark.parametrize("stored", [name for name in FORMATS if name != "mxfp4"])
def test_stored_experts_of_ranks_give_tokens_of_one_process(stored, by_expert, tmp_path):
    """Among seven experts, ranks have 3 and 4, or 1, 2, 2 and 2."""
    FORMATS[stored](tmp_path / "model", partial(mixture, num_experts=7))
    expected = results(tmp_path / "model", 1, dtype="bfloat16")
    for count in (2, 4):
        assert results(tmp_path / "model", count, dtype="bfloat16", enable_expert_parallel=by_expert) == expected, count


@pytest.mark.turn(4)
@BOTH_DIVISIONS
@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("Qwen2MoeForCausalLM", "gptq"),
        ("MixtralForCausalLM", "awq"),
        ("DeepseekV3ForCausalLM", "fp8 in blocks"),
        ("Glm4MoeForCausalLM", "compressed-tensors int8"),
        ("GptOssForCausalLM", "mxfp4"),
    ],
)
def test_stored_experts_of_other_families_give_tokens_of_one_process(family, stored, by_expert, tmp_path):
    """With shared experts, with expert names of its own, and with latent attention."""
    FORMATS[stored](tmp_path / "model", partial(mixture, family=family))
    expected = results(tmp_path / "model", 1, dtype="bfloat16")
    for count in (2, 4):
        assert results(tmp_path / "model", count, dtype="bfloat16", enable_expert_parallel=by_expert) == expected, count


@pytest.mark.turn(4)
@BOTH_DIVISIONS
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("stored", ["gptq", "fp8 in blocks"])
def test_stored_experts_that_are_rounded_again_give_tokens_of_one_process(stored, quantization, by_expert, tmp_path):
    FORMATS[stored](tmp_path / "model", mixture)
    options = {"dtype": "bfloat16", "quantization": quantization}
    expected = results(tmp_path / "model", 1, **options)
    assert results(tmp_path / "model", 2, enable_expert_parallel=by_expert, **options) == expected


# --- rows


def test_ranks_gate_only_rows_of_their_experts(tmp_path, monkeypatch):
    numbers = set()

    def gate(kernels, gate_up, activation, *, group_start):
        numbers.add((kernels.group.rank, len(group_start) - 1))
        return CpuKernels.gate(kernels, gate_up, activation, group_start=group_start)

    monkeypatch.setattr(RankedKernels, "gate", gate)
    results(mixture(tmp_path / "model", num_experts=7), 2, enable_expert_parallel=True)
    assert numbers == {(0, 3), (1, 4)}


# --- counted bytes


def loads_and_layers(path, num_ranks, monkeypatch, **options):
    """Return the load of each step of a request, and the layers of experts of all ranks."""
    layers = []

    class Watched(expert_layer.Experts):
        def __init__(self, *args):
            super().__init__(*args)
            layers.append(self)

    monkeypatch.setattr(expert_layer, "Experts", Watched)
    llm = LLM(
        str(path), tensor_parallel_size=num_ranks, skip_tokenizer_init=True, max_model_len=160, num_threads=1,
        kv_cache_memory_bytes=8 << 20, packed_cache_bytes=0, rank_timeout_s=60.0, **options,
    )  # fmt: skip
    llm.generate([{"prompt_token_ids": PROMPTS[2]}], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    loads = [each.load for each in llm.llm_engine.core.recent.since(0) if isinstance(each, ExpertsComputed)]
    llm.llm_engine.shutdown()
    return loads, layers


@BOTH_DIVISIONS
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_bytes_of_experts_are_those_of_all_ranks(quantization, by_expert, tmp_path, monkeypatch):
    """Ranks have unequal numbers of experts, and unequal parts of 192 features."""
    config = tiny_config("Qwen3MoeForCausalLM", num_experts=7, moe_intermediate_size=192, hidden_size=192)
    path = write_checkpoint(tmp_path / "model", config, std=0.1)
    options = {"dtype": "bfloat16", "quantization": quantization}
    expected, _ = loads_and_layers(path, 1, monkeypatch, **options)
    assert len(expected) > 4
    loads, layers = loads_and_layers(path, 2, monkeypatch, enable_expert_parallel=by_expert, **options)
    assert loads == expected
    in_memory = sum(weights.num_bytes for each in layers for weights in each.groups)
    assert {each.bytes_per_expert for each in layers} == {in_memory // (7 * config["num_hidden_layers"])}


def test_bytes_of_experts_include_repeated_column_orders(tmp_path, monkeypatch):
    """Each rank has the column order (int32) of every matrix of which it has rows."""
    write_act_order(tmp_path / "model", partial(mixture, moe_intermediate_size=128))
    expected, (alone, _) = loads_and_layers(tmp_path / "model", 1, monkeypatch, dtype="bfloat16")
    loads, layers = loads_and_layers(tmp_path / "model", 2, monkeypatch, dtype="bfloat16")
    orders = 4 * (64 + 128)
    assert {each.bytes_per_expert for each in layers} == {alone.bytes_per_expert + orders}
    assert [each.read_bytes for each in loads] == [each.read_bytes + each.num_reads * orders for each in expected]
