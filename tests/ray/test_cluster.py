"""The cluster with failing calls of Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray_nodes import needs_ray
from test_driver import settings

from octavo.ray.fleet import ClusterError

pytestmark = needs_ray


class Calls:
    """Stands for the calls of Ray. failing: Names of those that raise an error. done: Names of the others."""

    def __init__(self):
        self.failing, self.done = set(), []

    def __getattr__(self, name):
        def call(*_, **__):
            if name in self.failing:
                from ray.exceptions import RpcError

                raise RpcError("the head node\ndoes not respond")
            self.done.append(name)
            return self

        return call


@pytest.fixture
def calls(monkeypatch):
    from octavo.ray import cluster

    calls = Calls()
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0}}]
    names = ("placement_group", "remove_placement_group", "request_resources", "PlacementGroupSchedulingStrategy")
    for name in names:
        monkeypatch.setattr(cluster, name, getattr(calls, name))
    fake = SimpleNamespace(
        nodes=lambda: nodes,
        remote=lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: _actor(calls))),
        kill=calls.kill,
        available_resources=calls.available_resources,
    )
    monkeypatch.setattr(cluster, "ray", fake)
    return calls


def _actor(calls):
    return SimpleNamespace(
        **{name: SimpleNamespace(remote=getattr(calls, name)) for name in ("start", "signal", "beat", "unlist")}
    )


@pytest.fixture
def cluster(calls):
    from octavo.ray.cluster import RayCluster

    return RayCluster(settings())


def test_place_is_freed_although_the_engine_cannot_be_killed(calls, cluster):
    engine = cluster.start(["m"])
    calls.failing = {"kill"}
    calls.done.clear()
    engine.remove()
    assert calls.done == ["remove_placement_group"]
    calls.failing = {"kill", "remove_placement_group", "signal", "beat", "unlist"}
    engine.remove()
    engine.signal(15)
    engine.beat()
    engine.drain()


def test_failed_start_frees_the_place(calls, cluster):
    calls.failing = {"start"}
    with pytest.raises(ClusterError, match=r"^the head node does not respond"):
        cluster.start(["m"])
    assert calls.done[-1] == "remove_placement_group"
    calls.failing = {"placement_group"}
    with pytest.raises(ClusterError, match=r"^the head node does not respond"):
        cluster.start(["m"])


def test_failed_requests_are_errors_of_the_cluster(calls, cluster):
    calls.failing = {"request_resources", "available_resources"}
    with pytest.raises(ClusterError, match=r"^the head node does not respond"):
        cluster.request(2)
    assert cluster.room().startswith("the free resources are unknown: the head node does not respond")
