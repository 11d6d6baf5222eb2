"""octavo, through its Python API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import Job, Request, run

from octavo import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


class Octavo:
    """`LLM` with its defaults."""

    def __init__(self, job: Job) -> None:
        self.llm = LLM(
            job.checkpoint,
            dtype="bfloat16",
            quantization=job.quantization,
            max_model_len=job.max_model_len,
            max_num_seqs=64,
            kv_cache_memory_bytes=job.kv_bytes,
            enable_prefix_caching=job.prefix_caching,
            num_threads=job.threads,
            tensor_parallel_size=job.ranks,
            skip_tokenizer_init=True,
            **({} if job.speculation is None else {"speculative_config": {"method": job.speculation}}),
        )

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer the requests; return the numbers of tokens."""
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.out, ignore_eos=True, detokenize=False)
            for request in requests
        ]
        outputs = self.llm.generate([request.prompt for request in requests], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    run(Octavo)
