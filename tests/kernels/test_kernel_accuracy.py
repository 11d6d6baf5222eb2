"""The accuracy check for kernels accepts right computations and rejects wrong ones."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def product(generator, rows, depth, width, dtype):
    """Return rows, weight, plain torch's product of them, and the exact product."""
    x, weight = (torch.randn(size, depth, generator=generator).to(dtype) for size in (rows, width))
    return x, weight, F.linear(x.float(), weight.float()).to(dtype), x.double() @ weight.double().T


def truncated(values):
    """Round float32 to bfloat16 towards zero."""
    return (values.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


@FLOATS
@pytest.mark.parametrize("depth", [64, 520, 4864])
def test_accuracy_check_accepts_other_summation_orders(generator, depth, dtype):
    x, weight, plain, exact = product(generator, 40, depth, 65, dtype)
    parts = [a.float() @ b.float().T for a, b in zip(x.split(64, 1), weight.split(64, 1), strict=True)]
    assert_as_exact_as_torch(torch.stack(parts).sum(0).to(dtype), plain, exact)
    assert_as_exact_as_torch(exact.to(dtype), plain, exact)


@pytest.mark.parametrize("shape", [(130, 520, 65), (5, 123, 123), (3, 64, 33)], ids=str)
def test_accuracy_check_detects_truncation(generator, shape):
    x, weight, plain, exact = product(generator, *shape, torch.bfloat16)
    with pytest.raises(AssertionError, match=r"lean|norm|row"):
        assert_as_exact_as_torch(truncated(F.linear(x.float(), weight.float())), plain, exact)


@FLOATS
@pytest.mark.parametrize("shape", [(130, 520, 65), (9, 257, 40), (12, 4864, 96)], ids=str)
def test_accuracy_check_detects_missing_last_k(generator, shape, dtype):
    x, weight, plain, exact = product(generator, *shape, dtype)
    with pytest.raises(AssertionError, match="norm"):
        assert_as_exact_as_torch(F.linear(x[:, :-1].float(), weight[:, :-1].float()).to(dtype), plain, exact)


def test_accuracy_check_detects_one_long_float32_chain(generator):
    x, weight, plain, exact = product(generator, 12, 4864, 96, torch.float32)
    chain = torch.zeros_like(plain)
    for column, other in zip(x.T, weight.T, strict=True):
        chain.addcmul_(column.unsqueeze(1), other)
    with pytest.raises(AssertionError, match="norm"):
        assert_as_exact_as_torch(chain, plain, exact)


@FLOATS
@pytest.mark.parametrize("of_a_row", [1e-6, 1.0])
def test_accuracy_check_detects_one_wrong_row(generator, of_a_row, dtype):
    x, weight, _, _ = product(generator, 130, 520, 65, dtype)
    x[77] *= of_a_row
    plain, exact = F.linear(x.float(), weight.float()).to(dtype), x.double() @ weight.double().T
    for wrong in (plain[76] * of_a_row, plain[77] * (4 / 3), plain[77].roll(1)):
        result = plain.clone()
        result[77] = wrong
        with pytest.raises(AssertionError, match="row 77" if of_a_row < 1 else "norm"):
            assert_as_exact_as_torch(result, plain, exact)


@FLOATS
@pytest.mark.parametrize("length", [300, 2500])
def test_accuracy_check_detects_missing_attention_tile(generator, length, dtype):
    """One of 40 tokens lacks the tile."""
    q, k, v = (torch.randn(2, rows, 128, generator=generator).to(dtype) for rows in (40, length, length))
    seen = torch.arange(length) <= torch.arange(length - 40, length).unsqueeze(1)

    def attention(kind, positions):
        return F.scaled_dot_product_attention(*(each.to(kind) for each in (q, k, v)), attn_mask=positions)

    exact, plain = attention(torch.float64, seen), attention(torch.float32, seen).to(dtype)
    assert_as_exact_as_torch(attention(torch.float32, seen).to(dtype), plain, exact)
    seen[20, 128:192] = False
    with pytest.raises(AssertionError, match=r"row|norm"):
        assert_as_exact_as_torch(attention(torch.float32, seen).to(dtype), plain, exact)
