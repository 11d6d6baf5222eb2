"""Worked case (h): a prompt that was computed before and ends at the end of a block. 48 tokens, blocks of 16.

The second request shares two blocks. The third block is copied: its last token is computed again for its logits, and a
shared block is never written. So 47 of 48 tokens come from the cache. With blocks of 256 it is 255 of 256 tokens.
"""

from __future__ import annotations

from driver import Driver


def ask_twice(prompt_tokens: int, block_size: int) -> dict[str, object]:
    """Compute a prompt twice; return cached and computed tokens, block table and copies of the second request."""
    driver = Driver(block_size=block_size, max_num_batched_tokens=1024)
    prompt = list(range(prompt_tokens))
    driver.add("first", prompt, max_tokens=1)
    driver.step()
    again = driver.add("again", prompt, max_tokens=1)
    scheduled = driver.step()
    [data] = scheduled.scheduled_new_reqs
    return {
        "from_cache": again.sequence.num_cached_tokens,
        "computed": scheduled.total_num_scheduled_tokens,
        "block_table": data.block_ids[0],
        "copied": scheduled.copies.block_copies,
    }


def run() -> dict[str, object]:
    """Drive the scheduler through the case; return its decisions."""
    return {"blocks_of_16": ask_twice(48, 16), "blocks_of_256": ask_twice(256, 256)}


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
