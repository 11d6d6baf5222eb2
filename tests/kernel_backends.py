"""The backends of kernel tests."""

import importlib.util

import pytest

from octavo.config import kernels_required

COMPILED = importlib.util.find_spec("octavo._kernels") is not None
ALL_ISAS = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable")


def isas_here():
    """Return the instruction sets of this processor, so that no case of another one is made and skipped."""
    if not COMPILED:
        return ALL_ISAS
    from octavo import _kernels

    return tuple(isa for isa in ALL_ISAS if isa in _kernels.instruction_sets())


ISAS = isas_here()


def compiled_kernels(isa="auto", num_threads=2):
    """Return compiled kernels; skip if this machine or installation has none."""
    if not COMPILED and not kernels_required():
        pytest.skip("octavo was installed without compiled kernels")
    from octavo import _kernels
    from octavo.kernels.cpu import CpuKernels

    if isa not in ("auto", *_kernels.instruction_sets()):
        pytest.skip(f"this processor has no {isa}")
    return CpuKernels(isa, num_threads)
