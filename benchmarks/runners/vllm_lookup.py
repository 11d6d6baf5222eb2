"""vLLM with and without prompt lookup, in turns: `python vllm_lookup.py CHECKPOINT < JOB`.

`lookup.py` describes a job.
"""

from __future__ import annotations

import sys
from typing import Any

from lookup import run
from vllm import LLM, SamplingParams


def open_engine(num_drafts: int) -> LLM:
    """Return a warmed-up engine. num_drafts: 0 for no prompt lookup."""
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, "disable_log_stats": False}
    if num_drafts:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": num_drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    llm = LLM(sys.argv[1], dtype="bfloat16", enable_prefix_caching=False, **options)
    llm.generate([{"prompt_token_ids": list(range(300, 340))}], SamplingParams(max_tokens=16), use_tqdm=False)
    return llm


def time_per_output_token(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """Answer one prompt greedily; return the seconds per output token and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    return (output.metrics.last_token_ts - output.metrics.first_token_ts) / max(len(tokens) - 1, 1), tokens


if __name__ == "__main__":
    run(open_engine, time_per_output_token)
