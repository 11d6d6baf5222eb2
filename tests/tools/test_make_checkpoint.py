"""The benchmark checkpoints have the published shapes, and the tool writes what octavo loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from octavo.engine.tokenizer import Tokenizer
from octavo.models.registry import read_architecture

TOOL = Path(__file__).parents[2] / "tools" / "make_checkpoint.py"


def run(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_tiny_checkpoint_of_every_option(tmp_path):
    options = ("--hidden-size", 96, "--num-hidden-layers", 3, "--dtype", "bfloat16", "--max-shard-bytes", 100_000)
    result = run("tiny-mistral", tmp_path, *options, "--std", 0.1, "--set", "sliding_window=33", "--seed", 5)
    assert result.returncode == 0, result.stderr
    architecture = read_architecture(tmp_path)
    assert (architecture.hidden_size, architecture.num_layers, architecture.dtype) == (96, 3, "bfloat16")
    assert architecture.sliding_window == (33, 33, 33)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == architecture.tensor_shapes()
    assert abs(model.model.layers[0].mlp.up_proj.weight.float().std().item() - 0.1) < 0.005
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.vocab_size <= architecture.vocab_size
    text = "def __init__(self, größe):\n    return self\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(tmp_path).encode(text)


@pytest.mark.parametrize(("shape", "num_parameters"), [("qwen2-0.5b", 494_032_768), ("qwen3-0.6b", 596_049_920)])
def test_benchmark_shapes(shape, num_parameters, tmp_path):
    sys.path.insert(0, str(TOOL.parent))
    try:
        from make_checkpoint import SHAPES
    finally:
        sys.path.remove(str(TOOL.parent))
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape]))
    architecture = read_architecture(tmp_path)
    assert architecture.num_parameters == num_parameters  # of the published models of these names
    assert architecture.dtype == "bfloat16"
    assert architecture.rope.theta == 1e6
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1e6


def test_unknown_shape(tmp_path):
    result = run("gpt-5", tmp_path)
    assert result.returncode == 2
    assert "qwen2-0.5b" in result.stderr
