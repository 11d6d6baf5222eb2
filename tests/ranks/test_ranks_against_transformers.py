"""Ranks give the tokens of transformers: random weights, float32, greedy."""

from __future__ import annotations

import pytest
import torch
from rank_threads import RankThread
from sdks import transformers

from octavo import LLM, SamplingParams
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.ranks import leader

PROMPTS = [[(11 * i * i + 5 * i + n) % 499 for i in range(n)] for n in (1, 17, 90, 300)]
NUM_TOKENS = 24
TIE = 1e-4  # both sides compute logits to about 1e-5


@pytest.mark.turn(4)
@pytest.mark.parametrize(
    ("family", "num_ranks", "divides_by_expert"),
    [
        ("Qwen3ForCausalLM", 4, False),
        ("Olmo2ForCausalLM", 2, False),
        ("Qwen3MoeForCausalLM", 2, True),
        ("DeepseekV3ForCausalLM", 4, True),
        ("GptOssForCausalLM", 2, False),
        ("Qwen3_5ForCausalLM", 2, False),
        ("Qwen3NextForCausalLM", 2, True),
        ("GraniteMoeHybridForCausalLM", 2, True),
        ("NemotronHForCausalLM", 4, False),
        ("Lfm2ForCausalLM", 4, False),
        ("Lfm2MoeForCausalLM", 2, True),
    ],
)
def test_greedy_tokens_of_ranks_equal_transformers(family, num_ranks, divides_by_expert, tmp_path, monkeypatch):
    monkeypatch.setattr(leader, "start_process", RankThread)
    path = write_checkpoint(tmp_path / "model", tiny_config(family, vocab_size=499), std=0.1)
    llm = LLM(
        str(path), dtype="float32", tensor_parallel_size=num_ranks, enable_expert_parallel=divides_by_expert,
        skip_tokenizer_init=True, max_num_batched_tokens=64, num_threads=1, kv_cache_memory_bytes=16 << 20,
        rank_timeout_s=60.0,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    llm.llm_engine.shutdown()
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        assert bool((chosen >= logits.amax(1) - TIE).all())
        assert len(set(answer)) > 3
