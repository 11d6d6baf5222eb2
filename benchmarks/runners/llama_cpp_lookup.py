"""llama.cpp with and without prompt lookup, in turns: `python llama_cpp_lookup.py MODEL.gguf < JOB`.

Uses llama-cpp-python, in its environment; `lookup.py` describes a job.
"""

from __future__ import annotations

import itertools
import sys
import time

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from lookup import run

OPTIONS = {"n_ctx": 1024, "n_threads": 2, "n_threads_batch": 2, "verbose": False}


def time_per_output_token(model: Llama, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """Answer one prompt greedily; return the seconds per output token and the tokens."""
    model.reset()
    times, tokens = [], []
    for token in itertools.islice(model.generate(prompt, temp=0.0), max_tokens):
        times.append(time.perf_counter())
        tokens.append(token)
        if token == model.token_eos():
            break
    return (times[-1] - times[0]) / max(len(times) - 1, 1), tokens


def open_engine(num_drafts: int) -> Llama:
    """Load the model named on the command line. num_drafts: 0 for no prompt lookup."""
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=num_drafts) if num_drafts else None
    return Llama(sys.argv[1], draft_model=lookup, **OPTIONS)


if __name__ == "__main__":
    run(open_engine, time_per_output_token)
