"""Copies between blocks and host blocks keep every bit, and run in the order that a step needs."""

from __future__ import annotations

import pytest
import torch

from octavo.config import CacheConfig
from octavo.data.kv_groups import FullAttention, SlidingWindow
from octavo.data.scheduler_output import BlockCopies
from octavo.errors import ConfigError
from octavo.kernels.quantization import kv_scales
from octavo.models.kv_layout import KVLayout, KVShape, LayerGroup
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.worker import kv_cache
from octavo.worker.kv_cache import LAYOUT_VERSION, PagedKVCache
from octavo.worker.memory import block_bytes, decide_host_size

CPU = torch.device("cpu")


@pytest.fixture
def cache():
    cache = PagedKVCache(
        KVLayout((KVShape(num_kv_heads=1, head_dim=8),) * 2),
        num_blocks=[6],
        block_size=4,
        dtype=torch.bfloat16,
        device=CPU,
        num_host_blocks=3,
    )
    cache.groups[0].blocks.view(torch.int16).random_(generator=torch.Generator().manual_seed(1))  # including NaNs
    return cache


@pytest.fixture
def windowed():
    """Two layers in blocks of 256 bytes, and one layer in window blocks of 384 bytes."""
    shapes = (KVShape(1, 8), KVShape(3, 8, window=6), KVShape(1, 8))
    cache = PagedKVCache(
        KVLayout(shapes), num_blocks=[6, 4], block_size=4, dtype=torch.bfloat16, device=CPU,
        num_host_blocks=3,
    )  # fmt: skip
    for each in cache.memory:
        each.view(torch.int16).random_(generator=torch.Generator().manual_seed(1))
    return cache


def bits(block):
    return block.view(torch.int16).clone()


def test_swapped_block_returns_bit_for_bit(cache):
    before = bits(cache.groups[0].blocks[2])
    cache.copy(BlockCopies(swap_out=[(0, 2, 1)]))
    cache.groups[0].blocks[2].zero_()
    cache.copy(BlockCopies(swap_in=[(0, 1, 5)]))
    assert torch.equal(bits(cache.groups[0].blocks[5]), before)


def test_copy_reports_swapped_blocks_bytes_and_time(cache):
    saved, loaded = cache.copy(
        BlockCopies(swap_out=[(0, 2, 1), (0, 0, 0)], block_copies=[(0, 3, 2)], swap_in=[(0, 1, 5)])
    )()
    assert (saved.tier, saved.num_blocks, saved.num_bytes) == ("host", 2, 2 * cache.block_bytes)
    assert (loaded.tier, loaded.num_blocks, loaded.num_bytes) == ("host", 1, cache.block_bytes)
    assert min(saved.seconds, loaded.seconds) > 0
    saved, loaded = cache.copy(BlockCopies(swap_in=[(0, 1, 5)]))()
    assert saved == ("host", 0, 0, 0.0)
    assert loaded.num_blocks == 1
    assert cache.copy(BlockCopies(swap_out=[(0, 2, 1)]))()[1] == ("host", 0, 0, 0.0)
    assert cache.copy(BlockCopies(block_copies=[(0, 3, 2)]))() == cache.copy(BlockCopies())() == ()


def test_window_blocks_are_copied_in_same_order_as_blocks(windowed):
    cache = windowed
    assert [each.shape for each in cache.memory] == [(6, 128), (4, 192)]
    assert (cache.block_bytes, cache.groups[1].block_bytes, cache.stored_block_bytes) == (256, 384, 640)
    out, copied, other, untouched = (bits(cache.groups[1].blocks[index]) for index in range(4))
    block, kept = bits(cache.groups[0].blocks[1]), bits(cache.groups[0].blocks[2])
    saved, loaded = cache.copy(
        BlockCopies(
            swap_out=[(0, 1, 2), (1, 0, 0)],
            block_copies=[(1, 1, 0), (1, 2, 1)],
            swap_in=[(0, 2, 5), (1, 0, 2)],
        )
    )()  # fmt: skip
    assert torch.equal(bits(cache.groups[1].blocks[0]), copied)
    assert torch.equal(bits(cache.groups[1].blocks[1]), other)
    assert torch.equal(bits(cache.groups[1].blocks[2]), out)
    assert torch.equal(bits(cache.groups[1].blocks[3]), untouched)
    assert torch.equal(bits(cache.groups[0].blocks[5]), block)
    assert torch.equal(bits(cache.groups[0].blocks[2]), kept)
    assert (saved.num_blocks, saved.num_bytes) == (loaded.num_blocks, loaded.num_bytes) == (1, 640)
    saved, loaded = cache.copy(BlockCopies(swap_out=[(1, 3, 1)]))()  # without its block
    assert (saved.num_blocks, saved.num_bytes, loaded.num_bytes) == (0, 384, 0)
    assert saved.seconds > 0
    cache.copy(BlockCopies(swap_in=[(1, 1, 0)]))
    assert torch.equal(bits(cache.groups[1].blocks[0]), untouched)
    assert cache.copy(BlockCopies(block_copies=[(1, 1, 0)]))() == ()


