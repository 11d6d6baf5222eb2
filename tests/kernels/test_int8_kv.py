"""Keys and values as int8: rounded row by row like activations, and read as the numbers that they represent."""

import pytest
import torch
from paged_batches import assert_attention_is_as_exact, floats, paged_batch, rounded_caches

from octavo.kernels.quantization import kv_scales, quantize_rows

FLOATS = [torch.float32, torch.bfloat16]
HEADS = [
    (64, 2, 7),
    (128, 8, 2),
    (48, 1, 1),
    (80, 2, 2),
    (256, 1, 4),
    (20, 3, 1),
    (4, 1, 2),
]  # head_dim, KV heads, group


@pytest.mark.sweep(16)
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 48, 20, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_kv_rows_are_rounded_to_int8_on_write(kernels, generator, dtype, head_dim, block_size):
    batch, k_cache, v_cache = paged_batch([(9, 9), (30, 3), (1, 1)], block_size, 2, head_dim, dtype, generator)
    int8 = rounded_caches(k_cache, v_cache)
    before = [(cache.clone(), kv_scales(cache).clone()) for cache in int8]
    q, k, v = (torch.randn(len(batch.positions), 2, head_dim, generator=generator).to(dtype) for _ in range(3))
    v[3, 1], v[4, 0], k[5, 0, 1], k[6, 0, 2] = 0.0, 1e-31, float("nan"), float("inf")
    angles = torch.rand(40, head_dim // 2, generator=generator) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    turned = q.clone()
    kernels.rope_and_write_kv(turned, k, v, cos_sin, batch, k_cache, v_cache)
    kernels.rope_and_write_kv(q, k, v, cos_sin, batch, *int8)
    assert torch.equal(q, turned)
    block, offset = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    for cache, plain, (old_values, old_scales) in zip(int8[::-1], (v_cache, k_cache), before[::-1], strict=True):
        values, scales = quantize_rows(plain[block, :, offset].flatten(0, 1))
        finite = scales.isfinite()
        assert torch.equal(cache[block, :, offset].flatten(0, 1)[finite].float(), values[finite])
        written = kv_scales(cache)[block, :, offset].flatten()
        assert torch.equal(written[finite], scales[finite])
        assert torch.equal(written.isnan(), ~finite)
        cache[block, :, offset] = old_values[block, :, offset]  # all other slots are unchanged
        kv_scales(cache)[block, :, offset] = old_scales[block, :, offset]
        assert torch.equal(cache, old_values)
        assert torch.equal(kv_scales(cache).nan_to_num(), old_scales.nan_to_num())
    assert not finite.all()


@pytest.mark.sweep(32)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_int8_attention_equals_attention_over_dequantized_kv(kernels, generator, heads, block_size, window):
    """The bits are equal, so every property of a float32 cache holds for this one, except with pairs of bfloat16."""
    head_dim, num_kv_heads, group = heads
    sequences = [(1, 1), (70, 70), (150, 13), (64, 1), (129, 2), (1030, 2)]
    batch, k_cache, v_cache = paged_batch(sequences, block_size, num_kv_heads, head_dim, torch.float32, generator)
    int8 = rounded_caches(k_cache, v_cache)
    q = torch.randn(len(batch.positions), num_kv_heads * group, head_dim, generator=generator).bfloat16()
    expected = kernels.paged_attention(q.float(), *map(floats, int8), batch, head_dim**-0.5, window)
    assert not expected.isnan().any()
    assert torch.equal(kernels.paged_attention(q.float(), *int8, batch, head_dim**-0.5, window), expected)
    result = kernels.paged_attention(q, *int8, batch, head_dim**-0.5, window)
    if getattr(kernels, "isa", None) in {"amx", "avx512_bf16"}:  # int8 is exact in bfloat16
        assert_attention_is_as_exact(result, q, batch, [floats(cache) for cache in int8], window)
    else:
        assert torch.equal(result, expected.bfloat16())


def test_int8_kv_bytes_are_equal_on_every_isa(compiled, fastest, generator):
    batch, k_cache, v_cache = paged_batch([(40, 40)], 16, 2, 64, torch.bfloat16, generator)
    q, k, v = (torch.randn(40, 2, 64, generator=generator).bfloat16() for _ in range(3))
    cos_sin = torch.cat([torch.ones(40, 32), torch.zeros(40, 32)], dim=1)  # no rotation: k is unchanged
    results = []
    for kernels in (compiled, fastest):
        int8 = rounded_caches(k_cache, v_cache)
        kernels.rope_and_write_kv(q.clone(), k, v, cos_sin, batch, *int8)
        block, offset = batch.slot_mapping // 16, batch.slot_mapping % 16
        results.append([part[block, :, offset] for cache in int8 for part in (cache, kv_scales(cache))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
