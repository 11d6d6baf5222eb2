"""The planned memory fits, wastes nothing, and suffices for a single sequence."""

import random
from dataclasses import replace

import pytest
import torch

from octavo.config import CacheConfig, DeviceConfig, SchedulerConfig
from octavo.data.kv_groups import SlidingWindow
from octavo.models.random_weights import tiny_config, write_checkpoint
from octavo.models.registry import read_architecture
from octavo.models.weight_source import FolderWeights
from octavo.worker import memory
from octavo.worker.kv_plan import KVPlan, KVSize
from octavo.worker.memory import decide_kv_size, largest_batch
from octavo.worker.worker import Worker

GIB = 1 << 30
# Gemma 3 270M: 3 of 18 layers see all positions, 15 see 512 tokens; one head of 256 in bfloat16.
GEMMA3_270M = KVPlan(
    block_bytes=(3 * 16 * 1024, 15 * 16 * 1024), max_num_seqs=64, blocks_of_sequence=(34,), blocks_of_step=32,
)  # fmt: skip


def test_gemma3_plan_holds_three_times_as_many_tokens():
    size = GEMMA3_270M.within(4 * GIB, 10**9)
    assert 16 * (4 * GIB // GEMMA3_270M.bytes_of_all) == 233_008, "if all layers kept all"
    assert 16 * size.num_blocks == 762_656
    assert size.blocks_of_groups[1] == 7943
    assert 0 <= 4 * GIB - GEMMA3_270M.num_bytes(size) < GEMMA3_270M.bytes_of_all
    # The best plan for short sequences alone, which see all positions, has 233,008 tokens. Long ones: 4 GiB of blocks.
    assert size.blocks_of_groups[1] / (233_008 / 16) == pytest.approx(762_656 / (16 * 4 * GIB / (3 * 16 * 1024)), 1e-3)


def draw_plan(rng, num_bounded):
    block_size = rng.choice([1, 16, 64])
    windows = [rng.choice([5, 37, 512, 4096]) for _ in range(num_bounded)]
    multiples = [rng.choice([0, 1, 3, 5]), *(rng.choice([1, 3, 15]) for _ in windows)]
    return KVPlan(
        block_bytes=tuple(each * block_size * 512 for each in multiples),
        max_num_seqs=rng.choice([1, 4, 64]),
        blocks_of_sequence=tuple(-(-window // block_size) + 2 for window in windows),
        blocks_of_step=-(-rng.choice([64, 512]) // block_size),
    )


@pytest.mark.parametrize("num_bounded", [1, 2])
def test_random_kv_plans_fit_memory_and_waste_none(num_bounded):
    rng = random.Random(3)
    for _ in range(3000):
        plan, num_bytes = draw_plan(rng, num_bounded), rng.choice([10**4, 10**6, 10**8, 10**10])
        most = rng.choice([3, 500, 10**5]) if plan.block_bytes[0] else rng.choice([500, 10**5])
        size = plan.within(num_bytes, most)
        told = (plan, num_bytes, most, size)
        num_blocks, *bounded = size.blocks_of_groups
        assert plan.num_bytes(size) <= num_bytes, told
        assert max(bounded) <= num_blocks <= most, told
        assert num_blocks >= min(most, num_bytes // plan.bytes_of_all) or not plan.block_bytes[0], told
        for count, of_sequence in zip(bounded, plan.blocks_of_sequence, strict=True):
            assert count >= min(num_blocks, of_sequence + plan.blocks_of_step), told
            all_that_run = plan.max_num_seqs * of_sequence + plan.blocks_of_step
            assert count >= min(all_that_run, num_blocks, num_bytes // plan.bytes_of_all), told
            asked = plan.with_blocks(num_blocks).blocks_of_groups
            assert asked[0] == num_blocks
            assert min(all_that_run, asked[0]) <= max(asked[1:]) <= asked[0]
        left = num_bytes - plan.num_bytes(size)
        assert left < plan.bytes_of_all or min(bounded) == num_blocks or num_bounded > 1, told
        assert num_bounded > 1 or left < plan.bytes_of_all or num_blocks == most, told


def test_plan_without_windows_has_one_group():
    plan = KVPlan(block_bytes=(100,), max_num_seqs=4, blocks_of_sequence=(), blocks_of_step=9)
    assert plan.within(1099, 1000) == plan.with_blocks(10) == KVSize((10,))
    assert plan.within(1099, 7) == KVSize((7,))


def test_zero_byte_blocks_are_limited_by_usable_sequences():
    """Mistral 7B v0.1 in bfloat16: all 32 layers see 4096 tokens, a window block has 2 MiB."""
    plan = KVPlan(
        block_bytes=(0, 2 << 20), max_num_seqs=64, blocks_of_sequence=(258,), blocks_of_step=32,
    )  # fmt: skip
    of_32k = 2048

    def size(num_bytes):
        return plan.within(num_bytes, plan.num_usable_blocks(num_bytes, of_32k))

    assert size(4 * GIB) == KVSize((7 * of_32k, 2048)), "windows of seven and a step"
    assert size((7 * 258 + 31) * plan.block_bytes[1]) == KVSize((6 * of_32k, 7 * 258 + 31)), "the step lacks one"
    assert size(GIB) == KVSize((of_32k + 512, 512)), "the window of one, and what is kept of others"
    assert size(31 * plan.block_bytes[1]) == KVSize((31, 31))
    assert size(1024 * GIB).num_blocks == 64 * of_32k, "all that may run"
    assert replace(plan, block_bytes=(1, 2 << 20)).num_usable_blocks(GIB, of_32k) == 64 * of_32k


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    layer_types = ["sliding_attention"] * 3 + ["full_attention"]
    config = tiny_config("Gemma3ForCausalLM", num_hidden_layers=4, layer_types=layer_types, sliding_window=37)
    return write_checkpoint(tmp_path_factory.mktemp("windows"), config)


def make_worker(path, max_model_len=2048, **cache):
    architecture = read_architecture(path).within(max_model_len)
    worker = Worker(
        FolderWeights(path), architecture, dtype="float32", max_model_len=max_model_len,
        cache_config=CacheConfig(**cache), scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        device_config=DeviceConfig(device="cpu"), load_format="dummy",
    )  # fmt: skip
    worker.load()
    worker.plan()
    assert not hasattr(worker, "kv_cache")  # nothing is allocated yet
    worker.allocate()
    return worker


def test_worker_allocates_planned_kv_memory(path):
    of_layer = 2 * 2 * 16 * 16 * 4
    worker = make_worker(path, kv_cache_memory_bytes=4 << 20, swap_space_bytes=1 << 20)
    cache = worker.kv_cache
    assert [group.block_bytes for group in cache.groups] == [of_layer, 3 * of_layer]
    assert cache.groups[1].kind == SlidingWindow(37)
    assert 0 <= (4 << 20) - cache.num_bytes < 4 * of_layer
    assert cache.groups[1].num_blocks == (4 << 20) // (7 * of_layer)
    assert cache.num_host_blocks == (1 << 20) // (4 * of_layer)
    info = worker.info
    assert [group.spec.num_blocks for group in info.kv_groups] == [group.num_blocks for group in cache.groups]
    assert [group.block_bytes for group in info.kv_groups] == [group.block_bytes for group in cache.groups]
    assert info.num_host_blocks == cache.num_host_blocks
    assert (info.kv_cache_bytes, info.stored_block_bytes) == (cache.num_bytes, cache.stored_block_bytes)
    host_bytes = sum(group.host_blocks.nbytes for group in cache.groups)
    assert host_bytes == cache.num_host_blocks * 4 * of_layer
    worker = make_worker(path, num_gpu_blocks=100)
    assert (worker.kv_cache.num_blocks, worker.kv_cache.groups[1].num_blocks) == (100, 4 * 5 + 2 * 4)


def test_window_as_long_as_max_model_len_is_full_attention(path):
    cache = make_worker(path, max_model_len=37, num_gpu_blocks=10).kv_cache
    assert (len(cache.groups), cache.block_bytes) == (1, 4 * 2 * 2 * 16 * 16 * 4)
    assert make_worker(path, max_model_len=38, num_gpu_blocks=10).kv_cache.groups[1].kind == SlidingWindow(37)


@pytest.mark.parametrize("is_asked", [False, True])
def test_windows_only_model_gets_as_many_blocks_as_memory_supports(tmp_path, monkeypatch, is_asked):
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 64 << 20)
    monkeypatch.setattr(memory, "DEFAULT_KV_CACHE_BYTES", 1 << 20)
    config = tiny_config("MistralForCausalLM", sliding_window=37)
    architecture = read_architecture(write_checkpoint(tmp_path, config))
    size = decide_kv_size(
        architecture, CacheConfig(kv_cache_memory_bytes=1 << 20 if is_asked else None),
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64), dtype="float32", kv_dtype="float32",
        max_model_len=32768, device=torch.device("cpu"),
    )  # fmt: skip
    num_window_blocks = (1 << 20) // architecture.kv_layout.block_bytes(16, "float32")[1]
    assert architecture.kv_layout.block_bytes(16, "float32")[0] == 0
    assert size == KVSize(((num_window_blocks - 4) // 5 * 2048, num_window_blocks))
    assert size.num_blocks < 64 * 2048


def test_largest_batch_reserves_memory_for_window_blocks(path, monkeypatch):
    """In a cache of a given size, larger steps increase the number of window blocks."""
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 40 << 20)
    architecture, cpu = read_architecture(path), torch.device("cpu")
    formats = {"dtype": "float32", "kv_dtype": "float32", "device": cpu}
    cache = CacheConfig(num_gpu_blocks=2000)

    def scheduler(num_tokens):
        return SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=num_tokens)

    found = largest_batch(architecture, cache, scheduler(10**5), **formats, scratch_bytes=lambda count: 100 * count)
    assert 64 < found < 10**5

    def needs(num_tokens):
        size = decide_kv_size(architecture, cache, scheduler(num_tokens), **formats, max_model_len=2048)
        step = memory.activation_bytes(architecture, num_tokens, 4, "float32") + 100 * num_tokens
        return size.num_blocks * 4096 + size.blocks_of_groups[1] * 3 * 4096 + step

    assert needs(found) <= 40 << 20 < needs(found + 1)
