"""A real model gives the tokens of transformers: SmolLM2-135M-Instruct, chats, float32, greedy."""

import pytest
import torch
from sdks import transformers

from octavo import LLM, SamplingParams

NUM_TOKENS = 120
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write a haiku about the sea."}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is the sky green?"}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "List three fruits,\neach on a line of its own."}],
    [{"role": "user", "content": "Übersetze ins Englische: „Guten Morgen, 世界 🙂“"}],
    [{"role": "user", "content": "def fib(n):\n    # complete this function\n"}],
    [{"role": "user", "content": 'Give me a JSON object with the keys "a" and "b".'}],
    [{"role": "user", "content": "Explain gravity to a child. " * 20}],
    [{"role": "user", "content": "Why?"}],
]


@pytest.fixture(scope="module")
def oracle(real_model):
    path = real_model("smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


def test_smollm2_prompts_and_tokens_equal_transformers(real_model, oracle, sampled):
    """All chats in one batch.

    The oracle renders the prompts itself, reads each answer and has to choose each of its tokens.
    """
    model, tokenizer = oracle
    chats = sampled(CHATS)
    llm = LLM(str(real_model("smollm2")), dtype="float32")
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
    for chat, output in zip(chats, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = list(output.outputs[0].token_ids)
        assert output.prompt_token_ids == prompt
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert answer == logits.argmax(dim=-1).tolist()
        assert len(answer) == NUM_TOKENS or answer[-1] == tokenizer.eos_token_id
        assert output.outputs[0].text == tokenizer.decode(answer, skip_special_tokens=True)
