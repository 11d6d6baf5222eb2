"""Engines of a cluster that are found by their names, with fake actors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray_nodes import needs_ray

pytestmark = needs_ray


class Actor:
    """A fake actor. answers: Of its calls, or None while it does not respond."""

    def __init__(self, answer):
        self.answer, self.num_calls = answer, 0
        self.url = SimpleNamespace(remote=self._call)

    def _call(self):
        self.num_calls += 1
        return self


class Ray:
    """Stands for the package. actors: By name. waits_s: Time limits of waits that had to wait."""

    def __init__(self):
        self.actors, self.waits_s = {}, []
        self.util = SimpleNamespace(list_named_actors=lambda: [*self.actors, "other"])

    def get_actor(self, name):
        return self.actors[name]

    def wait(self, refs, num_returns, timeout):
        assert num_returns == len(refs) > 0
        done = [ref for ref in refs if ref.answer is not None]
        if len(done) < len(refs) and timeout:
            self.waits_s.append(timeout)
        return done, [ref for ref in refs if ref.answer is None]

    def get(self, ref):
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer or None


@pytest.fixture
def ray(monkeypatch):
    from octavo.ray import named_engines

    fake = Ray()
    monkeypatch.setattr(named_engines, "ray", fake)
    return fake


@pytest.fixture
def engines(ray):
    from octavo.ray.named_engines import NamedEngines

    for name in "ab":
        ray.actors[f"octavo-engine-{name}"] = Actor(f"http://{name}")
    return NamedEngines()


def test_engines_that_accept_requests_are_found(ray, engines):
    ray.actors["octavo-engine-c"] = Actor("")  # it has not started
    assert engines.urls() == ("http://a", "http://b")
    ray.actors["octavo-engine-c"].answer = "http://c"
    assert engines.urls() == ("http://a", "http://b", "http://c")
    del ray.actors["octavo-engine-a"]
    assert engines.urls() == ("http://b", "http://c")


def test_engine_that_does_not_answer_is_asked_once_and_keeps_its_address(ray, engines):
    engines.urls()
    silent = ray.actors["octavo-engine-a"]
    silent.answer = None
    for _ in range(5):
        assert engines.urls() == ("http://a", "http://b")
    assert silent.num_calls == 2
    assert ray.waits_s == [2.0]
    assert ray.actors["octavo-engine-b"].num_calls == 6
    silent.answer = "http://new"
    assert engines.urls() == ("http://new", "http://b")
    assert engines.urls() == ("http://new", "http://b")
    assert silent.num_calls == 3
    silent.answer = None
    engines.urls()
    del ray.actors["octavo-engine-a"]
    assert engines.urls() == ("http://b",)


def test_engine_whose_actor_has_ended_is_forgotten(ray, engines):
    from ray.exceptions import RayError

    assert engines.urls() == ("http://a", "http://b")
    ray.actors["octavo-engine-a"].answer = RayError("the actor has ended")
    assert engines.urls() == ("http://b",)
