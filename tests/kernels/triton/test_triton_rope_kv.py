"""rope_and_write_kv in Triton has the bits of plain torch, for all rotations, scales and roundings.

With norms of heads, it has the bits of rms_norm before it.
"""

import functools

import pytest
import torch
from broken_kernels import broken
from paged_batches import paged_batch, rounded_caches

from octavo.kernels.quantization import kv_scales
from octavo.kernels.reference import ReferenceKernels

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = [None, torch.int8, torch.float8_e4m3fn]
HEADS = [(64, 64), (80, 40), (128, 0), (96, 96), (256, 64), (20, 12)]  # head_dim, rotary_dim


@pytest.fixture(autouse=True)
def _several_programs_a_token(kernels, monkeypatch):
    """Several programs for the heads of q, and for those of k and v."""
    from octavo.kernels.triton import rope_kv

    monkeypatch.setattr(rope_kv, "_HEADS", 2)


def outcome(write, generator, dtype, heads, *, interleaved=False, scaled=False, kv=None):
    """Return all tensors after a call: q, k and v, which are views of one projection, and both caches."""
    head_dim, rotary_dim = heads
    batch, k_cache, v_cache = paged_batch([(40, 1), (3, 2)], 5, 3, head_dim, dtype, generator)
    num_tokens = len(batch.positions)
    fused = torch.randn(num_tokens, 11, head_dim, generator=generator).to(dtype)
    fused[0, 5, 3] = torch.nan
    fused[0, 10, -1] = torch.inf
    fused[1, 6] = 0
    fused[1, 9] = 1e-35
    turns = torch.randn(60, rotary_dim, generator=generator)
    scale = torch.rand(60, generator=generator) if scaled else None
    caches = (k_cache, v_cache)
    if kv is not None:
        caches = rounded_caches(k_cache.nan_to_num(), v_cache.nan_to_num(), dtype=kv)
    for cache in caches if kv else ():
        cache.zero_()
    q, k, v = fused.split([5, 3, 3], dim=1)
    write(q, k, v, turns, batch, *caches, interleaved=interleaved, query_scale=scale)
    if kv == torch.float8_e4m3fn:
        return [fused, *(cache.view(torch.uint8) for cache in caches), *map(kv_scales, caches)]
    return [fused, *caches, *(kv_scales(cache) for cache in caches if kv)]


def assert_same_as_torch(write, generator, options):
    expected, actual = (
        outcome(each, generator.manual_seed(1), **options) for each in (ReferenceKernels().rope_and_write_kv, write)
    )
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def normed_apart(kernels, q, k, v, *others, q_norm, k_norm, eps, **options):
    """Launch both norms by themselves, then the rest."""
    q = kernels.rms_norm(q, q_norm, eps)
    k = kernels.rms_norm(k, k_norm, eps)
    kernels.rope_and_write_kv(q, k, v, *others, **options)
    return q


def outcomes_with_norms(kernels, write, generator, weights, options):
    """Return all tensors after norms by themselves, and after `write`, which does all at once."""
    head_dim = options["heads"][0]
    q_norm, k_norm = (torch.randn(head_dim, generator=generator).to(dtype) + plus for dtype, plus in weights)
    found = []
    for each in (functools.partial(normed_apart, kernels), write):
        queries = []

        def keeping(*args, each=each, queries=queries, **more):
            queries.append(each(*args, q_norm=q_norm, k_norm=k_norm, eps=0.01, **more))

        fused, *caches = outcome(keeping, generator.manual_seed(1), **options)
        found.append([queries[0], fused[:, 5:], *caches])
    return found


