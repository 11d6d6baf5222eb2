"""rms_norm, add_rms_norm, add, gate, soft_cap, log_softmax, rope_and_write_kv."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch
from paged_batches import floats, paged_batch

from octavo.kernels.operations.add import add
from octavo.kernels.operations.divide import divide
from octavo.kernels.operations.log_softmax import log_softmax
from octavo.kernels.operations.soft_cap import soft_cap
from octavo.kernels.quantization import quantize_int4, quantize_int8
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.worker.kv_cache import PagedKVCache

FLOATS = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (5, 123), (7, 1120), (130, 48)]  # wider than one program's block, and more rows than it takes


@pytest.mark.parametrize("rows", [[], [0], [6], [1, 2, 5], [*range(7)], [3] * 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take_rows_equals_torch_indexing(kernels, generator, dtype, rows):
    """Of matrices, and of heads that are views of a wider tensor."""
    x = torch.randn(7, 5, 16, generator=generator).to(dtype)
    rows = torch.tensor(rows, dtype=torch.int64)
    for part in (x.view(7, 80), x, x[:, :3], x[:, 2:]):
        taken = kernels.take_rows(part, rows)
        assert torch.equal(taken, part[rows])
        assert taken.is_contiguous()


@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_is_as_exact_as_torch(kernels, generator, dtype, weight_dtype, shape):
    x = (torch.randn(shape, generator=generator) * 5).to(dtype)
    x[0] *= 1e-4  # smaller than the effect of eps
    weight = torch.randn(shape[-1], generator=generator).to(weight_dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    plain = F.rms_norm(x.float(), shape[-1:], weight.float(), 1e-6).to(dtype)
    assert_as_exact_as_torch(kernels.rms_norm(x, weight, 1e-6), plain, expected)


def test_rms_norm_accepts_strided_heads(kernels, generator):
    x = torch.randn(3, 4, 48, generator=generator)
    weight = torch.randn(48, generator=generator)
    flat = kernels.rms_norm(x.view(12, 48), weight, 1e-6)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), flat.view(3, 4, 48))
    parts = torch.cat([x, x + 1], dim=1)  # heads of a fused projection: tokens are further apart
    assert torch.equal(kernels.rms_norm(parts[:, :4], weight, 1e-6), flat.view(3, 4, 48))
    assert kernels.rms_norm(parts[:0, :4], weight, 1e-6).shape == (0, 4, 48)
    wide = torch.randn(4 * 48, generator=generator)
    together = kernels.rms_norm(x.view(3, 192), wide, 1e-6)
    assert torch.equal(kernels.rms_norm(parts[:, :4].view(3, 1, 192), wide, 1e-6), together.view(3, 1, 192))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_normalizes_rounded_sum(kernels, generator, dtype, shape):
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    total = x + residual
    normed = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_scales_input_in_float32(kernels, generator, dtype, shape):
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.ones(shape[-1])
    total = (residual.float() + x.float() * 0.22).to(dtype)
    normed = kernels.add_rms_norm(x, residual, weight, 1e-5, 0.22)
    assert torch.equal(residual, total)
    assert torch.equal(normed, kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_divide_equals_torch_division(kernels, generator, shape):
    x = torch.randn(shape, generator=generator)
    expected = x / torch.full_like(x, 0.3)  # for a Python number torch may multiply instead
    divide(kernels, x, 0.3)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_gate_is_as_exact_as_torch(kernels, generator, dtype, shape):
    rows, size = shape
    gate_up = (torch.randn(rows, 2 * size, generator=generator) * 20).to(dtype)
    gate_up[0, 0] = -200.0
    gate, up = gate_up.double().chunk(2, dim=1)
    plain_gate, plain_up = gate_up.chunk(2, dim=1)
    expected = F.silu(gate) * up
    assert_as_exact_as_torch(kernels.gate(gate_up), F.silu(plain_gate) * plain_up, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clamped_gate_is_as_exact_as_torch(kernels, generator, dtype, shape):
    """gpt-oss: gates are bounded from above only, `up` on both sides. NaN stays NaN."""
    rows, size = shape
    gate_up = (torch.randn(rows, 2 * size, generator=generator) * 8).to(dtype)
    gate_up[0, 0], gate_up[0, -1] = -200.0, torch.nan
    gate, up = gate_up.double().chunk(2, dim=1)
    plain_gate, plain_up = gate_up.chunk(2, dim=1)

    def compute(gate, up):
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    assert_as_exact_as_torch(kernels.gate(gate_up, "clamped_silu"), compute(plain_gate, plain_up), compute(gate, up))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_gate_worked_by_hand(kernels, activation):
    """gpt-oss with gate 9 and up -8: 7 * sigmoid(1.702 * 7) * (-7 + 1)."""
    expected = {"silu": -71.99115, "gelu_tanh": -72.0, "clamped_silu": -41.99972}[activation]
    found = kernels.gate(torch.tensor([[9.0, -8.0]]), activation)
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_gate_is_as_exact_as_torch(kernels, generator, dtype, shape):
    rows, size = shape
    gate_up = (torch.randn(rows, 2 * size, generator=generator) * 3).to(dtype)
    gate_up[0, 0] = -200.0
    gate, up = gate_up.double().chunk(2, dim=1)
    plain_gate, plain_up = gate_up.chunk(2, dim=1)
    expected = F.gelu(gate, approximate="tanh") * up
    plain = F.gelu(plain_gate, approximate="tanh") * plain_up
    assert_as_exact_as_torch(kernels.gate(gate_up, "gelu_tanh"), plain, expected)
    assert torch.equal(kernels.gate(gate_up[-1:], "gelu_tanh"), kernels.gate(gate_up, "gelu_tanh")[-1:])


GROUPS = [[0, 2, 7], [2, 2, 4, 5], [6, 7], [3, 3], [7, 7, 7]]


@pytest.mark.parametrize("starts", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gate_of_groups_equals_gate_of_all_rows(kernels, generator, dtype, starts):
    gate_up = torch.randn(7, 2 * 1120, generator=generator).to(dtype)
    found = kernels.gate(gate_up, group_start=torch.tensor(starts, dtype=torch.int32))
    rows = slice(starts[0], starts[-1])
    assert found.shape == (7, 1120)
    assert torch.equal(found[rows], kernels.gate(gate_up)[rows])


@pytest.mark.parametrize("starts", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_compiled_gate_does_not_write_rows_of_no_group(compiled, generator, monkeypatch, dtype, starts):
    gate_up = torch.randn(7, 2 * 1120, generator=generator).to(dtype)
    rows, expected = slice(starts[0], starts[-1]), torch.full((7, 1120), 7.0, dtype=dtype)
    expected[rows] = compiled.gate(gate_up)[rows]
    monkeypatch.setattr(compiled, "_empty", lambda *shape, dtype: torch.full(shape, 7.0, dtype=dtype))
    assert torch.equal(compiled.gate(gate_up, group_start=torch.tensor(starts, dtype=torch.int32)), expected)


def test_compiled_gate_refuses_groups_of_another_dtype(compiled):
    with pytest.raises(ValueError, match="starts has another dtype"):
        compiled.gate(torch.zeros(9, 40), group_start=torch.tensor([2, 6]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rounds_once(kernels, generator, dtype, shape):
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    expected, before = x + residual, x.clone()
    add(kernels, x, residual, 1.0)
    assert torch.equal(residual, expected)
    add(kernels, x, residual, 0.22)
    assert torch.equal(residual, (expected.float() + x.float() * 0.22).to(dtype))
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap_is_as_exact_as_torch(kernels, generator, cap, shape):
    x = torch.randn(shape, generator=generator) * 20 * torch.logspace(-30, 1, shape[1])
    expected, plain = torch.tanh(x.double() / cap) * cap, torch.tanh(x / cap) * cap
    alone, capped = x[-1:].clone(), x.clone()
    soft_cap(kernels, capped, cap)
    assert_as_exact_as_torch(capped, plain, expected)
    assert capped.abs().max() <= cap
    soft_cap(kernels, alone, cap)
    assert torch.equal(alone, capped[-1:])


@pytest.mark.parametrize("vocab", [5, 1123, 9001])
def test_log_softmax_is_as_exact_as_torch(kernels, generator, vocab):
    """A row has the same bits at each place of a batch. Rows of other lengths than multiples of 16 bytes are aligned
    differently.
    """
    logits = torch.randn(6, vocab, generator=generator) * torch.tensor([1, 30, 1e-3, 5, 5, 2000])[:, None]
    logits[3, 3:], logits[4, 2] = -torch.inf, torch.nan
    exact, plain, whole = logits.double().log_softmax(dim=-1), logits.log_softmax(dim=-1), logits.clone()
    log_softmax(kernels, whole)
    assert_as_exact_as_torch(*(each[[0, 1, 2, 5]] for each in (whole, plain, exact)))
    assert_as_exact_as_torch(*(each[3:4, :3] for each in (whole, plain, exact)))
    assert (whole[3, 3:] == -torch.inf).all()
    assert whole[4].isnan().all()
    for row in range(6):
        copies = logits[[row] * 5]
        log_softmax(kernels, copies)
        assert torch.equal(copies.nan_to_num(), whole[[row] * 5].nan_to_num())


def test_tanh_error_is_within_two_ulps(compiled):
    x = torch.cat(
        [torch.linspace(-12, 12, 200001), torch.logspace(-38, 38, 1001), torch.tensor([torch.inf, torch.nan])]
    )
    capped, expected = x.clone(), x.double().tanh()
    soft_cap(compiled, capped, 1.0)
    error = (capped.double() - expected).abs()
    assert (error[:-1] <= 2 * torch.finfo(torch.float32).eps * expected[:-1].abs()).all()
    assert capped[-1].isnan()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rounded", [torch.clone, quantize_int8, quantize_int4], ids=["float", "int8", "int4"])
def test_embeddings_are_scaled_and_rounded_once(kernels, generator, dtype, rounded):
    weight = kernels.pack_linear(rounded(torch.randn(70, 96, generator=generator)))
    ids = torch.tensor([0, 69, 33, 33])
    plain = kernels.embedding(ids, weight, torch.float32)
    assert torch.equal(kernels.embedding(ids, weight, dtype, 25.25), (plain * 25.25).to(dtype))


def test_exponential_error_is_within_two_ulps(compiled):
    x = torch.cat([torch.linspace(-87, 88, 200001), torch.zeros(1)])
    gate_up = torch.stack([-x, torch.ones_like(x)], dim=1)  # silu(-x) = -x / (1 + e^x)
    expected = F.silu(-x.double())
    error = (compiled.gate(gate_up)[:, 0].double() - expected).abs()
    assert (error <= 2.5 * torch.finfo(torch.float32).eps * expected.abs()).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_and_gate_rows_are_independent_of_batch_rows(compiled, single_threaded, generator, dtype):
    x = torch.randn(130, 897, generator=generator).to(dtype)
    weight = torch.randn(897, generator=generator)
    gate_up = torch.randn(130, 2 * 77, generator=generator).to(dtype)
    norm, gate = compiled.rms_norm(x, weight, 1e-6), compiled.gate(gate_up)
    for i in (0, 1, 64, 129):
        assert torch.equal(compiled.rms_norm(x[i : i + 1], weight, 1e-6), norm[i : i + 1])
        assert torch.equal(compiled.gate(gate_up[i : i + 1]), gate[i : i + 1])
    if compiled.isa == single_threaded.isa:
        assert torch.equal(single_threaded.rms_norm(x, weight, 1e-6), norm)
        assert torch.equal(single_threaded.gate(gate_up), gate)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 48, 80, 18])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_rope_and_write_kv_is_exact_and_writes_only_mapped_slots(kernels, generator, dtype, head_dim, block_size):
    batch, k_cache, v_cache = paged_batch([(9, 9), (30, 3), (1, 1)], block_size, 2, head_dim, dtype, generator)
    rows = len(batch.positions)
    projection = torch.randn(rows, 8 * head_dim, generator=generator).to(dtype)
    before = projection.clone()
    q, k, v = (
        part.unflatten(1, (-1, head_dim)) for part in projection.split([4 * head_dim, 2 * head_dim, 2 * head_dim], 1)
    )
    angles = torch.rand(40, head_dim // 2, generator=generator) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    kernels.rope_and_write_kv(q, k, v, cos_sin, batch, k_cache, v_cache)

    old_q, old_k, _ = before.split([4 * head_dim, 2 * head_dim, 2 * head_dim], 1)
    cosine, sine = cos_sin[batch.positions].double().unsqueeze(1).chunk(2, dim=-1)

    def rotated(x, kind):
        first, second = x.unflatten(1, (-1, head_dim)).to(kind).chunk(2, dim=-1)
        turned = [first * cosine.to(kind) - second * sine.to(kind), second * cosine.to(kind) + first * sine.to(kind)]
        return torch.cat(turned, dim=-1)

    block, offset = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    for result, x in ((q, old_q), (k_cache[block, :, offset], old_k)):
        assert_as_exact_as_torch(result, rotated(x, torch.float32).to(dtype), rotated(x, torch.float64))
    assert torch.equal(v_cache[block, :, offset], v)
    assert torch.equal(projection[:, 4 * head_dim :], before[:, 4 * head_dim :])  # only the written k is rotated
    for cache, old in ((k_cache, k_before), (v_cache, v_before)):  # all other slots are unchanged
        cache[block, :, offset] = old[block, :, offset]
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_value_that_is_not_finite_is_written_as_zeros_with_key_of_nan(kernels, generator, value, dtype, kv_dtype):
    layout, batch = KVLayout((KVShape(2, 80),)), paged_batch([(40, 40)], 16, 2, 80, dtype, generator)[0]
    q, k, v = torch.randn(40, 6, 80, generator=generator).to(dtype).split([2, 2, 2], 1)
    cos_sin = torch.rand(40, 40, generator=generator)

    def written(values):
        cache = PagedKVCache(
            layout, num_blocks=[8], block_size=16, dtype=kv_dtype or dtype, device=torch.device("cpu")
        ).layer(0)
        kernels.rope_and_write_kv(q.clone(), k, values, cos_sin, batch, *cache)
        block, offset = batch.slot_mapping // 16, batch.slot_mapping % 16
        return [(floats(each) if kv_dtype else each)[block, :, offset] for each in cache]

    (keys, values), broken = written(v), v.clone()
    broken[3, 1, 79], broken[17, 0, 5] = value, value
    for at in ((3, 1), (17, 0)):
        keys[at], values[at] = torch.nan, 0
    found = written(broken)
    assert torch.equal(found[0].nan_to_num(9), keys.nan_to_num(9))
    assert torch.equal(found[1], values)


def turned_part(x, cos_sin, *, interleaved):
    """Rotate the first dimensions of float64 heads [tokens, heads, size], as many as cos_sin [tokens, rotary_dim]
    has.
    """
    rotary_dim = cos_sin.shape[1]
    cosine, sine = cos_sin.double().unsqueeze(1).chunk(2, dim=-1)
    out = x.clone()
    if interleaved:
        first, second = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
        out[..., 0:rotary_dim:2], out[..., 1:rotary_dim:2] = (
            first * cosine - second * sine,
            second * cosine + first * sine,
        )
    else:
        first, second = x[..., :rotary_dim].chunk(2, dim=-1)
        turned = [first * cosine - second * sine, second * cosine + first * sine]
        out[..., :rotary_dim] = torch.cat(turned, dim=-1)
    return out


def test_rope_without_kv_heads_rotates_only_queries(kernels, generator):
    """As in layers that share the KV of an earlier layer."""
    batch, k_cache, v_cache = paged_batch([(9, 9), (30, 3), (1, 1)], 5, 2, 24, torch.bfloat16, generator)
    rows = torch.randn(len(batch.positions), 8, 24, generator=generator).bfloat16()
    turns = torch.randn(40, 24, generator=generator)
    before = [cache.nan_to_num() for cache in (k_cache, v_cache)]
    results = []
    for num_kv_heads in (0, 2):
        q, k, v = rows.clone().split([8 - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        kernels.rope_and_write_kv(q, k, v, turns, batch, k_cache, v_cache)
        results.append(q)
        if num_kv_heads == 0:
            assert all(map(torch.equal, (k_cache.nan_to_num(), v_cache.nan_to_num()), before))
    assert torch.equal(results[0][:, :4], results[1])
    assert not torch.equal(results[0], rows)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 40), (128, 96), (18, 6), (34, 34), (16, 0)])
def test_partial_rope_rotates_only_rotary_dimensions(
    kernels, generator, dtype, scaled, interleaved, head_dim, rotary_dim
):
    """Halves or neighbours are rotated, and the rest of the head is unchanged; queries are scaled after that."""
    batch, k_cache, v_cache = paged_batch([(9, 9), (30, 3), (1, 1)], 5, 2, head_dim, dtype, generator)
    rows = len(batch.positions)
    projection = torch.randn(rows, 8, head_dim, generator=generator).to(dtype)
    q, k, v = projection.split([4, 2, 2], 1)
    old_q, old_k = q.clone(), k.clone()
    angles = torch.rand(40, rotary_dim // 2, generator=generator) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    query_scale = torch.rand(40, generator=generator) + 1 if scaled else None
    kernels.rope_and_write_kv(
        q, k, v, cos_sin, batch, k_cache, v_cache, interleaved=interleaved, query_scale=query_scale
    )
    turns = cos_sin[batch.positions]
    block, offset = batch.slot_mapping // 5, batch.slot_mapping % 5
    keys = k_cache[block, :, offset]
    expected_q, expected_k = (turned_part(x.double(), turns, interleaved=interleaved) for x in (old_q, old_k))
    plain_q, plain_k = (
        turned_part(x.float().double(), turns, interleaved=interleaved).to(dtype) for x in (old_q, old_k)
    )
    if scaled:
        factors = query_scale[batch.positions, None, None]
        expected_q, plain_q = expected_q * factors, (plain_q.float() * factors).to(dtype)
    assert_as_exact_as_torch(q, plain_q, expected_q)
    assert_as_exact_as_torch(keys, plain_k, expected_k)
    assert torch.equal(keys[..., rotary_dim:], old_k[..., rotary_dim:])
    assert torch.equal(k, old_k)
    assert torch.equal(v_cache[block, :, offset], v)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_rope_with_norms_of_heads_has_bits_of_norms_before_it(kernels, generator, kv_dtype):
    """The norms of queries and keys have different weights. Values may be keys before their norm, as in Gemma 4."""
    batch, _, _ = paged_batch([(40, 40)], 16, 2, 80, torch.bfloat16, generator)
    rows = torch.randn(len(batch.positions), 8, 80, generator=generator).bfloat16()
    turns = torch.randn(40, 40, generator=generator)
    q_norm, k_norm = torch.randn(2, 80, generator=generator).bfloat16()
    for num_kv_heads, values_are_keys in ((2, False), (2, True), (0, False)):
        found = []
        for is_apart in (True, False):
            q, k, v = rows.clone().split([8 - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)
            cache = PagedKVCache(
                KVLayout((KVShape(2, 80),)), num_blocks=[8], block_size=16, dtype=kv_dtype, device=torch.device("cpu")
            ).layer(0)
            v, old_k = k if values_are_keys else v, k.clone()
            if is_apart:
                q, k = kernels.rms_norm(q, q_norm, 1e-6), kernels.rms_norm(k, k_norm, 1e-6)
                result = kernels.rope_and_write_kv(q, k, v, turns, batch, *cache)
                assert result is q
            else:
                options = {"q_norm": q_norm, "k_norm": k_norm if num_kv_heads else None, "eps": 1e-6}
                result = kernels.rope_and_write_kv(q, k, v, turns, batch, *cache, **options)
                assert torch.equal(k, old_k)
            block, offset = batch.slot_mapping // 16, batch.slot_mapping % 16
            caches = [floats(each) if kv_dtype == torch.int8 else each for each in cache]
            found.append([result, *(each[block, :, offset] for each in caches if num_kv_heads)])
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_rope_rows_are_independent_of_batch_rows(compiled, generator, kv_dtype):
    batch, _, _ = paged_batch([(40, 40)], 16, 2, 80, torch.bfloat16, generator)
    projection = torch.randn(40, 8, 80, generator=generator).bfloat16()
    cos_sin, scale = torch.rand(40, 40, generator=generator), torch.rand(40, generator=generator)

    def turn(rows):
        part = replace(batch, positions=batch.positions[rows], slot_mapping=batch.slot_mapping[rows])
        q, k, v = projection[rows].clone().split([4, 2, 2], 1)
        cache = PagedKVCache(
            KVLayout((KVShape(2, 80),)), num_blocks=[8], block_size=16, dtype=kv_dtype, device=torch.device("cpu")
        ).layer(0)
        compiled.rope_and_write_kv(q, k, v, cos_sin, part, *cache, interleaved=True, query_scale=scale)
        block, offset = part.slot_mapping // 16, part.slot_mapping % 16
        return q, cache[0][block, :, offset], cache[1][block, :, offset]

    whole = turn(torch.arange(40))
    for row in (0, 1, 17, 39):
        for alone, among in zip(turn(torch.tensor([row])), whole, strict=True):
            assert torch.equal(alone, among[row : row + 1])
