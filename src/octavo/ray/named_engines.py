"""The engines of a Ray cluster that have a name."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from octavo.ray.cluster import NAME_PREFIX

_ANSWER_S = 2.0


class NamedEngines:
    """Asks all engines of the connected cluster for their addresses."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the engines that accept requests."""
        names = {name for name in ray.util.list_named_actors() if name.startswith(NAME_PREFIX)}
        self._actors = {name: actor for name, actor in self._actors.items() if name in names}
        for name in names - self._actors.keys():
            with contextlib.suppress(ValueError):  # it has just ended
                self._actors[name] = ray.get_actor(name)
        asked = [actor.url.remote() for _, actor in sorted(self._actors.items())]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        found = [self._url(ref) for ref in asked if ref in done]
        return tuple(url for url in found if url is not None)

    @staticmethod
    def _url(ref: Any) -> str | None:
        with contextlib.suppress(RayError):
            return ray.get(ref)  # type: ignore[no-any-return]
        return None
