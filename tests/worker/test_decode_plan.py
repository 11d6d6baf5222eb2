"""Which decode steps become graphs, and that their memory is reserved before the KV cache is sized."""

import pytest
import torch

from octavo.config import CacheConfig, DeviceConfig, SchedulerConfig
from octavo.config.step_defaults import GPU_DEFAULTS
from octavo.errors import ConfigError
from octavo.kernels.reference import ReferenceKernels
from octavo.models.loader import load_model
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.worker import memory
from octavo.worker import worker as worker_module
from octavo.worker.decode_plan import BYTES_PER_LAYER, kept_bytes, make_decode_plan
from octavo.worker.worker import Worker

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class GraphKernels(ReferenceKernels):
    """Plain torch kernels that claim to capture graphs, or not. asked: the experts of the questions."""

    def __init__(self, *, can_capture=True):
        self.can_capture, self.asked, self.decodes = can_capture, [], None

    def captures_graphs(self, experts):
        self.asked.append(list(experts))
        return self.can_capture

    def record_forward(self, forward, token_ids, batch, max_tokens, decodes=None):
        self.decodes = decodes
        return forward(token_ids, batch), None


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"))


@pytest.fixture
def planned(checkpoint):
    """Return a function that plans graphs of a tiny model."""

    def plan(config=None, device=GPU, kernels=None, *, max_num_seqs=4, max_model_len=128, num_rows=(1,)):
        model = load_model(
            FolderWeights(checkpoint), read_architecture(checkpoint), kernels or GraphKernels(), dtype="float32",
            device=CPU, max_model_len=max_model_len,
        )  # fmt: skip
        return make_decode_plan(
            model, config or DeviceConfig(), device, num_rows=num_rows, max_num_seqs=max_num_seqs,
            max_model_len=max_model_len, block_size=16,
        )  # fmt: skip

    return plan


def test_graph_sizes_cover_batch_up_to_limits(planned):
    assert planned(max_num_seqs=1).sizes == {1: (1,)}
    assert planned(max_num_seqs=20).sizes == {1: (1, 2, 4, 8, 16, 20)}
    assert planned(max_num_seqs=20, num_rows=(1, 33)).sizes == {1: (1, 2, 4, 8, 16, 20), 33: (1, 2, 4, 8, 15)}
    default = planned(max_num_seqs=GPU_DEFAULTS.max_num_seqs, num_rows=(1, 9)).sizes
    assert default == {1: (1, 2, 4, *range(8, 257, 8)), 9: (1, 2, 4, *range(8, 57, 8))}
    most = planned(max_num_seqs=1000).sizes[1]
    assert most[:6] == (1, 2, 4, 8, 16, 24)
    assert most[-3:] == (480, 496, 512)
    asked = DeviceConfig(max_cudagraph_capture_size=6)
    assert planned(asked, max_num_seqs=20, num_rows=(1, 5)).sizes == {1: (1, 2, 4, 6), 5: (1, 2, 4, 6)}
    assert planned(asked, CPU, max_num_seqs=3).sizes == {1: (1, 2, 3)}


def test_no_graphs_are_planned_if_disabled_or_unsupported(planned):
    for config in (DeviceConfig(enforce_eager=True), DeviceConfig(max_cudagraph_capture_size=0)):
        assert planned(config) is None
    assert planned(kernels=ReferenceKernels()) is None
    assert planned(device=CPU) is None
    with pytest.raises(ConfigError, match="max_cudagraph_capture_size"):
        DeviceConfig(max_cudagraph_capture_size=-1)


def test_recurrent_layers_have_no_graphs(tmp_path, caplog):
    checkpoint = write_checkpoint(tmp_path, tiny_config("Qwen3_5ForCausalLM"))
    model = load_model(
        FolderWeights(checkpoint), read_architecture(checkpoint), GraphKernels(), dtype="float32", device=CPU,
        max_model_len=128,
    )  # fmt: skip
    caplog.set_level("INFO")
    limits = {"num_rows": (1,), "max_num_seqs": 4, "max_model_len": 128, "block_size": 16}
    assert make_decode_plan(model, DeviceConfig(), GPU, **limits) is None
    assert "recurrent layers do not support them yet" in caplog.text


@pytest.mark.parametrize(("family", "groups_per_layer"), [("Qwen3ForCausalLM", 0), ("MixtralForCausalLM", 2)])
def test_graph_support_is_queried_with_experts(tmp_path, family, groups_per_layer):
    checkpoint, kernels = write_checkpoint(tmp_path, tiny_config(family)), GraphKernels(can_capture=False)
    model = load_model(
        FolderWeights(checkpoint), read_architecture(checkpoint), kernels, dtype="float32", device=CPU,
        max_model_len=128,
    )  # fmt: skip
    limits = {"num_rows": (1,), "max_num_seqs": 4, "max_model_len": 128, "block_size": 16}
    assert make_decode_plan(model, DeviceConfig(), GPU, **limits) is None
    (experts,) = kernels.asked
    assert len(experts) == groups_per_layer * len(model.layers)


def test_planned_graph_bytes_grow_with_graphs_rows_and_tables(planned, checkpoint):
    architecture = read_architecture(checkpoint)
    more, fewer = (planned(max_num_seqs=count) for count in (4, 3))  # the same number of graphs
    assert more.num_bytes > fewer.num_bytes
    assert planned(max_num_seqs=8).num_bytes > more.num_bytes + len(architecture.layers) * BYTES_PER_LAYER
    assert planned(num_rows=(1, 2)).num_bytes > more.num_bytes + 3 * len(architecture.layers) * BYTES_PER_LAYER
    assert [planned().table_width, planned(max_model_len=130).table_width] == [8, 9]
    assert kept_bytes(architecture, 4, 8, 9, "float32") - kept_bytes(architecture, 4, 8, 8, "float32") == 4 * 4


@pytest.mark.parametrize("can_capture", [True, False])
def test_kv_cache_size_reserves_memory_for_graphs(checkpoint, monkeypatch, can_capture):
    kernels = GraphKernels(can_capture=can_capture)
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 400 << 20)
    monkeypatch.setattr(memory, "DEFAULT_KV_CACHE_BYTES", 1 << 40)
    monkeypatch.setattr(worker_module, "create_kernels", lambda *_arguments: kernels)

    def blocks(**device):
        made = Worker(
            FolderWeights(checkpoint), read_architecture(checkpoint), dtype="float32", max_model_len=256,
            cache_config=CacheConfig(block_size=1),
            scheduler_config=SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=4096),
            device_config=DeviceConfig(device="cpu", **device),
        )  # fmt: skip
        made.load()
        made.plan()
        made.allocate()
        return made.kv_cache

    without = blocks()
    assert kernels.decodes is None
    assert not kernels.asked
    with_graphs = blocks(max_cudagraph_capture_size=64)
    taken = without.num_bytes - with_graphs.num_bytes
    if can_capture:
        assert kernels.decodes.sizes[1][-1] == 64
        assert abs(taken - kernels.decodes.num_bytes) <= without.block_bytes
    else:
        assert (kernels.decodes, taken) == (None, 0)
