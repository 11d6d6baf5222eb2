"""A Ray cluster."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import socket
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octavo.errors import ConfigError
from octavo.ray.engine_host import EngineHost, versions
from octavo.ray.fleet import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.ray.messages import Settings

logger = logging.getLogger(__name__)
NAMESPACE = "octavo"
NAME_PREFIX = "octavo-engine-"
_CONNECT_S = 5.0
_OBJECT_STORE_BYTES = 128 << 20  # engines do not use it
_NUM_CALLS = 8  # of an actor at a time
_FAULTS = (RayError, RuntimeError, OSError, ValueError)  # of calls of Ray, if for example the head node is down


def connect(address: str | None) -> None:
    """Connect this process to a cluster, or start a cluster on this machine. Raises `ConfigError`."""
    if address is not None and address != "auto":
        _check_reachable(address)
    try:
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            **({} if address else {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RuntimeError, ConnectionError, ValueError, RayError) as error:
        hint = "; it may require another token (RAY_AUTH_TOKEN)" if isinstance(error, ConnectionError) else ""
        where = address or "of this machine"
        raise ConfigError(f"cannot use the Ray cluster {where}: {_one_line(error)}{hint}") from error


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        raise ConfigError(f"ray-address must be auto or the address of a head node, like 10.0.0.1:6379, got {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {error}; start one with `ray start --head`") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


class RayCluster:
    """Places engines on the nodes of the connected cluster.

    settings: With the number of threads, and True or False for the GPU. A restarted driver needs both, because at its
    start perhaps only the head node is known again.
    """

    def __init__(self, settings: Settings) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        uses_gpu = settings.uses_gpu
        if uses_gpu is None:
            uses_gpu = any(resources.get("GPU") for resources in nodes)
        cpus = sorted((int(resources.get("CPU", 0)) for resources in nodes), reverse=True)
        num_threads = settings.num_threads or threads_each(cpus, settings.max_replicas)
        self.settings = msgspec.structs.replace(settings, num_threads=num_threads, uses_gpu=uses_gpu)
        self.bundle = {"CPU": max(num_threads, settings.num_ranks)} | ({"GPU": 1} if uses_gpu else {})
        self._more = ["--num-threads", str(num_threads)]
        self._environment = settings.environment
        self._launcher = secrets.token_hex(4)
        self._numbers = itertools.count()

    def start(self, words: Sequence[str]) -> RayEngine:
        """Start an engine as soon as a node has room for it. Raises `ClusterError`."""
        name = f"{NAME_PREFIX}{self._launcher}-{next(self._numbers)}"
        try:
            return RayEngine(name, self.bundle, [*words, *self._more], self._environment)
        except _FAULTS as error:
            raise ClusterError(_one_line(error)) from error

    def request(self, num_engines: int) -> None:
        """Request nodes for a number of engines from the autoscaler of Ray. Raises `ClusterError`.

        The request replaces that of any other command in the cluster.
        """
        try:
            request_resources(bundles=[self.bundle] * num_engines)
        except _FAULTS as error:
            raise ClusterError(_one_line(error)) from error

    @staticmethod
    def room() -> str:
        """Describe the free resources of all nodes."""
        try:
            free = ray.available_resources()
            nodes = sum(1 for node in ray.nodes() if node["Alive"])
        except _FAULTS as error:
            return f"the free resources are unknown: {_one_line(error)}"
        return f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free on {nodes} nodes"


def threads_each(cpus: Sequence[int], num_engines: int) -> int:
    """Return the largest number of CPUs per engine with room for all engines, at least 1.

    cpus: Number of CPUs of each node.
    """
    for each in range(max(cpus, default=1), 1, -1):
        if sum(cpu // each for cpu in cpus) >= num_engines:
            return each
    return 1


class RayEngine:
    """An engine and its placement group.

    url: None until it has started. end: Why it has ended, or None. is_fatal: True if it ended because no engine can
    run in this cluster.
    """

    def __init__(self, name: str, bundle: dict[str, int], words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.url: str | None = None
        self.is_ready = self.is_fatal = False
        self.end: str | None = None
        self._group = placement_group([bundle], strategy="STRICT_PACK", name=name)
        try:
            self._actor = self._make_actor(bundle)
            self._started = self._actor.start.remote(list(words), dict(environment), versions())
        except BaseException:
            self._free()
            raise
        self._ready: Any = None
        self._ended: Any = None

    def _make_actor(self, bundle: dict[str, int]) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, 0)
        return (
            ray.remote(EngineHost)
            .options(
                name=self.name,
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=_NUM_CALLS,
                scheduling_strategy=strategy,
            )
            .remote()
        )

    def look(self) -> None:
        """Update the state."""
        try:
            if self._started is not None and _is_done(self._started):
                self.url, problem = ray.get(self._started)
                self._started = None
                if problem:
                    self.url, self.end, self.is_fatal = None, problem, True
                    return
                self._ready, self._ended = self._actor.ready.remote(), self._actor.ended.remote()
            if self._ended is not None and _is_done(self._ended):
                self.end = ray.get(self._ended)
            elif self._ready is not None and _is_done(self._ready):
                self.is_ready, self._ready = ray.get(self._ready), None
        except RayError as error:
            self.is_fatal = self._started is not None and isinstance(error.__cause__, ImportError)
            self.end = _one_line(error)

    def signal(self, number: int) -> None:
        """Send a signal to the engine."""
        with contextlib.suppress(*_FAULTS):
            self._actor.signal.remote(number)

    def beat(self) -> None:
        """Prove to the actor that this process runs. Another thread may call it."""
        with contextlib.suppress(*_FAULTS):
            self._actor.beat.remote()

    def drain(self) -> None:
        """Let routers forget the engine."""
        with contextlib.suppress(*_FAULTS):
            self._actor.unlist.remote()

    def remove(self) -> None:
        """Free the engine's place. Kills the engine if it runs."""
        with contextlib.suppress(*_FAULTS):
            ray.kill(self._actor)
        self._free()

    def _free(self) -> None:
        with contextlib.suppress(*_FAULTS):
            remove_placement_group(self._group)


def _is_done(ref: Any) -> bool:
    done, _ = ray.wait([ref], timeout=0)
    return bool(done)


def disconnect() -> None:
    """Disconnect. A cluster that this process started ends."""
    ray.shutdown()
