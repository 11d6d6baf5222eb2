"""The big twin of the built-in model answers as it does."""

import sys
from pathlib import Path

import pytest
from alone_and_crowd import needs_kernels

from octavo import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from make_twin import Shape, make_twin

pytestmark = needs_kernels
CHATS = [
    [{"role": "user", "content": content}]
    for content in ("What is 12 + 30?", "Tell me a story about a fox.", "Sort these numbers: 5 3 9", "Repeat: a b a c")
]


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return make_twin(tmp_path_factory.mktemp("twin"), Shape(num_layers=6, intermediate_size=512, num_heads=10))


@pytest.fixture(scope="module")
def hybrid_twin(tmp_path_factory):
    shape = Shape(num_layers=17, intermediate_size=512, num_heads=10, is_hybrid=True)
    return make_twin(tmp_path_factory.mktemp("hybrid"), shape)


def answers(model: str | None, dtype: str, **params) -> list[list[int]]:
    llm = LLM(model, dtype=dtype, num_gpu_blocks_override=64)
    greedy = SamplingParams(temperature=0.0, max_tokens=80, **params)
    return [output.outputs[0].token_ids for output in llm.chat(CHATS, greedy, use_tqdm=False)]


@pytest.mark.turn(12)
def test_float32_twin_generates_tokens_of_built_in_model(twin):
    assert answers(str(twin), "float32", ignore_eos=True) == answers(None, "float32", ignore_eos=True)


@pytest.mark.turn(12)
def test_float32_hybrid_twin_generates_tokens_of_built_in_model(hybrid_twin):
    assert answers(str(hybrid_twin), "float32", ignore_eos=True) == answers(None, "float32", ignore_eos=True)


@pytest.mark.turn(12)
def test_bfloat16_twin_matches_built_in_model_in_most_chats(twin):
    """Sums of more columns are made in another order."""
    same = [one == other for one, other in zip(answers(str(twin), "bfloat16"), answers(None, "bfloat16"), strict=True)]
    assert sum(same) >= len(CHATS) - 1
