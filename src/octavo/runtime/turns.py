"""Tasks of several tenants on one executor, one tenant after another."""

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


class Executor(Protocol):
    """What tasks run on: calls whatever it is given, some time after it was given it."""

    def submit(self, run: Callable[[], None], /) -> object:
        """Take it in."""
        ...


class Turns:
    """Tasks for one executor, tenant after tenant: who has many waiting waits for them alone. Any thread may ask.

    max_waiting: tasks of one tenant that have not begun, math.inf for no limit. refusal: what who asks for one more is
    told, and parameter: which field of a request that is about.
    """

    def __init__(
        self, executor: Executor, max_waiting: float = math.inf, refusal: str = "", parameter: str | None = None
    ) -> None:
        self._executor = executor
        self._max_waiting, self._refusal, self._parameter = max_waiting, refusal, parameter
        self._waiting: OrderedDict[str, deque[_Task]] = OrderedDict()  # whose turn is next comes first
        self._lock = threading.Lock()

    def submit(self, tenant: str, run: Callable[[], T]) -> Future[T]:
        """Run it when it is the tenant's turn. Raises `QueueFullError` where too many of the tenant's wait."""
        future: Future[T] = Future()
        with self._lock:
            if len(self._waiting.get(tenant, ())) >= self._max_waiting:
                self._waiting[tenant] = deque(task for task in self._waiting[tenant] if not task[0].cancelled())
            if len(self._waiting.get(tenant, ())) >= self._max_waiting:
                raise QueueFullError(self._refusal, parameter=self._parameter)
            self._executor.submit(self._run_next)  # which waits for the lock
            self._waiting.setdefault(tenant, deque()).append((future, run))
        return future

    def _take(self) -> _Task | None:
        """Take a task of the tenant whose turn it is, which comes last then; what was cancelled takes no turn."""
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
        """Run a task; there are at least as many calls as tasks."""
        if (task := self._take()) is None:
            return
        future, run = task
        try:
            result = run()
        except BaseException as error:  # noqa: BLE001 - raised again by the result
            future.set_exception(error)
        else:
            future.set_result(result)
