"""tools/make_expert_gguf.py writes files that octavo runs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from make_expert_gguf import SHAPES, write

from octavo import LLM, SamplingParams
from octavo.startup.checkpoint import open_checkpoint

SMALL = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "experts": 4, "chosen": 2, "expert": 256}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3-30b-a3b", "Q4_K"), ("olmoe-1b-7b", "Q4_0"), ("gpt-oss-20b", "MXFP4"), ("glm-4.7-flash", "Q4_K")],
)
def test_written_experts_run(name, kind, tmp_path):
    shape = SHAPES[name] | SMALL | {"vocabulary": 320}
    if "latent" in shape:
        shape |= {"kv_heads": 1, "query": 256, "latent": 256, "rotated": 32, "value": 64, "dense": 512}
    path = write(tmp_path / "experts.gguf", shape, layers=2, kind=kind)
    assert open_checkpoint(path).read_architecture().num_active_parameters > 0
    llm = LLM(str(path), max_model_len=64)
    outputs = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(outputs[0].outputs[0].token_ids) == 4


def test_shapes_have_published_sizes():
    """Qwen3-30B-A3B has 30.5 billion weights, of which 3.3 are used for a token."""
    shape = SHAPES["qwen3-30b-a3b"]
    expert = 3 * shape["hidden"] * shape["expert"]
    assert 48 * shape["experts"] * expert == pytest.approx(29.0e9, rel=0.01)
    assert 48 * shape["chosen"] * expert == pytest.approx(1.81e9, rel=0.01)
