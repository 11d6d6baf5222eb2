"""The loss of the built-in model by rounding on held-out questions stays within bounds."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kernels_available import COMPILED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

demo_data = pytest.importorskip("demo_data")
evaluation = pytest.importorskip("eval_demo_model")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not COMPILED, reason="octavo was installed without its compiled kernels"),
]
MODEL = Path(evaluation.__file__).parents[1] / "src" / "octavo" / "assets" / "demo"
QUESTIONS = 40  # per task
# Allowed loss of the share of right answers, and KL divergence in nats per token: two to three times the measured
# value.
BOUNDS = {
    "int8": (evaluation.Rounding("int8"), 0.01, 1e-4),
    "int4": (evaluation.Rounding("int4"), 0.03, 1.5e-3),
    "int4 in groups of 128": (evaluation.Rounding("int4", group_size=128), 0.03, 2.3e-3),
    "int4_all": (evaluation.Rounding("int4_all"), 0.03, 2.5e-3),
    "int4_all in groups of 128": (evaluation.Rounding("int4_all", group_size=128), 0.03, 3.5e-3),
    "int8 KV": (evaluation.Rounding(kv_cache_dtype="int8"), 0.01, 1e-4),
}


@pytest.fixture(scope="module")
def examples():
    return evaluation.examination(QUESTIONS, seed=0)


def share_of_right(examples, rounding):
    answers = evaluation.answer_with_octavo(str(MODEL), examples, rounding)
    scores = evaluation.grade(examples, answers)
    return sum(scores.values()) / len(scores)


@pytest.fixture(scope="module")
def plain_share(examples):
    share = share_of_right(examples, evaluation.Rounding())
    assert share > 0.9
    return share


def test_demo_model_makes_correct_tool_calls(examples):
    asked = [example for example in examples if example.tools]
    shares = evaluation.grade_calls(asked, evaluation.answer_with_octavo(str(MODEL), asked))
    assert shares["decision"] >= 0.9
    assert min(shares.values()) >= 0.8


def test_tool_calls_are_graded_by_decision_names_and_arguments():
    call, other = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '<tool_call>\n{"name": "f"'
    due = evaluation.demo_tools.questions("call", 4)
    none = evaluation.demo_tools.questions("no_call", 1)
    due = [replace(example, answer=call) for example in due]
    answers = [call, call.replace("1", "2"), other, "No.", call]
    expected = {"decision": 3 / 5, "names": 2 / 4, "arguments": 1 / 4}
    assert evaluation.grade_calls([*due, *none], answers) == expected


@pytest.mark.parametrize("name", BOUNDS)
def test_quantization_keeps_share_of_right_answers(examples, plain_share, name):
    rounding, points, _ = BOUNDS[name]
    assert share_of_right(examples, rounding) >= plain_share - points


@pytest.mark.parametrize("name", BOUNDS)
def test_quantization_keeps_token_distributions(examples, name):
    rounding, _, nats = BOUNDS[name]
    divergence, agreement = evaluation.divergence(str(MODEL), examples[::4], rounding)
    assert 0 < divergence < nats  # 0 would mean that nothing was rounded
    assert agreement > 0.995
