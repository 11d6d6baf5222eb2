"""Keeps the wanted number of engines running."""

from __future__ import annotations

import contextlib
import logging
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_FAILED_STARTS = 3
_UNLISTED_S = 2.0  # until all routers have stopped sending to a drained engine
_REQUEST_S = 10.0  # until a failed request is repeated
_DRAIN_MARGIN_S = 30.0  # an engine needs some of it for its own end


class ClusterError(OctavoError):
    """The cluster does not do what it was asked. It may do so later."""


class Engine(Protocol):
    """An engine somewhere. See `octavo.ray.cluster.RayEngine`."""

    name: str
    url: str | None
    is_ready: bool
    is_fatal: bool
    end: str | None

    def look(self) -> None: ...  # noqa: D102
    def signal(self, number: int) -> None: ...  # noqa: D102
    def beat(self) -> None: ...  # noqa: D102
    def drain(self) -> None: ...  # noqa: D102
    def remove(self) -> None: ...  # noqa: D102


class Cluster(Protocol):
    """Starts engines. `start` and `request` raise `ClusterError`."""

    bundle: dict[str, int]

    def start(self, words: Sequence[str]) -> Engine: ...  # noqa: D102
    def request(self, num_engines: int) -> None: ...  # noqa: D102
    def room(self) -> str: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """Times after which a fleet acts.

    timeout_s: For finding room, while no drained engine holds a place. Later the wanted number falls, but not below
    min_size.
    start_s: In which a placed engine must be ready. Then it is killed.
    drain_s: In which the requests of a drained engine end. Some time later the engine is killed.
    """

    timeout_s: float
    start_s: float
    drain_s: float
    min_size: int


@dataclass(slots=True, eq=False)
class _Member:
    """An engine of the fleet.

    generation: Counts changes of the engines' options. waits_from: Since when it lacks a place that it could have.
    """

    engine: Engine
    words: tuple[str, ...]
    generation: int
    waits_from: float
    placed_at: float | None = None
    was_ready: bool = False
    drained_at: float | None = None
    is_told: bool = False  # to stop
    is_killed: bool = False


