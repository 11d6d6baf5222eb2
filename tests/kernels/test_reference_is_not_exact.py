"""The reason for own kernels: in these operations of plain torch, a row's result depends on its neighbours.

Each of these is strictly expected to fail, so a fix in torch is noticed. The operations further below are exact for the
widths of real models on one thread, and must stay exact. bfloat16 products are omitted, because their exactness depends
on the processor.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from octavo.kernels.reference import ReferenceKernels

WIDTHS = [896, 4864]


def assert_rows_are_independent(operation, x):
    alone = torch.cat([operation(x[i : i + 1]) for i in range(len(x))])
    for rows in (2, 3, 7, 33, len(x)):
        assert torch.equal(operation(x[:rows]), alone[:rows]), rows
    assert torch.equal(operation(x[97:]), alone[97:])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.xfail(strict=True, reason="one row takes another path (a matrix-vector product) than many")
def test_float32_linear_is_batch_invariant(generator, width):
    kernels = ReferenceKernels()
    packed = kernels.pack_linear(torch.randn(160, width, generator=generator))
    assert_rows_are_independent(lambda x: kernels.linear(x, packed), torch.randn(130, width, generator=generator))


@pytest.mark.xfail(strict=True, reason="one row takes another path (a matrix-vector product) than many")
def test_bfloat16_linear_in_float32_is_batch_invariant(generator):
    """The reference computes logits so: bfloat16 weights and activations, products in float32."""
    kernels = ReferenceKernels()
    packed = kernels.pack_linear(torch.randn(160, 896, generator=generator).to(torch.bfloat16))
    x = torch.randn(2, 896, generator=generator).to(torch.bfloat16)
    both, first = (kernels.linear(rows, packed, float32_out=True) for rows in (x, x[:1]))
    assert torch.equal(both[:1], first)


@pytest.mark.xfail(strict=True, reason="elements in the last incomplete vector of the tensor are computed another way")
def test_float32_silu_is_batch_invariant(generator):
    assert_rows_are_independent(F.silu, torch.randn(130, 123, generator=generator) * 5)


@pytest.mark.parametrize("operation", [torch.sum, torch.mean])
@pytest.mark.xfail(strict=True, reason="one row of more elements than a thread's share is summed by several threads")
def test_float32_reduction_by_two_threads_is_batch_invariant(generator, operation):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(100, 151_936, generator=generator)
        assert_rows_are_independent(lambda rows: operation(rows, dim=-1), x)
    finally:
        torch.set_num_threads(before)


EXACT = {
    "sum": lambda x: x.sum(dim=-1),
    "mean": lambda x: x.mean(dim=-1),
    "softmax": lambda x: x.softmax(dim=-1),
    "logsumexp": lambda x: x.logsumexp(dim=-1),
    "cumsum": lambda x: x.cumsum(dim=-1),
    "argmax": lambda x: x.argmax(dim=-1),
    "rms_norm": lambda x: ReferenceKernels().rms_norm(x, torch.linspace(0.5, 2, x.shape[1]), 1e-6),
    "gate": lambda x: ReferenceKernels().gate(x),
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("operation", EXACT)
def test_operation_on_one_thread_is_batch_invariant(generator, operation, width):
    assert_rows_are_independent(EXACT[operation], torch.randn(130, width, generator=generator) * 5)
