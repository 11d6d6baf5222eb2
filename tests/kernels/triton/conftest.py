"""Triton's kernels on this machine: in its interpreter where there is no GPU (`tests/conftest.py` asks for it)."""

import pytest
import torch
from triton_interpreter import interpreted_kernels


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def kernels():
    pytest.importorskip("triton")
    with interpreted_kernels() as made:
        yield made
