"""Operations: which backend computes them, and inputs that the compiled kernels refuse."""

import pytest
import torch
from kernel_backends import compiled_kernels

from octavo.kernels.operation import Operation
from octavo.kernels.operations.add import add
from octavo.kernels.operations.soft_cap import soft_cap
from octavo.kernels.reference import ReferenceKernels


@Operation
def halve(x: torch.Tensor) -> None:
    """Divide x by two in place."""
    x.div_(2)


def test_operation_keeps_name_and_docstring_of_plain_version():
    assert (halve.name, halve.__name__, halve.__doc__) == ("halve", "halve", "Divide x by two in place.")
    assert halve.__module__ == __name__


def test_backend_without_kernel_calls_plain_version(kernels):
    x = torch.tensor([3.0, 5.0])
    halve(kernels, x)
    assert x.tolist() == [1.5, 2.5]


def test_operation_calls_compiled_kernel_if_present(monkeypatch):
    kernels = compiled_kernels("portable")
    monkeypatch.setattr(soft_cap, "reference", lambda *_: pytest.fail("the plain version was called"))
    x = torch.tensor([30.0])
    soft_cap(kernels, x, 1.0)
    assert x.item() == 1.0


REFUSED = {
    "another dtype than the kernel expects": (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bfloat16)),
    "x is not contiguous": (torch.zeros(3, 2).t(), torch.zeros(2, 3)),
    "sum is not contiguous": (torch.zeros(2, 3), torch.zeros(2, 6)[:, :3]),
    "alike": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "size. alike": (torch.zeros(6), torch.zeros(6)),
}


@pytest.mark.parametrize(("message", "tensors"), REFUSED.items(), ids=REFUSED)
def test_compiled_kernel_refuses_invalid_tensors(message, tensors):
    before = tensors[1].clone()
    with pytest.raises(ValueError, match=message):
        add(compiled_kernels("portable"), *tensors, 1.0)
    assert torch.equal(tensors[1], before)


def test_dimension_of_size_one_may_have_any_stride():
    x = torch.zeros(4, 3)[:1]
    total = torch.ones(3, 5).t()[:1]  # [1, 3], strides (1, 5)
    with pytest.raises(ValueError, match="sum is not contiguous"):
        add(compiled_kernels("portable"), x, total, 1.0)
    column = torch.ones(2, 7)[:, :1].t()  # [1, 2], strides (1, 7)
    assert not column.is_contiguous()
    row = torch.ones(7).as_strided((1, 3), (100, 1))
    add(compiled_kernels("portable"), torch.full((1, 3), 2.0), row, 0.5)
    assert row.tolist() == [[2.0, 2.0, 2.0]]


def test_kernels_empty_allocates_contiguous_tensor(kernels):
    like = torch.zeros(2, dtype=torch.bfloat16)
    made = kernels.empty(3, 4, like=like)
    assert (made.shape, made.dtype, made.device) == ((3, 4), torch.bfloat16, like.device)
    assert made.is_contiguous()
    assert made.data_ptr() != ReferenceKernels().empty(3, 4, like=like).data_ptr()
