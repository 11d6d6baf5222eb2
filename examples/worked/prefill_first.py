"""Worked case (f): prompts first, without chunks. A budget of 20 tokens and three prompts of 8, 6 and 10 tokens.

A and B fit into the first step (14 tokens). With C it would be 24, so C waits. The second step computes C alone (10
tokens): prompts go first, so the decodes of A and B wait. The third step gives each of the three one token. A ends. D
arrives and is computed before B and C continue.
"""

from __future__ import annotations

from driver import Driver


def run() -> dict[str, object]:
    """Drive the scheduler through the case; return its decisions."""
    driver = Driver(max_num_batched_tokens=20, batching="prefill_first", enable_chunked_prefill=False)
    for name, length, max_tokens in (("A", 8, 2), ("B", 6, 10), ("C", 10, 10)):
        driver.add(name, length, max_tokens=max_tokens)
    steps = [driver.step() for _ in range(3)]
    driver.add("D", 5, max_tokens=10)
    steps += [driver.step() for _ in range(2)]
    return {
        "steps": [list(step.num_scheduled_tokens) for step in steps],
        "totals": [step.total_num_scheduled_tokens for step in steps],
        "finished": driver.finished,
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
