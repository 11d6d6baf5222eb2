"""Small deterministic worlds: every interleaving of up to three requests over four blocks, with aborts.

Each request arrives before one of the first steps, is aborted before a later one or never, and ends after one to three
tokens. Together these are all orders of arrivals, aborts and completions that steps can distinguish.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.data.request import Request
from octavo.sampling_params import SamplingParams
from simulation.hash_model import Oracle
from simulation.world import SimulationError, Tracked, World, WorldConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEVER = 99
PROMPTS = (
    [1, 2, 3, 4],
    [1, 2, 4],
    [1, 2, 3, 4, 5],
)  # block size 2: all share a block, and the first prompt ends in the last one's
CONFIGS = tuple(
    {"policy": policy, "admission": admission, "preemption": preemption, "batching": batching, **others}
    for policy, admission, preemption, batching, others in (
        ("fcfs", "optimistic", "recompute", "mixed", {}),
        ("fcfs", "optimistic", "swap", "mixed", {}),
        ("priority", "optimistic", "swap", "prefill_first", {}),
        ("fair", "reservation", "recompute", "mixed", {}),
        ("deadline", "reservation", "recompute", "prefill_first", {}),
        ("fcfs", "optimistic", "swap", "mixed", {"window": 2, "max_num_batched_tokens": 3}),  # with three window blocks
        ("fair", "reservation", "recompute", "mixed", {"window": 3, "max_num_batched_tokens": 3}),
        ("fcfs", "optimistic", "recompute", "mixed", {"has_states": True, "num_spare_states": 1, "num_host_blocks": 0}),
    )
)


@dataclass(frozen=True, slots=True)
class Story:
    """The steps before which each request arrives and is aborted, and the number of its tokens."""

    arrivals: tuple[int, ...]
    aborts: tuple[int, ...]
    lengths: tuple[int, ...]
    config: int


def all_stories(
    num_arrival_steps: int, num_abort_steps: int, max_length: int, configs: Sequence[int]
) -> Iterator[Story]:
    """Yield every story of one, two and three requests."""
    aborts = [*range(1, num_abort_steps + 1), NEVER]
    for count in (1, 2, 3):
        for config in configs:
            for arrivals in itertools.product(range(num_arrival_steps), repeat=count):
                for chosen in itertools.product(aborts, repeat=count):
                    if any(abort <= arrival for abort, arrival in zip(chosen, arrivals, strict=True)):
                        continue
                    for lengths in itertools.product(range(1, max_length + 1), repeat=count):
                        yield Story(arrivals, chosen, lengths, config)


def live(story: Story) -> None:
    """Run a story. Raises `SimulationError` that names the story."""
    options = CONFIGS[story.config]
    config = WorldConfig(
        num_blocks=4,
        block_size=2,
        max_num_seqs=3,
        remote_rate=0.0,
        draft_rate=0.0,
        **{"num_host_blocks": 2, "max_num_batched_tokens": 5, **options},  # type: ignore[arg-type]
    )
    world = World("exhaustive", config)
    world.healed = True
    try:
        for step in range(max(*story.arrivals, *(a for a in story.aborts if a != NEVER), 0) + 1):
            for index, prompt in enumerate(PROMPTS[: len(story.arrivals)]):
                if story.arrivals[index] == step:
                    add(world, f"r{index}", prompt, story.lengths[index])
                if story.aborts[index] == step:
                    world._take(world.scheduler.abort_request(f"r{index}"))
            world._step()
        world._drain()
    except (SimulationError, AssertionError, LookupError) as error:
        raise SimulationError(f"{story}: {error!r}") from error


def add(world: World, name: str, prompt: list[int], max_tokens: int) -> None:
    """Add a request; reservation refuses none of these."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    world.scheduler.add_request(Request(name, prompt, params, priority=len(prompt) % 2, tenant=name))
    world.worker.identities[name] = 0
    world.tracked[name] = Tracked(Oracle(prompt, 0, world.config.kinds), max_tokens)


def run_all(
    num_arrival_steps: int = 3,
    num_abort_steps: int = 5,
    max_length: int = 3,
    jobs: int = 1,
    configs: Sequence[int] = range(len(CONFIGS)),
    part: tuple[int, int] = (0, 1),
) -> int:
    """Run all stories with these of `CONFIGS` in `jobs` processes; return their number. part (2, 9): every ninth, from
    the third.
    """
    stories = itertools.islice(
        all_stories(num_arrival_steps, num_abort_steps, max_length, configs), part[0], None, part[1]
    )
    if jobs == 1:
        return sum(1 for _ in map(live, stories))
    with ProcessPoolExecutor(jobs) as pool:
        return sum(1 for _ in pool.map(live, stories, chunksize=2000))
