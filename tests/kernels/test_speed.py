"""Speed that must not be lost unseen: shares of what the same registers and the same memory give in the same run.

No second is compared with a number. Run alone (`make guard`): a neighbour on this machine's cores slows the one and not
the other. Neighbours outside of it come and go, so a share that is too small is measured again for a while: the best
times of both sides are kept, which only come closer to what the kernels can do. What a kernel has lost does not come
back with patience.
"""

import time

import pytest
import torch
from kernel_backends import compiled_kernels

from octavo.kernels.quantization import quantize_int4, quantize_int8

pytestmark = pytest.mark.performance
ROUNDS = 15  # between two looks at the share
PATIENCE = 40.0  # seconds that a disturbance may last
ROUND_WORDS = 1 << 15  # of the register loops
COPIES_BYTES = 128 << 20  # weights are cycled through so much memory: no cache keeps them

# What each kind of weight must reach of the register loop at 512 rows: two thirds of what it did when this was written.
LEAST_SHARES = {
    "amx": {"bf16": 0.2, "int8": 0.17, "int4": 0.1},
    "avx512_bf16": {"bf16": 0.55, "int8": 0.45, "int4": 0.29},
    "avx512_vnni": {"bf16": 0.48, "int8": 0.45, "int4": 0.29},
    "avx512": {"bf16": 0.48},
}
LEAST_BANDWIDTH = {"bf16": 0.6, "int8": 0.55, "int4": 0.4}  # of the streaming read, at one row


def stored(precision):
    weight = torch.randn(4864, 896, generator=torch.Generator().manual_seed(0)) * 0.02
    if precision == "bf16":
        return weight.bfloat16()
    return quantize_int8(weight) if precision == "int8" else quantize_int4(weight)


def best_share(ours, reference, work, least):
    """Return how fast `ours` does its work beside how fast `reference` does its own, each at its best.

    Args:
        ours: The call that is looked at.
        reference: The call that does nothing else than what the machine is best at.
        work: The amount of work of the two calls, in the same unit.
        least: The share that is enough: once it is seen, no more rounds are run.

    Rounds of the two are interleaved, so that a disturbance falls on both.

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
def test_products_of_many_rows_are_near_the_register_peak(isa, precision):
    kernels = compiled_kernels(isa, num_threads=1)
    packed = kernels.pack_linear(stored(precision))
    x = torch.randn(512, 896).bfloat16()
    loop = kernels.kernel_set.spin_pairs if precision == "bf16" else kernels.kernel_set.spin_bytes
    operations = loop(ROUND_WORDS)
    least = LEAST_SHARES[isa][precision]
    work = (2 * 512 * 896 * 4864, operations)
    assert best_share(lambda: kernels.linear(x, packed), lambda: loop(ROUND_WORDS), work, least) > least


@pytest.mark.parametrize("precision", LEAST_BANDWIDTH)
def test_products_of_one_row_are_near_the_bandwidth(precision):
    kernels = compiled_kernels(num_threads=1)
    if kernels.isa not in LEAST_SHARES:
        pytest.skip(f"nothing is promised for {kernels.isa}")
    weight = stored(precision)
    first = kernels.pack_linear(weight)
    copies = [first, *(kernels.pack_linear(weight) for _ in range(COPIES_BYTES // first.num_bytes))]
    data = torch.ones(COPIES_BYTES, dtype=torch.uint8)
    x = torch.randn(1, 896).bfloat16()
    share = best_share(
        lambda: [kernels.linear(x, packed) for packed in copies],
        lambda: kernels.kernel_set.read_memory(data.data_ptr(), COPIES_BYTES),
        (len(copies) * first.num_bytes, COPIES_BYTES),
        LEAST_BANDWIDTH[precision],
    )
    assert share > LEAST_BANDWIDTH[precision]
