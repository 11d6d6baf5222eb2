"""Reads request bodies."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from octavo.errors import QueueFullError, RequestError
from octavo.http.errors import BodyTooLargeError, SlowBodyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from octavo.config import AccessConfig
    from octavo.http.limiter import Pool
    from octavo.http.timeouts import TimeoutQueue

FREE_BYTES = 64 << 10


@contextlib.asynccontextmanager
async def received(
    request: Request, config: AccessConfig, pool: Pool, timeouts: TimeoutQueue
) -> AsyncIterator[list[bytes]]:
    """Read a request's body and yield its pieces. The end of the `with` block releases the units of `pool`.

    Raises `SlowBodyError`, `BodyTooLargeError`, `QueueFullError`.
    """
    with contextlib.ExitStack() as taken:
        try:
            async with timeouts.timeout(config.body_timeout_s):
                chunks = await _read_limited(request, config.max_body_bytes, pool, taken)
        except TimeoutError:
            raise SlowBodyError(f"the request's body did not arrive within {config.body_timeout_s:g} s") from None
        yield chunks


def read_timeout(request: Request, limit_s: float) -> float:
    """Return the request's X-Request-Timeout in seconds, at most `limit_s`. Raises `RequestError`."""
    given = request.headers.get("x-request-timeout")
    if given is None:
        return limit_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise RequestError("X-Request-Timeout must be a number of seconds above 0", parameter="X-Request-Timeout")
    return min(seconds, limit_s)


async def _read_limited(request: Request, max_bytes: int, pool: Pool, taken: contextlib.ExitStack) -> list[bytes]:
    """Read a body. Reserve its size minus `FREE_BYTES` in `pool` until `taken` is closed."""
    error = BodyTooLargeError(f"the request's body exceeds the limit of {max_bytes} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise error
    chunks: list[bytes] = []
    num_bytes, num_taken, tenant = 0, 0, request.state.tenant
    taken.callback(lambda: pool.give_back(tenant, num_taken))
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise error
        if (more := num_bytes - FREE_BYTES - num_taken) > 0:
            if more > pool.available(tenant, besides=num_taken):
                raise QueueFullError("too many large requests arrive at the same time")
            pool.take(tenant, more)
            num_taken += more
        chunks.append(chunk)
    return chunks
