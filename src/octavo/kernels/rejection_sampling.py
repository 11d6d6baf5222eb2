"""Rejection sampling of drafts: answers have the same distribution as without drafts, but not the same tokens.

Leviathan et al. (arXiv 2211.17192), algorithm 1; Chen et al. (arXiv 2302.01318), algorithm 2; see docs/speculation.md.
p: the target's distribution; q: the draft's. Tokens have distribution p for any q, if decisions to verify a draft do
not depend on its token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.noise import RandomStream, uniform_noise
from octavo.kernels.reference import kept_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import SamplingRows


def filtered_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the float64 distributions that `Kernels.sample` draws from.

    A row for which `Kernels.sample` returns -1 sums to 0 or to NaN.
    """
    temperature = rows.temperature.to(logits.device).unsqueeze(1)
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)
    largest = scaled.amax(dim=1, keepdim=True)
    is_largest = scaled == largest
    weights = torch.where(is_largest, 1.0, (scaled.double() - largest.double()).exp())
    is_kept = torch.where(is_greedy, is_largest & (is_largest.cumsum(dim=1) == 1), kept_tokens(scaled, rows))
    weights = torch.where(is_kept & (scaled > -torch.inf), weights, 0.0)
    total = weights.sum(dim=1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token id per row in proportion to weights, or -1 if weights sum to 0 or NaN.

    uniform: a number in (0, 1) per row. The first id with a cumulative float64 sum above total * uniform is drawn.
    """
    sums = weights.double().cumsum(dim=1)
    total = sums[:, -1:].contiguous()
    part = torch.minimum(uniform.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(sums, part, right=True)
    return torch.where(total > 0, ids, -1).squeeze(1)


def rejection_sampling_batched(
    target_sampled: Tensor,
    draft_ids: Tensor,
    cu_num_logits: Tensor,
    num_speculative_steps: int,
    *,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    rows: SamplingRows,
) -> tuple[Tensor, Tensor]:
    """Return each request's accepted drafts, then one more token. For the rest, see `Kernels.rejection_sample`.

    target_sampled: only used after a request's last draft, if all drafts are accepted.
    target_probs [num_logits, vocab]: p, from `filtered_probs`. draft_probs [num_logits, vocab]: q of the next row's
    draft; None if drafts were looked up (q = 1).
    If a row's p sums to 0 or NaN, its token is -1, and no token follows.
    """
    first, num_rows = cu_num_logits[:-1].long(), cu_num_logits.diff().long()
    if bool(((num_rows < 1) | (num_rows > num_speculative_steps + 1)).any()):
        raise IndexError(f"a request has no row of logits, or more than {num_speculative_steps} drafts")
    device = target_probs.device
    seed, position, sample_index = (each.to(device) for each in (rows.seed, rows.position, rows.sample_index))
    drafts = draft_ids.roll(-1)
    p = target_probs.gather(1, drafts.unsqueeze(1)).squeeze(1).double()
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, drafts.unsqueeze(1)).squeeze(1).double()
    is_accepted = uniform_noise(seed, position, sample_index, RandomStream.ACCEPTANCE) * q < p

    steps = torch.arange(num_speculative_steps + 1, device=device)
    row_of = (first.unsqueeze(1) + steps).clamp(max=len(drafts) - 1)
    is_accepted_so_far = (is_accepted[row_of] & (steps < num_rows.unsqueeze(1) - 1)).int().cumprod(dim=1).bool()
    num_accepted = is_accepted_so_far.sum(dim=1)
    end = first + num_accepted
    chosen = target_sampled[end]

    is_rejected = num_accepted < num_rows - 1
    at = end[is_rejected]
    target = target_probs[at].double()
    if draft_probs is None:
        residual = target.scatter(1, drafts[at].unsqueeze(1), 0.0)
    else:
        residual = (target - draft_probs[at].double()).clamp(min=0.0)
    # The residual is zero if p and q differ only by rounding.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, target)
    chosen[is_rejected] = draw(
        residual, uniform_noise(seed[at], position[at], sample_index[at], RandomStream.RESAMPLING)
    )
    sampled = torch.where(is_accepted_so_far, drafts[row_of], -1).scatter_(1, num_accepted[:, None], chosen[:, None])
    return sampled, (num_accepted + 1).int()
