"""Which decode steps become graphs, and that their memory is set aside before the KV cache is sized."""

import pytest
import torch

from octavo.config import CacheConfig, DeviceConfig, SchedulerConfig
from octavo.errors import ConfigError
from octavo.kernels.reference import ReferenceKernels
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.worker import memory
from octavo.worker import worker as worker_module
from octavo.worker.decode_plan import BYTES_PER_LAYER, capture_sizes, make_decode_plan
from octavo.worker.worker import Worker

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class GraphKernels(ReferenceKernels):
    """Plain torch that says it captures graphs."""

    captures_graphs = True

    def record_forward(self, forward, token_ids, batch, max_tokens, decodes=None):
        self.decodes = decodes
        return forward(token_ids, batch), None


def test_sizes():
    kernels = GraphKernels()
    assert capture_sizes(DeviceConfig(), GPU, kernels, 1) == (1,)
    assert capture_sizes(DeviceConfig(), GPU, kernels, 20) == (1, 2, 4, 8, 16, 20)
    most = capture_sizes(DeviceConfig(), GPU, kernels, 1000)
    assert most[:6] == (1, 2, 4, 8, 16, 24)
    assert most[-3:] == (480, 496, 512)
    assert capture_sizes(DeviceConfig(max_cudagraph_capture_size=6), GPU, kernels, 20) == (1, 2, 4, 6)
    assert capture_sizes(DeviceConfig(max_cudagraph_capture_size=6), CPU, kernels, 3) == (1, 2, 3)


def test_none_are_captured_where_nobody_can_or_wants_to():
    for config in (DeviceConfig(enforce_eager=True), DeviceConfig(max_cudagraph_capture_size=0)):
        assert capture_sizes(config, GPU, GraphKernels(), 8) == ()
    assert capture_sizes(DeviceConfig(), GPU, ReferenceKernels(), 8) == ()
    assert capture_sizes(DeviceConfig(), CPU, GraphKernels(), 8) == ()
    with pytest.raises(ConfigError, match="max_cudagraph_capture_size"):
        DeviceConfig(max_cudagraph_capture_size=-1)


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_config("Qwen3ForCausalLM"))


def test_what_is_planned_grows_with_graphs_rows_and_tables(checkpoint):
    architecture = read_architecture(checkpoint)

    def planned(sizes, max_model_len=128, num_scratch_blocks=0):
        return make_decode_plan(
            architecture, GraphKernels(), sizes, dtype="float32", max_model_len=max_model_len, block_size=16,
            num_scratch_blocks=num_scratch_blocks,
        )  # fmt: skip

    assert planned(()) is None
    layers = len(architecture.layers)
    assert planned((1, 2, 4)).num_bytes - planned((4,)).num_bytes == 2 * layers * BYTES_PER_LAYER
    assert planned((8,)).num_bytes > planned((4,)).num_bytes
    assert [planned((4,)).table_width, planned((4,), 130).table_width, planned((4,), 128, 2).table_width] == [8, 9, 10]


def test_the_kv_cache_leaves_room_for_graphs(checkpoint, monkeypatch):
    kernels = GraphKernels()
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
        return made.kv_cache

    without = blocks()
    assert kernels.decodes is None
    with_graphs = blocks(max_cudagraph_capture_size=64)
    assert kernels.decodes.sizes[-1] == 64
    taken = without.num_bytes - with_graphs.num_bytes
    assert abs(taken - kernels.decodes.num_bytes) <= without.block_bytes
