"""Progress bars, shown only if stderr is a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from octavo.outputs import RequestOutput


class LoadingProgress:
    """A progress bar of bytes. Its `with` block gets a callback(done, total)."""

    def __init__(self, text: str = "loading weights") -> None:
        self._progress = _bar(TextColumn(text), BarColumn(), DownloadColumn())
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return lambda done, total: self._progress.update(self._task, completed=done, total=total)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


class CountProgress:
    """A progress bar of items. Its `with` block gets a callback for an item."""

    def __init__(self, text: str, total: int) -> None:
        self._progress = _bar(TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Callable[[object], None]:
        self._progress.start()
        return lambda _one: self._progress.update(self._task, advance=1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()


class RequestProgress:
    """A progress bar of requests. Its `with` block gets a callback for outputs."""

    def __init__(self, num_requests: int, *, enabled: bool = True) -> None:
        rate = TextColumn("{task.fields[rate]}")
        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
        self._progress = _bar(*columns, enabled=enabled)
        self._task = self._progress.add_task("", total=num_requests, rate="")
        self._num_tokens = 0

    def __enter__(self) -> Callable[[RequestOutput], None]:
        self._progress.start()
        return self._on_output

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _on_output(self, output: RequestOutput) -> None:
        if output.finished:
            self._num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
            elapsed = self._progress.tasks[0].elapsed or 0.0
            rate = f"{self._num_tokens / elapsed:.0f} tok/s" if elapsed else ""
            self._progress.update(self._task, advance=1, rate=rate)


def _bar(*columns: ProgressColumn, enabled: bool = True) -> Progress:
    return Progress(
        *columns, console=Console(file=sys.stderr), transient=True, disable=not (enabled and sys.stderr.isatty())
    )
