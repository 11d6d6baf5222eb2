"""Replicas on Ray under load: replicas, nodes and the head are killed; replicas are replaced one after another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

import pytest
from ray_nodes import RayNodes, needs_ray
from ray_service import SMALL, BackgroundLoad, engine_processes, known, octavo, wait

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]
NUM_KILLS = int(os.environ.get("OCTAVO_RAY_KILLS", "20"))
NUM_CLIENTS = 4
TERMINAL_S = 10.0
ORPHAN_S = 20.0
UNNOTICED_S = 5.0  # 1 s on an idle machine
RECONNECT_S = "5"  # then Ray's processes end if the head is gone; 60 by default


@pytest.fixture(scope="module")
def cluster():
    nodes = RayNodes(2, 4, RAY_gcs_rpc_server_reconnect_timeout_s=RECONNECT_S)
    with contextlib.closing(nodes):
        yield nodes


@pytest.fixture(scope="module")
def service(cluster):
    words = ("serve", "--launcher", "ray", "--ray-address", cluster.address, "--replicas", "4", *SMALL)
    with octavo(*words, environment=cluster.environment) as running:
        running.wait_ready(4)
        yield running


@pytest.fixture(scope="module")
def right(service):
    return known(service.port)


def kill_replica(cluster):
    (victim, *_) = engine_processes(folder=cluster.folder)
    family = [victim, *victim.children(recursive=True)]
    victim.kill()
    return family


def kill_node(cluster):
    family = engine_processes(cluster.nodes[1]["raylet"], cluster.folder)
    cluster.kill_node(1)
    return family


def kill_head(cluster):
    family = engine_processes(folder=cluster.folder)
    cluster.kill_head()
    return family


def mend_head(cluster):
    cluster.end()
    cluster.start()


TROUBLES = {
    "replica": (kill_replica, lambda cluster: None),
    "node": (kill_node, RayNodes.add_node),
    "head": (kill_head, mend_head),
}


@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_kill_under_load_ends_every_request_in_time_with_right_tokens(number, name, cluster, service, right):
    trouble, mend = TROUBLES[name]
    service.wait_ready(4)
    with BackgroundLoad(service.port, right, NUM_CLIENTS) as load:
        wait(lambda: len(load.outcomes) > NUM_CLIENTS, "the load has begun")
        killed_at = time.monotonic()
        victims = trouble(cluster)
        wait(lambda: not any(map(is_running, victims)), "all victims have ended", ORPHAN_S)
        wait(lambda: not ready_without_listener(service), "the router sends nothing to them", UNNOTICED_S)
        gone_at = time.monotonic()
        wait(lambda: len(load.since(gone_at)) >= NUM_CLIENTS, "requests end again", TERMINAL_S)
        stopped_at = time.monotonic()
        oldest = min(load.open.values(), default=stopped_at)
    mend(cluster)
    outcomes = load.since(killed_at)
    assert {outcome.kind for outcome in outcomes} <= {"whole", "error", "refused"}, outcomes
    assert not any(outcome.is_wrong or outcome.is_double for outcome in outcomes)
    assert max(outcome.ended - max(outcome.begun, killed_at) for outcome in outcomes) < TERMINAL_S
    assert stopped_at - oldest < TERMINAL_S


def ready_without_listener(service):
    """Return the engines that the router uses although they refuse connections."""
    found = []
    for url, engine in service.engines().items():
        if engine["ready"]:
            host, _, port = url.removeprefix("http://").rpartition(":")
            try:
                socket.create_connection((host, int(port)), 1.0).close()
            except OSError:
                found.append(url)
    return found


def is_running(process):
    with contextlib.suppress(Exception):
        return process.is_running() and process.status() != "zombie"
    return False


def test_replacing_all_replicas_fails_no_request(cluster, service, right):
    service.wait_ready(4)
    before = {process.pid for process in engine_processes(folder=cluster.folder)}
    with BackgroundLoad(service.port, right, NUM_CLIENTS) as load:
        wait(lambda: len(load.outcomes) > NUM_CLIENTS, "the load has begun")
        service.process.send_signal(signal.SIGUSR1)
        wait(lambda: not before & {process.pid for process in engine_processes(folder=cluster.folder)}, service.log)
        service.wait_ready(4)
    assert {outcome.kind for outcome in load.outcomes} == {"whole"}
    assert not any(outcome.is_wrong or outcome.is_double for outcome in load.outcomes)
