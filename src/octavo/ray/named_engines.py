"""The engines of a Ray cluster that have a name."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from octavo.ray.cluster import NAME_PREFIX

_ANSWER_S = 2.0


class NamedEngines:
    """Asks all engines of the connected cluster for their addresses. An engine has at most one call at a time."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._calls: dict[str, Any] = {}
        self._urls: dict[str, str | None] = {}

    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the engines that accept requests.

        An engine that does not respond has its last known address.
        """
        names = {name for name in ray.util.list_named_actors() if name.startswith(NAME_PREFIX)}
        for known in (self._actors, self._calls, self._urls):
            for name in known.keys() - names:
                del known[name]
        for name in names - self._actors.keys():
            with contextlib.suppress(ValueError):  # it has just ended
                self._actors[name] = ray.get_actor(name)
        calls = {name: self._actors[name].url.remote() for name in self._actors.keys() - self._calls.keys()}
        self._calls.update(calls)
        if calls:  # earlier calls have already had their time
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=_ANSWER_S)
        for name, call in list(self._calls.items()):
            done, _ = ray.wait([call], num_returns=1, timeout=0)
            if done:
                del self._calls[name]
                self._urls[name] = self._url(call)
        return tuple(url for _, url in sorted(self._urls.items()) if url is not None)

    @staticmethod
    def _url(call: Any) -> str | None:
        with contextlib.suppress(RayError):
            return ray.get(call)  # type: ignore[no-any-return]
        return None
