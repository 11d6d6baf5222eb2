"""octavo gives the logits and greedy tokens of transformers: random weights, float32, all lengths."""

import pytest
import torch
from test_against_transformers import ALTERATIONS, MIN_GAP, generate_staggered, load_oracle
from transformers_cases import CASES, MORE_CASES, make_prompts

from octavo.kernels import create_kernels
from octavo.models.loader import load_model
from octavo.models.random_weights import write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights

LENGTH = 301  # longer than windows of 37, blocks of 16, and the original length of each rope
STEP = 23


@pytest.mark.sweep(48)
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=lambda case: case.name)
def test_logits_match_transformers(case, prompt_logits, tmp_path):
    """Row p has the logits after p + 1 tokens; several steps are computed, so most rows read keys of earlier steps."""
    path = write_checkpoint(tmp_path / "model", case.full_config, seed=case.seed, std=0.1)
    token_ids = next(prompt for prompt in make_prompts(case.seed) if len(prompt) == LENGTH)
    cpu, architecture = torch.device("cpu"), read_architecture(path)
    max_model_len = case.max_model_len or architecture.max_context_tokens
    model = load_model(
        FolderWeights(path), architecture, create_kernels(cpu, "auto"), dtype="float32", device=cpu,
        max_model_len=max_model_len,
    )  # fmt: skip
    oracle = load_oracle(path)
    with torch.inference_mode():
        ours = prompt_logits(model, token_ids, step=STEP)
        expected = oracle(input_ids=torch.tensor([token_ids])).logits[0]
        assert apart(ours, expected) < case.tolerance
        for feature in (*case.altered, *case.altered_logits):
            altered = ALTERATIONS[feature](oracle)(input_ids=torch.tensor([token_ids])).logits[0]
            assert apart(ours, altered) > 1e-2, f"the oracle gives the same logits with another {feature}"


LENGTHS = (1, 2, 15, 16, 17, 36, 37, 38, 64, 65, 128, 300)
NUM_TOKENS = 24


@pytest.mark.sweep(72)
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_batched_tokens_equal_transformers(case, tmp_path):
    """Of many prompts in a batch. After a choice that is too close, the rest of an answer is not compared."""
    path = write_checkpoint(tmp_path / "model", case.full_config, seed=case.seed, std=0.1)
    longest = max(make_prompts(case.seed), key=len)
    prompts = [longest[:length] for length in LENGTHS]
    answers = generate_staggered(path, prompts, NUM_TOKENS, case.max_model_len)
    oracle, compared = load_oracle(path), 0
    for prompt, answer in zip(prompts, answers, strict=True):
        # The tokens after the answer make the sequence long enough for the factors of long sequences; no row reads
        # ahead.
        token_ids = torch.tensor([prompt + answer + longest[:40]])
        with torch.inference_mode():
            best = oracle(input_ids=token_ids).logits[0, len(prompt) - 1 : -41].topk(2)
        is_close = (best.values[:, 0] - best.values[:, 1] < MIN_GAP).tolist()
        told = is_close.index(True) if True in is_close else NUM_TOKENS
        assert answer[:told] == best.indices[:told, 0].tolist()
        compared += told
    assert compared > 0.9 * NUM_TOKENS * len(prompts)


def apart(ours, theirs):
    """Return the largest difference, relative to the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
