"""Worked case (b): a budget of 20 tokens, two requests that decode and two that wait.

One running request has 2 prompt and 2 output tokens, the other one has 4 and 1. Their newest token is known but not
computed, so their next positions are 3 and 4. The waiting prompts of 5 and 3 tokens fit into the same step: 1 + 1 + 5 +
3 = 10 of 20.
"""

from __future__ import annotations

from driver import Driver


def run() -> dict[str, object]:
    """Drive the scheduler through the case; return its decisions."""
    driver = Driver(max_num_batched_tokens=20)
    first = driver.add("two", 2, max_tokens=10)
    driver.step()
    second = driver.add("four", 4, max_tokens=10)
    driver.step()
    known = [(r.num_prompt_tokens, r.sequence.num_output_tokens) for r in (first, second)]
    driver.add("five", 5, max_tokens=10)
    driver.add("three", 3, max_tokens=10)
    positions = driver.positions()
    scheduled = driver.schedule()
    return {
        "prompt_and_output": known,
        "positions": positions,
        "scheduled": scheduled.num_scheduled_tokens,
        "total": scheduled.total_num_scheduled_tokens,
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
