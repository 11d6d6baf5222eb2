"""Norms, gates and what else is computed row by row: held to plain torch's accuracy, as the other backends are."""

import pytest
import torch
from test_elementwise import (
    test_add_rms_norm_rounds_the_sum_then_normalizes_it,
    test_add_rounds_once,
    test_divide,
    test_gate_by_gelu,
    test_gate_by_silu,
    test_rms_norm,
    test_rms_norm_of_heads,
    test_soft_cap,
    test_what_is_added_is_scaled_in_float32,
)

from octavo.kernels.reference import ReferenceKernels

__all__ = [
    "test_add_rms_norm_rounds_the_sum_then_normalizes_it",
    "test_add_rounds_once",
    "test_divide",
    "test_gate_by_gelu",
    "test_gate_by_silu",
    "test_rms_norm",
    "test_rms_norm_of_heads",
    "test_soft_cap",
    "test_what_is_added_is_scaled_in_float32",
]

pytestmark = pytest.mark.sweep(4)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_take_rows(kernels, generator, dtype):
    x = torch.randn(7, 5, 300, generator=generator).to(dtype)
    for part in (x.view(7, 1500), x, x[:, :3], x[:, 2:]):
        for rows in ([], [6], [3, 0, 3, 5]):
            taken = kernels.take_rows(part, torch.tensor(rows, dtype=torch.int64))
            assert torch.equal(taken, part[rows])
            assert taken.is_contiguous()
    assert kernels.take_rows(x[:0], torch.tensor([], dtype=torch.int64)).shape == (0, 5, 300)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1.0, 5.477])
def test_embedding(kernels, generator, dtype, weight_dtype, scale):
    packed = kernels.pack_linear(torch.randn(50, 1123, generator=generator).to(weight_dtype))
    token_ids = torch.tensor([49, 0, 7, 7])
    found = kernels.embedding(token_ids, packed, dtype, scale)
    assert found.dtype == dtype
    assert torch.equal(found, ReferenceKernels().embedding(token_ids, packed, dtype, scale))
    assert kernels.embedding(token_ids[:0], packed, dtype).shape == (0, 1123)