class Fleet:
    """Starts, restarts, replaces and stops engines. All times are on the caller's clock.

    failure: Why no engine can run, or None.
    is_placed: True after all first engines have found room. was_ready: True after an engine was ready.
    settled_at: Since when exactly the wanted engines are ready, or None.
    words: Options of the last replacement that is complete. size: Wanted number of engines.
    """

    def __init__(self, cluster: Cluster, words: Sequence[str], size: int, limits: FleetLimits, now: float) -> None:
        self.failure: str | None = None
        self._cluster, self._limits = cluster, limits
        self._words = self.words = tuple(words)
        self._generation = 0
        self._members: list[_Member] = []
        self._pause_s, self._num_failed, self._starts_from = _FIRST_PAUSE_S, 0, now
        self._requested: int | None = None
        self._requests_from = now
        self.is_placed = self.was_ready = False
        self.settled_at: float | None = None
        self.size = size

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of engines that accept requests."""
        return tuple(member.engine.url for member in self._active() if member.engine.url is not None)

    @property
    def ready_urls(self) -> tuple[str, ...]:
        """The addresses of engines that accept requests and have been ready."""
        ready = (member.engine.url for member in self._active() if member.was_ready)
        return tuple(url for url in ready if url is not None)

    @property
    def is_replacing(self) -> bool:
        """True until a replacement is complete or undone."""
        return self._words != self.words or bool(self._old())

    def resize(self, size: int) -> None:
        """Change the wanted number of engines."""
        if size != self.size:
            logger.info("the number of replicas changes from %d to %d", self.size, size)
            self.size = size
            self.settled_at = None

    def replace(self, words: Sequence[str]) -> None:
        """Replace all engines one after another. A new engine must be ready before an old one is drained."""
        logger.info("all replicas are replaced, one after another")
        self._words = tuple(words)
        self._generation += 1
        self._num_failed, self._pause_s = 0, _FIRST_PAUSE_S
        self.settled_at = None

    def kill(self, url: str) -> None:
        """Kill an engine that does not respond."""
        for member in self._members:
            if member.engine.url == url:
                logger.error("%s does not respond any more: killing it", _name(member))
                member.engine.signal(signal.SIGKILL)

    def reload(self) -> None:
        """Let engines read the API keys again."""
        for member in self._members:
            member.engine.signal(signal.SIGHUP)

    def step(self, now: float, load_of: Callable[[str], float]) -> None:
        """Look at all engines, and act. load_of: Returns the number of open requests of an address."""
        for member in list(self._members):
            if member in self._members:  # the end of another one may have removed it
                self._look(member, now)
        if self.failure is None:
            self._request_nodes(now)
            self._start_missing(now)
            self._drain_surplus(now, load_of)
            self._check_room(now)
        self._note_complete(now)
        self._stop_drained(now)
        self._kill_slow(now)

    def beat(self) -> None:
        """Prove to all engines that this process runs. Another thread may call it."""
        for member in list(self._members):
            member.engine.beat()

    def stop(self) -> None:
        """Ask all engines to end, and release the nodes that the autoscaler was asked for."""
        for member in self._members:
            member.engine.drain()
            member.engine.signal(signal.SIGTERM)
        with contextlib.suppress(ClusterError):
            self._cluster.request(0)

    def remove_ended(self) -> bool:
        """Free the places of ended engines. Return True if all engines have ended."""
        for member in list(self._members):
            member.engine.look()
            if member.engine.end is not None or member.engine.url is None:
                self._remove(member)
        return not self._members

    def remove_all(self) -> None:
        """Free all places."""
        for member in list(self._members):
            self._remove(member)

    def _active(self) -> list[_Member]:
        return [member for member in self._members if member.drained_at is None]

    def _remove(self, member: _Member) -> None:
        if member in self._members:
            self._members.remove(member)
            member.engine.remove()

    def _look(self, member: _Member, now: float) -> None:
        engine = member.engine
        engine.look()
        if engine.end is not None:
            self._remove(member)
            self._ended(member, now)
            return
        if member.placed_at is None and engine.url is not None:
            member.placed_at = now
        if engine.is_ready and not member.was_ready:
            member.was_ready = self.was_ready = True
            self._num_failed, self._pause_s = 0, _FIRST_PAUSE_S
            logger.info("%s is ready", _name(member))

    def _note_complete(self, now: float) -> None:
        active, old = self._active(), self._old()
        if not old and any(member.was_ready for member in active):
            self.words = self._words
        if old or len(active) != self.size or not all(member.was_ready for member in active):
            self.settled_at = None
        elif self.settled_at is None:
            self.settled_at = now

    def _request_nodes(self, now: float) -> None:
        if self._requested == self.size or now < self._requests_from:
            return
        try:
            self._cluster.request(self.size)
        except ClusterError as error:
            logger.warning("the autoscaler was not asked for %d replicas: %s", self.size, error)
            self._requests_from = now + _REQUEST_S
        else:
            self._requested = self.size

    def _ended(self, member: _Member, now: float) -> None:
        engine = member.engine
        if member.drained_at is not None:
            logger.info("%s has stopped", _name(member))
            return
        logger.error("%s has ended: %s", _name(member), engine.end)
        self._num_failed += not member.was_ready
        if engine.is_fatal or self._num_failed >= _MAX_FAILED_STARTS:
            if not any(each.was_ready for each in self._active()):
                self.failure = f"{_name(member)} could not be started: {engine.end}"
                return
            self._undo("the new replicas could not be started")
        self._pause(now)

    def _pause(self, now: float) -> None:
        self._starts_from = now + self._pause_s
        logger.info("another replica starts in %g s", self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _old(self) -> list[_Member]:
        return [member for member in self._active() if member.generation < self._generation]

    def _undo(self, why: str) -> None:
        """End a replacement. Engines with the new options are replaced by engines with the previous options."""
        if not self._old():
            return
        logger.error("%s; the previous options stay", why)
        self._words = self.words
        self._generation += 1
        for member in self._active():
            if member.words == self.words:
                member.generation = self._generation
        for member in self._old():
            if not member.was_ready:
                self._remove(member)

    def _start_missing(self, now: float) -> None:
        active, old = self._active(), self._old()
        are_new_ready = all(member.was_ready for member in active if member not in old)
        wanted = self.size + (1 if old and are_new_ready else 0)
        if now >= self._starts_from:
            for _ in range(wanted - len(active)):
                try:
                    engine = self._cluster.start(self._words)
                except ClusterError as error:
                    logger.error("a replica could not be started: %s", error)  # noqa: TRY400 - the error says all
                    self._pause(now)
                    return
                self._members.append(_Member(engine, self._words, self._generation, now))

    def _drain_surplus(self, now: float, load_of: Callable[[str], float]) -> None:
        active, old = self._active(), self._old()
        num_surplus = len(active) - self.size
        if old and not all(member.was_ready for member in active if member not in old):
            return

        def rank(member: _Member) -> tuple[bool, bool, bool, float]:
            url = member.engine.url
            return member not in old, member.was_ready, url is not None, load_of(url or "")

        for member in sorted(active, key=rank)[: max(num_surplus, 0)]:
            if member.engine.url is None:
                self._remove(member)
            else:
                member.drained_at = now
                member.engine.drain()
                logger.info("%s is drained", _name(member))

    def _stop_drained(self, now: float) -> None:
        for member in self._members:
            if member.drained_at is None:
                continue
            drained_s = now - member.drained_at
            if not member.is_told and drained_s >= _UNLISTED_S:
                member.is_told = True
                member.engine.signal(signal.SIGTERM)
            if drained_s >= _UNLISTED_S + self._limits.drain_s + _DRAIN_MARGIN_S:
                self._kill(member, f"has not stopped {drained_s:g} s after it was drained")

    def _kill_slow(self, now: float) -> None:
        for member in self._active():
            if member.placed_at is None or member.was_ready:
                continue
            if now - member.placed_at >= self._limits.start_s:
                self._kill(member, f"is not ready after {self._limits.start_s:g} s")

    @staticmethod
    def _kill(member: _Member, why: str) -> None:
        if not member.is_killed:
            member.is_killed = True
            logger.error("%s %s: killing it", _name(member), why)
            member.engine.signal(signal.SIGKILL)

    def _check_room(self, now: float) -> None:
        placeless = [member for member in self._active() if member.engine.url is None]
        if not self.is_placed:
            self.is_placed = len(self._active()) >= self.size and not placeless
        if len(self._active()) < len(self._members):  # a drained engine frees its place later
            for member in placeless:
                member.waits_from = now
        late = [member for member in placeless if now - member.waits_from >= self._limits.timeout_s]
        if not late:
            return
        why = f"no node has room for {late[0].engine.name}: it needs {self._needs()}; {self._cluster.room()}"
        if not self.is_placed:
            self.failure = f"{why} (after {self._limits.timeout_s:g} s)"
        elif self._old():
            self._undo(why)
        else:
            logger.warning("%s", why)
            self.resize(max(self.size - len(late), self._limits.min_size))
        for member in late:
            member.waits_from = now

    def _needs(self) -> str:
        return " and ".join(f"{number} {kind}s" for kind, number in self._cluster.bundle.items())


def _name(member: _Member) -> str:
    return f"{member.engine.name} ({member.engine.url})" if member.engine.url else member.engine.name