def test_cache_of_windows_alone_has_zero_byte_blocks():
    layout = KVLayout((KVShape(1, 8, window=6),) * 2)
    sizes = {"num_blocks": [1000, 2], "block_size": 4}
    cache = PagedKVCache(layout, **sizes, dtype=torch.bfloat16, device=CPU, num_host_blocks=2)
    assert (cache.block_bytes, cache.num_bytes) == (0, 2 * cache.groups[1].block_bytes)
    cache.layer(1)[0].fill_(3)
    copies = BlockCopies(swap_out=[(0, 999, 1), (1, 0, 1)], swap_in=[(0, 1, 0), (1, 1, 1)])
    assert cache.copy(copies)()[1].num_bytes == cache.groups[1].block_bytes
    assert bool((cache.layer(1)[0][1] == 3).all())


def test_swaps_do_not_wait_for_device(cache, monkeypatch):
    """Their times are read after the step."""
    passed, waits, copy = [], [], torch.Tensor.copy_

    class Time:
        def elapsed_time(self, end):
            assert passed, "the copies are not done"
            return 3000.0 if end is not self else 0.0

    def watch(target, source, non_blocking=False):
        waits.append(not non_blocking)
        return copy(target, source)

    monkeypatch.setattr(kv_cache, "time_mark", lambda _: Time())
    monkeypatch.setattr(torch.Tensor, "copy_", watch)
    moves = cache.copy(BlockCopies(swap_out=[(0, 2, 1), (0, 1, 0)], swap_in=[(0, 1, 5)]))
    assert waits == [False] * 3
    passed.append(True)
    assert [(move.num_blocks, move.seconds) for move in moves()] == [(2, 3.0), (1, 3.0)]


def test_gpu_times_swaps_by_events(monkeypatch):
    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing
            self.is_recorded = False

        def record(self):
            self.is_recorded = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert kv_cache.time_mark(torch.device("cuda")).is_recorded


def test_gpu_has_pinned_host_blocks_of_exact_size(monkeypatch):
    asked, meta = [], torch.device("meta")
    monkeypatch.setattr(
        kv_cache, "pinned_memory", lambda size: asked.append(size) or torch.empty(size, dtype=torch.uint8)
    )
    layout = KVLayout((KVShape(1, 8), KVShape(3, 8, window=6)))
    sizes = {"num_blocks": [6, 4], "block_size": 4, "num_host_blocks": 3}
    cache = PagedKVCache(layout, **sizes, dtype=torch.bfloat16, device=meta)
    assert asked == [3 * 128, 3 * 384] == [group.host_blocks.nbytes for group in cache.groups]


def test_copied_block_is_independent_of_source(cache):
    before = bits(cache.groups[0].blocks[0])
    cache.copy(BlockCopies(block_copies=[(0, 0, 3)]))
    cache.groups[0].blocks[3].zero_()
    assert torch.equal(bits(cache.groups[0].blocks[0]), before)


