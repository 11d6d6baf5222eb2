"""Worked case (i): five drafts in a step. How many tokens a step yields with exact and with rejection verification.

Exact: the drafts are 4 5 6 7 8, and the model samples 4 5 9 at their positions. 4 and 5 are accepted, and 9 replaces
the third draft: 3 tokens.

Rejection sampling: the model gives the first two drafts the same probability as their source, and the third one
probability 0. Two are accepted, the third is rejected, and a token sampled from the residual distribution replaces it:
3 tokens.

If each draft is accepted with probability 0.8, a step yields 1 + 0.8 + 0.8^2 + ... + 0.8^5 = (1 - 0.8^6) / (1 - 0.8) =
3.69 tokens, compared with 1 without drafts. That is not the speed-up: a step with drafts takes longer.
"""

from __future__ import annotations

import torch

from octavo.kernels.interface import SamplingRows
from octavo.kernels.reference import ReferenceKernels
from octavo.kernels.rejection_sampling import rejection_sampling_batched

DRAFTS = [4, 5, 6, 7, 8]
NEWEST = 3  # the token before the drafts
VOCAB_SIZE = 10


def verify_exactly(chosen: list[int]) -> list[int]:
    """Return the tokens of a step, padded with -1. chosen: the model's token at each draft, and the one after them."""
    rows = torch.tensor([0, len(chosen)], dtype=torch.int32)
    sampled, _ = ReferenceKernels().rejection_sample(
        torch.tensor(chosen), torch.tensor([NEWEST, *DRAFTS]), rows, len(DRAFTS)
    )
    return sampled[0].tolist()


def verify_by_rejection(
    target_probs: torch.Tensor, draft_probs: torch.Tensor | None, num_requests: int
) -> torch.Tensor:
    """Return the tokens of a step for each of several requests with the same drafts, padded with -1.

    target_probs, draft_probs: float64 [6, vocab], p and q; None for drafts that were not sampled.
    """
    num_rows = len(DRAFTS) + 1
    places = torch.arange(num_rows, dtype=torch.int32).repeat(num_requests)
    anything = torch.ones(len(places))
    sampled, _ = rejection_sampling_batched(
        torch.zeros(len(places), dtype=torch.int64),  # the token after five accepted drafts
        torch.tensor([NEWEST, *DRAFTS]).repeat(num_requests),
        torch.arange(num_requests + 1, dtype=torch.int32) * num_rows,
        len(DRAFTS),
        target_probs=target_probs.repeat(num_requests, 1),
        draft_probs=None if draft_probs is None else draft_probs.repeat(num_requests, 1),
        rows=SamplingRows(
            temperature=anything,
            top_k=anything.int(),
            top_p=anything,
            min_p=anything,
            seed=torch.arange(num_requests).repeat_interleave(num_rows),
            sample_index=torch.zeros_like(places),
            position=places,
        ),
    )
    return sampled


def run() -> dict[str, object]:
    """Verify drafts in both ways; return the tokens, and the expected and measured number of tokens per step."""
    draft_probs = torch.eye(VOCAB_SIZE, dtype=torch.float64)[[*DRAFTS, 0]]
    target_probs = draft_probs.clone()
    target_probs[2] = torch.eye(VOCAB_SIZE)[9]  # 9 in place of 6
    likely = 0.8 * draft_probs + 0.2 * torch.eye(VOCAB_SIZE)[1]  # the draft with 0.8, else 1
    measured = (verify_by_rejection(likely, None, 20_000) >= 0).sum(dim=1).double().mean()
    return {
        "exact": verify_exactly([4, 5, 9, 7, 8, 1]),
        "third_rejected": verify_by_rejection(target_probs, draft_probs, 1)[0].tolist(),
        "tokens_per_step": round((1 - 0.8**6) / (1 - 0.8), 2),
        "measured": round(float(measured), 2),
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
