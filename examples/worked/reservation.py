"""Worked case (g): admission by reservation, the rule of Hugging Face TGI, with limits of 1,024 and 4,096 tokens.

One step admits prompts of at most 1,024 tokens in total. The sum of prompt + max_tokens over all running requests stays
within 4,096. Two requests, 512 + 1,024 and 300 + 512, enter, and 1,748 tokens remain to reserve. A third request, 400 +
800, fits into these, but not into the step: 512 + 300 + 400 is 1,212. It enters with the next step. The first request
ends after 800 of its 1,024 tokens and releases all of its 1,536.
"""

from __future__ import annotations

from driver import Driver

from octavo.data.request import RequestStatus


def run() -> dict[str, object]:
    """Drive the scheduler through the case; return its decisions."""
    driver = Driver(
        max_num_batched_tokens=4096,
        enable_chunked_prefill=False,
        admission="reservation",
        max_batch_prefill_tokens=1024,
        max_batch_total_tokens=4096,
    )
    for name, length, max_tokens in (("first", 512, 1024), ("second", 300, 512), ("third", 400, 800)):
        driver.add(name, length, max_tokens=max_tokens)
    admission = driver.scheduler.admission
    first_step = list(driver.step().num_scheduled_tokens)
    left_after_first_step = 4096 - admission.num_reserved_total
    second_step = driver.step().num_scheduled_tokens
    left_after_second_step = 4096 - admission.num_reserved_total
    while driver.scheduler.requests["first"].sequence.num_output_tokens < 800:
        driver.step()
    ended = {"second", "third"} & set(driver.finished)
    before = admission.num_reserved_total
    driver.scheduler.finish_requests(["first"], RequestStatus.FINISHED_STOPPED)
    return {
        "first_step": first_step,
        "left_after_first_step": left_after_first_step,
        "second_step": second_step,
        "left_after_second_step": left_after_second_step,
        "ended_meanwhile": sorted(ended),
        "returned": before - admission.num_reserved_total,
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}")
