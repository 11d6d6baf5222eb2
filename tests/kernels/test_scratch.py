"""The memory that attention allocates is within the worker's plan."""

import json
import subprocess
import sys

import pytest
from kernel_backends import COMPILED

PROGRAM = """
import ctypes, sys, torch
from paged_batches import paged_batch
from octavo.kernels.cpu import CpuKernels

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

count, length, queries, shared, kv_heads = map(int, sys.argv[1:])
heads, dim, block_size = 16, 128, 16
kernels = CpuKernels(num_threads=2)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
sequences = [(shared + 1, 1)] * count if shared else [(length, queries)]
batch, *caches = paged_batch(sequences, block_size, kv_heads, dim, torch.bfloat16, generator)
if shared:
    batch.block_tables[1:, : shared // block_size] = batch.block_tables[0, : shared // block_size]
tiny, *tiny_caches = paged_batch([(5, 1)], block_size, kv_heads, dim, torch.bfloat16, generator)
q = torch.randn(len(batch.positions), heads, dim, generator=generator).bfloat16()
kernels.paged_attention(q[:1], *tiny_caches, tiny, 0.1, None)
ctypes.CDLL(None).malloc_trim(0)  # what was freed and is still there would be taken again
before = resident()
result = kernels.paged_attention(q, *caches, batch, 0.1, None)
bound = kernels.scratch_bytes(
    num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, vocab_size=0, max_seq_len=int(batch.seq_lens.max()),
    max_tokens=len(q),
)
print([resident() - before - result.nbytes, bound])
"""


@pytest.mark.turn(12)
@pytest.mark.sweep(8)
@pytest.mark.skipif(not COMPILED or sys.platform != "linux", reason="compiled kernels, and Linux tells the memory")
@pytest.mark.parametrize(
    "batch",
    [("256", "0", "0", "256", "8"), ("1", "33000", "60", "0", "2")],
    ids=["behind a prefix", "in partitions"],
)
def test_attention_scratch_memory_is_within_scratch_bytes(batch, request):
    """Each batch runs in its own process, with an allocator that has no free memory to reuse."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *batch],
        cwd=request.path.parent, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    taken, bound = json.loads(done.stdout)
    assert bound / 2 < taken <= bound