def assert_norms_have_bits_of_rms_norm(kernels, write, generator, weights, options):
    expected, actual = outcomes_with_norms(kernels, write, generator, weights, options)
    for one, other in zip(expected, actual, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


def test_rope_without_kv_heads_rotates_only_queries(kernels, generator):
    """As in layers that share the KV of an earlier layer."""
    batch, k_cache, v_cache = paged_batch([(9, 9), (30, 3), (1, 1)], 5, 2, 24, torch.bfloat16, generator)
    rows = torch.randn(len(batch.positions), 8, 24, generator=generator).bfloat16()
    turns = torch.randn(40, 24, generator=generator)
    before = [cache.nan_to_num() for cache in (k_cache, v_cache)]
    results = []
    for num_kv_heads in (0, 2):
        q, k, v = rows.clone().split([8 - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
        kernels.rope_and_write_kv(q, k, v, turns, batch, k_cache, v_cache)
        results.append(q)
        if num_kv_heads == 0:
            assert all(map(torch.equal, (k_cache.nan_to_num(), v_cache.nan_to_num()), before))
    assert torch.equal(results[0][:, :4], results[1])
    assert not torch.equal(results[0], rows)


@pytest.mark.sweep(288)
@pytest.mark.parametrize("kv", ROUNDED, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rope_and_write_kv_has_bits_of_torch(kernels, generator, dtype, heads, interleaved, scaled, kv):
    options = {"dtype": dtype, "heads": heads, "interleaved": interleaved, "scaled": scaled, "kv": kv}
    assert_same_as_torch(kernels.rope_and_write_kv, generator, options)


@pytest.mark.sweep(144)
@pytest.mark.parametrize("kv", ROUNDED, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norms_have_bits_of_rms_norm(kernels, generator, dtype, heads, interleaved, scaled, kv):
    """With weights of the model's type, as in Qwen3, and weights around 1 in float32, as in Gemma 3."""
    options = {"dtype": dtype, "heads": heads, "interleaved": interleaved, "scaled": scaled, "kv": kv}
    for weights in ([(dtype, 0), (dtype, 0)], [(torch.float32, 1), (dtype, 1)]):
        assert_norms_have_bits_of_rms_norm(kernels, kernels.rope_and_write_kv, generator, weights, options)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("kv", "old", "new"),
    [
        (torch.int8, "is_half = half < ROTARY_DIM // 2", "is_half = half < ROTARY_DIM // 2 - 1"),
        (torch.int8, "is_there = is_head & (dim < HEAD_DIM)", "is_there = is_head & (dim < HEAD_DIM - 1)"),
        (torch.int8, "round_to_whole(x * inverse).to", "(x * inverse).to"),
        (torch.float8_e4m3fn, "127.0 if stored == tl.int8 else _E4M3_MAX", "127.0"),
        (torch.int8, "is_head = (kv_head < NUM_KV_HEADS)", "is_head = (kv_head < NUM_KV_HEADS - 1)"),
        (torch.float8_e4m3fn, "y * cosine + x * sine", "y * cosine - x * sine"),
        (torch.int8, "(part - NUM_QUERY_BLOCKS) * HEADS", "0 * part"),
        (torch.int8, "kv_head * k_scales_head_stride + offset", "kv_head // 2 * k_scales_head_stride + offset"),
        (torch.int8, "v_scales_ptr + block * v_scales_stride", "v_scales_ptr + token * 0"),
        (None, "x = tl.where(is_finite, x, 0.0)", "pass"),
        (None, "tl.where(is_finite, y, nan)", "y"),
        (torch.int8, "tl.where(is_finite, magnitude, 0.0)", "magnitude"),
    ],
    ids=[
        "half",
        "tail of values",
        "rounding",
        "range of fp8",
        "heads",
        "sign",
        "programs",
        "scales' head",
        "block",
        "infinite values",
        "their keys",
        "their scales",
    ],
)
def test_broken_rope_and_write_kv_is_detected(kernels, generator, tmp_path, kv, old, new):
    wrong = broken(tmp_path, "rope_kv", old, new)
    wrong._HEADS = 2
    options = {"dtype": torch.bfloat16, "heads": (80, 40), "kv": kv}
    with pytest.raises(AssertionError):
        assert_same_as_torch(wrong.rope_and_write_kv, generator, options)


NORMED_REST = "z = _normed(place, rest, is_head, rest < HEAD_DIM, inverse, weight_ptr, HAS_NORM)\n        if"


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("dtype", "old", "new"),
    [
        (torch.bfloat16, "x * x, eps, HEAD_DIM", "x * x, 0.5 * eps, HEAD_DIM"),
        (torch.bfloat16, "x * x, eps, HEAD_DIM", "x * x, eps, 1 << LEVELS"),
        (torch.bfloat16, "mask=is_head & (dim < HEAD_DIM), other=0.0).to", "mask=is_head & (dim < 79), other=0.0).to"),
        (torch.float32, "inverse * weight, x.dtype)", "(inverse * weight), x.dtype)"),
        (torch.bfloat16, "x = round_to(x.to(tl.float32) * inverse * weight, x.dtype)", "x = x * inverse * weight"),
        (torch.bfloat16, NORMED_REST, "z = tl.load(place + rest)\n        if"),
        (torch.bfloat16, "turns, k_norm_ptr, eps", "turns, q_norm_ptr, eps"),
        (torch.bfloat16, "tl.load(weight_ptr + dim, mask=is_dim", "tl.load(weight_ptr + dim // 2, mask=is_dim"),
    ],
    ids=["eps", "width", "tail", "order of products", "rounding", "rest of queries", "weight of keys", "weight"],
)
def test_broken_norms_of_heads_are_detected(kernels, generator, tmp_path, dtype, old, new):
    wrong = broken(tmp_path, "rope_kv", old, new)
    wrong._HEADS = 2
    options = {"dtype": dtype, "heads": (80, 40), "kv": torch.int8}
    with pytest.raises(AssertionError):
        assert_norms_have_bits_of_rms_norm(
            kernels, wrong.rope_and_write_kv, generator, [(dtype, 0), (dtype, 0)], options
        )
