"""Weights in blocks have the numbers that llama.cpp reads from them."""

import numpy as np
import pytest
import torch

from octavo.kernels.block_weight import BlockKind, BlockWeight, group_by_kind, random_blocks


@pytest.mark.parametrize("kind", BlockKind)
def test_gguf_blocks_dequantize_as_in_llama_cpp(generator, kind):
    gguf = pytest.importorskip("gguf")
    weight = random_blocks(generator, kind, 37, 512)
    expected = gguf.quants.dequantize(weight.rows.numpy(), gguf.GGMLQuantizationType[kind.name])
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected))
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
    assert sizes == (kind.block_values, kind.block_bytes)


def test_every_mxfp4_exponent_dequantizes_as_in_llama_cpp():
    gguf = pytest.importorskip("gguf")
    data = torch.full((256, 17), 0x5A, dtype=torch.uint8)
    data[:, 0] = torch.arange(256)
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(BlockWeight(BlockKind.MXFP4, data, 32).dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", BlockKind)
def test_select_rows_returns_rows_of_weight(generator, kind):
    weight, some = random_blocks(generator, kind, 20, 256), torch.tensor([3, 0, 19, 3])
    assert torch.equal(weight.select_rows(some).dequantize(), weight.dequantize()[some])
    assert weight.select_rows(slice(2, 7)).shape == (5, 256)


@pytest.mark.parametrize("kind", BlockKind)
def test_rows_of_partial_blocks_are_refused(kind):
    with pytest.raises(ValueError, match=f"{kind.name} has blocks of {kind.block_values} values"):
        kind.row_bytes(kind.block_values + 16)
    with pytest.raises(ValueError, match=f"take uint8 rows of {kind.block_bytes} bytes"):
        BlockWeight(kind, torch.zeros(2, kind.block_bytes + 1, dtype=torch.uint8), kind.block_values)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("kind", BlockKind)
def test_has_broken_scale_detects_non_finite_scales(generator, kind):
    """Rows of random bytes: rows with non-finite numbers are detected from their scales, without their integers."""
    size = 192 * 256 // kind.block_values * kind.block_bytes
    data = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    weight = BlockWeight(kind, data.view(-1, kind.row_bytes(256)), 256)
    rows = [weight.select_rows(slice(row, row + 1)) for row in range(len(weight.rows))]
    if kind is BlockKind.MXFP4:
        expected = [bool((row.rows[0, ::17] == 255).any()) for row in rows]
    else:
        expected = [not bool(row.dequantize().isfinite().all()) for row in rows]
    assert [row.has_broken_scale() for row in rows] == expected
    assert any(expected) != all(expected)
    assert not random_blocks(generator, kind, 64, 256).has_broken_scale()


def test_largest_float16_is_valid_scale():
    data = torch.zeros(1, 34, dtype=torch.uint8)
    for bits, is_broken in ((0x7BFF, False), (0xFBFF, False), (0x7C00, True), (0xFC00, True), (0x7E00, True)):
        data[0, 0], data[0, 1] = bits & 255, bits >> 8
        assert BlockWeight(BlockKind.Q8_0, data, 32).has_broken_scale() is is_broken


def test_group_by_kind_joins_adjacent_weights_of_one_kind(generator):
    q, k = (random_blocks(generator, BlockKind.Q4_K, rows, 256) for rows in (8, 4))
    v, other = random_blocks(generator, BlockKind.Q6_K, 4, 256), random_blocks(generator, BlockKind.Q4_K, 4, 256)
    groups = group_by_kind([q, k, v, other])
    assert [[id(weight) for weight in group] for group in groups] == [[id(q), id(k)], [id(v)], [id(other)]]
