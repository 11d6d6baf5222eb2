"""Worked case (a): prompts of 9, 3 and 5 tokens in one batch, and a request that enters when another one ends.

The first step computes 9 + 3 + 5 = 17 tokens. From then on each request decodes one token per step, first at the
position after its prompt: 9, 3 and 5. The request with 3 prompt tokens ends and one with 12 enters: 1 + 1 + 12 = 14
tokens in one mixed batch.
"""

from __future__ import annotations

from driver import Driver


def run() -> dict[str, object]:
    """Drive the scheduler through the case; return its decisions."""
    driver = Driver(max_num_batched_tokens=100)
    driver.add("nine", 9, max_tokens=10)
    driver.add("three", 3, max_tokens=2)
    driver.add("five", 5, max_tokens=10)
    prefill = driver.step()
    decode_positions = driver.positions()
    decode = driver.step()
    driver.add("twelve", 12, max_tokens=10)
    mixed = driver.step()
    return {
        "step_totals": [prefill.total_num_scheduled_tokens, decode.total_num_scheduled_tokens],
        "decode_positions": decode_positions,
        "finished": driver.finished,
        "mixed_total": mixed.total_num_scheduled_tokens,
        "mixed": mixed.num_scheduled_tokens,
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
