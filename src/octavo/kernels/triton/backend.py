"""The Triton kernels behind the interface; plain torch computes what they do not cover."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import triton
from triton.runtime import driver

from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.triton import attention, rope_kv

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import AttentionBatch

_OPERATIONS = (
    "add",
    "add_rms_norm",
    "divide",
    "embedding",
    "gate",
    "gated_linear",
    "linear",
    "paged_attention",
    "rejection_sample",
    "rms_norm",
    "rope_and_write_kv",
    "sample",
    "soft_cap",
    "take_rows",
    "top_tokens",
)


class TritonKernels(ReferenceKernels):
    """Kernels in Triton for a GPU, or in Triton's interpreter for the CPU.

    An operation that is not defined here is that of plain torch, and a warning names it when the kernels are made.
    """

    name = "triton"

    def __init__(self) -> None:
        in_torch = [name for name in _OPERATIONS if name not in vars(TritonKernels)]
        if in_torch:
            warnings.warn(
                f"plain torch computes what there are no Triton kernels for: {', '.join(in_torch)}; a token may depend "
                "on the batch that it was computed in",
                RuntimeWarning,
                stacklevel=3,
            )
        self.identity = f"{self.name} {triton.__version__}:{_target()}"

    def rope_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        batch: AttentionBatch,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        interleaved: bool = False,
        query_scale: Tensor | None = None,
    ) -> None:
        """Rotate q in place; write rotated k and v into their slots."""
        rope_kv.rope_and_write_kv(
            q, k, v, cos_sin, batch, k_cache, v_cache, interleaved=interleaved, query_scale=query_scale
        )

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return causal attention of every row over the KV of its own sequence."""
        return attention.paged_attention(q, k_cache, v_cache, batch, scale, window, softcap)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before it was imported), on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def _target() -> str:
    """What kernels are compiled for."""
    if is_interpreted():
        return "interpreter"
    target = driver.active.get_current_target()
    return f"{target.backend} {target.arch}"
