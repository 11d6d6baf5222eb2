"""Tasks of several tenants on one executor, one tenant after another."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.errors import QueueFullError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    _Task = tuple[Future[Any], Callable[[], Any]]

T = TypeVar("T")


class Turns:
    """Tasks for one executor, tenant after tenant: who has many waiting waits for them alone. Any thread may ask.

    In a tenant's turns its kinds of tasks take turns, too. max_waiting: tasks of one tenant that have not begun,
    math.inf for no limit. refusal: what who asks for one more is told, and parameter: which field of a request that is
    about.
    """

    def __init__(
        self, executor: Executor, max_waiting: float = math.inf, refusal: str = "", parameter: str | None = None
    ) -> None:
        self._executor = executor
        self._max_waiting, self._refusal, self._parameter = max_waiting, refusal, parameter
        # By tenant and kind; whose turn is next comes first.
        self._waiting: OrderedDict[str, OrderedDict[str, deque[_Task]]] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, tenant: str, run: Callable[[], T], kind: str = "") -> Future[T]:
        """Run it when it is the tenant's turn. Raises `QueueFullError` where too many of the tenant's wait."""
        future: Future[T] = Future()
        with self._lock:
            if self._num_waiting(tenant) >= self._max_waiting:
                self._forget_cancelled(tenant)
            if self._num_waiting(tenant) >= self._max_waiting:
                raise QueueFullError(self._refusal, parameter=self._parameter)
            self._executor.submit(self._run_next)  # which waits for the lock
            self._waiting.setdefault(tenant, OrderedDict()).setdefault(kind, deque()).append((future, run))
        return future

    def _num_waiting(self, tenant: str) -> int:
        return sum(map(len, self._waiting.get(tenant, {}).values()))

    def _forget_cancelled(self, tenant: str) -> None:
        for kind, tasks in list(self._waiting[tenant].items()):
            wanted = deque(task for task in tasks if not task[0].cancelled())
            if wanted:
                self._waiting[tenant][kind] = wanted
            else:
                del self._waiting[tenant][kind]

    def _take(self) -> _Task | None:
        """Take a task of the tenant whose turn it is, which comes last then; what was cancelled takes no turn."""
        with self._lock:
            while self._waiting:
                tenant, kinds = next(iter(self._waiting.items()))
                kind, tasks = next(iter(kinds.items()))
                future, run = tasks.popleft()
                is_wanted = future.set_running_or_notify_cancel()
                _pass_on(kinds, kind, is_wanted=is_wanted)
                _pass_on(self._waiting, tenant, is_wanted=is_wanted)
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


def _pass_on(turns: OrderedDict[str, Any], key: str, *, is_wanted: bool) -> None:
    """Let the next one have its turn, where this one has had it or has nothing left."""
    if not turns[key]:
        del turns[key]
    elif is_wanted:
        turns.move_to_end(key)
