"""Runs engines on a Ray cluster for a router."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Self

import msgspec

from octavo.errors import OctavoError
from octavo.ray.messages import Order, Settings
from octavo.ray.process import RayProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from octavo.ray.messages import Report

logger = logging.getLogger(__name__)
_FROZEN_TIMES = 8  # as of local replicas


class RayReplicas(RayProcess):
    """Runs engines during a `with` block. SIGUSR1 replaces all engines one after another.

    again: Returns the engines' command line as the configuration file has it now. Raises `ConfigError`.
    """

    def __init__(self, settings: Settings, again: Callable[[], Sequence[str]]) -> None:
        super().__init__("octavo.ray.driver", settings, start_s=settings.timeout_s, stop_s=settings.stop_s)
        self._settings, self._again = settings, again
        self._replacement: tuple[str, ...] | None = None  # not complete
        self._is_replacing = False

    def reload(self) -> None:
        """Reload API keys."""
        self.send(Order(reload=True))

    def silent(self, url: str, num_times: int) -> None:
        """Restart the engine if it is frozen."""
        if num_times >= _FROZEN_TIMES:
            self.send(Order(silent=url))

    def replace(self) -> None:
        """Read the configuration again, and replace all engines one after another."""
        try:
            words = tuple(self._again())
        except OctavoError as error:
            logger.error("the replicas were not replaced: %s", error)  # noqa: TRY400 - the error says all
            return
        self._replacement = words
        if not self.send(Order(words=words)):
            self._forget_replacement()

    def __enter__(self) -> Self:
        """Start the engines. Raises `ConfigError` if they do not find room in time."""
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._on_signal)
        return super().__enter__()

    def _note(self, report: Report) -> None:
        if report.restart is not None:
            self._settings = msgspec.structs.replace(self._settings, **msgspec.structs.asdict(report.restart))
        has_ended = self._is_replacing and not report.is_replacing
        if has_ended or self._settings.words == self._replacement:
            self._replacement = None
        self._is_replacing = report.is_replacing

    def _run_once(self) -> str:
        failure = super()._run_once()
        if self._is_placed:
            self._first = self._settings = msgspec.structs.replace(self._settings, is_again=True)
        if self._replacement is not None or self._is_replacing:
            self._forget_replacement()
        return failure

    def _forget_replacement(self) -> None:
        self._replacement, self._is_replacing = None, False
        if not self._is_stopping.is_set():
            logger.error("the replicas were not replaced: the process that uses Ray has ended; send SIGUSR1 again")

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=self.replace, name="octavo-replace", daemon=True).start()
