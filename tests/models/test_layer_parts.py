"""A model with layers that differ in every part, compared with the same model in plain torch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernels_available import COMPILED

from octavo.config import kernels_required
from octavo.kernels import create_kernels
from octavo.models.architecture import Architecture
from octavo.models.attention import AttentionConfig
from octavo.models.decoder_layer import LayerConfig, LayerNorms
from octavo.models.gated_mlp import GatedMLPConfig
from octavo.models.loader import load_model
from octavo.models.random_weights import RandomWeights
from octavo.models.rope_config import RopeConfig
from octavo.models.weight_source import FolderWeights
from octavo.worker.kv_cache import PagedKVCache

CPU = torch.device("cpu")
IDS = [(37 * i + 5) % 101 for i in range(40)]
AROUND = LayerNorms(after_attention="behind_attention_norm", before_mlp="mlp_norm", after_mlp="behind_mlp_norm")
BEHIND = replace(AROUND, before_attention=None, before_mlp=None)
NEAR = LayerConfig(
    attention=AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig(theta=100.0), window=5, qk_norm="head"
    ),
    mlp=GatedMLPConfig(intermediate_size=96, activation="gelu_tanh"),
    norms=AROUND,
)
CAPPED = LayerConfig(attention=replace(NEAR.attention, window=None, scale=8.0, softcap=0.2), mlp=NEAR.mlp, norms=BEHIND)
FAR = LayerConfig(
    attention=AttentionConfig(num_heads=6, num_kv_heads=3, head_dim=8, rope=RopeConfig(theta=1e5), qkv_bias=True),
    mlp=GatedMLPConfig(intermediate_size=64, bias=True),
)
MIXED = Architecture(
    name="Mixed", vocab_size=101, hidden_size=48, layers=(CAPPED, NEAR, FAR, NEAR, CAPPED), rms_norm_eps=1e-6,
    max_context_tokens=64, tie_word_embeddings=False, dtype="float32", bos_token_id=None, eos_token_ids=(),
    embedding_scale=48.0, norm_offset=1.0, logit_softcap=0.3,
)  # fmt: skip


def kernels_named(name):
    if name == "cpu" and not COMPILED and not kernels_required():
        pytest.skip("octavo was installed without compiled kernels")
    return create_kernels(CPU, name)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_mixed_layers_match_plain_torch(kernels, prompt_logits, tmp_path):
    model = load_model(
        FolderWeights(tmp_path), MIXED, kernels_named(kernels), dtype="float32", device=CPU, max_model_len=64,
        load_format="dummy", seed=3,
    )  # fmt: skip
    ours, expected = prompt_logits(model, IDS, step=7), plain_logits(MIXED)
    assert (ours - expected).norm() < 1e-5 * expected.norm()
    sizes = {"num_blocks": [3, 3], "block_size": 16}
    paged = PagedKVCache(MIXED.kv_layout, **sizes, dtype=torch.float32, device=CPU)
    assert torch.equal(prompt_logits(model, IDS, step=7, cache=paged), ours)


NEARS = {
    "norms": replace(NEAR, norms=LayerNorms(before_mlp="mlp_norm")),
    "window": replace(NEAR, attention=replace(NEAR.attention, window=None)),
    "rope": replace(NEAR, attention=replace(NEAR.attention, rope=FAR.attention.rope)),
    "activation": replace(NEAR, mlp=replace(NEAR.mlp, activation="silu")),
}
CAPPEDS = {
    "norms": replace(CAPPED, norms=AROUND),
    "scale": replace(CAPPED, attention=replace(CAPPED.attention, scale=None)),
    "softcap": replace(CAPPED, attention=replace(CAPPED.attention, softcap=None)),
}
OTHERS = {
    **{f"near_{name}": replace(MIXED, layers=(CAPPED, NEAR, FAR, near, CAPPED)) for name, near in NEARS.items()},
    **{f"capped_{name}": replace(MIXED, layers=(*MIXED.layers[:-1], capped)) for name, capped in CAPPEDS.items()},
    "embedding_scale": replace(MIXED, embedding_scale=1.0),
    "norm_offset": replace(MIXED, norm_offset=0.0),
    "logit_softcap": replace(MIXED, logit_softcap=None),
}


@pytest.mark.parametrize("other", OTHERS)
def test_changing_any_part_changes_logits(other):
    """Plain torch with another part gives other logits, so the test above would notice it."""
    expected, altered = plain_logits(MIXED), plain_logits(OTHERS[other])
    assert (altered - expected).norm() > 1e-3 * expected.norm()


def test_each_declared_tensor_is_loaded_once(tmp_path):
    """The bytes reported during a load are those of its tensors: each is loaded exactly once."""
    told = []
    load_model(
        FolderWeights(tmp_path), MIXED, create_kernels(CPU, "reference"), dtype="float32", device=CPU, max_model_len=64,
        load_format="dummy", progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told[-1] == (4 * MIXED.num_parameters,) * 2
    assert len(told) == len(MIXED.tensor_shapes())


def plain_logits(architecture):
    """Return logits of every position in float64, with the weights of `load_format="dummy"`."""
    shapes = MIXED.tensor_shapes() | architecture.tensor_shapes()
    source = RandomWeights(shapes, torch.float32, seed=3, norm_mean=1.0 - MIXED.norm_offset)
    weights = lambda name: source.tensor(f"{name}.weight").double()  # noqa: E731
    linear = lambda x, name, bias: F.linear(  # noqa: E731
        x, weights(name), source.tensor(f"{name}.bias").double() if bias else None
    )

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], weights(name) + architecture.norm_offset, architecture.rms_norm_eps)

    optional_norm = lambda x, prefix, name: x if name is None else norm(x, f"{prefix}.{name}")  # noqa: E731
    x = weights("model.embed_tokens")[IDS] * architecture.embedding_scale
    for index, layer in enumerate(architecture.layers):
        attention, norms, name = layer.attention, layer.norms, f"model.layers.{index}"
        hidden = optional_norm(x, name, norms.before_attention)
        q, k, v = (
            linear(hidden, f"{name}.self_attn.{each}_proj", attention.qkv_bias).unflatten(1, (-1, attention.head_dim))
            for each in "qkv"
        )
        if attention.qk_norm:
            q, k = norm(q, f"{name}.self_attn.q_norm"), norm(k, f"{name}.self_attn.k_norm")
        hidden = linear(attend(attention, q, k, v), f"{name}.self_attn.o_proj", attention.o_bias)
        x = x + optional_norm(hidden, name, norms.after_attention)
        hidden = optional_norm(x, name, norms.before_mlp)
        gate, up = (linear(hidden, f"{name}.mlp.{each}_proj", layer.mlp.bias) for each in ("gate", "up"))
        gate = F.silu(gate) if layer.mlp.activation == "silu" else F.gelu(gate, approximate="tanh")
        x = x + optional_norm(linear(gate * up, f"{name}.mlp.down_proj", layer.mlp.bias), name, norms.after_mlp)
    logits = F.linear(norm(x, "model.norm"), weights("lm_head"))
    return logits if architecture.logit_softcap is None else soft_cap(logits, architecture.logit_softcap)


def soft_cap(x, cap):
    return torch.tanh(x / cap) * cap


def attend(attention, q, k, v):
    positions = torch.arange(len(q)).double()
    angles = positions[:, None] * attention.rope.theta ** -(torch.arange(0, attention.head_dim, 2) / attention.head_dim)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    group = attention.num_heads // attention.num_kv_heads
    k, v = rotate(k).repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (attention.window or len(q)))
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    scores = torch.einsum("qhd,khd->hqk", rotate(q), k) * scale
    if attention.softcap is not None:
        scores = soft_cap(scores, attention.softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
