"""Multi-head latent attention: products by head, rows of latents, and attention to the first values of keys."""

import pytest
import torch
from kernel_backends import compiled_kernels
from paged_batches import assert_attention_is_as_exact, floats, paged_batch, rounded_caches

from octavo.kernels import instruction_sets
from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.cpu import CpuKernels
from octavo.kernels.operations.rope_and_write_latents import rope_and_write_latents
from octavo.kernels.quantization import kv_scales, quantize_int8
from octavo.kernels.reference import ReferenceKernels
from octavo.models.kv_layout import LatentShape

ISAS = instruction_sets()  # of this processor
FLOATS = [torch.float32, torch.bfloat16]
LATENTS = [(3, 24, 8), (2, 40, 24), (20, 512, 64)]  # heads, rank, rotary_dim
BLOCK_SIZE, NUM_BLOCKS, EPS = 4, 6, 1e-6


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "Q8_0"])
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_head_product_has_bits_of_product_with_weight_of_head(num_rows, stored, generator):
    num_heads, width, columns = 3, 64, 545
    dtype = torch.bfloat16 if stored == "bfloat16" else torch.float32
    weights = torch.randn(num_heads, columns, width, generator=generator).to(dtype)
    x = torch.randn(num_rows, num_heads, width + 8, generator=generator).to(dtype)[..., :width]
    if stored == "int8":
        weights = [quantize_int8(each) for each in weights]
    elif stored == "Q8_0":
        weights = [[random_blocks(generator, BlockKind.Q8_0, columns, width)] for _ in range(num_heads)]
    for isa in ISAS:
        for num_threads in (1, 2, 5):
            kernels = CpuKernels(isa, num_threads)
            linears = [kernels.pack_linear(each) for each in weights]
            packed, wide = kernels.pack_groups(linears), torch.zeros(num_rows, num_heads, columns + 3, dtype=dtype)
            found = kernels.head_linear(x, packed)
            written = kernels.head_linear(x, packed, wide[..., :columns])
            assert written.data_ptr() == wide.data_ptr()
            assert not wide[..., columns:].any()
            for head, linear in enumerate(linears):
                alone = kernels.linear(x[:, head].contiguous(), linear)
                assert torch.equal(found[:, head], alone)
                assert torch.equal(written[:, head], alone)


def test_head_product_refuses_tensors_that_do_not_fit():
    kernels = compiled_kernels(ISAS[0])
    packed = kernels.pack_groups([kernels.pack_linear(torch.zeros(8, 32))] * 2)
    x = torch.zeros(3, 2, 32)
    with pytest.raises(ValueError, match="of as many rows"):
        kernels.head_linear(x, packed, torch.zeros(4, 2, 8))
    with pytest.raises(ValueError, match="not of these groups"):
        kernels.head_linear(torch.zeros(3, 4, 32), packed)


def make_rows(generator, heads, dtype, num_rows=9):
    """Return the arguments of `rope_and_write_latents` up to the cache. Slots are scattered, and rows have gaps."""
    num_heads, rank, rotary_dim = heads
    q = torch.randn(num_rows, num_heads, rotary_dim + 5, generator=generator).to(dtype)[..., 5:]
    latent = torch.randn(num_rows, 3 + rank + rotary_dim, generator=generator).to(dtype)[:, 3:]
    weight, cos_sin = torch.rand(rank, generator=generator) + 0.5, torch.randn(50, rotary_dim, generator=generator)
    positions = torch.randint(50, (num_rows,), generator=generator)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_rows]
    return [q, latent, weight.to(dtype), EPS, cos_sin, True, positions, slots]


def empty_cache(heads, dtype):
    shape, num_bytes = LatentShape(*heads[1:]), {torch.int8: "int8"}.get(dtype, str(dtype).removeprefix("torch."))
    size = shape.block_bytes(BLOCK_SIZE, num_bytes) // dtype.itemsize
    return shape.views(torch.zeros(NUM_BLOCKS, size, dtype=dtype), BLOCK_SIZE)[0]


def write(kernels, args, cache):
    num_heads, rank = args[0].shape[1], len(args[2])
    queries = torch.full((len(args[0]), num_heads, rank + args[0].shape[2]), 7.0, dtype=args[0].dtype)
    rope_and_write_latents(kernels, *args, cache, queries)
    assert bool((queries[..., :rank] == 7).all())
    return queries[..., rank:]


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", LATENTS, ids=str)
def test_written_latents_and_queries_equal_plain_torch(heads, dtype, is_interleaved, generator):
    args = make_rows(generator, heads, dtype)
    args[5] = is_interleaved
    expected = empty_cache(heads, dtype)
    expected_queries = write(ReferenceKernels(), args, expected)
    for isa in ISAS:
        cache = empty_cache(heads, dtype)
        queries = write(compiled_kernels(isa), args, cache)
        torch.testing.assert_close(cache, expected)
        torch.testing.assert_close(queries, expected_queries)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_written_row_does_not_depend_on_other_rows(dtype, generator):
    heads = LATENTS[1]
    args = make_rows(generator, heads, torch.float32 if dtype == torch.int8 else dtype)
    for isa in ISAS:
        kernels, cache, again = compiled_kernels(isa), empty_cache(heads, dtype), empty_cache(heads, dtype)
        queries = write(kernels, args, cache)
        for row in range(len(args[0])):
            part = [x[row : row + 1] if i in {0, 1, 6, 7} else x for i, x in enumerate(args)]
            assert torch.equal(write(kernels, part, again), queries[row : row + 1])
        assert torch.equal(again, cache)


