"""torch's oneDNN product, where its self-check lets it serve: as exact as ours, and a check that finds what it must."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from kernel_accuracy import assert_as_exact_as_torch
from kernel_backends import compiled_kernels

from octavo.kernels.onednn import OneDnnWeight
from octavo.kernels.panels import PanelWeight

SHAPES = [(896, 1152), (4864, 96), (123, 33), (64, 64)]  # in, out


@pytest.fixture(scope="module")
def onednn():
    return compiled_kernels(linear="onednn")


@pytest.fixture
def make(onednn, generator):
    """Return a function: (in, out) -> a packed weight that oneDNN serves, and the weight and bias it was made from."""

    def packed_weight(depth, width):
        weight = torch.randn(width, depth, generator=generator).to(torch.bfloat16)
        bias = torch.randn(width, generator=generator).to(torch.bfloat16)
        packed = onednn.pack_linear(weight, bias)
        if not isinstance(packed.storage, OneDnnWeight):
            pytest.skip("oneDNN fails the self-check on this processor, so that octavo's own product serves")
        return packed, weight, bias

    return packed_weight


def rows_of(generator, count, depth):
    return torch.randn(count, depth, generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_a_row_does_not_depend_on_its_neighbours(onednn, make, generator, depth, width):
    packed, _, _ = make(depth, width)
    x = rows_of(generator, 512, depth)
    x[0] *= 3
    alone = torch.cat([onednn.linear(x[i : i + 1], packed) for i in range(len(x))])
    for rows in (2, 3, 4, 5, 7, 9, 11, 15, 17, 31, 33, 63, 65, 127, 255, 257, 511, 512):
        assert torch.equal(onednn.linear(x[:rows], packed), alone[:rows]), rows
        assert torch.equal(onednn.linear(x[-rows:], packed), alone[-rows:]), f"the last {rows}"
    assert torch.equal(onednn.linear(x[101:108], packed), alone[101:108])


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_error_is_that_of_torch(onednn, make, generator, depth, width, rows):
    packed, weight, bias = make(depth, width)
    x = rows_of(generator, rows, depth)
    expected = x.double() @ weight.double().T + bias.double()
    plain = F.linear(x.float(), weight.float(), bias.float()).to(torch.bfloat16)
    assert_as_exact_as_torch(onednn.linear(x, packed), plain, expected)


@pytest.fixture
def taken(monkeypatch):
    """Let weights be packed on processors for which torch has no such product, too; who uses it brings the product."""
    if not OneDnnWeight.is_supported():
        monkeypatch.setattr(OneDnnWeight, "is_supported", lambda: True)
        monkeypatch.setattr(OneDnnWeight, "pack", OneDnnWeight)


def one_path_for_odd_counts(x):
    return x * (1 + x.shape[0] % 2)


def another_for_large_batches(x):
    return x * (2 if x.shape[0] > 256 else 1)


def another_for_the_last_incomplete_tile(x):
    out = x.clone()
    out[x.shape[0] // 16 * 16 :] *= 2
    return out


def another_for_five_rows(x):
    return x * (2 if x.shape[0] == 5 else 1)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    "product",
    [
        one_path_for_odd_counts,
        another_for_large_batches,
        another_for_the_last_incomplete_tile,
        another_for_five_rows,
    ],
)
def test_the_self_check_refuses(generator, monkeypatch, product):
    kernels = compiled_kernels(linear="onednn")
    weight = torch.randn(48, 64, generator=generator).to(torch.bfloat16)
    monkeypatch.setattr(OneDnnWeight, "_multiply", lambda self, x: product(x))
    assert isinstance(kernels.pack_linear(weight).storage, PanelWeight)


@pytest.mark.usefixtures("taken")
def test_the_self_check_runs_once_per_kind(generator, monkeypatch):
    kernels = compiled_kernels(linear="onednn")
    calls = []
    monkeypatch.setattr(OneDnnWeight, "rows_are_independent", lambda self, depth: calls.append(depth) or True)
    weight = torch.randn(48, 64, generator=generator).to(torch.bfloat16)
    for each in (weight, weight + 1, weight.T, weight[:32]):
        assert isinstance(kernels.pack_linear(each).storage, OneDnnWeight)
    kernels.pack_linear(weight, weight[:, 0])
    assert calls == [64, 48, 64, 64]


def test_octavo_serves_where_torch_has_no_such_product(generator, monkeypatch):
    monkeypatch.setattr(OneDnnWeight, "is_supported", lambda: False)
    monkeypatch.setattr(OneDnnWeight, "pack", None)
    kernels = compiled_kernels(linear="onednn")
    weight, x = rows_of(generator, 48, 64), rows_of(generator, 5, 64)
    packed = kernels.pack_linear(weight)
    assert isinstance(packed.storage, PanelWeight)
    assert torch.equal(kernels.linear(x, packed), compiled_kernels().linear(x, compiled_kernels().pack_linear(weight)))
