"""The process of a router that finds engines in a Ray cluster: `python -m octavo.ray.finder`."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from octavo.errors import ConfigError
from octavo.ray.cluster import NAME_PREFIX, connect
from octavo.ray.messages import Channel, Report, Search
from octavo.runtime import logs

_LOOK_S = 0.5
_ANSWER_S = 2.0


class Finder:
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


def main() -> None:
    """Report the addresses until the input ends."""
    channel = Channel()
    search = channel.first(Search)
    logs.configure(search.log_level.upper(), search.log_format)
    try:
        connect(search.address)
    except ConfigError as error:
        channel.report(Report(failure=str(error)))
        return
    finder = Finder()
    while not channel.is_closed:
        channel.report(Report(finder.urls(), is_connected=True, is_placed=True, was_ready=True))
        channel.next(_LOOK_S)


if __name__ == "__main__":
    main()
