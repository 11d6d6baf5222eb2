"""Latents in Triton: rope_and_write_latents has the bits of plain torch with Triton's norm, and attention to latents is
right. Both have the same bits alone and among other rows.
"""

import pytest
import torch
from broken_kernels import broken
from paged_batches import assert_attention_is_as_exact, floats, paged_batch, rounded_caches
from test_latents import BLOCK_SIZE, NUM_BLOCKS, empty_cache, make_rows, write

from octavo.kernels.operations import rope_and_write_latents as operation
from octavo.kernels.quantization import kv_scales
from octavo.kernels.reference import ReferenceKernels

# The interpreter uses numpy, which warns of intended values: infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

LATENTS = [(3, 24, 8), (5, 40, 24), (2, 512, 64)]  # heads, rank, rotary_dim
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
STORED = [None, torch.int8, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _several_programs_a_token(kernels, monkeypatch):
    from octavo.kernels.triton import rope_and_write_latents

    monkeypatch.setattr(rope_and_write_latents, "_HEADS", 2)


def make(generator, heads, dtype, *, is_interleaved=True):
    """Return arguments up to the cache. Some latents and keys are not finite, tiny or zero."""
    args = make_rows(generator, heads, dtype)
    rank, args[5] = heads[1], is_interleaved
    args[1][0, 3] = torch.nan
    args[1][1, 1] = torch.inf
    args[1][2, rank] = torch.nan
    args[1][3, rank + 1] = -torch.inf
    args[1][4] = 0
    args[1][5] = 1e-35
    return args


def outcome(kernels, args, stored):
    """Return the rotated queries, and the cache with its scales."""
    heads = args[0].shape[1], len(args[2]), args[0].shape[2]
    cache = empty_cache(heads, stored or args[0].dtype)
    queries = write(kernels, args, cache)
    if stored is None:
        return [queries, cache]
    return [queries, cache.view(torch.uint8), kv_scales(cache)]


def assert_same_as_torch(kernels, args, stored=None):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(operation, "rms_norm", lambda x, *others: kernels.rms_norm(x.contiguous(), *others))
        expected = outcome(ReferenceKernels(), args, stored)
    for one, other in zip(expected, outcome(kernels, args, stored), strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.sweep(36)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", LATENTS, ids=str)
def test_latents_have_bits_of_torch(kernels, generator, heads, dtype, is_interleaved, stored):
    assert_same_as_torch(kernels, make(generator, heads, dtype, is_interleaved=is_interleaved), stored)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_latent_alone_has_bits_of_latent_among_other_rows(kernels, generator, stored):
    args = make_rows(generator, LATENTS[1], torch.bfloat16)
    cache, again = (empty_cache(LATENTS[1], stored or torch.bfloat16) for _ in range(2))
    queries = write(kernels, args, cache)
    for row in range(len(queries)):
        alone = [x[row : row + 1] if i in {0, 1, 6, 7} else x for i, x in enumerate(args)]
        assert torch.equal(write(kernels, alone, again), queries[row : row + 1])
    assert torch.equal(again.view(torch.uint8), cache.view(torch.uint8))


@pytest.mark.sweep(8)
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_padding_row_writes_no_latent(kernels, generator, stored):
    args = make_rows(generator, LATENTS[0], torch.float32)
    args[7][:] = -1
    cache = empty_cache(LATENTS[0], stored or torch.float32)
    write(kernels, args, cache[1:])  # a mistake would write a row before these blocks
    assert not cache.view(torch.uint8).any()
    assert stored is None or not kv_scales(cache).any()


@pytest.fixture
def attention(kernels, monkeypatch):
    """Attention that divides heads of more than 32 bytes, as it divides those of more than 512 on a device."""
    from octavo.kernels.triton import attention

    divide_narrow_heads(attention, monkeypatch)
    return attention


def divide_narrow_heads(module, monkeypatch):
    for name, value in {"_MAX_ROW_BYTES": 32, "_PIECE": 16, "_VALUE_BYTES": 64}.items():
        monkeypatch.setattr(module, name, value)


def assert_attends(attention, generator, heads, dtype, stored=None, sequences=((70, 5), (300, 1), (1, 1))):
    num_heads, rank, rotary_dim = heads
    batch, latents, _ = paged_batch(list(sequences), 16, 1, rank + rotary_dim, dtype, generator)
    q = torch.randn(len(batch.positions), num_heads, rank + rotary_dim, generator=generator).to(dtype)
    cache = latents if stored is None else rounded_caches(latents, latents, dtype=stored)[0]
    found = attention.paged_attention(q, cache, cache[..., :rank], batch, (rank + rotary_dim) ** -0.5, None)
    numbers = latents if stored is None else floats(cache)
    assert_attention_is_as_exact(found, q, batch, (numbers, numbers[..., :rank]), None)


@pytest.mark.sweep(24)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", [(3, 24, 8), (5, 40, 24), (2, 32, 2)], ids=str)
def test_attention_to_latents_is_as_exact_as_torch(attention, generator, heads, dtype, stored):
    assert_attends(attention, generator, heads, dtype, stored)


@pytest.mark.turn(12)
@pytest.mark.sweep(12)
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(3, 512, 64), (3, 128, 32)], ids=str)
def test_attention_to_wide_latents_is_as_exact_as_torch(kernels, generator, heads, dtype, stored):
    assert_attends(kernels, generator, heads, dtype, stored, [(70, 3), (300, 1)])


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_to_latents_has_equal_bits_alone_and_in_chunks(attention, generator, dtype):
    heads, rank, width = 2, 40, 64
    latents = torch.randn(290, 2, 1, width, generator=generator).to(dtype)
    q = torch.randn(290, heads, width, generator=generator).to(dtype)

    def attend(first, last, company=()):
        strangers = [torch.randn(length, 2, 1, width, generator=generator).to(dtype) for length, _ in company]
        sequences = [*company, (last, last - first)]
        batch, cache, _ = paged_batch(sequences, 16, 1, width, dtype, generator, [*strangers, latents])
        before = sum(rows for _, rows in company)
        queries = torch.cat([torch.ones(before, heads, width, dtype=dtype), q[first:last]])
        return attention.paged_attention(queries, cache, cache[..., :rank], batch, 0.2, None)[before:]

    whole = attend(0, 290)
    for first, last, company in ((289, 290, ()), (20, 90, ((40, 3),)), (255, 258, ((270, 2), (3, 3)))):
        assert torch.equal(attend(first, last, company), whole[first:last]), first


