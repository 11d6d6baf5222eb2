"""Extension points for LoRA, tried with stubs: an MLP that reads the batch, and weights by group of rows."""

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.kernels import create_kernels
from octavo.kernels.interface import AttentionBatch, OutputRows
from octavo.models.declared import Linear
from octavo.models.gated_mlp import GatedMLP, GatedMLPConfig, GatedMLPTensors
from octavo.models.loader import load_model
from octavo.models.random_weights import RandomWeights, tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights

CPU = torch.device("cpu")
NUM_ADAPTERS = 2


class AdaptedTensors(NamedTuple):
    mlp: GatedMLPTensors
    adapters: tuple[Linear, ...]


@dataclass(frozen=True)
class AdaptedConfig:
    """A gated MLP that adds each sequence's product with its own adapter: sequence i has adapter i."""

    base: GatedMLPConfig
    reverses: bool = False  # sequence i has the i-th adapter from the end

    @property
    def intermediate_size(self):
        return self.base.intermediate_size

    def tensors(self, name, hidden_size):
        names = [f"{name}.mlp.adapters.{index}" for index in range(NUM_ADAPTERS)]
        adapters = tuple(Linear(((each, hidden_size),), hidden_size) for each in names)
        return AdaptedTensors(self.base.tensors(name, hidden_size), adapters)

    def build(self, context, tensors):
        return AdaptedMLP(context, self, tensors)


class AdaptedMLP:
    def __init__(self, context, config, tensors):
        self.base = GatedMLP(context, config.base, tensors.mlp)
        self.adapters = context.grouped(tensors.adapters)
        self.kernels, self.reverses = context.kernels, config.reverses

    def forward(self, hidden, batch):
        starts = batch.query_start
        missing = NUM_ADAPTERS + 1 - len(starts)
        starts = torch.cat(
            [starts.new_zeros(missing), starts] if self.reverses else [starts, starts[-1:].repeat(missing)]
        )
        return self.base.forward(hidden, batch) + self.kernels.grouped_linear(hidden, self.adapters, starts)


class Cache:
    def __init__(self, model, num_blocks):
        shapes = [each.cache_spec for each in model.architecture.attentions]
        self._layers = [torch.zeros(2, num_blocks, s.num_kv_heads, 16, s.head_dim) for s in shapes]

    def layer(self, index):
        return self._layers[index].unbind(0)


def adapted(architecture, **options):
    layers = (replace(each, mlp=AdaptedConfig(each.mlp, **options)) for each in architecture.layers)
    return replace(architecture, layers=tuple(layers))


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with adapters, and its architecture."""
    path = write_checkpoint(tmp_path, tiny_config("LlamaForCausalLM"), std=0.2)
    architecture = read_architecture(path)
    shapes = {name: shape for name, shape in adapted(architecture).tensor_shapes().items() if ".adapters." in name}
    assert len(shapes) == 2 * NUM_ADAPTERS
    made = RandomWeights(shapes, torch.float32, seed=1, std=0.2)
    weights = load_file(path / "model.safetensors") | {name: made.tensor(name) for name in shapes}
    save_file(weights, path / "model.safetensors")
    return SimpleNamespace(weights=FolderWeights(path), architecture=architecture)


def load(checkpoint, kernels, **options):
    architecture = adapted(checkpoint.architecture, **options)
    return load_model(
        checkpoint.weights, architecture, create_kernels(CPU, kernels), dtype="float32", device=CPU, max_model_len=64
    )


def logits(model, prompts, wanted=None):
    """Return the logits of prompts of at most a block, computed in one step. wanted: rows with logits; None for all."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    starts = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
    slots = torch.cat([16 * index + torch.arange(len(prompt)) for index, prompt in enumerate(prompts)])
    tables = torch.arange(len(prompts), dtype=torch.int32)[:, None]
    batch = AttentionBatch(starts, lengths, tables, positions, slots, 16)
    if wanted is not None:
        rows = torch.tensor(wanted)
        counts = torch.tensor([((first <= rows) & (rows < end)).sum() for first, end in pairwise(starts)])
        of_rows = replace(
            batch, query_start=torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32), positions=positions[rows],
            slot_mapping=slots[rows],
        )  # fmt: skip
        batch = replace(batch, outputs=OutputRows(rows, of_rows))
    token_ids = torch.tensor([token_id for prompt in prompts for token_id in prompt])
    return model.compute_logits(model.forward(token_ids, batch, Cache(model, len(prompts))))


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.filterwarnings("ignore:octavo was installed without:RuntimeWarning")
def test_custom_mlp_applies_separate_adapter_per_sequence(checkpoint, kernels):
    first, second = [5, 6, 7, 8, 9], [5, 6, 7]
    model, reverse = load(checkpoint, kernels), load(checkpoint, kernels, reverses=True)
    together = logits(model, [first, second])
    torch.testing.assert_close(together[:5], logits(model, [first]))
    torch.testing.assert_close(together[5:], logits(reverse, [second]))
    assert not torch.allclose(together[:3], together[5:]), "the same tokens with another adapter"


def test_last_layer_mlp_receives_batch_of_output_rows(checkpoint):
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7]]
    model = load(checkpoint, "reference")
    torch.testing.assert_close(logits(model, prompts, wanted=[3, 4, 7]), logits(model, prompts)[[3, 4, 7]])


def test_grouped_tensor_is_counted_and_shape_checked(checkpoint):
    told = []
    architecture = adapted(checkpoint.architecture)
    load_model(
        checkpoint.weights, architecture, create_kernels(CPU, "reference"), dtype="float32", device=CPU,
        max_model_len=64, progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told[-1] == (4 * architecture.num_parameters,) * 2
    name = "model.layers.1.mlp.adapters.0.weight"
    path = checkpoint.weights.path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {name: weights[name][:1]}, path)
    with pytest.raises(ModelError, match=r"adapters\.0\.weight has shape \[1, 64\], but config.json requires \[64, 64"):
        load(checkpoint, "reference")


def test_rotary_attention_refuses_multidimensional_positions(checkpoint):
    architecture = replace(adapted(checkpoint.architecture), num_position_dims=3)
    with pytest.raises(ModelError, match="takes positions of one dimension"):
        load_model(
            checkpoint.weights, architecture, create_kernels(CPU, "reference"), dtype="float32", device=CPU,
            max_model_len=64,
        )  # fmt: skip