def test_int8_cache_of_latents_holds_rounded_rows(generator):
    heads = LATENTS[1]
    args = make_rows(generator, heads, torch.float32)
    for kernels in (ReferenceKernels(), *map(compiled_kernels, ISAS)):
        exact, rounded = empty_cache(heads, torch.float32), empty_cache(heads, torch.int8)
        write(kernels, args, exact)
        write(kernels, args, rounded)
        error = (rounded.float() * kv_scales(rounded).unsqueeze(-1) - exact).abs()
        assert bool((error <= exact.abs().amax(dim=-1, keepdim=True) / 127 * 0.51).all())
        assert rounded.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args: args.__setitem__(1, args[1][:, :-1]), "do not fit together"),
        (lambda args: args.__setitem__(1, args[1].bfloat16()), "do not fit together"),
        (lambda args: args.__setitem__(7, args[7].int()), "slot_mapping"),
        (lambda args: args.__setitem__(4, args[4].bfloat16()), "cos_sin"),
    ],
)
def test_latents_that_do_not_fit_are_refused(change, message, generator):
    args = make_rows(generator, LATENTS[0], torch.float32)
    change(args)
    with pytest.raises((ValueError, KeyError), match=message):
        write(compiled_kernels(ISAS[0]), args, empty_cache(LATENTS[0], torch.float32))


@pytest.mark.sweep(16)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("heads", LATENTS, ids=str)
def test_attention_to_first_values_of_keys_is_as_exact_as_torch(kernels, heads, is_int8, dtype, generator):
    num_heads, rank, rotary_dim = heads
    sequences = [(1, 1), (70, 70), (150, 13), (64, 1), (1100, 2)]
    batch, latents, _ = paged_batch(sequences, 16, 1, rank + rotary_dim, dtype, generator)
    q = torch.randn(len(batch.positions), num_heads, rank + rotary_dim, generator=generator).to(dtype)
    cache = rounded_caches(latents, latents)[0] if is_int8 else latents
    found = kernels.paged_attention(q, cache, cache[..., :rank], batch, (rank + rotary_dim) ** -0.5, None)
    numbers = floats(cache) if is_int8 else cache
    assert_attention_is_as_exact(found, q, batch, (numbers, numbers[..., :rank]), None)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_to_latents_has_equal_bits_alone_and_in_chunks(dtype, generator):
    num_heads, rank, rotary_dim = LATENTS[1]
    history = [torch.randn(300, 2, 1, rank + rotary_dim, generator=generator).to(dtype) for _ in range(3)]
    q = [torch.randn(300, num_heads, rank + rotary_dim, generator=generator).to(dtype) for _ in range(3)]

    def attend(kernels, sequences, numbers):
        batch, latents, _ = paged_batch(
            sequences, 16, 1, rank + rotary_dim, dtype, generator, [history[number] for number in numbers]
        )
        rows = [q[n][length - count : length] for n, (length, count) in zip(numbers, sequences, strict=True)]
        return kernels.paged_attention(torch.cat(rows), latents, latents[..., :rank], batch, 0.2, None)

    for isa in ISAS:
        kernels = compiled_kernels(isa)
        together = attend(kernels, [(300, 300), (120, 7), (65, 1)], [0, 1, 2])
        chunks = [attend(kernels, [(end, end - start)], [0]) for start, end in ((0, 1), (1, 77), (77, 300))]
        assert torch.equal(together[:300], torch.cat(chunks))
        assert torch.equal(together[300:307], attend(kernels, [(120, 7)], [1]))
        assert torch.equal(together[307:], attend(kernels, [(65, 1)], [2]))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_latent_that_is_not_finite_reaches_only_rows_that_see_it(dtype, generator):
    heads = LATENTS[1]
    num_heads, rank, rotary_dim = heads
    args = make_rows(generator, heads, torch.bfloat16 if dtype == torch.int8 else dtype, NUM_BLOCKS * BLOCK_SIZE)
    num_rows = len(args[0])
    args[6] = args[7] = torch.arange(num_rows)
    args[1][-2] = torch.inf
    batch, _, _ = paged_batch([(num_rows, num_rows)], BLOCK_SIZE, 1, 8, torch.float32, generator)
    batch.block_tables[0, :NUM_BLOCKS] = torch.arange(NUM_BLOCKS)
    for kernels in (ReferenceKernels(), *map(compiled_kernels, ISAS)):
        cache = empty_cache(heads, dtype)
        write(kernels, args, cache)
        q = torch.randn(num_rows, num_heads, rank + rotary_dim, generator=generator).to(args[0].dtype)
        found = kernels.paged_attention(q, cache, cache[..., :rank], batch, 0.2, None)
        assert bool(found[:-2].isfinite().all())
        assert bool(found[-2:].isnan().all())
