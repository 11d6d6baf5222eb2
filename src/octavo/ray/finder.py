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
_ANSWER_S = 0.5


class Finder:
    """Asks all engines of the connected cluster for their addresses."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._urls: dict[str, str | None] = {}

    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the engines that accept requests. Without an answer an engine keeps its address."""
        names = {name for name in ray.util.list_named_actors() if name.startswith(NAME_PREFIX)}
        self._actors = {name: actor for name, actor in self._actors.items() if name in names}
        for name in names - self._actors.keys():
            with contextlib.suppress(ValueError):  # it has just ended
                self._actors[name] = ray.get_actor(name)
        self._asked = {name: ref for name, ref in self._asked.items() if name in names}
        self._urls = {name: url for name, url in self._urls.items() if name in names}
        for name in self._actors.keys() - self._asked.keys():
            self._asked[name] = self._actors[name].url.remote()
        asked = list(self._asked.values())
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        for name in [name for name, ref in self._asked.items() if ref in done]:
            self._urls[name] = self._url(self._asked.pop(name))
        return tuple(url for _, url in sorted(self._urls.items()) if url is not None)

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
        channel.report(Report(finder.urls(), is_placed=True, was_ready=True))
        channel.next(_LOOK_S)


if __name__ == "__main__":
    main()
