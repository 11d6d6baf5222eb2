"""OpenVINO GenAI, through its continuous batching pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import openvino
import openvino_genai
from protocol import Job, Request, has_bf16, run

if TYPE_CHECKING:
    from collections.abc import Sequence


class OpenVino:
    """`ContinuousBatchingPipeline` with steps of at most 512 tokens."""

    def __init__(self, job: Job) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = -(-job.kv_bytes // 2**30)
        scheduler.max_num_batched_tokens = 512
        scheduler.max_num_seqs = 64
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = job.prefix_caching
        properties: dict[str, object] = {"INFERENCE_NUM_THREADS": job.threads}
        if has_bf16():
            properties["INFERENCE_PRECISION_HINT"] = "bf16"
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(job.checkpoint, scheduler, "CPU", properties)

    def generate(self, requests: Sequence[Request]) -> list[int]:
        """Answer the requests; return the numbers of tokens."""
        prompts = [openvino.Tensor(np.array([request.prompt], dtype=np.int64)) for request in requests]
        configs = []
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request.out
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        return [len(result.m_generation_ids[0]) for result in self.pipeline.generate(prompts, configs)]


if __name__ == "__main__":
    run(OpenVino)
