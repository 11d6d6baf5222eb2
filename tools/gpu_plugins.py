"""Attention by libraries that are installed beside octavo: their errors, and their times beside octavo's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from gpu_correctness import attention_error
from gpu_speed import HEAD_DIM, HEADS, KV_HEADS

from octavo.errors import ConfigError
from octavo.kernels import create_kernels

if TYPE_CHECKING:
    from gpu_device import Check, Entries

    from octavo.kernels import Kernels

BACKENDS = ("flashinfer-inexact", "flash-attn-3-inexact")


def plugins(check: Check, entries: Entries) -> None:
    """Find, for each library, its error in units of the last place, and octavo's time over its own."""
    for backend in BACKENDS:
        try:
            kernels: Any = create_kernels(check.device, backend)
        except ConfigError as error:  # it is not installed, or does not serve this device
            entries.add(backend, partial(dict, left_out=str(error)))
            continue
        for dtype in (torch.float16, torch.bfloat16):
            for case in dict.fromkeys(replace(each, int8=False) for each in check.sizes.attention):
                if kernels.covers(case.head_dim, dtype):
                    name = f"{backend} {case.name(dtype)}"
                    entries.add(name, partial(attention_error, check, kernels, dtype, case))
        for count, context in check.sizes.decodes:
            spans = [(context - 1, context)] * count
            entries.add(f"{backend} decode {count} at {context}", partial(_ratio, check, kernels, spans))
        for tokens, context in check.sizes.prefills:
            spans = [(context - tokens, context)]
            entries.add(f"{backend} prefill {tokens} to {context}", partial(_ratio, check, kernels, spans))


def _ratio(check: Check, library: Kernels, spans: list[tuple[int, int]]) -> dict[str, float]:
    """Time attention of one layer by both. FlashInfer's plan, once a step, is not in it."""
    tables = check.tables(len(spans), max(last for _, last in spans))
    head_dim = 64 if check.is_dry else HEAD_DIM
    caches = check.caches(tables.numel(), KV_HEADS, head_dim, torch.bfloat16)
    batch = check.batch(spans, tables)
    q = check.random(len(batch.positions), HEADS, head_dim)
    own, other = (
        check.seconds(partial(kernels.paged_attention, q, *caches, batch, head_dim**-0.5, None))
        for kernels in (check.kernels, library)
    )
    return {"us": other * 1e6, "us_octavo": own * 1e6, "octavo_over_library": own / other}
