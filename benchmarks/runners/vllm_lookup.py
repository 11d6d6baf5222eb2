"""vLLM with and without prompt lookup, in turns: `python vllm_lookup.py CHECKPOINT < JOB`.

The job and what is printed are those of `llama_cpp_lookup.py`.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from vllm import LLM, SamplingParams


def open_engine(checkpoint: str, num_drafts: int) -> LLM:
    """Return an engine that is warm; num_drafts: 0 for none."""
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 8, "disable_log_stats": False}
    if num_drafts:
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": num_drafts,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    llm = LLM(checkpoint, dtype="bfloat16", enable_prefix_caching=False, **options)
    llm.generate([{"prompt_token_ids": list(range(300, 340))}], SamplingParams(max_tokens=16), use_tqdm=False)
    return llm


def time_per_output_token(llm: LLM, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """Answer one prompt, greedily; return the figure and the tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    return (output.metrics.last_token_ts - output.metrics.first_token_ts) / max(len(tokens) - 1, 1), tokens


def main() -> None:
    """Measure and print."""
    jobs = json.load(sys.stdin)
    num_drafts = next(iter(jobs.values()))["num_drafts"]
    llms = {"none": open_engine(sys.argv[1], 0), "lookup": open_engine(sys.argv[1], num_drafts)}
    result: dict[str, dict[str, list[float]]] = {name: {method: [] for method in llms} for name in jobs}
    num_same = num_answers = 0
    for name, job in jobs.items():
        for prompts in job["turns"]:
            answers = []
            for method, llm in llms.items():
                told = [time_per_output_token(llm, prompt, job["max_tokens"]) for prompt in prompts]
                result[name][method].append(statistics.mean(figure for figure, _ in told))
                answers.append([tokens for _, tokens in told])
            num_same += sum(one == other for one, other in zip(*answers, strict=True))
            num_answers += len(prompts)
    print(json.dumps({"figures": result, "num_same": num_same, "num_answers": num_answers}))


if __name__ == "__main__":
    main()
