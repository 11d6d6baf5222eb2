"""Devices that get the Triton kernels, and the messages if they cannot be used."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from octavo.errors import ConfigError
from octavo.kernels import are_exact, create_kernels
from octavo.kernels.quantization import quantize_int8

CPU = torch.device("cpu")


def test_triton_interpreter_serves_cpu(kernels, device):
    if device != CPU:
        pytest.skip("kernels are compiled here")
    made = create_kernels(CPU, "triton")  # no operation falls back to plain torch, which would warn
    assert made.name == "triton"
    assert made.identity.endswith(":interpreter")


def test_triton_backend_without_interpreter_needs_gpu(kernels, monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ConfigError, match=r"cannot serve device 'cpu': it needs a GPU \(or TRITON_INTERPRET=1"):
        create_kernels(CPU, "triton")


def test_missing_triton_is_config_error(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[gpu\]', or choose auto"):
        create_kernels(CPU, "triton")


def test_auto_backend_on_untested_gpu_is_reference():
    assert create_kernels(torch.device("cuda"), "auto").name == "reference"
    assert create_kernels(torch.device("cuda"), "triton").name == "triton"


def test_graphs_are_captured_unless_experts_are_multiplied_one_by_one(kernels, device, caplog):
    made, weight = create_kernels(device, "triton"), torch.ones(8, 32)
    floats = made.pack_groups([made.pack_linear(weight)] * 2)
    assert made.captures_graphs([])
    assert made.captures_graphs([floats, floats])
    assert not caplog.records
    for packed in (made.pack_linear(quantize_int8(weight)), made.pack_linear(weight, torch.ones(8))):
        assert not made.captures_graphs([floats, made.pack_groups([packed] * 2)])
        assert caplog.records[-1].message.endswith("experts with quantized weights or biases prevent them")


def test_interpreter_supports_no_cuda_graphs(device, caplog, monkeypatch):
    from octavo.kernels.triton.backend import TritonKernels
    from octavo.kernels.triton.graphs import CudaGraphPool

    monkeypatch.setattr(TritonKernels, "graph_pool", CudaGraphPool)
    made = create_kernels(device, "triton")
    assert made.captures_graphs([]) == (device.type == "cuda")
    assert ("Triton's interpreter does not support them" in caplog.text) == (device.type == "cpu")


def test_fast_inexact_backend_uses_torch_products_and_is_not_exact(kernels, device):
    made = create_kernels(device, "fast-inexact")
    assert (made.name, are_exact(device, "fast-inexact")) == ("fast-inexact", False)
    assert made.identity != kernels.identity
    weight, x = torch.randn(3, 40), torch.randn(2, 40)
    assert torch.equal(made.linear(x, made.pack_linear(weight)), F.linear(x, weight))
    rounded = quantize_int8(weight)
    assert torch.equal(made.linear(x, made.pack_linear(rounded)), kernels.linear(x, kernels.pack_linear(rounded)))
