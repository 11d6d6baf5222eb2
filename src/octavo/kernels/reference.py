"""Every operation in plain torch: the tests' reference and the fallback. A row's bits may depend on other rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from octavo.kernels.block_weight import BlockWeight
from octavo.kernels.interface import (
    GATE_LIMIT,
    GATE_SLOPE,
    AttentionBatch,
    KeptLinear,
    PackedGroups,
    PackedLinear,
    SamplingRows,
)
from octavo.kernels.noise import gumbel_noise
from octavo.kernels.operations.add import add
from octavo.kernels.quantization import (
    GROUP_MULTIPLE,
    ROUNDED_KV_DTYPES,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    kv_scales,
    linear_blocks,
    linear_fp8,
    linear_int4,
    linear_int8,
    quantize_int4,
    quantize_int8,
    round_kv_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from octavo.kernels.interface import Activation, DecodePlan, Kernels, WeightToPack
    from octavo.kernels.operation import Arguments, Operation

_PRODUCTS: dict[type, Callable[..., Tensor]] = {Int8Weight: linear_int8, Int4Weight: linear_int4, Fp8Weight: linear_fp8}
_SAMPLE_ROWS = 8
_SAMPLE_BYTES_PER_LOGIT = 128  # noise, sorted values, ids, float64 weights
_QUERY_CHUNK = 256
_WEIGHT_CHUNK = 16384


class ReferenceKernels:
    """Plain torch kernels."""

    name = identity = "reference"
    has_own_threads = False
    kv_cache_dtypes: tuple[str, ...] = ("int8", "fp8")
    has_fp8_weights = True
    multiplies_fp8 = False
    warm_up_rows: tuple[int, ...] = ()

    def take_compilations(self) -> list[str]:
        """Return nothing."""
        return []

    def compute(self, operation: Operation[*Arguments], *args: *Arguments) -> None:
        """See `Kernels`."""
        operation.reference(*args)

    def round_weight(self, weight: Tensor, bits: int, group_size: int = GROUP_MULTIPLE) -> QuantizedWeight:
        """See `Kernels`."""
        if not weight.is_floating_point():
            raise ValueError(f"a weight of {weight.dtype} cannot be quantized")
        return quantize_int8(weight) if bits == 8 else quantize_int4(weight, group_size)

    def pack_linear(self, weight: WeightToPack, bias: Tensor | None = None) -> PackedLinear:
        """See `Kernels`."""
        if isinstance(weight, Sequence):
            parts = [part for part in weight if isinstance(part, BlockWeight)]
            if parts:
                num_bytes = sum(part.rows.nbytes for part in parts) + (0 if bias is None else bias.nbytes)
                return PackedLinear(sum(part.shape[0] for part in parts), parts[0].in_features, parts, bias, num_bytes)
            weight = torch.cat([part for part in weight if isinstance(part, torch.Tensor)])
        num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        return PackedLinear(weight.shape[0], weight.shape[1], weight, bias, num_bytes)

    layout = None

    def keep_linear(self, packed: PackedLinear) -> tuple[KeptLinear, ...]:
        """Return no parts."""
        del packed
        return ()

    def restore_linear(self, kept: Sequence[KeptLinear]) -> PackedLinear:
        """Raise `NotImplementedError`."""
        raise NotImplementedError

    def allocate(self, num_bytes: int) -> Tensor:
        """See `Kernels`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty(self, *shape: int, like: Tensor) -> Tensor:
        """See `Kernels`."""
        return like.new_empty(shape)

    def linear(
        self, x: Tensor, packed: PackedLinear, *, float32_out: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """See `Kernels`."""
        if out is not None:
            return out.copy_(self.linear(x, packed, float32_out=float32_out))
        weight, bias = packed.storage, packed.bias
        out_dtype = torch.float32 if float32_out else x.dtype
        if isinstance(weight, list):
            products = torch.cat([linear_blocks(x, part) for part in weight], dim=1)
            return (products if bias is None else products + bias.float()).to(out_dtype)
        if type(weight) in _PRODUCTS:
            product: Tensor = _PRODUCTS[type(weight)](x, weight, bias, out_dtype)
            return product
        if weight.dtype == x.dtype == out_dtype and (bias is None or bias.dtype == x.dtype):
            return F.linear(x, weight, bias)
        wide = x.float()
        out = torch.cat([F.linear(wide, part.float()) for part in weight.split(_WEIGHT_CHUNK)], dim=1)
        return (out if bias is None else out + bias.float()).to(out_dtype)

    def gated_linear(self, x: Tensor, packed: PackedLinear, activation: Activation = "silu") -> Tensor:
        """See `Kernels`."""
        return self.gate(self.linear(x, packed), activation)

    def pack_groups(self, weights: Sequence[PackedLinear]) -> PackedGroups:
        """See `Kernels`."""
        return pack_groups(weights)

    def grouped_linear(
        self,
        x: Tensor,
        packed: PackedGroups,
        group_start: Tensor,
        *,
        sources: Tensor | None = None,
        float32_out: bool = False,
    ) -> Tensor:
        """See `Kernels`."""
        return grouped_linear(self, x, packed, group_start, sources=sources, float32_out=float32_out)

    def head_linear(self, x: Tensor, packed: PackedGroups, out: Tensor | None = None) -> Tensor:
        """See `Kernels`."""
        return head_linear(self, x, packed, out)

    def embedding(self, token_ids: Tensor, packed: PackedLinear, dtype: Any, scale: float = 1.0) -> Tensor:
        """See `Kernels`."""
        weight = packed.storage
        if isinstance(weight, list):
            (vocabulary,) = weight
            rows: Tensor = vocabulary.select_rows(token_ids).dequantize()
        elif isinstance(weight, Int4Weight):
            assert weight.order is None
            whole, units = weight.rows(token_ids).whole_values()
            rows = whole.float() * units.unsqueeze(1)
        elif isinstance(weight, Int8Weight):
            rows = weight.rows(token_ids).dequantize()
        else:
            rows = F.embedding(token_ids, weight)
        return (rows if scale == 1.0 else rows.float() * scale).to(dtype)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """See `Kernels`."""
        return x[rows]

    def captures_graphs(self, experts: Iterable[PackedGroups]) -> bool:
        """Return False."""
        del experts
        return False

    def record_forward(
        self,
        forward: Callable[[Tensor, AttentionBatch], Tensor],
        token_ids: Tensor,
        batch: AttentionBatch,
        max_tokens: int,
        decodes: DecodePlan | None = None,
    ) -> tuple[Tensor, Callable[[Tensor, AttentionBatch], Tensor] | None]:
        """Record nothing."""
        del max_tokens, decodes
        return forward(token_ids, batch), None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels`."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        """See `Kernels`."""
        add(self, x, residual, scale)
        return self.rms_norm(residual, weight, eps)

    def rope_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        interleaved: bool = False,
        query_scale: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """See `Kernels`."""
        q = q if q_norm is None else self.rms_norm(q, q_norm, eps)
        k = k if k_norm is None else self.rms_norm(k, k_norm, eps)
        turns = cos_sin[batch.positions].unsqueeze(1)  # [num_tokens, 1, rotary_dim]
        q.copy_(rotate(q, turns, interleaved=interleaved))
        if query_scale is not None:
            q.copy_(q.float() * query_scale[batch.positions, None, None])
        if not k.shape[1]:
            return q
        is_finite = v.isfinite().all(dim=-1, keepdim=True)
        write_rows(
            k_cache, batch.slot_mapping, torch.where(is_finite, rotate(k, turns, interleaved=interleaved), torch.nan)
        )
        write_rows(v_cache, batch.slot_mapping, torch.where(is_finite, v, 0.0))
        return q

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Kernels`."""
        out = q.new_empty(q.shape[0], q.shape[1] * v_cache.shape[3])
        query_start = batch.query_start.tolist()
        for i, seq_len in enumerate(batch.seq_lens.tolist()):
            blocks = batch.block_tables[i, : -(-seq_len // batch.block_size)].long()
            start = 0 if window is None else max(0, int(batch.positions[query_start[i]]) - window + 1)
            num_released = start // batch.block_size
            blocks[:num_released] = blocks[num_released]
            keys = _read_blocks(k_cache, blocks)[:seq_len]
            are_keys = v_cache.data_ptr() == k_cache.data_ptr()  # values are the first dimensions of keys
            values = keys[..., : v_cache.shape[3]].nan_to_num() if are_keys else _read_blocks(v_cache, blocks)[:seq_len]
            keys[:start] = values[:start] = 0
            for first in range(query_start[i], query_start[i + 1], _QUERY_CHUNK):
                rows = slice(first, min(first + _QUERY_CHUNK, query_start[i + 1]))
                attended = _attend(q[rows].float(), keys, values, batch.positions[rows], scale, window, softcap, sinks)
                out[rows] = attended.to(q.dtype)
        return out

    def gate(self, gate_up: Tensor, activation: Activation = "silu", *, group_start: Tensor | None = None) -> Tensor:
        """See `Kernels`. Computes all rows."""
        del group_start
        gate, up = gate_up.float().chunk(2, dim=-1)
        if activation == "clamped_silu":
            gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT) + 1
            activated = gate * torch.sigmoid(GATE_SLOPE * gate)
        else:
            activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (activated * up).to(gate_up.dtype)

    def scratch_bytes(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int, max_seq_len: int, max_tokens: int
    ) -> int:
        """See `Kernels`."""
        del max_tokens
        attention = max_seq_len * (4 * num_kv_heads * head_dim * 4 + _QUERY_CHUNK * num_heads * 13)
        return max(attention, _SAMPLE_ROWS * vocab_size * _SAMPLE_BYTES_PER_LOGIT)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """See `Kernels`."""
        parts = (slice(i, i + _SAMPLE_ROWS) for i in range(0, logits.shape[0], _SAMPLE_ROWS))
        return torch.cat([_sample(logits[part], rows.take(part)) for part in parts])

    def rejection_sample(
        self, target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        first, num_rows = cu_num_logits[:-1].long(), cu_num_logits.diff()
        if bool(((num_rows < 1) | (num_rows > num_speculative_steps + 1)).any()):
            raise IndexError(f"a request has no row of logits, or more than {num_speculative_steps} drafts")
        steps = torch.arange(num_speculative_steps + 1, device=target_sampled.device)
        rows = (first[:, None] + steps).clamp(max=target_sampled.shape[0] - 1)
        is_accepted = F.pad(target_sampled[:-1] == draft_ids[1:], (0, 1))[rows] & (steps < num_rows[:, None] - 1)
        num_sampled = 1 + is_accepted.int().cumprod(dim=1).sum(dim=1)
        sampled = torch.where(steps < num_sampled[:, None], target_sampled[rows], -1)
        return sampled, num_sampled.int()

    def top_tokens(self, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        largest, ids = values.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(dim=1, descending=True, stable=True)
        return largest[:, :k], ids[:, :k]


def _sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    temperature, seed, position, sample_index = (
        column.to(logits.device) for column in (rows.temperature, rows.seed, rows.position, rows.sample_index)
    )
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    noise = gumbel_noise(seed, position, sample_index, logits.shape[1])
    keys = torch.where(kept_tokens(scaled, rows), scaled + noise, -torch.inf)
    keys = torch.where(greedy.unsqueeze(1), logits, keys)
    largest = keys.amax(dim=1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where((keys == largest) & (keys > -torch.inf), ids, logits.shape[1]).amin(dim=1)
    nothing = logits.isnan().any(dim=1) | (first == logits.shape[1])
    return torch.where(nothing, -1, first)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Kernels`. Computed in float32, rounded once."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rotate(x: Tensor, turns: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first rotary_dim dimensions of x. turns [..., rotary_dim]: cosines, then sines."""
    turning, rest = x.split_with_sizes([turns.shape[-1], x.shape[-1] - turns.shape[-1]], dim=-1)
    half = turns.shape[-1] // 2
    pairs = turning.float().reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    first, second = pairs.unbind(-1 if interleaved else -2)
    cosine, sine = turns.chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat([torch.stack(turned, dim=-1 if interleaved else -2).flatten(-2).to(x.dtype), rest], dim=-1)


def write_rows(cache: Tensor, slot_mapping: Tensor, rows: Tensor) -> None:
    """Write rows [num_tokens, num_heads, width] to a cache; round for int8 and fp8."""
    block_size = cache.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    if cache.dtype in ROUNDED_KV_DTYPES:
        values, scales = round_kv_rows(rows.flatten(0, 1), cache.dtype)
        cache.view(torch.int8)[block, :, offset] = values.view(torch.int8).view(rows.shape)
        kv_scales(cache)[block, :, offset] = scales.view(rows.shape[:2])
    else:
        cache[block, :, offset] = rows


def _read_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return float32 [positions, num_kv_heads, head_dim]."""
    if cache.dtype in ROUNDED_KV_DTYPES:
        values = cache.view(torch.int8)[blocks].view(cache.dtype)  # not every device indexes fp8
        read = values.float() * kv_scales(cache)[blocks].unsqueeze(-1)
    else:
        read = cache[blocks].float()
    return read.transpose(1, 2).flatten(0, 1)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return float32 [n, num_heads * value_dim]."""
    num_rows, num_heads, head_dim = q.shape
    grouped = q.view(num_rows, keys.shape[1], num_heads // keys.shape[1], head_dim)
    scores = torch.einsum("nkgd,skd->nkgs", grouped, keys) * scale
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    kv_positions = torch.arange(keys.shape[0], device=q.device)
    seen = kv_positions <= positions.unsqueeze(1)
    if window is not None:
        seen &= kv_positions > positions.unsqueeze(1) - window
    scores.masked_fill_(~seen[:, None, None, :], -torch.inf)
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        column = sinks.view(1, *grouped.shape[1:3], 1).expand(num_rows, -1, -1, -1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    return torch.einsum("nkgs,skd->nkgd", weights, values).reshape(num_rows, -1)


def kept_tokens(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """Return a mask of the tokens that min_p, then top_k, then top_p keep. scaled: logits / temperature [n, vocab].

    min_p keeps value >= max + ln(min_p). top_k and top_p keep a prefix of the order (value descending, id ascending),
    top_p the shortest one of probability top_p or more. Probabilities are added in float64, in this order.
    """
    top_k, top_p, min_p = (column.to(scaled.device) for column in (rows.top_k, rows.top_p, rows.min_p))
    if not bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        return torch.ones_like(scaled, dtype=torch.bool)
    values, ids = scaled.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(values.shape[1], device=values.device)
    limit = values[:, :1] + min_p.double().log().float().unsqueeze(1)
    kept = (values >= limit) | (min_p == 0).unsqueeze(1)
    kept &= (rank < top_k.unsqueeze(1)) | (top_k == 0).unsqueeze(1)
    largest = values[:, :1].double()
    weights = torch.where(values == largest, 1.0, (values.double() - largest).exp()).where(kept, 0.0)
    before = weights.cumsum(dim=1) - weights
    target = top_p.double().unsqueeze(1) * weights.sum(dim=1, keepdim=True)
    kept &= (before < target) | (top_p >= 1).unsqueeze(1)
    return torch.zeros_like(kept).scatter_(1, ids, kept)


def pack_groups(weights: Sequence[PackedLinear]) -> PackedGroups:
    """Group without copies."""
    first = weights[0]
    num_bytes = sum(each.num_bytes for each in weights)
    return PackedGroups(len(weights), first.out_features, first.in_features, list(weights), num_bytes)


def grouped_linear(
    kernels: Kernels,
    x: Tensor,
    packed: PackedGroups,
    group_start: Tensor,
    *,
    sources: Tensor | None,
    float32_out: bool,
) -> Tensor:
    """See `Kernels`. Reads group_start on the host."""
    x = x if sources is None else x[sources]
    out = x.new_empty(len(x), packed.out_features, dtype=torch.float32 if float32_out else x.dtype)
    for weight, (first, end) in zip(packed.storage, pairwise(group_start.tolist()), strict=True):
        if first < end:
            out[first:end] = kernels.linear(x[first:end], weight, float32_out=float32_out)
    return out


def head_linear(kernels: Kernels, x: Tensor, packed: PackedGroups, out: Tensor | None) -> Tensor:
    """See `Kernels.head_linear`."""
    if out is None:
        out = x.new_empty(*x.shape[:2], packed.out_features)
    for head, weight in enumerate(packed.storage):
        out[:, head] = kernels.linear(x[:, head].contiguous(), weight)
    return out
