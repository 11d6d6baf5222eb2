"""Weights in blocks: the numbers that llama.cpp means by them."""

import numpy as np
import pytest
import torch

from octavo.kernels.block_weight import BlockKind, BlockWeight, group_by_kind, random_blocks


@pytest.mark.parametrize("kind", BlockKind)
def test_blocks_stand_for_the_numbers_of_llama_cpp(generator, kind):
    gguf = pytest.importorskip("gguf")
    weight = random_blocks(generator, kind, 37, 512)
    expected = gguf.quants.dequantize(weight.rows.numpy(), gguf.GGMLQuantizationType[kind.name])
    assert torch.equal(weight.dequantize(), torch.from_numpy(expected))
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
    assert sizes == (kind.block_values, kind.block_bytes)


def test_every_exponent_of_mxfp4():
    gguf = pytest.importorskip("gguf")
    data = torch.full((256, 17), 0x5A, dtype=torch.uint8)
    data[:, 0] = torch.arange(256)
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(BlockWeight(BlockKind.MXFP4, data, 32).dequantize(), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", BlockKind)
def test_rows_are_those_of_the_weight(generator, kind):
    weight, some = random_blocks(generator, kind, 20, 256), torch.tensor([3, 0, 19, 3])
    assert torch.equal(weight.select_rows(some).dequantize(), weight.dequantize()[some])
    assert weight.select_rows(slice(2, 7)).shape == (5, 256)


@pytest.mark.parametrize("kind", BlockKind)
def test_rows_of_another_length_are_refused(kind):
    with pytest.raises(ValueError, match=f"{kind.name} has blocks of {kind.block_values} values"):
        kind.row_bytes(kind.block_values + 16)
    with pytest.raises(ValueError, match=f"take uint8 rows of {kind.block_bytes} bytes"):
        BlockWeight(kind, torch.zeros(2, kind.block_bytes + 1, dtype=torch.uint8), kind.block_values)


def test_neighbours_of_one_kind_stand_together(generator):
    q, k = (random_blocks(generator, BlockKind.Q4_K, rows, 256) for rows in (8, 4))
    v, other = random_blocks(generator, BlockKind.Q6_K, 4, 256), random_blocks(generator, BlockKind.Q4_K, 4, 256)
    groups = group_by_kind([q, k, v, other])
    assert [[id(weight) for weight in group] for group in groups] == [[id(q), id(k)], [id(v)], [id(other)]]
