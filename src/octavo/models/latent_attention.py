"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from octavo.models.declared import HeadPart, Linear, Norm
from octavo.models.kv_layout import LatentShape

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile
    from octavo.models.latent_layer import LatentAttention
    from octavo.models.layers import ModelContext
    from octavo.models.rope_config import RopeConfig

_MOST_VALUES = 576  # of a row of the cache; csrc/kv_rows.h
_ABSORBED = re.compile(r"\.(kv_b_proj|[kv]_b_proj\.\d+)\.weight$")


class LatentAttentionTensors(NamedTuple):
    """Latent attention's tensors. down: q_a or q, and kv_a. k_b, v_b: by head."""

    down: Linear
    q_norm: Norm | None
    q_b: Linear | None
    kv_norm: Norm
    k_b: tuple[Linear, ...]
    v_b: tuple[Linear, ...]
    o: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Attention with one latent and one rotated key per token for all heads.

    Weights are absorbed: the head's transposed key weight multiplies a query, the query attends to latents, and the
    head's value weight multiplies the result. This is done for every row, so its bits do not depend on its chunk.

    q_rank      size of the queries' latent; None if the hidden state gives queries
    kv_rank     size of the latent in the cache
    nope_dim    a head's dimensions without rotation
    rope_dim    dimensions with rotation
    value_dim   width of a head's values
    scale       factor of scores
    bias        of q_a, kv_a and o
    is_split    the checkpoint stores each head's key and value weights separately
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig
    scale: float
    bias: bool = False
    is_split: bool = False

    @classmethod
    def read(cls, config: ConfigFile, *, rope: RopeConfig, scale: float = 1.0) -> LatentAttentionConfig:
        """Read the sizes. scale: multiplies the scores in addition to the usual factor."""
        nope_dim, rope_dim = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
        kv_rank = config.count("kv_lora_rank")
        if rope_dim % 2:
            raise config.error("qk_rope_head_dim", f"rotary embeddings need an even number, not {rope_dim}")
        if kv_rank + rope_dim > _MOST_VALUES:
            raise config.error(
                "kv_lora_rank",
                f"octavo's kernels support at most {_MOST_VALUES} with qk_rope_head_dim, not {kv_rank + rope_dim}",
            )
        bias = config.flag("attention_bias", default=False)
        if bias and not config.has("q_lora_rank"):
            raise config.error("attention_bias", "octavo supports biases only with q_lora_rank")
        rope.check(config, rope_dim)
        return cls(
            num_heads=config.count("num_attention_heads"),
            q_rank=config.count("q_lora_rank") if config.has("q_lora_rank") else None,
            kv_rank=kv_rank,
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=config.count("v_head_dim"),
            rope=rope,
            scale=scale * (nope_dim + rope_dim) ** -0.5,
            bias=bias,
            is_split=config.flag("kv_b_is_split", default=False),
        )

    def within(self, max_model_len: int) -> LatentAttentionConfig:
        """See `RopeConfig.within`."""
        return replace(self, rope=self.rope.within(max_model_len))

    @property
    def num_kv_heads(self) -> int:
        """Always 1."""
        return 1

    @property
    def head_dim(self) -> int:
        """Values per row of the cache, and per query."""
        return self.kv_rank + self.rope_dim

    @property
    def rotary_width(self) -> int:
        """See `AttentionConfig`."""
        return self.rope_dim

    @property
    def window(self) -> None:
        """No window."""
        return

    @property
    def cache_spec(self) -> LatentShape:
        """See `TokenMixerConfig`."""
        return LatentShape(self.kv_rank, self.rope_dim)

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        heads = self.num_heads * (self.nope_dim + self.rope_dim + self.head_dim + self.kv_rank + self.value_dim)
        return heads + self.head_dim + 2 * (self.q_rank or 0)

    def tensors(self, name: str, hidden_size: int) -> LatentAttentionTensors:
        """See `TokenMixerConfig`."""
        name, q_rows = f"{name}.self_attn", self.num_heads * (self.nope_dim + self.rope_dim)
        kv_a = (f"{name}.kv_a_proj_with_mqa", self.head_dim)
        if self.q_rank is None:
            down, q_norm, q_b = ((f"{name}.q_proj", q_rows), kv_a), None, None
        else:
            down = ((f"{name}.q_a_proj", self.q_rank), kv_a)
            q_norm = Norm(f"{name}.q_a_layernorm", self.q_rank)
            q_b = Linear(((f"{name}.q_b_proj", q_rows),), self.q_rank)
        k_b, v_b = zip(*(self._head(name, head) for head in range(self.num_heads)), strict=True)
        return LatentAttentionTensors(
            down=Linear(down, hidden_size, self.bias),
            q_norm=q_norm,
            q_b=q_b,
            kv_norm=Norm(f"{name}.kv_a_layernorm", self.kv_rank),
            k_b=k_b,
            v_b=v_b,
            o=Linear(((f"{name}.o_proj", hidden_size),), self.num_heads * self.value_dim, self.bias),
        )

    def _head(self, name: str, head: int) -> tuple[Linear, Linear]:
        key, value = (f"{name}.k_b_proj.{head}", self.kv_rank), (f"{name}.v_b_proj.{head}", self.value_dim)
        if self.is_split:
            return Linear((key,), self.nope_dim), Linear((value,), self.kv_rank)
        per_head = self.nope_dim + self.value_dim
        first = head * per_head
        whole = Linear(((f"{name}.kv_b_proj", self.num_heads * per_head),), self.kv_rank)
        keys, values = (first, first + self.nope_dim), (first + self.nope_dim, first + per_head)
        return (
            HeadPart((key,), self.nope_dim, whole=whole, rows=keys, is_transposed=True),
            HeadPart((value,), self.kv_rank, whole=whole, rows=values),
        )

    def build(self, context: ModelContext, tensors: LatentAttentionTensors) -> LatentAttention:
        """See `TokenMixerConfig`."""
        from octavo.models.latent_layer import LatentAttention  # noqa: PLC0415

        return LatentAttention(context, self, tensors)


def is_absorbed(tensor_name: str) -> bool:
    """Return True for the weights of one head's keys or values."""
    return _ABSORBED.search(tensor_name) is not None
