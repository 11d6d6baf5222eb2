"""Round-robin scheduling of tenants' tasks."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from octavo.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable

    _Task = tuple[Future[Any], Callable[[], Any]]

T = TypeVar("T")


class TaskRunner(Protocol):
    """Runs callables later."""

    def submit(self, run: Callable[[], None], /) -> object:
        """Queue a callable. It runs after this call has returned."""
        ...


class Turns:
    """Lets tenants use an executor in turns. A tenant's backlog delays only this tenant. Thread-safe.

    max_waiting: limit of a tenant's waiting tasks. refusal, parameter: message and request field of `QueueFullError`.
    """

    def __init__(
        self, executor: TaskRunner, max_waiting: float = math.inf, refusal: str = "", parameter: str | None = None
    ) -> None:
        self._executor = executor
        self._max_waiting, self._refusal, self._parameter = max_waiting, refusal, parameter
        self._waiting: OrderedDict[str, deque[_Task]] = OrderedDict()  # the next tenant is first
        self._lock = threading.Lock()

    def submit(self, tenant: str, run: Callable[[], T]) -> Future[T]:
        """Run `run` at the tenant's turn. Raises `QueueFullError` if max_waiting tasks wait."""
        future: Future[T] = Future()
        with self._lock:
            if len(self._waiting.get(tenant, ())) >= self._max_waiting:
                self._waiting[tenant] = deque(task for task in self._waiting[tenant] if not task[0].cancelled())
            if len(self._waiting.get(tenant, ())) >= self._max_waiting:
                raise QueueFullError(self._refusal, parameter=self._parameter)
            self._executor.submit(self._run_next)  # `_run_next` waits for the lock
            self._waiting.setdefault(tenant, deque()).append((future, run))
        return future

    def _take(self) -> _Task | None:
        with self._lock:
            while self._waiting:
                tenant, tasks = self._waiting.popitem(last=False)
                future, run = tasks.popleft()
                is_wanted = future.set_running_or_notify_cancel()
                if tasks:
                    self._waiting[tenant] = tasks
                    self._waiting.move_to_end(tenant, last=is_wanted)
                if is_wanted:
                    return future, run
        return None

    def _run_next(self) -> None:
        if (task := self._take()) is None:
            return
        future, run = task
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001 - the result raises it
            future.set_exception(error)
        else:
            future.set_result(result)
