"""vLLM on the CPU, through its Python API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from protocol import Job, Request, has_bf16, run
from vllm import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


class Vllm:
    """`LLM` with its defaults (compiled graphs included). Its products of int4 weights support only bfloat16."""

    def __init__(self, job: Job) -> None:
        is_rounded = "quantization_config" in json.loads((Path(job.checkpoint) / "config.json").read_bytes())
        self.llm = LLM(
            job.checkpoint,
            dtype="bfloat16" if is_rounded or has_bf16() else "float32",
            max_model_len=job.max_model_len,
            max_num_seqs=64,
            enable_prefix_caching=job.prefix_caching,
            disable_log_stats=True,
            tensor_parallel_size=job.ranks,
        )

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer the requests; return the numbers of tokens."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.out, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    run(Vllm)
