"""Rows by expert on a GPU: a stable counting sort without atomics, one program per expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl

from octavo.kernels.triton.launch import kernel
from octavo.kernels.triton.loops import loop_bound

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1024


def sort_by_expert(ids: Tensor, sources: Tensor, places: Tensor, starts: Tensor) -> None:
    """See `octavo.kernels.operations.sort_by_expert`."""
    _sort_by_expert[(len(starts) - 1,)](
        ids, sources, places, starts, ids.numel(), NUM_CHOSEN=ids.shape[1], BLOCK=_BLOCK, enable_fp_fusion=False
    )


@kernel(do_not_specialize=["num_choices"])
def _sort_by_expert(
    ids_ptr, sources_ptr, places_ptr, starts_ptr, num_choices, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    expert = tl.program_id(0)
    num_lower = tl.zeros([BLOCK], tl.int32)
    for first in range(0, loop_bound(num_choices), BLOCK):
        index = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + index, mask=index < num_choices, other=expert)
        num_lower += (ids < expert).to(tl.int32)
    place = tl.sum(num_lower)
    tl.store(starts_ptr + expert, place)
    for first in range(0, loop_bound(num_choices), BLOCK):
        index = first + tl.arange(0, BLOCK)
        is_own = tl.load(ids_ptr + index, mask=index < num_choices, other=-1) == expert
        number = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(places_ptr + index, place + number - 1, mask=is_own)
        tl.store(sources_ptr + place + number - 1, (index // NUM_CHOSEN).to(tl.int64), mask=is_own)
        place += tl.max(number)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, num_choices)
