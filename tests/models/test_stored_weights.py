"""The loader asks once for each weight, and looks up a family once."""

from collections import Counter

import pytest
import torch
from gguf_files import write_gguf

from octavo.kernels.reference import ReferenceKernels
from octavo.models import gguf_config, gguf_weights
from octavo.models.gguf_tensors import GGUFTensors
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.startup.checkpoint import open_checkpoint


@pytest.fixture
def stored_in_blocks(tmp_path):
    folder = write_checkpoint(tmp_path / "folder", tiny_config("LlamaForCausalLM", vocab_size=288))
    return write_gguf(folder, tmp_path / "model.gguf", kind="Q8_0")


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_loader_reads_each_matrix_once(stored_in_blocks, quantization, monkeypatch):
    asked = {"weight": Counter(), "tensor": Counter()}
    for method, counts in asked.items():
        original = getattr(GGUFTensors, method)

        def counted(self, name, *, original=original, counts=counts):
            counts[name] += 1
            return original(self, name)

        monkeypatch.setattr(GGUFTensors, method, counted)
    checkpoint = open_checkpoint(stored_in_blocks)
    architecture = checkpoint.read_architecture()
    load_model(
        checkpoint.weights, architecture, ReferenceKernels(), dtype="float32", device=torch.device("cpu"),
        max_model_len=64, quantization=quantization,
    )  # fmt: skip
    matrices = [name for name, shape in architecture.tensor_shapes().items() if len(shape) == 2]
    assert asked["weight" if quantization is None else "tensor"].total() == len(matrices) + (
        0 if quantization is None else len(architecture.tensor_shapes()) - len(matrices)
    )
    assert all(asked["weight" if quantization is None else "tensor"][name] == 1 for name in matrices)
    assert not any(asked["tensor" if quantization is None else "weight"][name] for name in matrices)


def test_gguf_family_is_looked_up_once(stored_in_blocks, monkeypatch):
    looked_up = []

    def find(file):
        looked_up.append(file)
        return gguf_config.find_gguf_family(file)

    monkeypatch.setattr(gguf_weights, "find_gguf_family", find)
    checkpoint = open_checkpoint(stored_in_blocks)
    checkpoint.read_architecture()
    checkpoint.read_embedding_config()
    checkpoint.weights.open()
    assert len(looked_up) == 1
