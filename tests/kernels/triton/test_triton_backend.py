"""Devices that get the Triton kernels, and the messages if they cannot be used."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from octavo.errors import ConfigError
from octavo.kernels import are_exact, create_kernels
from octavo.kernels.quantization import quantize_int8

CPU = torch.device("cpu")


def test_the_interpreter_serves_on_the_cpu(kernels, device):
    if device != CPU:
        pytest.skip("kernels are compiled here")
    made = create_kernels(CPU, "triton")  # no operation falls back to plain torch, which would warn
    assert made.name == "triton"
    assert made.identity.endswith(":interpreter")


def test_without_the_interpreter_it_takes_a_gpu(kernels, monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ConfigError, match=r"cannot serve device 'cpu': it needs a GPU \(or TRITON_INTERPRET=1"):
        create_kernels(CPU, "triton")


def test_without_triton(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[gpu\]', or choose auto"):
        create_kernels(CPU, "triton")


def test_a_gpu_gets_what_was_tried_on_one_unless_it_is_asked_for_by_name():
    assert create_kernels(torch.device("cuda"), "auto").name == "reference"
    assert create_kernels(torch.device("cuda"), "triton").name == "triton"


def test_a_model_has_graphs_unless_plain_torch_computes_a_part_of_it(kernels, device, caplog):
    made = create_kernels(device, "triton")
    assert made.captures_graphs({64, 256}, torch.bfloat16)
    assert made.captures_graphs({64}, torch.float32)
    assert not caplog.records
    assert not made.captures_graphs({64, 256}, torch.float32)
    (record,) = caplog.records
    assert record.message.endswith("plain torch computes attention of heads wider than 128 in float32")


def test_the_interpreter_has_no_graphs_of_its_own(device, caplog, monkeypatch):
    from octavo.kernels.triton.backend import TritonKernels
    from octavo.kernels.triton.graphs import CudaGraphPool

    monkeypatch.setattr(TritonKernels, "graph_pool", CudaGraphPool)
    made = create_kernels(device, "triton")
    assert made.captures_graphs({64}, torch.bfloat16) == (device.type == "cuda")
    assert ("Triton's interpreter does not support them" in caplog.text) == (device.type == "cpu")


def test_products_of_the_library_are_named_inexact(kernels, device):
    made = create_kernels(device, "fast-inexact")
    assert (made.name, are_exact(device, "fast-inexact")) == ("fast-inexact", False)
    assert made.identity != kernels.identity
    weight, x = torch.randn(3, 40), torch.randn(2, 40)
    assert torch.equal(made.linear(x, made.pack_linear(weight)), F.linear(x, weight))
    rounded = quantize_int8(weight)
    assert torch.equal(made.linear(x, made.pack_linear(rounded)), kernels.linear(x, kernels.pack_linear(rounded)))
