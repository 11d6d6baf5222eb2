"""Weights in GGUF blocks: tokens and logprobs do not depend on the schedule, and the recorded forward pass is used."""

import pytest
import torch
from alone_and_crowd import alone, crowd, needs_kernels
from gguf_files import write_gguf
from kernels_available import INSTRUCTION_SETS

from octavo import CacheConfig, DeviceConfig, LLMEngine, ModelConfig, SamplingParams, SchedulerConfig
from octavo.kernels.block_panels import BlockPanels
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.panels import PanelWeight
from octavo.models.gguf_tensors import GGUFTensors
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.weight_bytes import weight_bytes
from octavo.startup.gguf_checkpoint import GGUFCheckpoint

# Types of matrices and of some parts of a layer: products of one type, of two, and of blocks with floats.
FILES = {
    "Q4_0": {"kind": "Q4_0"},
    "mixed": {"kind": "Q4_1", "kinds": {"attn_v": "Q8_0", "ffn_down": "Q5_1", "attn_output": "F16"}},
    "Q4_K_M": {"kind": "Q4_K", "kinds": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_q": "Q5_K"}},
    "some expanded": {"kind": "Q5_0", "kinds": {"attn_k": "F16"}},
    "gated delta nets": {"kind": "Q4_0", "kinds": {"attn_gate": "Q4_1", "ssm_alpha": "F32", "attn_q": "Q8_0"}},
}
REQUESTS = [
    (
        [2 + (7 * index + 3 * place) % 280 for place in range(length)],
        SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2, temperature=0.8 * (index % 2), seed=index),
    )
    for index, length in enumerate([1, 2, 15, 17, 33, 64, 90, 5])
]


@pytest.fixture(scope="module", params=FILES)
def path(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if request.param == "Q4_K_M" else {}
    name = "Qwen3_5ForCausalLM" if request.param == "gated delta nets" else "LlamaForCausalLM"
    config = tiny_config(name, vocab_size=288, tie_word_embeddings=True, **sizes)
    folder = write_checkpoint(directory / "folder", config, std=0.1)
    return write_gguf(folder, directory / "model.gguf", **FILES[request.param])


def make_engine(path, *, isa="auto", kernels="auto", chunk=0):
    return LLMEngine(
        ModelConfig(model=str(path), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=256),
        cache_config=CacheConfig(num_gpu_blocks=256, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=128, long_prefill_token_threshold=chunk
        ),
        device_config=DeviceConfig(device="cpu", isa=isa, kernels=kernels),
    )


@needs_kernels
@pytest.mark.sweep(32)
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_gguf_weights_give_equal_tokens_alone_batched_and_chunked(path, isa):
    expected = alone(make_engine(path, isa=isa), REQUESTS)
    assert crowd(make_engine(path, isa=isa), REQUESTS) == expected
    assert crowd(make_engine(path, isa=isa, chunk=7), REQUESTS) == expected


@needs_kernels
def test_gguf_block_weights_stay_packed_and_mixed_ones_are_expanded(tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("Qwen2ForCausalLM", vocab_size=288), std=0.1)
    kinds = {"attn_v": "Q8_0", "attn_output": "F16", "ffn_up": "F32"}
    checkpoint = GGUFCheckpoint(write_gguf(folder, tmp_path / "model.gguf", kind="Q4_0", kinds=kinds))
    kernels, architecture = CpuKernels(), checkpoint.read_architecture()
    model = load_model(
        checkpoint.weights, architecture, kernels, dtype="bfloat16", device=torch.device("cpu"), max_model_len=64
    )
    layer = model.layers[0]
    qkv = layer.attention.qkv.storage
    assert isinstance(qkv, BlockPanels)
    assert [part.out_features for part in qkv.panels] == [96, 32]
    assert isinstance(model.embed_tokens.storage, BlockPanels)
    assert isinstance(layer.attention.o.storage, PanelWeight)
    assert isinstance(layer.mlp.gate_up.storage, PanelWeight)
    linears = [model.embed_tokens, model.lm_head]
    for each in model.layers:
        linears += [each.attention.qkv, each.attention.o, each.mlp.gate_up, each.mlp.down]
    taken = sum(linear.num_bytes for linear in linears)
    assert abs(taken - weight_bytes(architecture, "bfloat16")) < 0.02 * taken  # norms and biases


@pytest.mark.parametrize("path", sorted(FILES.keys() - {"Q4_K_M"}), indirect=True)  # random blocks give large logits
def test_gguf_block_kernels_match_logprobs_of_expanded_weights(path, monkeypatch, tmp_path):
    """The logprobs of the likeliest tokens equal those of the expanded weights, up to the rounding of activations."""
    greedy = [(prompt, SamplingParams(max_tokens=1, logprobs=5)) for prompt, _ in REQUESTS]
    found = crowd(make_engine(path), greedy)
    monkeypatch.setattr(GGUFTensors, "weight", GGUFTensors.tensor)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the fingerprint of the first engine has other numbers
    for (_, ours), (_, theirs) in zip(found, crowd(make_engine(path), greedy), strict=True):
        for token, logprob in ours[0].items():
            if token in theirs[0]:
                assert abs(logprob.logprob - theirs[0][token].logprob) < 0.15
        assert len(ours[0].keys() & theirs[0].keys()) >= 3
