"""Triton's kernels on this machine: in its interpreter where there is no GPU (`tests/conftest.py` asks for it)."""

import warnings

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def kernels():
    pytest.importorskip("triton")
    from octavo.kernels.triton.backend import TritonKernels

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of operations that plain torch computes
        return TritonKernels()
