"""Launches of Triton's kernels without a GPU: none computes anything, each is compiled as far as its key."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import triton
from late_queue import LateQueue
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

if TYPE_CHECKING:
    from collections.abc import Iterator

_BACKEND = make_backend(GPUTarget("cuda", 90, 32))
_PROCESSORS = 132


@functools.cache
def _bind(kernel):
    jitted = JITFunction(kernel.fn, **kernel.kwargs)
    return jitted.params, create_function_from_signature(jitted.signature, jitted.params, _BACKEND)


@functools.cache
def _launched(kernel):
    from octavo.kernels.triton.launch import Kernel

    return Kernel(kernel.fn, **kernel.kwargs)


def key_of(kernel, args, options):
    """Return what Triton would compile a kernel for: parameters with types and properties, or with their values."""
    params, bind = _bind(kernel)
    _, properties, options = bind(*args, **options)
    parts = [f"{param.name}: {kind} {value}" for param, (kind, value) in zip(params, properties, strict=True)]
    return f"{kernel.__name__}({', '.join(parts)}) {sorted(options.items())}"


def _zeroed(allocate):
    """Return the function with memory of zeros, because kernels write no results."""
    return lambda *args, **options: allocate(*args, **options).zero_()


class _NoGraphs:
    """A `GraphPool` with replays that do nothing."""

    num_bytes = 0

    def capture(self, run):
        run()
        return lambda: None


@contextlib.contextmanager
def launches() -> Iterator[set[str]]:
    """Yield the keys of all launches in this context. Triton's hook gets each new one, as of a compilation.

    Engines make steps as on a GPU: they warm up, have graphs and pinned memory, and compute on the host by torch.
    Experts are chosen at random, so they have any numbers of rows.
    """
    from octavo.kernels.operations.choose_experts import choose_experts
    from octavo.kernels.operations.sort_by_expert import sort_by_expert
    from octavo.kernels.reference import ReferenceKernels
    from octavo.kernels.triton import backend, matmul
    from octavo.worker import model_runner
    from octavo.worker.host_copies import PinnedMemory

    keys, found = set(), {}

    def launch(kernel, *args, grid, warmup, **options):
        key = key_of(kernel, args, options)
        launched = _launched(kernel)
        rest = launched.params[len(args) :]
        own = (kernel.__name__, *launched.specialization(args), *options.items())
        if not all(each.is_constexpr and each.name in options for each in rest):
            raise AssertionError(f"{key}: only constants may be keywords, and every constant must be one")
        if found.setdefault(own, key) != key:
            raise AssertionError(f"{key}: a launch would use the code of {found[own]}")
        hook = triton.knobs.runtime.jit_post_compile_hook
        if key not in keys and hook is not None:
            hook(fn=SimpleNamespace(name=kernel.__name__), key=key)
        keys.add(key)

    make, kernel_of, generator = backend.TritonKernels.__init__, backend.kernel_of, torch.Generator().manual_seed(0)

    def choose(logits, *others):
        choose_experts.reference(torch.randn(logits.shape, generator=generator), *others)

    def launch_and_compute(name):
        launched, computed = kernel_of(name), {"choose_experts": choose, "sort_by_expert": sort_by_expert.reference}
        return launched if name not in computed else lambda *args: (launched(*args), computed[name](*args))

    def make_as_on_device(kernels):
        make(kernels)
        kernels.warm_up_rows = backend.WARM_UP_ROWS

    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(place, name, _zeroed(getattr(place, name)))
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr(backend, "kernel_of", launch_and_compute)
        patch.setattr(backend.TritonKernels, "__init__", make_as_on_device)
        patch.setattr(backend.TritonKernels, "graph_pool", lambda _device: _NoGraphs())
        patch.setattr(backend.TritonKernels, "rejection_sample", ReferenceKernels.rejection_sample)
        patch.setattr(matmul, "_INTERPRETED_PROCESSORS", _PROCESSORS)
        patch.setattr(model_runner, "create_host_copies", lambda device: PinnedMemory(device, LateQueue()))
        yield keys
