"""Which devices get the kernels in Triton, and what is said where they cannot serve."""

import importlib.util

import pytest
import torch

from octavo.errors import ConfigError
from octavo.kernels import create_kernels
from octavo.kernels.block_weight import BlockKind, BlockWeight

CPU = torch.device("cpu")


def test_the_interpreter_serves_on_the_cpu(kernels):
    made = create_kernels(CPU, "triton")  # and nothing is left to plain torch, of which it would warn
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


def test_what_blocks_are_multiplied_by_is_said_once(kernels):
    weight = BlockWeight(BlockKind.Q8_0, torch.zeros(2, 34, dtype=torch.uint8), 32)
    made = create_kernels(CPU, "triton")
    with pytest.warns(RuntimeWarning, match="plain torch computes products with weights in blocks"):
        packed = made.pack_linear([weight])
    assert made.pack_linear([weight]).out_features == 2
    assert made.linear(torch.ones(3, 32), packed).tolist() == [[0.0, 0.0]] * 3
