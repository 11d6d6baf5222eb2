"""Worked case (e): with a threshold of 2,048, a prompt of 8,192 tokens takes 4 chunks. The last yields the first token.

With two decoding requests each of these steps computes 1 + 1 + 2,048 tokens, so a long prompt does not delay answers.
"""

from __future__ import annotations

from driver import Driver


def compute_long_prompt(*, num_decodes: int) -> tuple[list[dict[str, int]], int]:
    """Compute the prompt together with `num_decodes` decoding requests.

    Return the scheduled tokens of each step by request, and the step of the first token.
    """
    driver = Driver(max_num_batched_tokens=16_384, long_prefill_token_threshold=2_048)
    for index in range(num_decodes):
        driver.add(f"decode{index}", 10, max_tokens=20)
    if num_decodes:
        driver.step()
    driver.add("long", 8_192, max_tokens=2)
    steps = []
    while "long" not in driver.first_token_step:
        steps.append(driver.step().num_scheduled_tokens)
    return steps, driver.first_token_step["long"]


def run() -> dict[str, object]:
    """Drive the scheduler through both cases; return the chunks and the step of the first token."""
    alone, first_token_step = compute_long_prompt(num_decodes=0)
    beside, _ = compute_long_prompt(num_decodes=2)
    return {
        "chunks": [step["long"] for step in alone],
        "first_sample_in_step": first_token_step,
        "beside_two_decodes": [list(step.values()) for step in beside],
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
