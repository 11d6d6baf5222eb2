"""Triton's kernels on this machine: in its interpreter, or on a GPU with TRITON_INTERPRET=0 (see `tests/conftest.py`).

Tensors made by a test, including tests shared with other backends, are on the device that it uses.
"""

import contextlib
import importlib.util

import pytest
import torch
from broken_kernels import broken, replaced
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
def make_mistake(tmp_path, monkeypatch, kernels):
    """Return a function that puts a mistake into a module (see `broken`): `kernels` use it until the test ends.

    `torch.empty` returns NaN until then, because its memory may hold the right result of an earlier test.
    """
    from octavo.kernels.triton import backend

    def make(module, old, new, *users):
        made = broken(tmp_path, module, old, new, *users)
        last = [module, *users][-1]
        if importlib.util.find_spec(f"octavo.kernels.operations.{last}"):
            right = backend.kernel_of
            monkeypatch.setattr(backend, "kernel_of", lambda name: getattr(made, name) if name == last else right(name))
            return made
        for name, wrong in replaced(vars(backend), last, made).items():
            monkeypatch.setattr(backend, name, wrong)
        return made

    torch.use_deterministic_algorithms(True)
    yield make
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def generator(device):
    return torch.Generator(device).manual_seed(0)
