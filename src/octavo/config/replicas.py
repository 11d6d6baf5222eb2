"""Configuration of replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.config.fields import at_least, check_choices, option
from octavo.errors import ConfigError

LAUNCHERS = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasConfig:
    """Engines that one command runs, with a router.

    min_replicas, max_replicas: None means num_replicas.
    """

    num_replicas: int = option(
        1,
        "Number of engines with one router in front; each runs in its own processes.",
        name="replicas",
        low=1,
    )
    launcher: str = option(
        "local",
        "Machines of replicas. local: on this machine. ray: on the nodes of a Ray cluster (octavo[ray]).",
        choices=LAUNCHERS,
    )
    ray_address: str | None = option(
        None,
        "Ray cluster: the address of its head node, or auto for the cluster of this machine. Default: RAY_ADDRESS in "
        "the environment, else a new cluster on this machine, which ends with the command.",
        unit="HOST:PORT",
    )
    ray_timeout_s: float = option(
        60.0,
        "Time in which the first replicas must find room in the Ray cluster.",
        name="ray_timeout",
        unit="SECONDS",
        low=0.001,
    )
    ray_start_timeout_s: float = option(
        3600.0,
        "Time in which a replica in a Ray cluster must load its model. Then it is killed, and its start has failed.",
        name="ray_start_timeout",
        unit="SECONDS",
        low=0.001,
    )
    min_replicas: int | None = option(
        None, "Minimum number of replicas, with --launcher ray. Default: --replicas.", low=1
    )
    max_replicas: int | None = option(
        None, "Maximum number of replicas, with --launcher ray. Default: --replicas.", low=1
    )
    target_queue_time_s: float = option(
        1.0,
        "If requests wait longer for their first step, up to --max-replicas are started.",
        name="target_queue_time",
        unit="SECONDS",
        low=0.001,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("num_replicas", "min_replicas", "max_replicas"):
            at_least(name, getattr(self, name), 1, may_be_none=name != "num_replicas")
        for name in ("ray_timeout_s", "ray_start_timeout_s", "target_queue_time_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)}")
        if self.launcher != "ray" and (self.min_replicas or self.max_replicas or self.ray_address):
            raise ConfigError("min_replicas, max_replicas and ray_address need --launcher ray")
        low, high = self.bounds
        if not low <= self.num_replicas <= high:
            raise ConfigError(
                f"min_replicas <= replicas <= max_replicas must hold, got {low}, {self.num_replicas} and {high}"
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """The minimum and maximum number of replicas."""
        return self.min_replicas or self.num_replicas, self.max_replicas or self.num_replicas
