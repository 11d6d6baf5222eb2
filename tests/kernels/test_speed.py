"""Performance guards: shares of the speed that the same registers and memory have in the same run.

No absolute time is compared. Run these tests alone (`make guard`), because other processes on the machine's cores slow
down only one side. Load from outside the machine varies, so a share that is too small is measured again for a while:
the best times of both sides are kept, which approach the real speed of the kernels. A real regression does not
disappear with more measurements.
"""

import time
from dataclasses import replace

import pytest
import torch
from kernel_backends import compiled_kernels
from paged_batches import paged_batch

from octavo.kernels.block_weight import BlockKind, random_blocks
from octavo.kernels.machine import cold_bytes
from octavo.kernels.quantization import quantize_int4, quantize_int8

pytestmark = pytest.mark.performance
ROUNDS = 15  # between two checks of the share
PATIENCE = 40.0  # seconds that a disturbance may last
ROUND_WORDS = 1 << 15  # of the register loops
COPIES_BYTES = cold_bytes()  # weights are cycled through this much memory: no cache keeps them

# Least share of the register loop for each kind of weight at 512 rows: two thirds of the measured share.
LEAST_SHARES = {
    "amx": {"bf16": 0.25, "int8": 0.2, "int4": 0.1, "Q8_0": 0.05, "Q4_K": 0.035, "Q6_K": 0.03},
    "avx512_bf16": {"bf16": 0.6, "int8": 0.52, "int4": 0.31, "Q8_0": 0.33, "Q4_K": 0.27},
    "avx512_vnni": {"bf16": 0.52, "int8": 0.48, "int4": 0.31, "Q8_0": 0.33, "Q4_K": 0.27},
    "avx512": {"bf16": 0.5},
    "avx2": {"bf16": 0.57, "int8": 0.55, "int4": 0.52, "Q8_0": 0.45, "Q4_K": 0.6},
}
LEAST_BANDWIDTH = {"bf16": 0.6, "int8": 0.6, "int4": 0.5}  # of the streaming read, at one row
# With tiles, least share of 8 and 32 rows of the speed of one row, which is bound by reading the weight: half of the
# measured share.
LEAST_OF_ONE_ROW = {"bf16": (0.48, 0.37), "int8": (0.42, 0.34), "int4": (0.34, 0.16)}
# Without tiles, least share of the streaming read or of 512 rows, whichever takes longer for this many rows: two
# thirds.
LEAST_OF_MEMORY_OR_MANY_ROWS = {
    "avx512_bf16": {"bf16": (0.62, 0.62), "int8": (0.6, 0.64), "int4": (0.62, 0.56)},
    "avx512_vnni": {"bf16": (0.64, 0.62), "int8": (0.6, 0.64), "int4": (0.62, 0.6)},
    "avx2": {"bf16": (0.39, 0.56), "int8": (0.63, 0.65), "int4": (0.55, 0.63)},
}
# Attention with the heads of qwen3-0.6b in bfloat16. decode: one token after each of 4 x 4,096 positions, compared with
# the streaming read, half of the measured share. chunk: 256 tokens, compared with the register loop, two thirds.
LEAST_ATTENTION = {
    "amx": {"decode": 0.34, "chunk": 0.09},
    "avx512_bf16": {"decode": 0.24, "chunk": 0.55},
    "avx512_vnni": {"decode": 0.2, "chunk": 0.4},
    "avx2": {"decode": 0.12, "chunk": 0.47},
}
# Attention with scores so far apart that nearly all weights are zero, compared with ordinary scores: the running
# maximum rises more often.
LEAST_OF_EVEN_WEIGHTS = 0.7
# 16 tokens, each after 1,088 positions of which 1,024 are the same. With tiles: the least speedup compared with no
# shared positions. Without tiles: the least share of the speed of 16 tokens of one sequence, which compute as much.
# Both are three quarters of the measured value.
LEAST_GAIN_OF_PREFIX = 4.0
LEAST_OF_ONE_SEQUENCE = {"avx512_bf16": 0.63, "avx512_vnni": 0.66, "avx512": 0.62, "avx2": 0.66}


