"""Grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from octavo.errors import ModelError
from octavo.models.declared import Linear, Norm, Vector
from octavo.models.kv_layout import KVShape

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch
    from octavo.models.config_file import ConfigFile
    from octavo.models.layers import ModelContext
    from octavo.models.rope_config import RopeConfig

_MAX_HEAD_DIM = 512  # csrc/kv_rows.h


class AttentionTensors(NamedTuple):
    """Attention's tensors."""

    qkv: Linear
    o: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: Vector | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Attention of one layer (Ainslie et al. 2023).

    rope      None for no rotation
    window    tokens that a position attends to, including itself; None for all
    scale     factor of scores; None for head_dim ** -0.5
    softcap   see `soft_cap`
    sinks     see `Kernels.paged_attention`
    qk_norm   norm before rotation: "head" over each head, with one weight [head_dim], "width" over all heads
    is_fused  the checkpoint stores q, k and v in one tensor
    v_norm    norm of values, without a weight
    values_are_keys  keys before norm and rotation are values
    shared_layer  see `CacheSpec`; this layer then has only queries
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    is_fused: bool = False
    sinks: bool = False
    v_norm: bool = False
    values_are_keys: bool = False
    shared_layer: int | None = None

    @classmethod
    def read(
        cls,
        config: ConfigFile,
        *,
        rope: RopeConfig | None,
        default_head_dim: int | None = None,
        default_num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: Literal["head", "width"] | None = None,
        is_fused: bool = False,
        head_dim_key: str = "head_dim",
        kv_heads_key: str = "num_key_value_heads",
    ) -> AttentionConfig:
        """Read a layer without a window."""
        hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
        if default_num_kv_heads is None or kv_heads_key in config.values:
            default_num_kv_heads = num_heads  # null also means num_heads
        num_kv_heads = config.count(kv_heads_key, default_num_kv_heads)
        if num_heads % num_kv_heads:
            raise config.error(kv_heads_key, f"must divide num_attention_heads = {num_heads}")
        if default_head_dim is None and not config.has(head_dim_key) and hidden_size % num_heads:
            problem = f"must be a multiple of num_attention_heads = {num_heads} without head_dim"
            raise config.error("hidden_size", problem)
        head_dim = config.count(head_dim_key, default_head_dim or hidden_size // num_heads)
        if head_dim % 2:
            raise config.error(head_dim_key, f"rotary embeddings need an even head_dim, not {head_dim}")
        if head_dim > _MAX_HEAD_DIM:
            raise config.error(
                head_dim_key, f"octavo's kernels support a head_dim of at most {_MAX_HEAD_DIM}, not {head_dim}"
            )
        if rope is not None:
            rope.check(config, head_dim)
        return cls(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=rope,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            is_fused=is_fused,
        )

    def within(self, max_model_len: int) -> AttentionConfig:
        """See `RopeConfig.within`. Drops a window that covers `max_model_len`."""
        window, rope = self.window, self.rope
        return replace(
            self,
            rope=None if rope is None else rope.within(max_model_len),
            window=None if window is not None and window >= max_model_len else window,
        )

    @property
    def rotary_width(self) -> int:
        """Width of the heads that `rope` rotates."""
        return self.head_dim

    @property
    def cache_spec(self) -> KVShape:
        """See `TokenMixerConfig`."""
        return KVShape(self.num_kv_heads, self.head_dim, self.window, self.shared_layer)

    @property
    def width(self) -> int:
        """See `TokenMixerConfig`."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def is_shared(self) -> bool:
        """True if another layer computes keys and values."""
        return self.shared_layer is not None

    @property
    def num_projections(self) -> int:
        """Computed projections of q, k and v."""
        return 1 if self.is_shared else 2 if self.values_are_keys else 3

    def unused_tensors(self, name: str, hidden_size: int) -> tuple[Any, ...]:
        """Declare optional unread tensors."""
        if not self.is_shared:
            return ()
        own, whole = self.tensors(name, hidden_size), replace(self, shared_layer=None).tensors(name, hidden_size)
        unused = replace(whole.qkv, parts=whole.qkv.parts[len(own.qkv.parts) :])
        return unused, whole.k_norm

    def tensors(self, name: str, hidden_size: int) -> AttentionTensors:
        """See `TokenMixerConfig`."""
        name = f"{name}.self_attn"
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        apart = ((f"{name}.q_proj", q_rows), (f"{name}.k_proj", kv_rows), (f"{name}.v_proj", kv_rows))
        qkv = ((f"{name}.qkv_proj", self.width),) if self.is_fused else apart[: self.num_projections]
        q_size, k_size = (q_rows, kv_rows) if self.qk_norm == "width" else (self.head_dim, self.head_dim)
        return AttentionTensors(
            qkv=Linear(qkv, hidden_size, self.qkv_bias),
            o=Linear(((f"{name}.o_proj", hidden_size),), q_rows, self.o_bias),
            q_norm=None if self.qk_norm is None else Norm(f"{name}.q_norm", q_size),
            k_norm=None if self.qk_norm is None or self.is_shared else Norm(f"{name}.k_norm", k_size),
            sinks=Vector(f"{name}.sinks", self.num_heads) if self.sinks else None,
        )

    def build(self, context: ModelContext, tensors: AttentionTensors) -> Attention:
        """See `TokenMixerConfig`."""
        return Attention(context, self, tensors)


class Attention:
    """One layer's attention."""

    __slots__ = (
        "config", "cos_sin", "eps", "head_norms", "interleaved", "k_norm", "kernels", "o", "q_norm", "qkv",
        "query_scale", "scale", "sinks", "v_norm",
    )  # fmt: skip

    def __init__(self, context: ModelContext, config: AttentionConfig, tensors: AttentionTensors) -> None:
        if config.rope is not None and context.architecture.num_position_dims > 1:
            raise ModelError("the rotary embedding of attention takes positions of one dimension")
        self.config = config
        self.kernels = context.kernels
        self.cos_sin = context.cos_sin(config.rope, config.head_dim)
        self.query_scale = context.query_scale(config.rope)
        self.interleaved = config.rope is not None and config.rope.interleaved
        self.scale = config.head_dim**-0.5 if config.scale is None else config.scale
        self.eps = context.architecture.rms_norm_eps
        self.qkv = context.linear(tensors.qkv)
        self.o = context.linear(tensors.o)
        self.q_norm = context.optional_norm(tensors.q_norm)
        self.k_norm = context.optional_norm(tensors.k_norm)
        self.head_norms = (self.q_norm, self.k_norm) if config.qk_norm == "head" else (None, None)
        self.v_norm = context.ones(config.head_dim) if config.v_norm else None
        self.sinks = None if tensors.sinks is None else context.vector(tensors.sinks)

    def write_kv(self, hidden: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """Write this step's keys and values. Return the queries [num_tokens, num_heads, head_dim]."""
        k_cache, v_cache = cache
        q, k, v = self.project(hidden)
        q_norm, k_norm = self.head_norms
        return self.kernels.rope_and_write_kv(
            q, k, v, self.cos_sin, batch, k_cache, v_cache,
            interleaved=self.interleaved, query_scale=self.query_scale, q_norm=q_norm, k_norm=k_norm, eps=self.eps,
        )  # fmt: skip

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [num_tokens, heads, head_dim], before norms of single heads and rotation."""
        config, kernels = self.config, self.kernels
        qkv = kernels.linear(hidden, self.qkv)
        num_kv_heads = 0 if config.is_shared else config.num_kv_heads
        sizes = (config.num_heads, *(num_kv_heads,) * max(config.num_projections - 1, 1))
        q, k, *apart = qkv.view(qkv.shape[0], sum(sizes), config.head_dim).split_with_sizes(sizes, dim=1)
        v = apart[0] if apart else k
        if config.qk_norm == "width" and self.q_norm is not None:
            # slices, because a view of one token's heads has no stride to record
            q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            parts = qkv.split_with_sizes((q_size, kv_size, kv_size), dim=1)
            q = kernels.rms_norm(parts[0].unsqueeze(1), self.q_norm, self.eps).view(q.shape)
            if self.k_norm is not None:
                k = kernels.rms_norm(parts[1].unsqueeze(1), self.k_norm, self.eps).view(k.shape)
        if self.v_norm is not None and num_kv_heads:
            v = kernels.rms_norm(v, self.v_norm, self.eps)
        return q, k, v

    def attend(self, q: Tensor, batch: AttentionBatch, cache: tuple[Tensor, ...]) -> Tensor:
        """See `TokenMixer`."""
        config, (k_cache, v_cache) = self.config, cache
        attended = self.kernels.paged_attention(
            q, k_cache, v_cache, batch, self.scale, config.window, config.softcap, self.sinks
        )
        return self.kernels.linear(attended, self.o)
