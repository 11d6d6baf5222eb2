"""The decoder that all families share, written against `Kernels`: what runs in every step of every request.

Names follow the checkpoints'. Each projection's weight is packed once, q, k, v and gate, up fused by rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch, Kernels, PackedLinear
    from octavo.models.architecture import Architecture


class KVCache(Protocol):
    """Where keys and values live."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (k_cache, v_cache) of a layer, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        ...


class Weights(Protocol):
    """Weights of a checkpoint, handed out by name and packed on their way."""

    def linear(self, *names: str, bias: bool = False) -> PackedLinear:
        """Return the linear layers `names` (without ".weight") fused by rows; see `Kernels.pack_linear`."""
        ...

    def norm(self, name: str) -> Tensor:
        """Return the weight of an RMS norm in the activations' dtype."""
        ...

    def skip(self, *names: str, bias: bool = False) -> None:
        """Tell that these linear layers come from elsewhere: they count as loaded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What layers are built from.

    dtype    of the activations
    cos_sin  float32 [max_model_len, head_dim], see `octavo.models.rope`
    """

    architecture: Architecture
    kernels: Kernels
    weights: Weights
    dtype: torch.dtype
    cos_sin: Tensor


class Attention:
    """Grouped-query attention (Ainslie et al. 2023) over the paged KV cache."""

    __slots__ = ("cos_sin", "eps", "head_dim", "kernels", "num_heads", "num_kv_heads", "o", "qkv", "scale", "window")

    def __init__(self, context: ModelContext, layer: int) -> None:
        architecture = context.architecture
        self.kernels = context.kernels
        self.cos_sin = context.cos_sin
        self.num_heads, self.num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        self.head_dim = architecture.head_dim
        self.scale = architecture.head_dim**-0.5
        self.window = architecture.sliding_window[layer]
        self.eps = architecture.rms_norm_eps
        name = f"model.layers.{layer}.self_attn"
        projections = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv = context.weights.linear(*projections, bias=architecture.qkv_bias)
        self.o = context.weights.linear(f"{name}.o_proj", bias=architecture.o_bias)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Write this step's keys and values into the cache; return its queries [num_tokens, num_heads, head_dim]."""
        qkv = self.kernels.linear(hidden, self.qkv)
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        q, k, v = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.prepare(q, k)
        self.kernels.rope_and_write_kv(q, k, v, self.cos_sin, batch, k_cache, v_cache)
        return q

    def attend(self, q: Tensor, batch: AttentionBatch, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Return [num_rows, hidden] of queries over the cache."""
        attended = self.kernels.paged_attention(q, k_cache, v_cache, batch, self.scale, self.window)
        return self.kernels.linear(attended, self.o)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys as they are rotated; families that normalize them do it here."""
        return q, k


class GatedMLP:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    __slots__ = ("down", "gate_up", "kernels")

    def __init__(self, context: ModelContext, layer: int) -> None:
        bias = context.architecture.mlp_bias
        name = f"model.layers.{layer}.mlp"
        self.kernels = context.kernels
        self.gate_up = context.weights.linear(f"{name}.gate_proj", f"{name}.up_proj", bias=bias)
        self.down = context.weights.linear(f"{name}.down_proj", bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [num_tokens, hidden] -> the same shape."""
        return self.kernels.linear(self.kernels.gated_linear(hidden, self.gate_up), self.down)


class DecoderLayer:
    """Attention and MLP, each behind a norm of its own."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, context: ModelContext, layer: int, attention: type[Attention]) -> None:
        self.input_norm = context.weights.norm(f"model.layers.{layer}.input_layernorm.weight")
        self.attention = attention(context, layer)
        self.post_attention_norm = context.weights.norm(f"model.layers.{layer}.post_attention_layernorm.weight")
        self.mlp = GatedMLP(context, layer)


class CausalLM:
    """A decoder-only transformer: token ids -> hidden states -> logits.

    Rows of a batch belong to any number of sequences; nothing is padded. `architecture` says the shapes, `dtype` is
    that of the activations and of the KV cache.
    """

    __slots__ = ("architecture", "cos_sin", "dtype", "embed_tokens", "kernels", "layers", "lm_head", "norms")

    def __init__(self, context: ModelContext, attention: type[Attention]) -> None:
        self.architecture = architecture = context.architecture
        self.kernels = context.kernels
        self.dtype = context.dtype
        self.cos_sin = context.cos_sin
        self.embed_tokens = context.weights.linear("model.embed_tokens")
        self.layers = [DecoderLayer(context, index, attention) for index in range(architecture.num_layers)]
        final_norm = context.weights.norm("model.norm.weight")
        # After layer i comes norms[i]: the next layer's input norm, or the final one.
        self.norms = [*(layer.input_norm for layer in self.layers[1:]), final_norm]
        tied = architecture.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else context.weights.linear("lm_head")

    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv_cache: KVCache) -> Tensor:
        """Return the final hidden states [num_outputs, hidden] of int64 [num_tokens]; writes their KV into the cache.

        Rows that are no outputs (`AttentionBatch.outputs`) end behind the last layer's keys and values.
        """
        kernels, eps = self.kernels, self.architecture.rms_norm_eps
        residual = kernels.embedding(token_ids, self.embed_tokens, self.dtype)
        hidden = kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        for index, layer in enumerate(self.layers):
            k_cache, v_cache = kv_cache.layer(index)
            q = layer.attention.write_kv(hidden, batch, k_cache, v_cache)
            if layer is self.layers[-1] and batch.outputs is not None:
                rows, batch = batch.outputs.rows, batch.outputs.attention
                q, residual = kernels.take_rows(q, rows), kernels.take_rows(residual, rows)
                if not len(rows):
                    return residual
            hidden = layer.attention.attend(q, batch, k_cache, v_cache)
            hidden = kernels.add_rms_norm(hidden, residual, layer.post_attention_norm, eps)
            hidden = layer.mlp.forward(hidden)
            hidden = kernels.add_rms_norm(hidden, residual, self.norms[index], eps)
        return hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return float32 [rows, vocab_size] of the rows that are sampled, in `out` if given."""
        return self.kernels.linear(hidden, self.lm_head, float32_out=True, out=out)
