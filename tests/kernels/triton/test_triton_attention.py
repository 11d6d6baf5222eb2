"""paged_attention in Triton is right, and has the same bits for all chunks, neighbours and splits into partitions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from broken_kernels import NothingRuns, broken
from paged_batches import assert_attention_is_as_exact, dense_attention, floats, paged_batch, rounded_caches
from test_attention import assert_first_position_of_partition_counts, assert_value_reaches_rows_that_see_it

from octavo.kernels import AttentionBatch
from octavo.kernels.reference import ReferenceKernels

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
ROUNDED = [None, torch.int8, torch.float8_e4m3fn]
HEADS = [(64, 2, 2), (80, 1, 7), (96, 2, 1), (128, 1, 8), (256, 1, 3), (20, 3, 1)]  # head_dim, KV heads, group
SHAPES = [(dtype, heads) for dtype in FLOATS for heads in [*HEADS, (288, 1, 2)]]
WINDOWS = [None, 1, 100]
NUMPY_WARNS = "ignore::RuntimeWarning:triton.runtime.interpreter"  # of infinities and NaN
NUM_ROWS = 290  # of `Prompt`: more than one partition


@pytest.fixture(scope="module")
def attention(kernels):
    from octavo.kernels.triton import attention

    return attention


SEQUENCES = [(70, 5), (300, 1), (1, 1), (129, 12)]  # KV lengths, and rows


def assert_right(
    paged_attention, generator, heads, dtype, *, window=None, softcap=None, kv=None, block_size=16,
    sequences=SEQUENCES, has_sinks=False,
):  # fmt: skip
    head_dim, num_kv_heads, group = heads
    sinks = torch.randn(num_kv_heads * group, generator=generator) + 1 if has_sinks else None
    batch, k_cache, v_cache = paged_batch(sequences, block_size, num_kv_heads, head_dim, dtype, generator)
    q = torch.randn(len(batch.positions), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    caches = (k_cache, v_cache) if kv is None else rounded_caches(k_cache, v_cache, dtype=kv)
    result = paged_attention(q, *caches, batch, head_dim**-0.5, window, softcap, sinks)
    numbers = [floats(cache) if kv else cache for cache in caches]
    assert_attention_is_as_exact(result, q, batch, numbers, window, softcap, sinks)


@pytest.mark.sweep(1200)
@pytest.mark.parametrize("kv", ROUNDED, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_size", [5, 16])
@pytest.mark.parametrize(("dtype", "heads"), SHAPES, ids=str)
def test_triton_attention_is_as_exact_as_torch(attention, generator, dtype, heads, block_size, window, softcap, kv):
    options = {"window": window, "softcap": softcap, "kv": kv, "block_size": block_size}
    assert_right(attention.paged_attention, generator, heads, dtype, **options)


@pytest.mark.sweep(16)
@pytest.mark.parametrize("kv", ROUNDED, ids=str)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("dtype", "heads"), [(torch.bfloat16, (64, 2, 3)), (torch.float32, (20, 1, 2))], ids=str)
def test_triton_sink_takes_its_share_of_every_row(attention, generator, dtype, heads, window, kv):
    assert_right(attention.paged_attention, generator, heads, dtype, window=window, kv=kv, has_sinks=True)


@pytest.mark.parametrize(
    ("old", "new", "length"),
    [
        ("totals, sinks_ptr + head,", "totals, sinks_ptr + 0 * head,", 90),
        ("sinks_ptr + tl.program_id(1) + row", "sinks_ptr + row", 1),
        ("tl.load(sink_place) * _LOG2_E", "tl.load(sink_place)", 1),
    ],
)
def test_wrong_sink_is_detected(attention, generator, tmp_path, old, new, length):
    """length: of the chunk; a single row is computed by parts, which another kernel merges."""
    wrong, options = broken(tmp_path, "attention", old, new), {"sequences": [(300, length)], "has_sinks": True}
    assert_right(attention.paged_attention, generator, (16, 2, 1), torch.float32, **options)
    with pytest.raises(AssertionError):
        assert_right(wrong.paged_attention, generator, (16, 2, 1), torch.float32, **options)


@pytest.mark.turn(12)
@pytest.mark.parametrize("window", [1, 37, 100])
def test_attention_does_not_read_kv_before_window(attention, generator, window):
    """This includes the numbers and the blocks, which may be released."""
    batch, k_cache, v_cache = paged_batch([(70, 5), (300, 1), (129, 12)], 16, 2, 64, torch.float32, generator)
    q = torch.randn(len(batch.positions), 4, 64, generator=generator)
    expected = attention.paged_attention(q, k_cache, v_cache, batch, 0.125, window, None)
    for table, start in zip(batch.block_tables, batch.query_start[:-1].tolist(), strict=True):
        first = max(0, int(batch.positions[start]) - window + 1)
        for cache in (k_cache, v_cache):
            cache[table[: first // 16].long()] = torch.nan
            cache[table[first // 16].long(), :, : first % 16] = torch.nan
        table[: first // 16] = -1
    assert torch.equal(attention.paged_attention(q, k_cache, v_cache, batch, 0.125, window, None), expected)


class Prompt:
    """A sequence with queries at every position, computed in any chunks, with any other sequences."""

    def __init__(
        self, generator, dtype=torch.bfloat16, heads=(64, 1, 3), *, window=None, softcap=None, kv=None, has_sinks=False
    ):
        self.head_dim, self.num_kv_heads, group = heads
        sinks = torch.randn(self.num_kv_heads * group, generator=generator) if has_sinks else None
        self.generator, self.dtype, self.options, self.kv = generator, dtype, (window, softcap, sinks), kv
        shape = (self.num_kv_heads, self.head_dim)
        self.q = torch.randn(NUM_ROWS, self.num_kv_heads * group, self.head_dim, generator=generator).to(dtype)
        self.history = torch.randn(NUM_ROWS, 2, *shape, generator=generator).to(dtype)

    def rows(self, attention, first, last, *, company=(), block_size=16):
        """Compute rows first .. last as one chunk, after `company` (KV length, query length); later rows are not
        written yet.
        """
        strangers = [
            torch.randn(length, 2, self.num_kv_heads, self.head_dim, generator=self.generator).to(self.dtype)
            for length, _ in company
        ]
        batch, k_cache, v_cache = paged_batch(
            [*company, (last, last - first)], block_size, self.num_kv_heads, self.head_dim, self.dtype,
            self.generator, [*strangers, self.history],
        )  # fmt: skip
        if self.kv is not None:
            k_cache, v_cache = rounded_caches(k_cache, v_cache, dtype=self.kv)
        before = sum(queries for _, queries in company)
        others = torch.randn(before, *self.q.shape[1:], generator=self.generator).to(self.dtype)
        q = torch.cat([others, self.q[first:last]])
        return attention.paged_attention(q, k_cache, v_cache, batch, self.head_dim**-0.5, *self.options)[before:]


def assert_alike(attention, prompt, *, whole_by=None):
    """Compare rows in one chunk and in several, alone and with other sequences, split into partitions or not."""
    whole = prompt.rows(whole_by or attention, 0, NUM_ROWS)
    for first, last, company, block_size in [
        (NUM_ROWS - 1, NUM_ROWS, (), 16),  # a single decode, with its partitions in several programs
        (NUM_ROWS - 4, NUM_ROWS, ((30, 1), (270, 3)), 5),  # drafts to verify
        (20, 90, ((3, 3),), 16),
        (255, 257, ((40, 30),), 16),
    ]:
        rows = prompt.rows(attention, first, last, company=company, block_size=block_size)
        assert torch.equal(rows, whole[first:last]), (first, last, company)


@pytest.mark.sweep(52)
@pytest.mark.parametrize("kv", ROUNDED, ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"), [(None, None, False), (70, None, True), (None, 2.0, False), (None, None, True)]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_triton_attention_bits_are_independent_of_chunks_and_batch(
    attention, generator, dtype, window, softcap, has_sinks, kv
):
    prompt = Prompt(generator, dtype, window=window, softcap=softcap, kv=kv, has_sinks=has_sinks)
    assert_alike(attention, prompt)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "heads"), SHAPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 64, 129])
def test_triton_attention_bits_are_equal_for_all_chunk_sizes(attention, generator, heads, dtype, size):
    prompt = Prompt(generator, dtype, heads)
    starts = range(0, NUM_ROWS, size) if size > 1 else range(NUM_ROWS - 40, NUM_ROWS)
    whole = prompt.rows(attention, 0, NUM_ROWS)
    for first in starts:
        last = min(first + size, NUM_ROWS)
        assert torch.equal(prompt.rows(attention, first, last), whole[first:last]), first


def test_partition_split_does_not_change_attention_bits(attention, generator, monkeypatch):
    """If partial sums would take too much memory, or the device is busy, nothing is split, and the bits are the
    same.
    """
    prompt = Prompt(generator, heads=(64, 2, 4))
    split = prompt.rows(attention, NUM_ROWS - 2, NUM_ROWS)
    monkeypatch.setattr(attention, "_merge_partitions", None)  # must not be called
    for name in ("_SPLIT_PROGRAMS", "_PARTIAL_BYTES"):
        with monkeypatch.context() as context:
            context.setattr(attention, name, 0)
            assert torch.equal(prompt.rows(attention, NUM_ROWS - 2, NUM_ROWS), split), name


def of_shared_partitions(attention, generator, num_sharers, window):
    """Return attention of sequences whose partitions are shared by some programs; 0: that are not split.

    A sequence of 8 tokens has two tiles of rows; one of 20 is never split.
    """
    generator.manual_seed(0)
    sequences = [(530, 8), (20, 20), (1, 1), (270, 2)]
    batch, k_cache, v_cache = paged_batch(sequences, 16, 1, 16, torch.float32, generator)
    q = torch.randn(len(batch.positions), 9, 16, generator=generator)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(attention, "_SPLIT_PROGRAMS", 512 if num_sharers else 0)
        context.setattr(attention, "_SHARERS_PER_PROCESSOR", num_sharers)
        context.setattr(attention, "num_processors", lambda _device: 1)
        return attention.paged_attention(q, k_cache, v_cache, batch, 0.25, window, None)


@pytest.mark.sweep(8)
@pytest.mark.parametrize("window", [None, 200])
def test_programs_that_share_partitions_do_not_change_attention_bits(attention, generator, window):
    expected = of_shared_partitions(attention, generator, 0, window)
    for num_sharers in (1, 20):
        assert torch.equal(of_shared_partitions(attention, generator, num_sharers, window), expected), num_sharers


@pytest.mark.sweep(12)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("is_before = ends <= item", "is_before = ends < item"),
        ("item - tl.max(tl.where(is_before, ends, 0))", "item"),
        (" * tl.cdiv(num_tokens * GROUP, BLOCK_M)\n", "\n"),
        ("tl.minimum(end_partition, own + 1)", "end_partition"),
        ("_first_seen(first_position, window) // (TILE * TILES) + number", "number"),
        ("tl.num_programs(0) - num_tiles, 1)", "tl.num_programs(0) - num_tiles, 1) + 1"),
    ],
    ids=["border", "number", "tiles", "one partition", "first partition", "step"],
)
def test_broken_share_of_partitions_is_detected(attention, generator, make_mistake, old, new):
    expected = of_shared_partitions(attention, generator, 0, 200)
    wrong = make_mistake("attention", old, new)
    assert not torch.equal(of_shared_partitions(wrong, generator, 2, 200), expected)


def test_number_of_programs_does_not_depend_on_length_of_tables(attention, monkeypatch):
    """So a step of short sequences costs the same for any max_model_len, in a graph as well."""
    grids = []

    class Recorded(NothingRuns):
        def __missing__(self, grid):
            grids.append(grid)
            return super().__missing__(grid)

    monkeypatch.setattr(attention, "_attend", Recorded())
    monkeypatch.setattr(attention, "_merge_partitions", NothingRuns())
    monkeypatch.setattr(attention, "num_processors", lambda _device: 132)
    lengths = torch.zeros(33, dtype=torch.int32)
    q, cache = torch.empty(32, 16, 64), torch.empty(2, 8, 16, 64)
    for length in (2048, 40960):
        batch = AttentionBatch(lengths, lengths[1:], lengths.new_zeros(32, length // 16), lengths, lengths, 16)
        attention.paged_attention(q, cache, cache, batch, 1.0, None, None)
    assert grids == [(33 + 33, 8, 1)] * 2  # a tile for each sequence, one between them, and two programs per processor


def test_partial_sums_are_within_scratch_bytes(attention, monkeypatch):
    """For batches of all kinds, up to 40 sequences with up to 3,000 positions."""
    taken, make = [], attention.partial_sums

    def watch(*arguments):
        sums = make(*arguments)
        taken.append(sum(part.nbytes for part in sums))
        return sums

    monkeypatch.setattr(attention, "partial_sums", watch)
    for kernel in ("_attend", "_merge_partitions"):
        monkeypatch.setattr(attention, kernel, NothingRuns())
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    most = attention.scratch_bytes(**shape, max_seq_len=3000)
    for num_seqs in (1, 3, 40, 255, 256, 300):
        for num_tokens in (num_seqs, num_seqs + 1, 8 * num_seqs, 8 * num_seqs + 500):
            tables = torch.zeros(num_seqs, -(-3000 // 16), dtype=torch.int32)
            lengths = torch.zeros(num_seqs + 1, dtype=torch.int32)
            batch = AttentionBatch(lengths, lengths[1:], tables, lengths, lengths, 16)
            q, cache = torch.empty(num_tokens, 8, 64, device="meta"), torch.empty(2, 2, 16, 64)
            attention.paged_attention(q, cache, cache, batch, 1.0, None, None)
    assert most / 2 < max(taken) <= most
    monkeypatch.setattr(attention, "_PARTIAL_BYTES", most // 10)
    attention.paged_attention(q[:40], cache, cache, replace(batch, seq_lens=lengths[:40]), 1.0, None, None)
    assert taken[-1] <= attention.scratch_bytes(**shape, max_seq_len=3000) == most // 10


def test_large_scores_do_not_overflow_triton_attention(attention, generator):
    batch, k_cache, v_cache = paged_batch([(300, 5)], 16, 1, 64, torch.float32, generator)
    q = torch.randn(5, 2, 64, generator=generator) * 1000
    result = attention.paged_attention(q, k_cache, v_cache, batch, 1.0, None, None)
    expected = dense_attention(q, batch, k_cache, v_cache, 1.0, None, torch.float64)
    assert torch.allclose(result.double(), expected, atol=0.05)  # scores of 10^4 have errors of 10^-3 in float32


@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.sweep(144)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0)])
@pytest.mark.parametrize("kv", ROUNDED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_value_that_is_not_finite_reaches_only_rows_that_see_it(kernels, generator, dtype, kv, window, softcap, value):
    """The other rows of its tile multiply it by weights of zero."""
    assert_value_reaches_rows_that_see_it(kernels, generator, value, 5, dtype, kv or dtype, window, softcap)


@pytest.mark.sweep(12)
@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize("kv", ROUNDED, ids=str)
def test_partition_in_which_row_sees_only_nan_is_not_ignored(attention, generator, kv):
    kernels = with_attention(attention, ReferenceKernels())
    assert_first_position_of_partition_counts(kernels, generator, kv, attention.PARTITION)


def with_attention(attention, kernels):
    """Return kernels that write KV as `kernels` do, with the given attention."""
    write = kernels.rope_and_write_kv
    return SimpleNamespace(name="triton", rope_and_write_kv=write, paged_attention=attention.paged_attention)


@pytest.mark.turn(12)
@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_nan_is_not_lost_if_maximum_ignores_it(kernels, generator, tmp_path, softcap):
    """As on a GPU; in the interpreter, the maximum of a NaN and a number is NaN."""
    scores = 'tl.where(scores == scores, scores, float("-inf"))'
    other = broken(tmp_path, "attention", "tl.max(scores, axis=1)", f"tl.max({scores}, axis=1)")
    mixed, dtype = with_attention(other, kernels), torch.float32
    for at in (0, 5):
        assert_value_reaches_rows_that_see_it(mixed, generator, torch.inf, at, dtype, dtype, 4, softcap)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("kv", "old", "new"),
    [
        (None, "(of_tile < seq_len)", "(of_tile <= seq_len)"),
        (None, "of_tile[None, :] <= position[:, None])", "of_tile[None, :] < position[:, None])"),
        (None, "> position[:, None] - window)", ">= position[:, None] - window)"),
        (None, "keep, add = tl.exp2(total_max - origin)", "keep, add = tl.exp2(total_max - origin) * 0.5"),
        (torch.int8, "k_scales_ptr += tl.program_id(1) * k", "k_scales_ptr += 0 * k"),
        (torch.float8_e4m3fn, "to_float32(v) * scales[:, None]", "to_float32(v)"),
    ],
    ids=["tail", "causal", "window", "merge", "scales' head", "no scales"],
)
def test_broken_triton_attention_is_detected(attention, generator, tmp_path, kv, old, new):
    wrong = broken(tmp_path, "attention", old, new)
    with pytest.raises(AssertionError):
        assert_right_where_all_masks_count(wrong, generator, kv)


def assert_right_where_all_masks_count(attention, generator, kv):
    options = {"window": 30, "kv": kv, "sequences": [(36, 2), (270, 1)]}
    assert_right(attention.paged_attention, generator, (16, 2, 1), torch.float32, **options)


@pytest.mark.parametrize("kv", ROUNDED, ids=str)
def test_correct_triton_attention_passes_masked_comparison(attention, generator, kv):
    assert_right_where_all_masks_count(attention, generator, kv)


@pytest.mark.turn(12)
@pytest.mark.parametrize(
    ("old", "new"),
    [("\nTILES = 4\n", "\nTILES = 2\n"), ("\nTILE = 64\n", "\nTILE = 32\n")],
    ids=["other partitions", "other tiles"],
)
def test_decode_tiles_unlike_prefill_tiles_are_detected(attention, generator, tmp_path, old, new):
    other = broken(tmp_path, "attention", old, new)
    assert_right(other.paged_attention, generator, (64, 1, 2), torch.float32)
    with pytest.raises(AssertionError):
        assert_alike(other, Prompt(generator, torch.float32), whole_by=attention)


@pytest.mark.parametrize("is_split", [True, False])
def test_padding_sequence_of_length_zero_returns_zeros(attention, generator, monkeypatch, is_split):
    """Its row pads a step, and its table has arbitrary content."""
    batch, k_cache, v_cache = paged_batch([(300, 1), (600, 1)], 16, 1, 16, torch.float32, generator)
    q = torch.randn(4, 2, 16, generator=generator)
    expected = attention.paged_attention(q[:2], k_cache, v_cache, batch, 0.25, None, None)
    pad = torch.nn.functional.pad
    padded = AttentionBatch(
        torch.arange(5, dtype=torch.int32),
        pad(batch.seq_lens, (0, 2)),
        pad(batch.block_tables, (0, 200, 0, 2), value=2**30),
        pad(batch.positions, (0, 2)),
        pad(batch.slot_mapping, (0, 2), value=-1),
        16,
    )
    monkeypatch.setattr(attention, "_SPLIT_PROGRAMS", 8 if is_split else 0)
    rows = attention.paged_attention(q, k_cache, v_cache, padded, 0.25, None, None)
    assert torch.equal(rows[:2], expected)
    assert not rows[2:].any()
    assert not attention.paged_attention(q, k_cache, v_cache, padded, 0.25, 100, None)[2:].any()
