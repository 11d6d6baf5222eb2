"""llama.cpp at its fastest: batches by its C API, without a server, like its own llama-batched-bench.

Uses the low-level API of llama-cpp-python, in an environment with it and numpy. Each sequence has its own KV
(kv_unified off), prompts are computed together, and the next token is the one with the largest logit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from protocol import Job, Request, run

if TYPE_CHECKING:
    from collections.abc import Sequence

_ONE, _MANY = (1, 2048), (64, 128)  # sequences, and tokens of KV of each
_BATCH_TOKENS = 2048


class LlamaCpp:
    """A model, with a context for one sequence or for many, created when first used."""

    def __init__(self, job: Job) -> None:
        llama_cpp.llama_backend_init()
        self.threads = job.threads
        self.model = llama_cpp.llama_model_load_from_file(
            job.checkpoint.encode(), llama_cpp.llama_model_default_params()
        )
        self.num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.contexts: dict[int, Any] = {}
        self.batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def context(self, num_sequences: int, num_tokens: int) -> Any:
        """Return an empty context for `num_sequences` sequences of `num_tokens` tokens."""
        if num_sequences not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_seq_max, params.n_ctx, params.kv_unified = num_sequences, num_sequences * num_tokens, False
            params.n_batch, params.n_ubatch = _BATCH_TOKENS, 512
            params.n_threads = params.n_threads_batch = self.threads
            self.contexts[num_sequences] = llama_cpp.llama_init_from_model(self.model, params)
        context = self.contexts[num_sequences]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        return context

    def decode(self, context: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows (sequence, position, token, True to return the next token); return the next tokens."""
        following = []
        for first in range(0, len(rows), _BATCH_TOKENS):
            part = rows[first : first + _BATCH_TOKENS]
            self.batch.n_tokens = len(part)
            for index, (sequence, position, token, is_wanted) in enumerate(part):
                self.batch.token[index], self.batch.pos[index] = token, position
                self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
                self.batch.logits[index] = is_wanted
            if llama_cpp.llama_decode(context, self.batch):
                raise RuntimeError("llama_decode failed")
            for index, (*_, is_wanted) in enumerate(part):
                if is_wanted:
                    logits = llama_cpp.llama_get_logits_ith(context, index)
                    following.append(int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.num_tokens,)))))
        return following

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer the requests; return the numbers of tokens."""
        context = self.context(*(_ONE if len(requests) == 1 else _MANY))
        ends = [len(request.prompt) for request in requests]
        rows = [
            (sequence, position, token, position == ends[sequence] - 1)
            for sequence, request in enumerate(requests)
            for position, token in enumerate(request.prompt)
        ]
        counts = [0] * len(requests)
        while rows:
            running = [sequence for sequence, _, _, is_wanted in rows if is_wanted]
            tokens = self.decode(context, rows)
            rows = []
            for sequence, token in zip(running, tokens, strict=True):
                counts[sequence] += 1
                if counts[sequence] < requests[sequence].out:
                    rows.append((sequence, ends[sequence] + counts[sequence] - 1, token, True))
        return counts


if __name__ == "__main__":
    run(LlamaCpp)
