"""Which devices get the kernels in Triton, and what is said where they cannot serve."""

import importlib.util

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels import create_kernels

CPU = torch.device("cpu")


def test_the_interpreter_serves_on_the_cpu(kernels):
    with pytest.warns(RuntimeWarning, match="plain torch computes"):
        made = create_kernels(CPU, "triton")
    assert made.name == "triton"
    assert made.identity.endswith(":interpreter")


def test_without_the_interpreter_it_takes_a_gpu(kernels, monkeypatch):
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    with pytest.raises(ConfigError, match="cannot serve device 'cpu': it needs a GPU, or TRITON_INTERPRET=1"):
        create_kernels(CPU, "triton")


def test_without_triton(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[gpu\]'; or choose reference"):
        create_kernels(CPU, "triton")
    with pytest.warns(RuntimeWarning, match=r"octavo\[gpu\].* Plain torch serves"):
        assert create_kernels(torch.device("cuda"), "auto").name == "reference"