def assert_only_rows_that_see_it_are_nan(attention, kernels, generator, stored):
    """A latent, and a key, that are not finite."""
    heads, num_rows = (2, 40, 24), NUM_BLOCKS * BLOCK_SIZE
    args = make_rows(generator, heads, torch.bfloat16, num_rows)
    args[6] = args[7] = torch.arange(num_rows)
    args[1][-1, 3] = torch.inf
    args[1][-3, 41] = torch.nan
    batch, _, _ = paged_batch([(num_rows, num_rows)], BLOCK_SIZE, 1, 8, torch.float32, generator)
    batch.block_tables[0, :NUM_BLOCKS] = torch.arange(NUM_BLOCKS)
    cache = empty_cache(heads, stored or torch.bfloat16)
    write(kernels, args, cache)
    q = torch.randn(num_rows, 2, 64, generator=generator).to(torch.bfloat16)
    found = attention.paged_attention(q, cache, cache[..., :40], batch, 0.2, None)
    assert bool(found[:-3].isfinite().all())
    assert bool(found[-3:].isnan().all())


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_latent_that_is_not_finite_reaches_only_rows_that_see_it(attention, kernels, generator, stored):
    assert_only_rows_that_see_it_are_nan(attention, kernels, generator, stored)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("range(PIECE, HEAD_DIM, PIECE)", "range(PIECE, HEAD_DIM - PIECE, PIECE)"),
        ("_queries(q_place, is_q, first_dim,", "_queries(q_place, is_q, 0,"),
        ("first_dim, q.dtype, HEAD_DIM, PIECE, HAS_SCALES), scores)",
         "first_dim, q.dtype, HEAD_DIM, PIECE, HAS_SCALES), 0.0 * scores)"),
        ("tl.program_id(2) * BLOCK_V", "tl.program_id(2)"),
        ("num_kv_heads, cdiv(value_dim, block_v)]", "num_kv_heads, 1]"),
        ("dim, dim < VALUE_DIM\n", "dim, dim < VALUE_DIM - 1\n"),
    ],
    ids=["last piece", "queries", "sum", "values", "programs", "mask"],
)  # fmt: skip
def test_broken_attention_to_latents_is_detected(kernels, generator, tmp_path, monkeypatch, old, new):
    wrong = broken(tmp_path, "attention", old, new)
    divide_narrow_heads(wrong, monkeypatch)
    with pytest.raises(AssertionError):
        assert_attends(wrong, generator, (5, 40, 24), torch.bfloat16, torch.int8, [(70, 5)])


def test_nan_in_scale_of_latents_is_detected(kernels, generator, tmp_path, monkeypatch):
    wrong = broken(tmp_path, "attention", "scales = tl.where(scales == scales, scales, 0.0)", "scales = scales + 0.0")
    divide_narrow_heads(wrong, monkeypatch)
    with pytest.raises(AssertionError):
        assert_only_rows_that_see_it_are_nan(wrong, kernels, generator, torch.int8)
