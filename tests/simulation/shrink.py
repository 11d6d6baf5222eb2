"""Shrink a failing world to a readable size."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from simulation.world import SimulationError, WorldConfig, run_world

if TYPE_CHECKING:
    from collections.abc import Iterator


def failure_of(seed: str, config: WorldConfig) -> str | None:
    """Return the error of a world, or None."""
    try:
        run_world(seed, config)
    except SimulationError as error:
        return str(error)
    return None


def simpler(config: WorldConfig) -> Iterator[WorldConfig]:
    """Yield configurations that are simpler in one respect: shorter ones first, then without a fault or a feature."""
    for num_steps in (config.num_steps // 2, config.num_steps * 9 // 10, config.num_steps - 1):
        if 0 < num_steps < config.num_steps:
            yield replace(config, num_steps=num_steps)
    plain = WorldConfig()
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name.endswith("_rate") and each.name != "arrival_rate" and value:
            yield replace(config, **{each.name: 0.0})
        elif each.name in {"policy", "admission", "batching"} and value != getattr(plain, each.name):
            yield replace(config, **{each.name: getattr(plain, each.name)})
        elif each.name in {"hash_bits", "max_num_waiting", "max_batch_total_tokens"} and value is not None:
            yield replace(config, **{each.name: None})
        elif each.name in {"max_drafts", "max_open", "num_host_blocks", "max_num_seqs"} and value > 1:
            yield replace(config, **{each.name: value - 1})


def shrink(seed: str, config: WorldConfig) -> tuple[WorldConfig, str]:
    """Return the simplest configuration found that still fails with this seed, and its error."""
    error = failure_of(seed, config)
    if error is None:
        raise ValueError(f"world {seed} does not fail")
    changed = True
    while changed:
        changed = False
        for candidate in simpler(config):
            found = failure_of(seed, candidate)
            if found is not None:
                config, error, changed = candidate, found, True
                break
    return config, error
