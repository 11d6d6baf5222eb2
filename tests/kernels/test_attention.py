"""paged_attention is right, and has the same bits for all chunks, neighbours, block sizes and numbers of threads."""

from itertools import pairwise

import pytest
import torch
from paged_batches import assert_attention_is_as_exact, dense_attention, floats, paged_batch, rounded_caches

from octavo.kernels import AttentionBatch, instruction_sets
from octavo.kernels.cpu import CpuKernels
from octavo.models.kv_layout import KVLayout, KVShape
from octavo.worker.kv_cache import PagedKVCache

FLOATS = [torch.float32, torch.bfloat16]
KV = pytest.mark.parametrize(
    ("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)], ids=str
)
HEADS = [  # head_dim, KV heads, group
    (64, 2, 7),
    (128, 8, 2),
    (48, 1, 1),
    (80, 2, 2),
    (96, 1, 9),
    (256, 1, 4),
    (512, 1, 4),
    (20, 3, 1),
]


@pytest.mark.sweep(64)
@pytest.mark.parametrize("window", [None, 1, 37])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_paged_attention_is_as_exact_as_torch(kernels, generator, softcap, dtype, heads, block_size, window):
    head_dim, num_kv_heads, group = heads
    sequences = [(1, 1), (70, 70), (150, 13), (64, 1), (129, 2)]
    batch, k_cache, v_cache = paged_batch(sequences, block_size, num_kv_heads, head_dim, dtype, generator)
    q = torch.randn(len(batch.positions), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    result = kernels.paged_attention(q, k_cache, v_cache, batch, head_dim**-0.5, window, softcap)
    assert_attention_is_as_exact(result, q, batch, (k_cache, v_cache), window, softcap)


@pytest.mark.sweep(24)
@KV
@pytest.mark.parametrize("heads", [(64, 1, 7), (128, 2, 2)], ids=str)
@pytest.mark.parametrize("window", [None, 1100])
def test_attention_over_several_partitions_is_as_exact_as_torch(kernels, generator, heads, window, dtype, int8):
    head_dim, num_kv_heads, group = heads
    sequences = [(2500, 1), (1024, 1), (1025, 3), (2100, 40)]
    batch, k_cache, v_cache = paged_batch(sequences, 16, num_kv_heads, head_dim, dtype, generator)
    q = torch.randn(len(batch.positions), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    caches = rounded_caches(k_cache, v_cache) if int8 else (k_cache, v_cache)
    result = kernels.paged_attention(q, *caches, batch, head_dim**-0.5, window)
    numbers = [floats(cache) if int8 else cache for cache in caches]
    assert_attention_is_as_exact(result, q, batch, numbers, window)
    capped = kernels.paged_attention(q, *caches, batch, head_dim**-0.5, window, 1.5)
    assert_attention_is_as_exact(capped, q, batch, numbers, window, 1.5)
    assert not torch.equal(capped, result)


@pytest.mark.sweep(16)
@KV
@pytest.mark.parametrize("heads", [(64, 2, 8), (20, 3, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("size", [0.0, 4.0, 60.0])
def test_sink_takes_its_share_of_every_row(kernels, generator, size, window, heads, dtype, int8):
    """It has a score and no value. A large one takes nearly all of a row, one far below the scores nothing."""
    head_dim, num_kv_heads, group = heads
    sequences = [(1, 1), (70, 70), (1500, 3), (129, 2)]
    batch, k_cache, v_cache = paged_batch(sequences, 16, num_kv_heads, head_dim, dtype, generator)
    q = torch.randn(len(batch.positions), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    sinks = torch.randn(num_kv_heads * group, generator=generator) + size
    caches = rounded_caches(k_cache, v_cache) if int8 else (k_cache, v_cache)
    numbers = [floats(cache) if int8 else cache for cache in caches]
    result = kernels.paged_attention(q, *caches, batch, head_dim**-0.5, window, None, sinks)
    assert_attention_is_as_exact(result, q, batch, numbers, window, None, sinks)
    plain = kernels.paged_attention(q, *caches, batch, head_dim**-0.5, window)
    assert not torch.equal(result, plain)
    nothing = torch.full_like(sinks, -1e4)
    assert torch.equal(kernels.paged_attention(q, *caches, batch, head_dim**-0.5, window, None, nothing), plain)


def test_large_scores_neither_overflow_nor_vanish(kernels, generator):
    """The running maximum is subtracted before the exponential: sharp attention neither overflows nor vanishes."""
    batch, k_cache, v_cache = paged_batch([(300, 5)], 16, 1, 64, torch.float32, generator)
    q = torch.randn(5, 2, 64, generator=generator) * 1000
    result = kernels.paged_attention(q, k_cache, v_cache, batch, 1.0, None)
    expected = dense_attention(q, batch, k_cache, v_cache, 1.0, None, torch.float64)
    assert torch.allclose(result.double(), expected, atol=0.05)  # scores of 10^4 have errors of 10^-3 in float32


class Prompt:
    """A sequence with queries at every position, computed in any chunks and block sizes, with any other sequences."""

    def __init__(
        self, length, num_kv_heads, group, head_dim, dtype, generator, window=None, *, int8=False, softcap=None,
        has_sinks=False,
    ):  # fmt: skip
        self.length, self.num_kv_heads, self.head_dim, self.dtype = length, num_kv_heads, head_dim, dtype
        self.window, self.generator, self.int8, self.softcap = window, generator, int8, softcap
        self.q = torch.randn(length, num_kv_heads * group, head_dim, generator=generator).to(dtype)
        self.history = torch.randn(length, 2, num_kv_heads, head_dim, generator=generator).to(dtype)
        self.sinks = torch.randn(num_kv_heads * group, generator=generator) if has_sinks else None

    def rows(self, kernels, first, last, block_size=16, others=()):
        """Compute rows first .. last as one chunk, after `others` (KV length, query length); later rows are not written
        yet.
        """
        strangers = [torch.randn(n, 2, self.num_kv_heads, self.head_dim, generator=self.generator).to(self.dtype)
                     for n, _ in others]  # fmt: skip
        batch, k_cache, v_cache = paged_batch(
            [*others, (last, last - first)], block_size, self.num_kv_heads, self.head_dim, self.dtype, self.generator,
            [*strangers, self.history],
        )  # fmt: skip
        if self.int8:
            k_cache, v_cache = rounded_caches(k_cache, v_cache)
        before = sum(queries for _, queries in others)
        company = torch.randn(before, *self.q.shape[1:], generator=self.generator).to(self.dtype)
        q = torch.cat([company, self.q[first:last]])
        result = kernels.paged_attention(
            q, k_cache, v_cache, batch, self.head_dim**-0.5, self.window, self.softcap, self.sinks
        )
        return result[before:]

    def in_chunks(self, kernels, size, **options):
        starts = range(0, self.length, size)
        return torch.cat([self.rows(kernels, i, min(i + size, self.length), **options) for i in starts])


@pytest.mark.sweep(32)
@KV
@pytest.mark.parametrize(
    ("heads", "window"),
    [((64, 2, 7), None), ((48, 1, 1), None), ((80, 1, 3), 50), ((20, 1, 2), 37), ((256, 1, 2), None), ((512, 1, 2), 9)],
    ids=str,
)
@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, False), (2.0, False), (None, True)])
def test_attention_bits_are_equal_for_any_chunks(compiled, generator, softcap, has_sinks, heads, window, dtype, int8):
    head_dim, num_kv_heads, group = heads
    prompt = Prompt(
        150, num_kv_heads, group, head_dim, dtype, generator, window, int8=int8, softcap=softcap, has_sinks=has_sinks
    )
    whole = prompt.rows(compiled, 0, 150)
    for size in (1, 7, 64):
        assert torch.equal(prompt.in_chunks(compiled, size), whole), size


FEW = [((32, 1, 16), None), ((64, 2, 7), 37), ((80, 1, 2), None), ((128, 2, 8), 37), ((128, 1, 2), None),
       ((256, 1, 1), 20), ((512, 2, 1), None), ((64, 1, 17), None)]  # fmt: skip


@pytest.mark.sweep(64)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize(("heads", "window"), FEW, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_bits_are_equal_for_few_and_many_rows(compiled, generator, softcap, heads, window, block_size, int8):
    """With tiles, up to sixteen rows use another product. Without tiles, they are not multiplied together with other
    keys.
    """
    head_dim, num_kv_heads, group = heads
    prompt = Prompt(150, num_kv_heads, group, head_dim, torch.bfloat16, generator, window, int8=int8, softcap=softcap)
    whole = prompt.rows(compiled, 0, 150)
    for first in (0, 7, 15, 16, 62, 63, 64, 100, 143):
        for count in (1, 2, 3):
            some = prompt.rows(compiled, first, first + count, block_size=block_size)
            assert torch.equal(some, whole[first : first + count]), (first, count)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_attention_bits_are_equal_if_scores_rise_between_tiles(compiled, generator, head_dim, int8):
    """Many rows add the values of several tiles together, except if the sums are rescaled between them."""
    prompt = Prompt(400, 1, 2, head_dim, torch.bfloat16, generator, int8=int8)
    prompt.q *= 4
    prompt.history[:, 0] *= (1 + 2 * (torch.arange(400) // 64 % 2))[:, None, None]  # 3 in each second tile
    whole = prompt.rows(compiled, 0, 400)
    for row in (127, 128, 190, 255, 256, 300, 399):
        assert torch.equal(prompt.rows(compiled, row, row + 1), whole[row : row + 1]), row


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_bits_are_equal_for_more_heads_than_rows_of_a_task(single_threaded, generator, dtype):
    prompt = Prompt(200, 1, 500, 32, dtype, generator)
    whole = prompt.rows(single_threaded, 198, 200)
    for heads in (slice(0, 7), slice(440, 470), slice(490, 500)):
        some = Prompt(200, 1, 1, 32, dtype, generator)
        some.q, some.history = prompt.q[:, heads], prompt.history
        assert torch.equal(some.rows(single_threaded, 198, 200), whole.unflatten(1, (500, -1))[:, heads].flatten(1))


@pytest.mark.parametrize("block_size", [1, 5, 32, 128])
def test_attention_bits_are_equal_for_any_block_size(compiled, generator, block_size):
    prompt = Prompt(150, 2, 7, 64, torch.bfloat16, generator)
    whole = prompt.rows(compiled, 0, 150)
    assert torch.equal(prompt.in_chunks(compiled, 64, block_size=block_size), whole)


def test_attention_bits_are_independent_of_other_sequences(compiled, generator):
    prompt = Prompt(150, 2, 7, 64, torch.bfloat16, generator)
    whole = prompt.rows(compiled, 0, 150)
    others = [(30, 30), (200, 1), (64, 9)]
    assert torch.equal(prompt.rows(compiled, 0, 150, others=others), whole)
    assert torch.equal(prompt.rows(compiled, 149, 150, others=others), whole[149:])


@pytest.mark.parametrize(("int8", "has_sinks"), [(False, False), (True, False), (False, True)])
def test_attention_bits_are_equal_for_any_partitions_and_threads(fastest, single_threaded, generator, int8, has_sinks):
    prompt = Prompt(2500, 1, 7, 64, torch.bfloat16, generator, int8=int8, has_sinks=has_sinks)
    chunk = prompt.rows(single_threaded, 2300, 2500)
    assert torch.equal(prompt.rows(fastest, 2300, 2500), chunk)
    for first in (2300, 2499):  # few rows: partitions run on different threads
        assert torch.equal(prompt.rows(fastest, first, first + 1), chunk[first - 2300 :][:1])
        assert torch.equal(prompt.rows(single_threaded, first, first + 1), chunk[first - 2300 :][:1])
    crowd = [(5, 1)] * 20  # many rows: they do not
    assert torch.equal(prompt.rows(fastest, 2499, 2500, others=crowd), chunk[-1:])


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("int8", "has_sinks"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 20), (1, 48), (2, 24)])
def test_attention_bits_are_equal_if_threads_divide_the_heads_of_a_kv_head(
    generator, num_kv_heads, group, int8, has_sinks
):
    """A step with fewer rows of work than threads divides the query heads of each KV head."""
    prompt = Prompt(1100, num_kv_heads, group, 64, torch.bfloat16, generator, int8=int8, has_sinks=has_sinks)
    for isa in instruction_sets():
        expected = prompt.rows(CpuKernels(isa, 1), 1090, 1100)
        for num_threads in (2, 3, 8):
            kernels = CpuKernels(isa, num_threads)
            for first, last in ((1090, 1091), (1099, 1100), (1096, 1099)):
                rows = expected[first - 1090 : last - 1090]
                assert torch.equal(prompt.rows(kernels, first, last), rows), (isa, num_threads, first)
                assert torch.equal(prompt.rows(kernels, first, last, others=[(40, 1)]), rows), (isa, num_threads, first)


@pytest.mark.sweep(24)
@KV
@pytest.mark.parametrize("at", [50, 51, 70])
def test_masked_positions_do_not_affect_row(compiled, generator, dtype, int8, at):
    """An infinite value at a later position of a chunk affects no earlier row, and no row with a window after it."""
    prompt = Prompt(100, 1, 2, 64, dtype, generator, window=20, int8=int8)
    clean = prompt.rows(compiled, 0, 100)
    prompt.history[at] = float("inf")
    prompt.history[at + 1] = float("nan")
    for size in (100, 7, 1):
        result = prompt.in_chunks(compiled, size)
        assert torch.equal(result[:at], clean[:at])
        assert torch.equal(result[at + 21 :], clean[at + 21 :])  # the window is past it
        assert result[at + 1 : at + 21].isnan().all()


def rows_of_written_kv(kernels, qkv, bounds, kv_dtype, window=None, softcap=None, block_size=16):
    """Write the KV of a prompt and compute its rows, chunk by chunk: [tokens, 4 query heads to 2 KV heads, head_dim].

    qkv: [tokens, 8 heads, head_dim].
    """
    num_tokens, _, head_dim = qkv.shape
    num_blocks, layout = -(-num_tokens // block_size), KVLayout((KVShape(2, head_dim),))
    caches = PagedKVCache(layout, num_blocks=[num_blocks], block_size=block_size, dtype=kv_dtype, device=qkv.device)
    caches.groups[0].blocks.view(torch.uint8).fill_(255)  # NaN
    cos_sin = torch.cat([torch.ones(num_tokens, head_dim // 2), torch.zeros(num_tokens, head_dim // 2)], dim=1)
    table, chunks = torch.arange(num_blocks, dtype=torch.int32).flip(0), []
    for first, last in pairwise(bounds):
        start, length = torch.tensor([0, last - first]).int(), torch.tensor([last]).int()
        at = torch.arange(first, last)
        slots = table[at // block_size].long() * block_size + at % block_size
        batch = AttentionBatch(start, length, table[None], at, slots, block_size)
        q, k, v = qkv[first:last].clone().split([4, 2, 2], dim=1)
        kernels.rope_and_write_kv(q, k, v, cos_sin, batch, *caches.layer(0))
        chunks.append(kernels.paged_attention(q, *caches.layer(0), batch, head_dim**-0.5, window, softcap))
    return torch.cat(chunks).unflatten(1, (4, head_dim))


def assert_value_reaches_rows_that_see_it(kernels, generator, value, at, dtype, kv_dtype, window, softcap):
    """A value of the second KV head, not finite, makes the rows that see it NaN, and changes no bit of the others."""
    num_tokens = at + 6
    qkv = torch.randn(num_tokens, 8, 32, generator=generator).to(dtype)
    broken = qkv.clone()
    broken[at, 7, 3] = value
    end, found = num_tokens if window is None else at + window, []
    for bounds in ([0, num_tokens], sorted({0, 3, at, at + 1, num_tokens})):
        clean, rows = (rows_of_written_kv(kernels, each, bounds, kv_dtype, window, softcap) for each in (qkv, broken))
        assert torch.equal(rows[:, :2], clean[:, :2])
        assert torch.equal(rows[:at], clean[:at])
        assert torch.equal(rows[end:], clean[end:])
        assert rows[at:end, 2:].isnan().all()
        found.append(rows.nan_to_num())
    assert kernels.name == "reference" or torch.equal(*found)


@pytest.mark.sweep(32)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0)])
@KV
@pytest.mark.parametrize("at", [5, 66])
def test_value_that_is_not_finite_reaches_only_rows_that_see_it(
    kernels, generator, at, dtype, int8, window, softcap, value
):
    kv_dtype = torch.int8 if int8 else dtype
    assert_value_reaches_rows_that_see_it(kernels, generator, value, at, dtype, kv_dtype, window, softcap)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_partition_in_which_row_sees_only_nan_is_not_ignored(kernels, generator, kv_dtype):
    assert_first_position_of_partition_counts(kernels, generator, kv_dtype, 1024)


def assert_first_position_of_partition_counts(kernels, generator, kv_dtype, first):
    """Its row sees no other position of the partition."""
    qkv = torch.randn(first + 2, 8, 32, generator=generator)
    qkv[first, 7, 3] = torch.inf
    for bounds in ([0, first + 2], [0, first, first + 1, first + 2]):
        is_nan = rows_of_written_kv(kernels, qkv, bounds, kv_dtype or qkv.dtype).isnan()
        assert is_nan[first:, 2:].all()
        assert is_nan.sum() == 2 * 2 * 32


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_bits_are_equal_on_avx512_and_avx2(generator, softcap):
    from kernel_backends import compiled_kernels

    prompt = Prompt(150, 2, 7, 64, torch.bfloat16, generator, softcap=softcap)
    results = [prompt.rows(compiled_kernels(isa), 0, 150) for isa in ("avx512", "avx2")]
    assert torch.equal(*results)
