"""Worked case (c): 8 blocks of 4 tokens. B begins with the same 8 tokens as A.

The 10 tokens of A take blocks 0, 1 and 2. After the step of A its two full blocks can be shared: B holds 0 and 1, too,
followed by a block of its own. When A ends, B still holds the shared blocks.
"""

from __future__ import annotations

from driver import Driver


def run() -> dict[str, object]:
    """Drive the scheduler through the case; return the block tables, references and free blocks."""
    driver = Driver(num_blocks=8, block_size=4)
    prefix = list(range(100, 108))
    a = driver.add("A", [*prefix, 1, 2], max_tokens=10)
    driver.step()
    table_a = list(a.sequence.block_table)
    b = driver.add("B", [*prefix, 3], max_tokens=10)
    driver.schedule()
    table_b = list(b.sequence.block_table)
    pool = driver.scheduler.kv_cache_manager.pool
    references = [pool.blocks[block_id].ref_count for block_id in (0, 1)]
    driver.scheduler.abort_request("A")
    return {
        "table_a": table_a,
        "table_b": table_b,
        "num_cached_tokens_b": b.sequence.num_cached_tokens,
        "references": references,
        "free_after_a": sorted(pool.free_block_ids()),
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
