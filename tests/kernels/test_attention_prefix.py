"""Sequences with the same blocks at their beginning have the bits that they have alone."""

import itertools

import pytest
import torch
from paged_batches import paged_batch, rounded_caches

from octavo.kernels import AttentionBatch

KV = pytest.mark.parametrize(
    ("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)], ids=str
)
HEADS = [(64, 2, 7), (128, 8, 2), (48, 1, 1), (80, 3, 2), (96, 1, 40), (20, 3, 1)]


class Sharing:
    """A batch of sequences (KV length, query length), some of which share the blocks of an earlier one.

    shared: for sequence i > 0 (j, positions): it begins with these positions of sequence j, rounded down to whole
    blocks.
    """

    def __init__(self, sequences, shared, heads, dtype, generator, *, block_size=16, int8=False):
        head_dim, num_kv_heads, group = heads
        self.sequences, self.scale = sequences, head_dim**-0.5
        self.batch, *caches = paged_batch(sequences, block_size, num_kv_heads, head_dim, dtype, generator)
        for i, (j, positions) in shared.items():
            blocks = min(positions, sequences[i][0] - sequences[i][1], sequences[j][0] - sequences[j][1]) // block_size
            self.batch.block_tables[i, :blocks] = self.batch.block_tables[j, :blocks]
        self.caches = rounded_caches(*caches) if int8 else caches
        self.q = torch.randn(len(self.batch.positions), num_kv_heads * group, head_dim, generator=generator).to(dtype)

    def together(self, kernels, window=None):
        return kernels.paged_attention(self.q, *self.caches, self.batch, self.scale, window)

    def alone(self, kernels, window=None):
        whole, parts = self.batch, []
        for i, (first, last) in enumerate(itertools.pairwise(whole.query_start.tolist())):
            batch = AttentionBatch(
                torch.tensor([0, last - first], dtype=torch.int32), whole.seq_lens[i : i + 1],
                whole.block_tables[i : i + 1], whole.positions[first:last], whole.slot_mapping[first:last],
                whole.block_size,
            )  # fmt: skip
            parts.append(kernels.paged_attention(self.q[first:last], *self.caches, batch, self.scale, window))
        return torch.cat(parts)


def crowd(generator, count, least, most):
    """Return decoding sequences with KV of least .. most positions."""
    return [(int(torch.randint(least, most, (), generator=generator)), 1) for _ in range(count)]


@pytest.mark.sweep(32)
@KV
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_shared_prefix_does_not_change_attention_bits(compiled, generator, heads, dtype, int8):
    sequences = crowd(generator, 9, 330, 500)
    shared = dict.fromkeys(range(1, 9), (0, 300))
    sharing = Sharing(sequences, shared, heads, dtype, generator, int8=int8)
    assert torch.equal(sharing.together(compiled), sharing.alone(compiled))


@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 128, 256])
def test_shared_prefix_bits_are_equal_for_any_block_size(compiled, generator, block_size):
    sequences = crowd(generator, 5, 300, 420)
    sharing = Sharing(
        sequences, dict.fromkeys(range(1, 5), (0, 290)), (64, 2, 7), torch.bfloat16, generator, block_size=block_size
    )
    assert torch.equal(sharing.together(compiled), sharing.alone(compiled))


@KV
@pytest.mark.sweep(12)
@pytest.mark.parametrize("positions", [1023, 1024, 1100, 2048, 2300])
@pytest.mark.parametrize("count", [2, 30])
def test_shared_prefix_bits_are_equal_over_several_partitions(
    fastest, single_threaded, generator, positions, count, dtype, int8
):
    """After the shared part, the partitions of few sequences run on different threads, those of many do not."""
    sequences = crowd(generator, count, 2310, 3400)
    shared = dict.fromkeys(range(1, count), (0, positions))
    sharing = Sharing(sequences, shared, (32, 1, 4), dtype, generator, int8=int8)
    result = sharing.together(fastest)
    assert torch.equal(result, sharing.alone(fastest))
    assert torch.equal(result, sharing.together(single_threaded))


@pytest.mark.parametrize("window", [None, 100, 1000])
def test_mixed_shared_prefixes_in_one_batch_do_not_change_bits(compiled, generator, window):
    sequences = [
        (600, 1), (700, 1), (650, 5), (640, 8), (640, 9),  # the last one has too many tokens to join
        (200, 64),  # a chunk of a prompt
        (400, 1), (420, 1), (129, 1), (128, 1),  # a deeper common prefix among them, and too short ones
        (900, 1), (905, 1), (910, 1), (390, 1),  # one more sequence, which shares too little to gain from joining
        (33, 33), (40, 1),
    ]  # fmt: skip
    shared = {
        1: (0, 512), 2: (0, 512), 3: (0, 512), 4: (0, 512), 6: (0, 128), 7: (6, 390), 8: (6, 128), 9: (6, 128),
        11: (10, 880), 12: (10, 880), 13: (10, 128), 15: (13, 32),
    }  # fmt: skip
    sharing = Sharing(sequences, shared, (64, 2, 2), torch.bfloat16, generator)
    assert torch.equal(sharing.together(compiled, window), sharing.alone(compiled, window))


@pytest.mark.parametrize("threads", [3, 8])
def test_shared_prefix_bits_are_equal_if_threads_divide_the_heads_of_a_kv_head(single_threaded, generator, threads):
    sharing = Sharing([(1310, 1), (1400, 1)], {1: (0, 1280)}, (64, 1, 48), torch.bfloat16, generator)
    expected = sharing.alone(single_threaded)
    single_threaded.set_num_threads(threads)
    try:
        assert torch.equal(sharing.together(single_threaded), expected)
    finally:
        single_threaded.set_num_threads(1)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_shared_prefix_bits_are_equal_for_any_number_of_threads(single_threaded, generator, threads):
    sequences = crowd(generator, 40, 270, 400)
    sharing = Sharing(sequences, dict.fromkeys(range(1, 40), (0, 256)), (64, 3, 5), torch.bfloat16, generator)
    expected = sharing.together(single_threaded)
    assert torch.equal(expected, sharing.alone(single_threaded))
    single_threaded.set_num_threads(threads)
    try:
        assert torch.equal(sharing.together(single_threaded), expected)
    finally:
        single_threaded.set_num_threads(1)


@KV
def test_private_infinite_values_do_not_reach_other_sequences(compiled, generator, dtype, int8):
    """Infinite values after the shared part belong to one sequence alone."""
    sequences = [(300, 1), (310, 1), (290, 1)]
    sharing = Sharing(sequences, {1: (0, 256), 2: (0, 256)}, (64, 2, 2), dtype, generator, int8=int8)
    clean = sharing.together(compiled)
    block = int(sharing.batch.block_tables[1, 17])
    if int8:
        sharing.caches[1][block, :, 0] = 127
        from octavo.kernels.quantization import kv_scales

        kv_scales(sharing.caches[1])[block] = float("inf")
    else:
        sharing.caches[1][block] = float("inf")
    result = sharing.together(compiled)
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
    assert not result[1].isfinite().any()
