"""Gemma 3 270M, a base model with windows of 512, gives the tokens of transformers: texts, float32, greedy."""

import pytest
import torch
from sdks import transformers

from octavo import LLM, SamplingParams

NUM_TOKENS = 32
_FACTS = "The sun is a star. The earth goes around it once a year. The moon goes around the earth. "
TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "def fib(n):\n    ",
    "Die Würde des Menschen",
    _FACTS * 3 + "The moon",
    _FACTS * 26 + "The sun",
]


@pytest.fixture(scope="module")
def oracle(real_model):
    path = real_model("gemma3")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def test_gemma3_prompts_and_tokens_equal_transformers(real_model, oracle, sampled):
    """All texts in one batch.

    The oracle encodes the prompts itself, reads each answer and has to choose each of its tokens.
    """
    model, tokenizer = oracle
    texts = sampled(TEXTS)
    llm = LLM(str(real_model("gemma3")), dtype="float32", max_model_len=2048)
    outputs = llm.generate(texts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        prompt = tokenizer(text)["input_ids"]
        answer = list(output.outputs[0].token_ids)
        assert output.prompt_token_ids == prompt
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + answer[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
        assert answer == logits.argmax(dim=-1).tolist()
        assert output.outputs[0].text == tokenizer.decode(answer, skip_special_tokens=True)
