"""Worked case (e): 8,192 prompt tokens at a threshold of 2,048 take 4 chunks; the first token comes with the last."""

from __future__ import annotations

from driver import Driver


def run() -> dict[str, object]:
    """Drive the scheduler through the case; return the chunks and the step of the first token."""
    driver = Driver(max_num_batched_tokens=16_384, long_prefill_token_threshold=2_048)
    driver.add("long", 8_192, max_tokens=2)
    chunks = []
    while "long" not in driver.first_token_step:
        chunks.append(driver.step().num_scheduled_tokens["long"])
    return {"chunks": chunks, "first_sample_in_step": driver.first_token_step["long"]}


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
