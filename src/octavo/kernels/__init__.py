"""Kernels: the `interface` and its backends."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from typing import TYPE_CHECKING, cast

from octavo.config import isa_from_environment
from octavo.errors import ConfigError
from octavo.kernels.interface import AttentionBatch, Kernels, PackedLinear, SamplingRows

if TYPE_CHECKING:
    import torch

    from octavo.kernels.cpu import Isa
    from octavo.kernels.ranked import RankGroup

__all__ = [
    "IN_TRITON",
    "AttentionBatch",
    "Kernels",
    "PackedLinear",
    "SamplingRows",
    "are_exact",
    "attention_slowness",
    "create_kernels",
    "default_instruction_set",
    "instruction_sets",
]


logger = logging.getLogger(__name__)
IN_TRITON = ("triton", "fast-inexact")

# Measured with qwen2-0.5b, for the last 512 of 4,096 prompt tokens. The value of avx512_bf16 for 4 bits is an estimate.
_ATTENTION_SLOWNESS = {
    "amx": {16: 3.0, 8: 4.9, 4: 2.8},
    "avx512_bf16": {16: 1.6, 8: 2.9, 4: 1.9},
    "avx512_vnni": {16: 1.7, 8: 5.2, 4: 3.4},
}


def attention_slowness(isa: str | None, bits: int) -> float:
    """Return how many times slower an arithmetic operation is in attention than in matrix products.

    isa: None means AVX-512 VNNI. bits: 16, 8 or 4 per weight.
    """
    return _ATTENTION_SLOWNESS.get(isa or "", _ATTENTION_SLOWNESS["avx512_vnni"])[bits]


def instruction_sets() -> tuple[str, ...]:
    """Return this processor's instruction sets with compiled kernels, best first."""
    if importlib.util.find_spec("octavo._kernels") is None:
        return ()
    from octavo import _kernels  # noqa: PLC0415

    return tuple(_kernels.instruction_sets())


def default_instruction_set() -> str | None:
    """Return OCTAVO_ISA if set, otherwise the best instruction set; None if no kernels are compiled.

    Raises ConfigError if the processor does not support OCTAVO_ISA.
    """
    available = instruction_sets()
    forced = isa_from_environment()
    if not available:
        return None
    if forced is not None and forced not in available:
        raise ConfigError(f"OCTAVO_ISA={forced} cannot be used: this processor has {', '.join(available)}")
    return forced or available[0]


def are_exact(device: torch.device, backend: str) -> bool:
    """Return True if a row is known to have the same bits in any batch: with compiled CPU kernels."""
    compiled = importlib.util.find_spec("octavo._kernels") is not None
    return device.type == "cpu" and backend in {"auto", "cpu"} and compiled


def create_kernels(
    device: torch.device,
    backend: str = "auto",
    num_threads: int | None = None,
    isa: str = "auto",
    group: RankGroup | None = None,
) -> Kernels:
    """Return a device's kernels. backend, isa: as in `DeviceConfig`. group: ranks, for compiled CPU kernels.

    Raises ConfigError for an unknown or unsupported backend or instruction set.
    """
    if backend not in {"auto", "reference", "cpu", *IN_TRITON}:
        choices = ", ".join(("auto", "reference", "cpu", *IN_TRITON[:-1]))
        raise ConfigError(f"kernel backend {backend!r} is unknown; choose {choices} or {IN_TRITON[-1]}")
    if backend == "cpu" and device.type != "cpu":
        raise ConfigError(f"kernel backend 'cpu' cannot serve device {str(device)!r}; choose auto or reference")
    compiled = importlib.util.find_spec("octavo._kernels") is not None
    if backend == "cpu" and not compiled:
        raise ConfigError(
            "kernel backend 'cpu' needs octavo's compiled kernels, which this installation lacks; reinstall octavo "
            "with a C++ compiler (OCTAVO_REQUIRE_KERNELS=1 makes pip show why the build fails), or choose reference"
        )
    wants_compiled = device.type == "cpu" and backend in {"auto", "cpu"}
    if isa != "auto":
        available = instruction_sets() if wants_compiled else ()
        if isa not in available:
            reason = f"this processor has {', '.join(available)}" if available else "no compiled kernels are installed"
            if wants_compiled and isa == "amx" and (refusal := _refused_tiles()):
                reason = refusal
            raise ConfigError(f"instruction set {isa!r} cannot be used: {reason}")
    if backend in IN_TRITON:
        return _triton_kernels(device, backend)
    if wants_compiled:
        if compiled:
            return _cpu_kernels(cast("Isa", isa), num_threads, group)
        warnings.warn(
            "octavo was installed without its compiled kernels: it runs on plain torch, several times slower, and "
            "tokens may depend on the batch. Reinstall octavo with a C++ compiler; OCTAVO_REQUIRE_KERNELS=1 makes "
            "pip show why the build fails.",
            RuntimeWarning,
            stacklevel=2,
        )
    from octavo.kernels.reference import ReferenceKernels  # noqa: PLC0415

    return ReferenceKernels()


def _cpu_kernels(isa: Isa, num_threads: int | None, group: RankGroup | None) -> Kernels:
    if isa == "auto" and (refusal := _refused_tiles()):
        logger.warning(
            "%s; slower kernels are used. Their results differ in the last bits from those of engines with AMX, so "
            "they share no KV with such engines",
            refusal,
        )
    if group is not None:
        from octavo.kernels.ranked import RankedKernels  # noqa: PLC0415

        return RankedKernels(group, isa, num_threads)
    from octavo.kernels.cpu import CpuKernels  # noqa: PLC0415

    return CpuKernels(isa, num_threads)


def _refused_tiles() -> str:
    if importlib.util.find_spec("octavo._kernels") is None:
        return ""
    from octavo import _kernels  # noqa: PLC0415

    error = _kernels.tiles_refused()
    if not error:
        return ""
    return (
        f"the system refuses AMX to this process ({os.strerror(error)}): restart it; if that does not help, allow "
        "the system call arch_prctl in its sandbox or container, and load no library that gives threads small signal "
        "stacks"
    )


def _triton_kernels(device: torch.device, backend: str) -> Kernels:
    if importlib.util.find_spec("triton") is None:
        what = f"kernel backend {backend!r} needs Triton, which is not installed"
        raise ConfigError(f"{what}; run pip install 'octavo[gpu]', or choose auto")
    from octavo.kernels.triton.backend import TritonKernels, is_interpreted  # noqa: PLC0415

    if device.type != "cuda" and not is_interpreted():
        raise ConfigError(
            f"kernel backend {backend!r} cannot serve device {str(device)!r}: it needs a GPU (or TRITON_INTERPRET=1: "
            "Triton then interprets kernels on the CPU, thousands of times slower); choose auto or reference"
        )
    if backend == "fast-inexact":
        from octavo.kernels.triton.inexact import InexactKernels  # noqa: PLC0415

        return InexactKernels()
    return TritonKernels()