def test_swap_out_runs_before_block_copies_and_swap_in(cache):
    out, copied, other = (bits(cache.groups[0].blocks[index]) for index in range(3))
    cache.copy(BlockCopies(swap_out=[(0, 0, 0)], block_copies=[(0, 1, 0), (0, 2, 1), (0, 0, 3)], swap_in=[(0, 0, 2)]))
    assert torch.equal(bits(cache.groups[0].blocks[0]), copied)
    assert torch.equal(bits(cache.groups[0].blocks[1]), other)
    assert torch.equal(bits(cache.groups[0].blocks[2]), out)
    assert torch.equal(bits(cache.groups[0].blocks[3]), copied)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_block_is_swapped_with_its_scales(tmp_path, dtype):
    architecture = read_architecture(write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM", num_hidden_layers=3)))
    cache = PagedKVCache(
        architecture.kv_layout, num_blocks=[5], block_size=4,
        dtype=dtype, device=torch.device("cpu"), num_host_blocks=2,
    )  # fmt: skip
    assert cache.num_bytes == 5 * block_bytes(architecture, 4, str(dtype).removeprefix("torch."))
    assert cache.groups[0].blocks[3].is_contiguous()
    keys, values = cache.layer(2)
    kv_scales(keys).fill_(0.25)
    kv_scales(values).fill_(0.5)
    keys.fill_(3)
    values.fill_(-7)
    cache.copy(BlockCopies(swap_out=[(0, 3, 1)]))
    cache.groups[0].blocks.zero_()
    cache.copy(BlockCopies(swap_in=[(0, 1, 4)]))
    for rows, scale, value in ((keys, 0.25, 3), (values, 0.5, -7)):
        assert torch.equal(kv_scales(rows)[4], torch.full_like(kv_scales(rows)[4], scale))
        assert bool((rows[4].float() == value).all())
        assert not rows[:4].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_layers_with_different_shapes_do_not_overlap_in_block(dtype):
    """Each layer has its own part of a block, and the parts together are the whole block."""
    shapes = (KVShape(2, 16, 37), KVShape(1, 24), KVShape(2, 16, 37), KVShape(3, 8))
    layout, kind = KVLayout(shapes), str(dtype).removeprefix("torch.")
    assert layout.specs == {shapes[0]: (0, 2), shapes[1]: (1,), shapes[3]: (3,)}
    assert layout.kv_groups == (LayerGroup(FullAttention(), (1, 3)), LayerGroup(SlidingWindow(37), (0, 2)))
    sizes = {"num_blocks": [3, 2], "block_size": 4, "num_host_blocks": 1}
    cache = PagedKVCache(layout, **sizes, dtype=dtype, device=CPU)
    assert cache.block_bytes == cache.groups[0].host_blocks[0].nbytes == layout.block_bytes(4, kind)[0]
    assert cache.groups[1].block_bytes == cache.groups[1].host_blocks[0].nbytes == layout.block_bytes(4, kind)[1]
    assert cache.stored_block_bytes == layout.without_windows.block_bytes(4, kind)[0]
    for each in cache.memory:
        each.view(torch.uint8).fill_(99)
    for index, shape in enumerate(shapes):
        for number, rows in enumerate(cache.layer(index)):
            assert rows.shape == (2 if shape.window else 3, shape.num_kv_heads, 4, shape.head_dim)
            rows.fill_(2 * index + number)
            if dtype.itemsize == 1:
                kv_scales(rows).fill_(2 * index + number)
    for index in range(len(shapes)):
        for number, rows in enumerate(cache.layer(index)):
            assert bool((rows.float() == 2 * index + number).all())
            assert dtype.itemsize > 1 or bool((kv_scales(rows) == 2 * index + number).all())
    assert not any(bool((each.view(torch.uint8) == 99).any()) for each in cache.memory)


def test_uniform_layers_keep_stored_block_layout():
    """The shape is [layers, 2, num_kv_heads, block_size, head_dim]; stores keep these bytes under keys with this
    version.
    """
    layout = KVLayout((KVShape(3, 8),) * 2)
    cache = PagedKVCache(layout, num_blocks=[2], block_size=4, dtype=torch.float32, device=CPU)
    assert LAYOUT_VERSION == 1
    as_ever = cache.groups[0].blocks.view(2, 2, 2, 3, 4, 8)
    for index in range(2):
        for number, rows in enumerate(cache.layer(index)):
            assert rows.data_ptr() == as_ever[:, index, number].data_ptr()
            assert rows.stride() == as_ever[:, index, number].stride()


@pytest.mark.parametrize(("name", "dtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_head_dim_with_unaligned_scales_is_refused(tmp_path, name, dtype):
    architecture = read_architecture(write_checkpoint(tmp_path, tiny_config("Qwen3ForCausalLM", head_dim=6)))
    with pytest.raises(ConfigError, match=f"kv_cache_dtype {name} needs a head_dim that is a multiple of 4, not 6"):
        block_bytes(architecture, 16, dtype)


def test_swap_space_bytes_sets_number_of_host_blocks(tmp_path):
    directory = write_checkpoint(tmp_path / "llama", tiny_config("LlamaForCausalLM"))
    architecture = read_architecture(directory)
    per_block = block_bytes(architecture, 16, "float32")
    config = CacheConfig(swap_space_bytes=3 * per_block + 1)
    assert decide_host_size(architecture, config, kv_dtype="float32") == (3, 0)
    with pytest.raises(ConfigError, match="swap_space_bytes"):
        decide_host_size(architecture, CacheConfig(swap_space_bytes=1 << 60), kv_dtype="float32")


def test_shared_layer_reads_kv_of_earlier_layer():
    shapes = (KVShape(2, 16, 37), KVShape(1, 24), KVShape(2, 16, 37, shared_layer=0))
    layout = KVLayout(shapes)
    assert layout.kv_groups == (LayerGroup(FullAttention(), (1,)), LayerGroup(SlidingWindow(37), (0,)))
    assert layout.block_bytes(4, "float32") == KVLayout(shapes[:2]).block_bytes(4, "float32")
    cache = PagedKVCache(layout, num_blocks=[3, 2], block_size=4, dtype=torch.float32, device=CPU)
    assert cache.layer(2)[0].data_ptr() == cache.layer(0)[0].data_ptr()
    assert cache.layer(2)[1].shape == cache.layer(0)[1].shape == (2, 2, 4, 16)


@pytest.mark.parametrize(
    "shape", [KVShape(2, 16, shared_layer=0), KVShape(2, 16, 37, shared_layer=2), KVShape(2, 16, 37, shared_layer=-1)]
)
def test_shared_layer_with_different_shape_or_order_is_refused(shape):
    with pytest.raises(ValueError, match="layer 2 cannot read the keys and values of layer"):
        KVLayout((KVShape(2, 16, 37), KVShape(1, 24), shape))
