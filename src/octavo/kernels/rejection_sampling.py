"""Classic rejection sampling of drafts: answers are distributed as without drafts, and which one comes hangs on them.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192), algorithm 1; Chen et
al., "Accelerating Large Language Model Decoding with Speculative Sampling" (arXiv 2302.01318), algorithm 2.

p is the target's distribution and q that of the draft, which was drawn from q by `Stream.DRAFT`. A draft x is accepted
with probability min(1, p(x) / q(x)), by `Stream.ACCEPTANCE`. In place of the first one that is not, a token is drawn
from max(p - q, 0), normalised, by `Stream.RESAMPLING`; behind drafts that are all accepted, one from p. So each token
has distribution p, whatever q is, provided that whether a draft is verified does not hang on which token it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.kernels.noise import Stream, uniform_noise
from octavo.kernels.reference import kept_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from octavo.kernels.interface import SamplingRows


def filtered_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return the distributions that `Kernels.sample` draws from: float32 [n, vocab] -> float64 [n, vocab].

    All of a greedy row's is on one token. A row that names no token (`Kernels.sample`) sums to 0, or to NaN.
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
    """Return a token id per row, with probabilities in proportion to its weights: [n, vocab] and [n] -> int64 [n].

    By inversion, in float64: the first token at which the sum so far exceeds that part of the whole. -1 where the
    weights sum to 0 or to NaN.
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
    """Return the tokens of each request that stand: the drafts that are accepted, and one token behind.

    target_sampled, draft_ids, cu_num_logits, num_speculative_steps and the result are those of
    `Kernels.rejection_sample`. Of target_sampled the last row of each request is looked at alone: the choice from p
    where all drafts are accepted.
    target_probs [num_logits, vocab]: p of each row, as `filtered_probs` gives it. draft_probs [num_logits, vocab]: q
    of the draft that stands behind each row, which is the next row's input; any numbers in a request's last row. None
    where drafts were not drawn but found: all of q is on the draft. rows: whose noise it is.

    The token is -1, and the last, where a row's p sums to 0 or to NaN.
    Raises `IndexError` for a request without a row, or with more than num_speculative_steps + 1 of them.
    """
    first, num_rows = cu_num_logits[:-1].long(), cu_num_logits.diff().long()
    if bool(((num_rows < 1) | (num_rows > num_speculative_steps + 1)).any()):
        raise IndexError(f"a request has no row of logits, or more than {num_speculative_steps} drafts")
    device = target_probs.device
    seed, position, sample_index = (each.to(device) for each in (rows.seed, rows.position, rows.sample_index))
    drafts = draft_ids.roll(-1)
    p = target_probs.gather(1, drafts.unsqueeze(1)).squeeze(1).double()
    q = torch.ones_like(p) if draft_probs is None else draft_probs.gather(1, drafts.unsqueeze(1)).squeeze(1).double()
    is_accepted = uniform_noise(seed, position, sample_index, Stream.ACCEPTANCE) * q < p

    steps = torch.arange(num_speculative_steps + 1, device=device)
    row_of = (first.unsqueeze(1) + steps).clamp(max=len(drafts) - 1)  # [num_requests, num_speculative_steps + 1]
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
    # Where p and q are equal but for rounding nothing may be left; that a draft is rejected then is rounding as well.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, target)
    chosen[is_rejected] = draw(residual, uniform_noise(seed[at], position[at], sample_index[at], Stream.RESAMPLING))
    sampled = torch.where(is_accepted_so_far, drafts[row_of], -1).scatter_(1, num_accepted[:, None], chosen[:, None])
    return sampled, (num_accepted + 1).int()
