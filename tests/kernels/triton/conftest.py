"""Triton's kernels on this machine: in its interpreter, or on a GPU with TRITON_INTERPRET=0 (see `tests/conftest.py`).

Tensors that a test makes, also those of the tests shared with other backends, are of the device it runs on.
"""

import contextlib

import pytest
import torch
from triton_interpreter import interpreted_kernels, kernels_device


@pytest.fixture(scope="session")
def device():
    pytest.importorskip("triton")
    return kernels_device()


@pytest.fixture(scope="session")
def kernels():
    pytest.importorskip("triton")
    with interpreted_kernels() as made:
        yield made


@pytest.fixture(autouse=True)
def _tensors_of_the_device(device):
    with contextlib.nullcontext() if device.type == "cpu" else device:
        yield


@pytest.fixture
def generator(device):
    return torch.Generator(device).manual_seed(0)
