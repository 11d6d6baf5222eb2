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
# A killed process closes its connections. A machine that vanishes does not, and the router needs up to 7 s to lose its
# engines (docs/router.md). That case needs several machines, and no test covers it.
UNNOTICED_S = 1.0
LOOK_S = 0.02
CORE = "octavo.startup.engine_main"
RECONNECT_S = "5"  # then Ray's processes end if the head is gone; 60 by default


@pytest.fixture(scope="module")
def cluster():
    # Four engines of one CPU need both nodes, so that a node that ends has a victim and a survivor.
    nodes = RayNodes(2, 3, RAY_gcs_rpc_server_reconnect_timeout_s=RECONNECT_S)
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


def kill_replica(cluster, servers):
    servers[0].kill()


def kill_node(cluster, _servers):
    cluster.kill_node(1)


def kill_head(cluster, _servers):
    cluster.kill_head()


def mend_head(cluster):
    cluster.end()
    cluster.start()


def first_engine(cluster):
    return engine_processes(folder=cluster.folder)[:1]


def engines_of_node(cluster):
    return engine_processes(cluster.nodes[1]["raylet"], cluster.folder)


def all_engines(cluster):
    return engine_processes(folder=cluster.folder)


TROUBLES = {
    "replica": (first_engine, kill_replica, lambda _: None),
    "node": (engines_of_node, kill_node, RayNodes.add_node),
    "head": (all_engines, kill_head, mend_head),
}


@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_kill_under_load_ends_every_request_in_time_with_right_tokens(number, name, cluster, service, right):
    find, kill, mend = TROUBLES[name]
    service.wait_ready(4)
    servers = find(cluster)
    victims = [each for server in servers for each in (server, *server.children(recursive=True))]
    addresses = [address_of(server) for server in servers]
    assert servers
    assert sum(CORE in process.cmdline() for process in victims) == len(servers)
    with BackgroundLoad(service.port, right, NUM_CLIENTS) as load:
        wait(lambda: len(load.outcomes) > NUM_CLIENTS, "the load has begun")
        killed_at = time.monotonic()
        kill(cluster, servers)
        unnoticed_s = unnoticed(service, addresses)
        noticed_at = time.monotonic()
        wait(lambda: not any(map(is_running, victims)), "all victims have ended", ORPHAN_S)
        if name == "head":  # until there is a new head, no engine runs
            gone_at = time.monotonic()
            wait(lambda: len(load.since(gone_at)) >= NUM_CLIENTS, "requests end again", TERMINAL_S)
        else:
            wait(lambda: num_answered(load, noticed_at) >= NUM_CLIENTS, "other engines answer", TERMINAL_S)
        stopped_at = time.monotonic()
        oldest = min(load.open.values(), default=stopped_at)
        mend(cluster)
        service.wait_ready(4)
        safe_from = time.monotonic() if name == "head" else noticed_at
        wait(lambda: num_answered(load, safe_from) >= 2 * NUM_CLIENTS, "all engines answer")
    outcomes = load.since(killed_at)
    assert {outcome.kind for outcome in outcomes} <= {"whole", "error", "refused"}, outcomes
    assert not [outcome for outcome in outcomes if outcome.kind != "whole" and outcome.begun > safe_from]
    assert not any(outcome.is_wrong or outcome.is_double for outcome in outcomes)
    assert max(outcome.ended - max(outcome.begun, killed_at) for outcome in outcomes) < TERMINAL_S
    assert stopped_at - oldest < TERMINAL_S
    assert unnoticed_s < UNNOTICED_S


def address_of(server):
    """Return the address at which an engine listens."""
    words = server.cmdline()
    host, port = (words[words.index(option) + 1] for option in ("--host", "--port"))
    return host, int(port)


def num_answered(load, start):
    """Return the number of requests that began since then and got a whole answer."""
    return sum(outcome.kind == "whole" and outcome.begun >= start for outcome in load.outcomes)


def unnoticed(service, addresses):
    """Wait until the router uses none of the engines. Return the longest time for which it used one without listener.

    Call it at the kill. The longest pause between two looks does not count, because the machine may have paused.
    """
    silent_at, unused_at, looked_at, pause_s = {}, {}, time.monotonic(), 0.0
    while len(unused_at) < len(addresses):
        engines = service.engines()
        for address in addresses:
            if address not in silent_at and refuses(address):
                silent_at[address] = time.monotonic()
            if address in silent_at and address not in unused_at and not is_used(engines, address):
                unused_at[address] = time.monotonic()
        pause_s, looked_at = max(pause_s, time.monotonic() - looked_at), time.monotonic()
        assert looked_at - min(silent_at.values(), default=looked_at) < ORPHAN_S
        time.sleep(LOOK_S)
    return max(unused_at[address] - silent_at[address] for address in addresses) - pause_s


def is_used(engines, address):
    return any(engine["ready"] for url, engine in engines.items() if url == "http://{}:{}".format(*address))


def refuses(address):
    try:
        socket.create_connection(address, 1.0).close()
    except OSError:
        return True
    return False


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
