"""Weights, keys and values as fp8 in plain torch, the reference of the Triton kernels."""

import pytest
import torch
from paged_batches import floats, paged_batch, rounded_caches

from octavo.kernels.quantization import Fp8Weight, fuse_quantized, kv_scales, quantize_fp8, quantize_rows, round_kv_rows
from octavo.kernels.reference import ReferenceKernels

FP8 = torch.float8_e4m3fn


def test_kv_rows_are_rounded_to_fp8_on_write(generator):
    batch, k_cache, v_cache = paged_batch([(9, 9), (30, 3), (1, 1)], 5, 2, 20, torch.bfloat16, generator)
    caches = rounded_caches(k_cache, v_cache, dtype=FP8)
    before = [(cache.view(torch.uint8).clone(), kv_scales(cache).clone()) for cache in caches]
    q, k, v = (torch.randn(13, 2, 20, generator=generator).bfloat16() for _ in range(3))
    v[3, 1], v[4, 0], k[5, 0, 1], k[6, 0, 2] = 0.0, -1e-31, float("nan"), float("inf")
    no_turn = torch.cat([torch.ones(40, 10), torch.zeros(40, 10)], dim=1)
    ReferenceKernels().rope_and_write_kv(q, k, v, no_turn, batch, *caches)
    block, offset = batch.slot_mapping // 5, batch.slot_mapping % 5
    rounded = [round_kv_rows(rows.flatten(0, 1), FP8) for rows in (k, v)]
    for cache, (values, scales), (old_bytes, old_scales) in zip(caches, rounded, before, strict=True):
        written = cache.view(torch.uint8), kv_scales(cache)
        assert torch.equal(written[0][block, :, offset].flatten(0, 1), values.view(torch.uint8))
        assert torch.equal(written[1][block, :, offset].flatten().nan_to_num(-1), scales.nan_to_num(-1))
        for now, old in zip(written, (old_bytes, old_scales), strict=True):
            now[block, :, offset] = old[block, :, offset]  # all other slots are unchanged
            assert torch.equal(now.nan_to_num(-1), old.nan_to_num(-1))
    (keys, key_scales), (values, _) = rounded
    assert key_scales.isnan().nonzero().flatten().tolist() == [10, 12]
    assert not keys[[10, 12]].view(torch.uint8).any()
    assert not values[[7, 8]].view(torch.uint8).any()


@pytest.mark.parametrize("window", [None, 37])
def test_fp8_attention_equals_attention_over_dequantized_kv(generator, window):
    batch, k_cache, v_cache = paged_batch([(70, 70), (150, 13), (64, 1)], 16, 2, 64, torch.float32, generator)
    caches = rounded_caches(k_cache, v_cache, dtype=FP8)
    q = torch.randn(len(batch.positions), 6, 64, generator=generator)
    result = ReferenceKernels().paged_attention(q, *caches, batch, 0.125, window)
    expected = ReferenceKernels().paged_attention(q, *map(floats, caches), batch, 0.125, window)
    assert not expected.isnan().any()
    assert torch.equal(result, expected)


def test_fp8_keeps_relative_precision_of_small_values(generator):
    """int8 has even steps and would round the small values to zero."""
    rows = torch.rand(50, 64, generator=generator) + 0.1
    rows[:, 7] = 3000.0
    values, scales = round_kv_rows(rows, FP8)
    assert ((values.float() * scales.unsqueeze(1) - rows).abs() <= rows * 2**-4 * 1.0001).all()
    assert torch.equal(values[:, 7].float(), torch.full((50,), 448.0))
    of_int8, _ = quantize_rows(rows)
    assert not of_int8[:, :7].any()


def test_fp8_weight_is_rounded_per_row_and_multiplied_dequantized(generator):
    weight = torch.randn(40, 200, generator=generator) * torch.logspace(-6, 3, 40)[:, None]
    weight[7] = 0.0
    rounded = quantize_fp8(weight.bfloat16())
    assert (rounded.values.dtype, rounded.shape, rounded.nbytes) == (FP8, weight.shape, 40 * 200 + 40 * 4)
    error = (rounded.dequantize() - weight.bfloat16().float()).abs()
    assert (error <= 1.001 * (weight.abs() * 2**-4 + rounded.scales * 2**-10)).all()
    x, bias = torch.randn(5, 200, generator=generator).bfloat16(), torch.randn(40, generator=generator)
    kernels = ReferenceKernels()
    result = kernels.linear(x, kernels.pack_linear(rounded, bias), float32_out=True)
    exact = x.double() @ rounded.dequantize().bfloat16().double().T + bias.double()
    assert torch.allclose(result.double(), exact, rtol=1e-5, atol=1e-5 * weight.abs().max().item())
    broken = weight.clone()
    broken[3, 5] = torch.nan
    result = kernels.linear(x, kernels.pack_linear(quantize_fp8(broken)))
    assert result.isnan().nonzero()[:, 1].unique().tolist() == [3]


def test_grouped_fp8_weights_are_sliced_and_fused(generator):
    values = quantize_fp8(torch.randn(6, 130, generator=generator)).values
    weight = Fp8Weight(values, torch.rand(6, 3, generator=generator), 64)
    expected = values.float() * weight.scales.repeat_interleave(64, dim=1)[:, :130]
    assert torch.equal(weight.dequantize(), expected)
    fused = fuse_quantized([weight.rows(slice(0, 2)), weight.rows(torch.tensor([5, 3]))])
    assert torch.equal(fused.dequantize(), expected[[0, 1, 5, 3]])
    copied = weight.to(torch.device("cpu"))
    assert copied.values.data_ptr() != values.data_ptr()
