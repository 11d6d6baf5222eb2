"""Acceptance of drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from octavo.kernels.triton.launch import kernel, power_of_2_from

if TYPE_CHECKING:
    from torch import Tensor


def rejection_sample(
    target_sampled: Tensor, draft_ids: Tensor, cu_num_logits: Tensor, num_speculative_steps: int
) -> tuple[Tensor, Tensor]:
    """See `Kernels`."""
    num_requests = cu_num_logits.shape[0] - 1
    num_rows = cu_num_logits.diff()
    if bool(((num_rows < 1) | (num_rows > num_speculative_steps + 1)).any()):
        raise IndexError(f"a request has no row of logits, or more than {num_speculative_steps} drafts")
    sampled = target_sampled.new_empty(num_requests, num_speculative_steps + 1)
    num_sampled = torch.empty(num_requests, dtype=torch.int32, device=target_sampled.device)
    _accept_drafts[(num_requests,)](
        target_sampled,
        draft_ids,
        cu_num_logits,
        sampled,
        num_sampled,
        num_speculative_steps + 1,
        BLOCK=power_of_2_from(num_speculative_steps + 1),
        num_warps=1,
        enable_fp_fusion=False,
    )
    return sampled, num_sampled


@kernel(do_not_specialize=["most"])
def _accept_drafts(
    target_ptr, draft_ids_ptr, cu_num_logits_ptr, sampled_ptr, num_sampled_ptr, most, BLOCK: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(cu_num_logits_ptr + request)
    last = tl.load(cu_num_logits_ptr + request + 1) - 1
    step = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + first + step, mask=first + step <= last, other=-1)
    draft = tl.load(draft_ids_ptr + first + step + 1, mask=first + step < last, other=-1)
    differs = (first + step >= last) | (target != draft)
    count = tl.min(tl.where(differs, step, BLOCK)) + 1
    tl.store(sampled_ptr + request * most + step, tl.where(step < count, target, -1), mask=step < most)
    tl.store(num_sampled_ptr + request, count)
