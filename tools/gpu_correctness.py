"""Check operations on a device against plain torch; attention and rotary embedding against float64."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_states import states_against_torch

from octavo.kernels import SamplingRows
from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.operations.add_experts import add_experts
from octavo.kernels.operations.choose_experts import SIGMOID, choose_experts
from octavo.kernels.operations.rope_and_write_latents import rope_and_write_latents
from octavo.kernels.operations.sort_by_expert import sort_by_expert
from octavo.kernels.quantization import ROUNDED_KV_DTYPES, kv_scales, quantize_fp8, quantize_int4, quantize_int8
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton.e4m3 import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_device import AttentionCase, Check, Entries
    from torch import Tensor

    from octavo.kernels import AttentionBatch, Kernels

PLAIN = ReferenceKernels()


def correctness(check: Check, entries: Entries) -> None:
    """Measure for each operation its largest error in units of the last place, or if its bits equal plain torch's."""
    for dtype in check.sizes.dtypes:
        _values(check, entries, dtype)
        _rotation(check, entries, dtype)
        _normed_heads(check, entries, dtype)
        for case in check.sizes.attention:
            entries.add(case.name(dtype), partial(attention_error, check, check.kernels, dtype, case))
        entries.add(f"rope_and_write_latents {dtype}", partial(_latents, check, dtype))
        states_against_torch(check, entries, dtype, units_off)
    _integers(check, entries)
    _choices(check, entries)
    _experts(check, entries)


