"""The schedulers of the recorded journals. All have so little memory that requests are preempted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BLOCK_SIZE = 4
OFTEN = {"preempted": 6, "evicted": 100, "hits": 16, "copied": 2, "chunks": 10, "parked": 3, "aborted": 3}


@dataclass(frozen=True)
class Scenario:
    """A scheduler, and the requests that it gets.

    draft_rate: share of steps after which drafts are proposed. pair_rate: share of requests whose prompt or answer
    another engine computes. token_s: seconds of a step per token. shows: the least number of occurrences of each event,
    by the names under which `Run` counts.
    """

    name: str
    scheduler: dict[str, Any] = field(default_factory=dict)
    num_blocks: int = 21
    num_host_blocks: int = 0
    num_window_blocks: int = 0
    window: int = 0
    enable_prefix_caching: bool = True
    cache_decoded_blocks: bool = True
    has_store: bool = False
    draft_rate: float = 0.0
    token_s: float = 0.004
    num_steps: int = 300
    most_open: int = 9
    pair_rate: float = 0.0
    shows: dict[str, int] = field(default_factory=dict)


WINDOWS: dict[str, Any] = {"window": 10, "num_window_blocks": 18}
SWAPS = {"swapped": 6, "swapped in": 10, "host hits": 5, "host evicted": 5}
DRAFTS = {"accepted": 50, "rejected": 50}
SAVES = {"loads": 8, "saves": 20, "late lookups": 5, "failed loads": 1}
SCENARIOS = [
    Scenario("fcfs", shows=OFTEN),
    Scenario("priority", {"policy": "priority", "ageing_s": 2.0}, shows=OFTEN),
    Scenario("deadline", {"policy": "deadline", "ageing_s": 0.5}, shows=OFTEN),
    Scenario("fair", {"policy": "fair"}, shows=OFTEN),
    Scenario(
        "reservation",
        {
            "admission": "reservation",
            "max_batch_total_tokens": 78,
            "waiting_served_ratio": 1.2,
            "max_waiting_tokens": 6,
        },
        shows=OFTEN
        | {"preempted": 2, "blocked: it waits so that several requests start together": 5},  # only when forced
    ),
    Scenario(
        "reservation_windows",
        {"admission": "reservation", "policy": "priority"},
        **WINDOWS,
        num_blocks=60,
        shows=OFTEN | {"copied": 0, "hits": 10, "parked": 1, "blocked: too few tokens are free to reserve": 10},
    ),
    Scenario("prefill_first", {"batching": "prefill_first", "enable_chunked_prefill": False}, shows={"preempted": 10}),
    Scenario("mixed_step", {"mixed_step_ms": 60.0, "attention_cost_tokens": 60.0}, shows=OFTEN),
    Scenario("no_prefix_cache", enable_prefix_caching=False, shows={"preempted": 10}),
    Scenario("last_preemption", {"max_num_preemptions": 1}, cache_decoded_blocks=False, shows=OFTEN),
    Scenario("windows", **WINDOWS, shows=OFTEN | {"window copied": 2}),
    Scenario(
        "windows_short_of",
        {"max_num_preemptions": 1},
        window=10,
        num_window_blocks=12,
        shows=OFTEN | {"hits": 6, "copied": 1},
    ),
    Scenario("swap", {"preemption": "swap"}, num_host_blocks=12, shows=OFTEN | SWAPS),
    Scenario(
        "swap_windows",
        {"preemption": "auto", "swap_block_cost_tokens": 3.8},
        **WINDOWS,
        num_host_blocks=12,
        shows=OFTEN | SWAPS | {"copied": 1, "swapped": 2, "window swapped out": 10, "window swapped in": 10},
    ),
    Scenario("store", has_store=True, num_blocks=28, shows=OFTEN | SAVES),
    Scenario(
        "store_windows",
        **WINDOWS,
        has_store=True,
        num_blocks=28,
        shows=OFTEN | SAVES | {"window loads": 5, "window saves": 10, "in part": 1},
    ),
    Scenario(
        "pairs_windows",
        **WINDOWS,
        has_store=True,
        pair_rate=0.7,
        num_blocks=28,
        num_steps=180,
        shows={"pairs": 20, "loads": 8, "saves": 20, "window saves": 10, "evicted": 100, "preempted": 2},
    ),
    Scenario("speculation", draft_rate=0.9, token_s=0.0005, shows=OFTEN | DRAFTS | {"bounded": 20}),
    Scenario(
        "speculation_windows",
        **WINDOWS,
        num_blocks=18,
        draft_rate=0.9,
        token_s=0.0005,
        shows=OFTEN | DRAFTS,
    ),
    Scenario("ahead", {"async_scheduling": True}, num_blocks=28, shows=OFTEN | {"ahead": 100}),
    Scenario(
        "ahead_windows",
        {"async_scheduling": True, "policy": "priority", "preemption": "swap"},
        num_blocks=24,
        num_window_blocks=24,
        window=10,
        num_host_blocks=10,
        shows=OFTEN | {"ahead": 100, "swapped": 5},
    ),
    Scenario(
        "everything",
        {"policy": "fair", "max_num_preemptions": 2},
        window=7,
        num_window_blocks=18,
        num_blocks=28,
        num_host_blocks=10,
        has_store=True,
        draft_rate=0.5,
        token_s=0.002,
        shows=OFTEN | {"swapped": 5, "loads": 5, "saves": 10, "accepted": 20, "rejected": 20},
    ),
]
