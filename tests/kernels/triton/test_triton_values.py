"""Norms, gates and other row by row operations, with plain torch's accuracy like the other backends."""

import pytest
import torch
from broken_kernels import broken
from test_elementwise import (
    test_add_rms_norm_normalizes_rounded_sum,
    test_add_rms_norm_scales_input_in_float32,
    test_add_rounds_once,
    test_clamped_gate_is_as_exact_as_torch,
    test_divide_equals_torch_division,
    test_gelu_gate_is_as_exact_as_torch,
    test_log_softmax_is_as_exact_as_torch,
    test_rms_norm_accepts_strided_heads,
    test_rms_norm_is_as_exact_as_torch,
    test_silu_gate_is_as_exact_as_torch,
    test_soft_cap_is_as_exact_as_torch,
)

from octavo.kernels.reference import ReferenceKernels

__all__ = [
    "test_add_rms_norm_normalizes_rounded_sum",
    "test_add_rms_norm_scales_input_in_float32",
    "test_add_rounds_once",
    "test_clamped_gate_is_as_exact_as_torch",
    "test_divide_equals_torch_division",
    "test_gelu_gate_is_as_exact_as_torch",
    "test_log_softmax_is_as_exact_as_torch",
    "test_rms_norm_accepts_strided_heads",
    "test_rms_norm_is_as_exact_as_torch",
    "test_silu_gate_is_as_exact_as_torch",
    "test_soft_cap_is_as_exact_as_torch",
]

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = [pytest.mark.sweep(16), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_triton_take_rows_equals_torch_indexing(kernels, generator, dtype):
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
def test_triton_embedding_has_bits_of_reference(kernels, generator, dtype, weight_dtype, scale):
    packed = kernels.pack_linear(torch.randn(50, 1123, generator=generator).to(weight_dtype))
    token_ids = torch.tensor([49, 0, 7, 7])
    found = kernels.embedding(token_ids, packed, dtype, scale)
    assert found.dtype == dtype
    assert torch.equal(found, ReferenceKernels().embedding(token_ids, packed, dtype, scale))
    assert kernels.embedding(token_ids[:0], packed, dtype).shape == (0, 1123)


@pytest.mark.parametrize("width", [48, 1200])
def test_triton_norm_and_gate_rows_are_independent_of_batch_rows(kernels, generator, width):
    x, weight = torch.randn(10, width, generator=generator), torch.randn(width, generator=generator)
    together, gated = kernels.rms_norm(x, weight, 1e-6), kernels.gate(x)
    for part in (slice(0, 1), slice(9, 10), slice(3, 8)):
        assert torch.equal(kernels.rms_norm(x[part], weight, 1e-6), together[part])
        assert torch.equal(kernels.gate(x[part]), gated[part])


def test_off_by_one_mask_in_rms_norm_is_detected(kernels, generator, tmp_path):
    x, weight = torch.randn(3, 48, generator=generator), torch.randn(48, generator=generator)
    wide = torch.cat([x, torch.full((3, 1), 9.0)], dim=1)[:, :48].unsqueeze(1)  # heads followed by other values
    expected = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(kernels.rms_norm(wide, weight, 1e-6).squeeze(1), expected)
    old = "is_there = is_row & (column < WIDTH)\n        value = tl.load(source + column, mask=is_there, other=0.0)"
    source = (old + ".to(tl.float32)\n        if", old.replace("< WIDTH", "<= WIDTH") + ".to(tl.float32)\n        if")
    one_too_many = broken(tmp_path, "norms", *source)
    assert not torch.allclose(one_too_many.rms_norm(wide, weight, 1e-6).squeeze(1), expected)


def test_rms_norm_sum_that_depends_on_row_count_is_detected(kernels, generator, tmp_path):
    x, weight = torch.randn(2, 1200, generator=generator), torch.randn(1200, generator=generator)
    x[:, 0] = 1e4  # a term that is only added to its square is lost
    old = "lanes = min(power_of_2_from(width), _MOST_LANES)"
    by_rows = broken(tmp_path, "norms", old, f"{old} if num_rows > 1 else 4")
    together = kernels.rms_norm(x, weight, 1e-6)
    assert torch.equal(by_rows.rms_norm(x, weight, 1e-6), together)
    assert torch.equal(kernels.rms_norm(x[:1], weight, 1e-6), together[:1])
    assert not torch.equal(by_rows.rms_norm(x[:1], weight, 1e-6), together[:1])
