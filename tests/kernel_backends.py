"""The backends of kernel tests."""

import importlib.util

import pytest

from octavo.config import kernels_required

COMPILED = importlib.util.find_spec("octavo._kernels") is not None
ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")


def compiled_kernels(isa="auto", num_threads=2):
    """Return compiled kernels; skip if this machine or installation has none."""
    if not COMPILED and not kernels_required():
        pytest.skip("octavo was installed without compiled kernels")
    from octavo import _kernels
    from octavo.kernels.cpu import CpuKernels

    if isa not in ("auto", *_kernels.instruction_sets()):
        pytest.skip(f"this processor has no {isa}")
    return CpuKernels(isa, num_threads)
