"""transformers: `generate`, one request after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from protocol import Job, Request, has_bf16, run
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Sequence


class Transformers:
    """A plain model."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        dtype = torch.bfloat16 if has_bf16() else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=dtype).eval()

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer the requests; return the numbers of tokens."""
        counts = []
        for request in requests:
            prompt = torch.tensor([request.prompt])
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=request.out,
                max_new_tokens=request.out,
                pad_token_id=0,
            )
            counts.append(out.shape[1] - prompt.shape[1])
        return counts


if __name__ == "__main__":
    run(Transformers)
