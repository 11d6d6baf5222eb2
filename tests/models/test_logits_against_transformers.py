"""The logits of octavo are those of transformers: random weights, float32, of every beginning of a prompt."""

import pytest
import torch
from test_against_transformers import ALTERATIONS, load_oracle
from transformers_cases import CASES, make_prompts

from octavo.kernels import create_kernels
from octavo.models.loader import load_model
from octavo.models.random_weights import write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights

LENGTH = 301  # around windows of 37 and blocks of 16, and past what each rope was made for
STEP = 23


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal(case, prompt_logits, tmp_path):
    """Row p has the logits behind p + 1 tokens; computed in steps, so that most rows read keys of earlier ones."""
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
        assert apart(ours, expected) < 2e-5
        for feature in (*case.altered, *case.altered_logits):
            altered = ALTERATIONS[feature](oracle)(input_ids=torch.tensor([token_ids])).logits[0]
            assert apart(ours, altered) > 1e-2, f"the oracle gives the same logits with another {feature}"


def apart(ours, theirs):
    """The largest difference, of the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