def units_off(actual: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the largest error in units of the last place of the largest result; infinity if a result is NaN."""
    unit = torch.finfo(actual.dtype).eps * float(exact.double().abs().max())
    off = float((actual.double() - exact.double()).abs().max()) / unit
    return {"units_off": off if off == off else float("inf")}  # noqa: PLR0124  a NaN differs from itself


def _values(check: Check, entries: Entries, dtype: torch.dtype) -> None:
    kernels = check.kernels
    x, weight = check.random(5, 530, dtype=dtype), check.random(96, 530, dtype=dtype, seed=1)
    norm, residual = check.random(530, dtype=dtype, seed=2), check.random(5, 530, dtype=dtype, seed=6)
    ids, order = torch.tensor([95, 0, 7, 7], device=check.device), torch.tensor([3, 0, 3], device=check.device)

    def added(some: Kernels) -> tuple[Tensor, Tensor]:
        total = residual.clone()
        return some.add_rms_norm(x, total, norm, 1e-6), total

    near: dict[str, Callable[[Kernels], Tensor]] = {
        "linear": lambda some: some.linear(x, some.pack_linear(weight)),
        "rms_norm": lambda some: some.rms_norm(x, norm, 1e-6),
        "add_rms_norm": lambda some: added(some)[0],
        "gate": lambda some: some.gate(x),
        "gate gelu_tanh": lambda some: some.gate(x, "gelu_tanh"),
    }
    equal: dict[str, Callable[[Kernels], Tensor]] = {
        "add_rms_norm's sum": lambda some: added(some)[1],
        "embedding": lambda some: some.embedding(ids, some.pack_linear(weight), dtype, 3.7),
        "take_rows": lambda some: some.take_rows(x, order),
    }
    for name, compute in near.items():
        entries.add(f"{name} {dtype}", lambda compute=compute: units_off(compute(kernels), compute(PLAIN)))  # type: ignore[misc]
    for name, compute in equal.items():
        entries.add(f"{name} {dtype}", lambda compute=compute: _equal(compute(kernels), compute(PLAIN)))  # type: ignore[misc]


def _rotation(check: Check, entries: Entries, dtype: torch.dtype) -> None:
    """Rotate and write 20 tokens of two sequences; compare with float64, and the whole cache with plain torch."""
    spans = [(0, 7), (30, 43)]
    angles = check.random(64, 32, dtype=torch.float32, seed=8) * 3
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)

    def left(some: Kernels, kv_dtype: torch.dtype, *, interleaved: bool) -> list[Tensor]:
        batch = check.batch(spans, check.tables(2, 43))
        fused = check.random(20, 12, 80, dtype=dtype)
        q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:]
        caches = check.caches(8, 2, 80, kv_dtype)
        some.rope_and_write_kv(q, k, v, cos_sin, batch, *caches, interleaved=interleaved)
        scales = [kv_scales(cache) for cache in caches if kv_dtype in ROUNDED_KV_DTYPES]
        return [fused, *map(as_bytes, caches), *scales]

    def against_float64() -> dict[str, float]:
        q = left(check.kernels, dtype, interleaved=False)[0][:, :8]
        exact = check.random(20, 12, 80, dtype=dtype)[:, :8].double()
        cosine, sine = cos_sin[check.batch(spans, check.tables(2, 43)).positions].double().unsqueeze(1).chunk(2, dim=2)
        first, second = exact[..., :32].clone(), exact[..., 32:64].clone()
        exact[..., :32], exact[..., 32:64] = first * cosine - second * sine, second * cosine + first * sine
        return units_off(q, exact)

    def against_torch(kv_dtype: torch.dtype, *, interleaved: bool) -> dict[str, bool]:
        pairs = zip(*(left(some, kv_dtype, interleaved=interleaved) for some in (check.kernels, PLAIN)), strict=True)
        return {"is_equal": all(torch.equal(ours, theirs) for ours, theirs in pairs)}

    entries.add(f"rope_and_write_kv {dtype}", against_float64)
    for kv_dtype in (dtype, *ROUNDED_KV_DTYPES):
        for interleaved in (False, True):
            name = f"rope_and_write_kv {dtype} to {kv_dtype}{' interleaved' * interleaved}"
            entries.add(name, partial(against_torch, kv_dtype, interleaved=interleaved))


def _normed_heads(check: Check, entries: Entries, dtype: torch.dtype) -> None:
    """Normalize heads in the launch that rotates them; compare with launches of rms_norm before it."""
    cos_sin = check.random(64, 64, dtype=torch.float32, seed=8)
    q_norm, k_norm = (check.random(80, dtype=dtype, seed=seed) for seed in (9, 10))

    def left(kv_dtype: torch.dtype, *, is_fused: bool) -> list[Tensor]:
        kernels, batch = check.kernels, check.batch([(0, 7), (30, 43)], check.tables(2, 43))
        fused, caches = check.random(20, 12, 80, dtype=dtype), check.caches(8, 2, 80, kv_dtype)
        q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:]
        if is_fused:
            q = kernels.rope_and_write_kv(q, k, v, cos_sin, batch, *caches, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
        else:
            q, k = kernels.rms_norm(q, q_norm, 1e-6), kernels.rms_norm(k, k_norm, 1e-6)
            kernels.rope_and_write_kv(q, k, v, cos_sin, batch, *caches)
        return [q, *map(as_bytes, caches), *(kv_scales(cache) for cache in caches if kv_dtype in ROUNDED_KV_DTYPES)]

    def against_rms_norm(kv_dtype: torch.dtype) -> dict[str, bool]:
        pairs = zip(left(kv_dtype, is_fused=True), left(kv_dtype, is_fused=False), strict=True)
        return {"is_equal": all(torch.equal(ours, theirs) for ours, theirs in pairs)}

    for kv_dtype in (dtype, *ROUNDED_KV_DTYPES):
        entries.add(f"rope_and_write_kv {dtype} with norms to {kv_dtype}", partial(against_rms_norm, kv_dtype))


def attention_error(check: Check, kernels: Kernels, dtype: torch.dtype, case: AttentionCase) -> dict[str, float]:
    """Compare a prompt's chunk, a decode and drafts, in one batch, with float64."""
    most = check.sizes.prompt
    spans = [(0, most // 2), (most - 1, most), (most // 2, most // 2 + 5)]
    tables = check.tables(len(spans), most)
    batch = check.batch(spans, tables)
    caches = case.views(*check.caches(tables.numel(), 2, case.head_dim, case.kv_dtype or dtype))
    q = check.random(len(batch.positions), 2 * case.group, case.head_dim, dtype=dtype)
    scale = float(case.head_dim**-0.5)
    sinks = check.random(q.shape[1], dtype=torch.float32) if case.has_sinks else None
    result = kernels.paged_attention(q, *caches, batch, scale, case.window, case.softcap, sinks)
    return units_off(result, dense_attention(q, *caches, batch, scale, case.window, case.softcap, sinks))


def dense_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention in float64, sequence by sequence, as `Kernels.paged_attention` defines it."""
    parts, starts = [], batch.query_start.tolist()
    for index, length in enumerate(batch.seq_lens.tolist()):
        rows, places = slice(starts[index], starts[index + 1]), torch.arange(length, device=q.device)
        block, offset = batch.block_tables[index][places // batch.block_size].long(), places % batch.block_size
        keys, value_dim = _wide(k_cache, block, offset, q.shape[1]), v_cache.shape[3]
        is_latent = value_dim < k_cache.shape[3]
        values = keys[..., :value_dim] if is_latent else _wide(v_cache, block, offset, q.shape[1])
        scores = q[rows].double().transpose(0, 1) @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        distance = batch.positions[rows].unsqueeze(1) - places
        seen = (distance >= 0) & (distance < (window or length))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        parts.append((weights @ values).transpose(0, 1).flatten(1))
    return torch.cat(parts)


def _wide(cache: Tensor, block: Tensor, offset: Tensor, num_heads: int) -> Tensor:
    """Return the content of a sequence's slots in float64, for each query head: [num_heads, length, head_dim]."""
    if cache.dtype not in ROUNDED_KV_DTYPES:
        values = cache[block, :, offset].double()
    else:
        values = cache.view(torch.int8)[block, :, offset].view(cache.dtype).double()
        values = values * kv_scales(cache)[block, :, offset].double().unsqueeze(-1)
    return values.repeat_interleave(num_heads // cache.shape[1], dim=1).transpose(0, 1)


def _latents(check: Check, dtype: torch.dtype) -> dict[str, Any]:
    """Compare rotated queries with plain torch in bits, and latents, whose norm torch sums in another order, nearly."""
    spans, angles = [(0, 7), (30, 43)], check.random(64, 16, dtype=torch.float32, seed=8) * 3
    cos_sin, fused = torch.cat([angles.cos(), angles.sin()], dim=1), check.random(20, 300, dtype=dtype)
    batch, q = check.batch(spans, check.tables(2, 43)), check.random(20, 3, 32, dtype=dtype, seed=1)

    def left(some: Kernels) -> tuple[Tensor, Tensor]:
        cache, queries = check.caches(8, 1, 168, dtype)[0].zero_(), q.new_zeros(20, 3, 168)
        weight = check.random(136, dtype=dtype, seed=2)
        rope_and_write_latents(
            some, q, fused[:, -168:], weight, 1e-6, cos_sin, True, batch.positions, batch.slot_mapping, cache, queries
        )
        return cache, queries

    (cache, queries), (plain_cache, plain_queries) = left(check.kernels), left(PLAIN)
    return units_off(cache, plain_cache) | _equal(queries, plain_queries)


def _experts(check: Check, entries: Entries) -> None:
    """Compare the choice, order and sum of experts with plain torch on the CPU."""
    logits, cpu = check.random(50, 160, dtype=torch.float32), torch.device("cpu")
    outputs, shared = (check.random(size, 70, dtype=torch.float32, seed=1).to(cpu) for size in (300, 50))

    def chosen(some: Kernels, device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.empty(50, 6, dtype=torch.int32, device=device)
        weights, (bias, factors) = ids.float(), check.random(2, 160, dtype=torch.float32, seed=2).to(device)
        choose_experts(some, logits.to(device), bias, factors, ids, weights, SIGMOID, 8, 3, False, 0.0, 2.5)
        return ids, weights

    ids, weights = chosen(PLAIN, cpu)

    def placed(some: Kernels, device: torch.device) -> list[Tensor]:
        own = ids.to(device)
        made = [own.new_empty(300, dtype=torch.int64), torch.empty_like(own), own.new_empty(161)]
        sort_by_expert(some, own, *made)
        return made

    places, gate = placed(PLAIN, cpu)[1], torch.zeros(50, 1)

    def added(some: Kernels, device: torch.device) -> Tensor:
        out = torch.empty(50, 70, device=device)
        add_experts(
            some, outputs.to(device), ids.to(device), places.to(device), weights.to(device), shared.to(device),
            gate.to(device), out, 160,
        )  # fmt: skip
        return out

    def choice() -> dict[str, Any]:
        own_ids, own_weights = chosen(check.kernels, check.device)
        return units_off(own_weights.to(cpu), weights) | _equal(own_ids, ids)

    def order() -> dict[str, bool]:
        pairs = zip(placed(check.kernels, check.device), placed(PLAIN, cpu), strict=True)
        return {"is_equal": all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)}

    entries.add("choose_experts", choice)
    entries.add("sort_by_expert", order)
    entries.add("add_experts", lambda: _equal(added(check.kernels, check.device), added(PLAIN, cpu)))


def _integers(check: Check, entries: Entries) -> None:
    x, weight = check.random(5, 544), check.random(96, 544, seed=1)

    def same(quantized: Any) -> dict[str, bool]:
        return _equal(*(some.linear(x, some.pack_linear(quantized)) for some in (check.kernels, PLAIN)))

    entries.add("linear int8", lambda: same(quantize_int8(weight)))
    entries.add("linear int4", lambda: same(quantize_int4(weight, 32)))
    for kind in BlockKind:
        entries.add(f"linear {kind.name}", partial(_blocks, check, [kind, BlockKind.Q8_0]))

    def expanded() -> dict[str, bool]:
        stored = quantize_fp8(weight)
        weights = (stored, stored.dequantize().to(x.dtype))
        return _equal(*(check.kernels.linear(x, check.kernels.pack_linear(each)) for each in weights))

    entries.add("linear fp8", expanded)

    def by_groups() -> dict[str, bool]:
        weights = check.random(3, 96, 544, seed=2)
        linears = [check.kernels.pack_linear(each) for each in weights]
        alone = [check.kernels.linear(x[:2], linears[0]), check.kernels.linear(x[2:5], linears[2])]
        start = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=check.device)
        return _equal(check.kernels.grouped_linear(x, check.kernels.pack_groups(linears), start), torch.cat(alone))

    entries.add("grouped_linear", by_groups)

    def gathered() -> dict[str, bool]:
        packed = check.kernels.pack_groups(
            [check.kernels.pack_linear(each) for each in check.random(3, 96, 544, seed=2)]
        )
        start = torch.tensor([0, 2, 2, 5], dtype=torch.int32, device=check.device)
        sources = torch.tensor([4, 0, 1, 1, 3], device=check.device)
        found = check.kernels.grouped_linear(x, packed, start, sources=sources)
        return _equal(found, check.kernels.grouped_linear(x[sources], packed, start))

    entries.add("grouped_linear gathered", gathered)

    def by_heads() -> dict[str, bool]:
        weights, heads = check.random(3, 96, 544, seed=2), check.random(5, 3, 544, seed=3)
        linears = [check.kernels.pack_linear(each) for each in weights]
        found = check.kernels.head_linear(heads, check.kernels.pack_groups(linears))
        alone = [check.kernels.linear(heads[:, i].contiguous(), each) for i, each in enumerate(linears)]
        return _equal(found, torch.stack(alone, dim=1))

    entries.add("head_linear", by_heads)


def _blocks(check: Check, kinds: list[BlockKind]) -> dict[str, bool]:
    """Compare products with a weight in blocks, for few and many rows, with the definition computed on the CPU."""
    width = 3 * max(kind.block_values for kind in kinds)
    cpu, generator = torch.device("cpu"), torch.Generator().manual_seed(3)
    weights = [random_blocks(generator, kind, 50, width) for kind in kinds]
    x, bias = check.random(40, width), check.random(100, seed=1)
    expected = PLAIN.linear(x.to(cpu), PLAIN.pack_linear(weights, bias.to(cpu)))
    packed = check.kernels.pack_linear([weight.to(check.device) for weight in weights], bias)
    found = torch.cat([check.kernels.linear(part, packed) for part in (x[:7], x[7:])])
    return _equal(found.to(cpu), expected)


def _choices(check: Check, entries: Entries) -> None:
    """Check that sampling, top logits and verification of drafts give the same bits as on the CPU."""
    logits, rows = check.sampling(8)

    def sample() -> dict[str, bool]:
        on_cpu = SamplingRows(*(getattr(rows, each.name).cpu() for each in fields(rows)))
        return _equal(check.kernels.sample(logits, rows), PLAIN.sample(logits.cpu(), on_cpu))

    def top_tokens() -> dict[str, bool]:
        ours, theirs = check.kernels.top_tokens(logits, 20), PLAIN.top_tokens(logits.cpu(), 20)
        return {"is_equal": all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))}

    def rejection_sample() -> dict[str, bool]:
        chosen = torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(9))
        drafts = torch.randint(0, 2, (40,), generator=torch.Generator().manual_seed(10))
        bounds = torch.tensor([0, 1, 5, 9, 12, 20, 21, 29, 37, 40], dtype=torch.int32)
        on_device = [each.to(check.device) for each in (chosen, drafts, bounds)]
        ours = check.kernels.rejection_sample(on_device[0], on_device[1], on_device[2], 7)
        pairs = zip(ours, PLAIN.rejection_sample(chosen, drafts, bounds, 7), strict=True)
        return {"is_equal": all(torch.equal(one.cpu(), other) for one, other in pairs)}

    entries.add("sample", sample)
    entries.add("top_tokens", top_tokens)
    entries.add("rejection_sample", rejection_sample)


def _equal(ours: Tensor, theirs: Tensor) -> dict[str, bool]:
    return {"is_equal": torch.equal(ours.cpu(), theirs.cpu())}
