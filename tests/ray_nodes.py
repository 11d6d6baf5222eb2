"""A real Ray cluster of several nodes on this machine, in a process of its own. For tests.

As a program, it runs the cluster: each line of its input is a command, and each line of its output has the nodes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

import psutil
import pytest

_PACKAGE = importlib.util.find_spec("ray")  # without Ray, it is the folder of tests
_IS_THERE = _PACKAGE is not None and _PACKAGE.origin is not None
_IS_REQUIRED = os.environ.get("OCTAVO_REQUIRE_RAY", "0") not in {"", "0"}
needs_ray = pytest.mark.skipif(not _IS_THERE and not _IS_REQUIRED, reason="there is no Ray: octavo[ray]")


class RayNodes:
    """A head node without CPUs, and other nodes. address: Of the cluster. nodes: Process ids by kind of each node."""

    def __init__(self, num_nodes: int, num_cpus: int, **variables: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="oct", dir="/tmp")  # short, because paths of sockets are
        self.environment = {**os.environ, "RAY_TMPDIR": self.folder, "RAY_USAGE_STATS_ENABLED": "0", **variables}
        self._size = num_nodes, num_cpus
        self._port = 0
        self.start()

    def start(self) -> None:
        """Start all nodes, at the same address as before."""
        command = [sys.executable, __file__, *map(str, (*self._size, self._port))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
        )
        self._read()
        self._port = int(self.address.rpartition(":")[2])

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):
                told = json.loads(line)
                self.address, self.nodes = told["address"], told["nodes"]
                return
        raise RuntimeError("the Ray cluster has not started")

    def _tell(self, word: str) -> None:
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        self._read()

    def add_node(self) -> None:
        self._tell("add")

    def kill_node(self, index: int) -> None:
        """Kill a node's raylet. Its other processes must end by themselves."""
        os.kill(self.nodes[index]["raylet"], signal.SIGKILL)
        del self.nodes[index]

    def kill_head(self) -> None:
        """Kill all processes of the head node, and end the other nodes."""
        for pid in self.nodes[0].values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End all nodes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            for each in [psutil.Process(self._process.pid), *family]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def close(self) -> None:
        """End all nodes, and remove their files."""
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)


def run(num_nodes: int, num_cpus: int, port: int) -> None:
    """Run a cluster until the input ends."""
    from ray.cluster_utils import Cluster

    options: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options | ({"gcs_server_port": port} if port else {}))
    nodes = [cluster.head_node] + [cluster.add_node(num_cpus=num_cpus) for _ in range(num_nodes)]
    tell(cluster.address, nodes)
    for _ in sys.stdin:
        nodes.append(cluster.add_node(num_cpus=num_cpus))
        tell(cluster.address, nodes)


def tell(address: str, nodes: list[Any]) -> None:
    """Print the address, and the process ids of all nodes that run."""
    running = [node for node in nodes if node.any_processes_alive()]
    pids = [{kind: each[0].process.pid for kind, each in node.all_processes.items()} for node in running]
    sys.stdout.write(json.dumps({"address": address, "nodes": pids}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    run(*map(int, sys.argv[1:]))
