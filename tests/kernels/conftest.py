"""Kernel backends as fixtures."""

import os

import pytest
import torch
from kernel_backends import COMPILED, ISAS, compiled_kernels

from octavo.kernels.reference import ReferenceKernels


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread():
    """As in the worker: torch's threads would spin on the cores that the kernels use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=ISAS)
def compiled(request):
    """Each instruction set of the compiled kernels, on two threads."""
    return compiled_kernels(request.param)


@pytest.fixture(scope="session", params=["reference", *ISAS])
def kernels(request):
    """Every backend."""
    return ReferenceKernels() if request.param == "reference" else compiled_kernels(request.param)


@pytest.fixture(scope="session")
def fastest():
    """The compiled kernels with default settings, for tests that are too large to run on every backend."""
    return compiled_kernels()


@pytest.fixture(scope="session")
def single_threaded():
    return compiled_kernels(num_threads=1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def pytest_report_header():
    required = os.environ.get("OCTAVO_REQUIRE_KERNELS", "") not in ("", "0")
    return f"compiled kernels: {'present' if COMPILED else 'absent'}{', required' if required else ''}"