def stored(precision):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4864, 896, generator=generator) * 0.02
    if precision == "bf16":
        return weight.bfloat16()
    if precision in BlockKind.__members__:
        kind = BlockKind[precision]
        return [random_blocks(generator, kind, 4864, 896 // kind.block_values * kind.block_values)]
    return quantize_int8(weight) if precision == "int8" else quantize_int4(weight)


def cold_weights(kernels, precision):
    """Return so many copies of a weight that each is evicted from the caches before it is used again."""
    weight = stored(precision)
    first = kernels.pack_linear(weight)
    return [first, *(kernels.pack_linear(weight) for _ in range(COPIES_BYTES // first.num_bytes))]


def best_share(ours, reference, work, least):
    """Return the speed of `ours` relative to that of `reference`, each at its best.

    ours: the call that is tested. reference: a call that only does what the machine is best at. work: the amounts of
    work of the two calls, in the same unit. least: the sufficient share; once it is reached, no more rounds run.

    Rounds of the two are interleaved, so that a disturbance affects both.
    """
    best = [float("inf"), float("inf")]
    end = time.perf_counter() + PATIENCE
    share = 0.0
    while share <= least and time.perf_counter() < end:
        for _ in range(ROUNDS):
            for index, call in enumerate((ours, reference)):
                start = time.perf_counter()
                call()
                best[index] = min(best[index], time.perf_counter() - start)
        share = (work[0] / best[0]) / (work[1] / best[1])
    return share


@pytest.mark.parametrize(
    ("isa", "precision"), [(isa, precision) for isa, shares in LEAST_SHARES.items() for precision in shares]
)
def test_many_row_product_is_near_register_peak(isa, precision):
    kernels = compiled_kernels(isa, num_threads=1)
    packed = kernels.pack_linear(stored(precision))
    x = torch.randn(512, packed.in_features).bfloat16()
    loop = kernels.kernel_set.spin_pairs if precision == "bf16" else kernels.kernel_set.spin_bytes
    operations = loop(ROUND_WORDS)
    least = LEAST_SHARES[isa][precision]
    work = (2 * x.numel() * 4864, operations)
    assert best_share(lambda: kernels.linear(x, packed), lambda: loop(ROUND_WORDS), work, least) > least


@pytest.mark.parametrize("precision", LEAST_BANDWIDTH)
def test_one_row_product_is_near_memory_bandwidth(precision):
    kernels = compiled_kernels(num_threads=1)
    if kernels.isa not in LEAST_SHARES:
        pytest.skip(f"nothing is promised for {kernels.isa}")
    copies = cold_weights(kernels, precision)
    data = torch.ones(COPIES_BYTES, dtype=torch.uint8)
    x = torch.randn(1, 896).bfloat16()
    share = best_share(
        lambda: [kernels.linear(x, packed) for packed in copies],
        lambda: kernels.kernel_set.read_memory(data.data_ptr(), COPIES_BYTES),
        (sum(packed.num_bytes for packed in copies), COPIES_BYTES),
        LEAST_BANDWIDTH[precision],
    )
    assert share > LEAST_BANDWIDTH[precision]


def multiply_all(kernels, copies, rows):
    """Return a call that multiplies `rows` rows with each of the weights."""
    x = torch.randn(rows, 896).bfloat16()
    return lambda: [kernels.linear(x, packed) for packed in copies]


@pytest.mark.parametrize("precision", LEAST_OF_ONE_ROW)
@pytest.mark.parametrize("rows", [8, 32])
def test_few_row_amx_product_is_near_one_row_speed(precision, rows):
    kernels = compiled_kernels("amx", num_threads=1)
    copies = cold_weights(kernels, precision)
    least = LEAST_OF_ONE_ROW[precision][rows > 8]
    share = best_share(multiply_all(kernels, copies, rows), multiply_all(kernels, copies, 1), (1, 1), least)
    assert share > least


@pytest.mark.parametrize(
    ("isa", "precision"),
    [(isa, precision) for isa, shares in LEAST_OF_MEMORY_OR_MANY_ROWS.items() for precision in shares],
)
@pytest.mark.parametrize("rows", [8, 32])
def test_few_row_product_is_near_memory_or_many_row_speed(isa, precision, rows):
    kernels = compiled_kernels(isa, num_threads=1)
    copies = cold_weights(kernels, precision)
    some, many = multiply_all(kernels, copies, rows), multiply_all(kernels, copies[:1], 512)
    data = torch.ones(COPIES_BYTES, dtype=torch.uint8)
    least = LEAST_OF_MEMORY_OR_MANY_ROWS[isa][precision][rows > 8]
    share = best_share(some, many, (rows * len(copies), 512), least)
    if share <= least:  # then memory takes longer
        share = best_share(
            some,
            lambda: kernels.kernel_set.read_memory(data.data_ptr(), COPIES_BYTES),
            (sum(packed.num_bytes for packed in copies), COPIES_BYTES),
            least,
        )
    assert share > least


@pytest.mark.parametrize("isa", LEAST_ATTENTION)
@pytest.mark.parametrize(("kind", "sequences"), [("decode", [(4096, 1)] * 4), ("chunk", [(1280, 256)])])
def test_attention_is_near_bandwidth_or_register_peak(isa, kind, sequences):
    kernels = compiled_kernels(isa, num_threads=1)
    generator = torch.Generator().manual_seed(0)
    batch, k_cache, v_cache = paged_batch(sequences, 16, 8, 128, torch.bfloat16, generator)
    q = torch.randn(len(batch.positions), 16, 128, generator=generator).bfloat16()
    data, least = torch.ones(COPIES_BYTES, dtype=torch.uint8), LEAST_ATTENTION[isa][kind]
    if kind == "decode":
        work = sum(length for length, _ in sequences) * 8 * 128 * 2 * 2, COPIES_BYTES
    else:
        seen = sum(sum(range(length - count + 1, length + 1)) for length, count in sequences)
        work = 4 * 16 * 128 * seen, kernels.kernel_set.spin_pairs(ROUND_WORDS)

    def reference():
        if kind == "decode":
            kernels.kernel_set.read_memory(data.data_ptr(), COPIES_BYTES)
        else:
            kernels.kernel_set.spin_pairs(ROUND_WORDS)

    share = best_share(
        lambda: kernels.paged_attention(q, k_cache, v_cache, batch, 128**-0.5, None), reference, work, least
    )
    assert share > least


@pytest.mark.parametrize("isa", LEAST_ATTENTION)
def test_vanishing_attention_weights_do_not_slow_attention(isa):
    """Underflow handled in microcode would make them three times as slow."""
    kernels = compiled_kernels(isa, num_threads=1)
    generator = torch.Generator().manual_seed(0)
    batch, k_cache, v_cache = paged_batch([(1280, 256)], 16, 8, 128, torch.bfloat16, generator)
    q = torch.randn(len(batch.positions), 16, 128, generator=generator).bfloat16()
    ours, reference = (attend_all(kernels, queries, k_cache, v_cache, batch) for queries in (100 * q, q))
    assert best_share(ours, reference, (1, 1), LEAST_OF_EVEN_WEIGHTS) > LEAST_OF_EVEN_WEIGHTS


def attend_all(kernels, q, k_cache, v_cache, batch):
    """Return a call that computes the attention of a batch."""
    return lambda: kernels.paged_attention(q, k_cache, v_cache, batch, 128**-0.5, None)


def tokens_behind_a_common_prefix(generator):
    """Return queries, keys and values of 16 tokens, and their batch with 1,024 common positions and without."""
    apart, k_cache, v_cache = paged_batch([(1088, 1)] * 16, 16, 8, 128, torch.bfloat16, generator)
    shared = replace(apart, block_tables=apart.block_tables.clone())
    shared.block_tables[1:, :64] = apart.block_tables[0, :64]
    return (torch.randn(16, 16, 128, generator=generator).bfloat16(), k_cache, v_cache), shared, apart


def test_shared_prefix_is_read_once_with_amx():
    kernels = compiled_kernels("amx", num_threads=1)
    tokens, shared, apart = tokens_behind_a_common_prefix(torch.Generator().manual_seed(0))
    ours, reference = attend_all(kernels, *tokens, shared), attend_all(kernels, *tokens, apart)
    assert best_share(ours, reference, (1, 1), LEAST_GAIN_OF_PREFIX) > LEAST_GAIN_OF_PREFIX


@pytest.mark.parametrize("isa", LEAST_OF_ONE_SEQUENCE)
def test_shared_prefix_is_read_once_without_amx(isa):
    kernels = compiled_kernels(isa, num_threads=1)
    generator, least = torch.Generator().manual_seed(0), LEAST_OF_ONE_SEQUENCE[isa]
    tokens, shared, _ = tokens_behind_a_common_prefix(generator)
    together, k_cache, v_cache = paged_batch([(1088, 16)], 16, 8, 128, torch.bfloat16, generator)
    ours, reference = attend_all(kernels, *tokens, shared), attend_all(kernels, tokens[0], k_cache, v_cache, together)
    assert best_share(ours, reference, (1, 1), least) > least
