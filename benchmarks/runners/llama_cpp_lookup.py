"""llama.cpp with and without prompt lookup, in turns: `python llama_cpp_lookup.py MODEL.gguf < JOB`.

Through llama-cpp-python, whose interpreter runs this. The job has of each name {"turns": [token ids of the prompts of
each turn], "max_tokens", "num_drafts"}. Printed are "figures", of each name {"none": [...], "lookup": [...]}, the mean
seconds of an output token behind the first in each turn; and how many answers were the same both times.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

OPTIONS = {"n_ctx": 1024, "n_threads": 2, "n_threads_batch": 2, "verbose": False}


def time_per_output_token(model: Llama, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """Answer one prompt, greedily; return the figure and the tokens."""
    model.reset()
    times, tokens = [], []
    for token in itertools.islice(model.generate(prompt, temp=0.0), max_tokens):
        times.append(time.perf_counter())
        tokens.append(token)
        if token == model.token_eos():
            break
    return (times[-1] - times[0]) / max(len(times) - 1, 1), tokens


def main() -> None:
    """Measure and print."""
    jobs = json.load(sys.stdin)
    num_drafts = next(iter(jobs.values()))["num_drafts"]
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=num_drafts)
    models = {"none": Llama(sys.argv[1], **OPTIONS), "lookup": Llama(sys.argv[1], draft_model=lookup, **OPTIONS)}
    result: dict[str, dict[str, list[float]]] = {name: {method: [] for method in models} for name in jobs}
    num_same = num_answers = 0
    for name, job in jobs.items():
        for prompts in job["turns"]:
            answers = []
            for method, model in models.items():
                told = [time_per_output_token(model, prompt, job["max_tokens"]) for prompt in prompts]
                result[name][method].append(statistics.mean(figure for figure, _ in told))
                answers.append([tokens for _, tokens in told])
            num_same += sum(one == other for one, other in zip(*answers, strict=True))
            num_answers += len(prompts)
    print(json.dumps({"figures": result, "num_same": num_same, "num_answers": num_answers}))


if __name__ == "__main__":
    main()
