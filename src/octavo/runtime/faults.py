"""Handles faults that affect one request: they are logged with the request's id, and only that request fails.

A loop over requests guards the work for each:

    try: ...
    except BaseException as error:
        log_fault(request_id, "it was rendered", error)

Then it fails that request with `request_failed(request_id)`.
"""

from __future__ import annotations

import logging

from octavo.errors import OctavoError, RequestFailedError
from octavo.outputs import ErrorCode

logger = logging.getLogger(__name__)


def request_failed(request_id: str) -> str:
    """Return an error text that does not reveal server internals."""
    return f"request {request_id}: {ErrorCode.REQUEST_FAILED.text}"


def is_fault(error: BaseException) -> bool:
    """Return False for requests to exit. A Rust library's panic is a fault, although no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def log_fault(request_id: str, doing: str, error: BaseException) -> None:
    """Log a fault. Re-raise any other error."""
    if not is_fault(error):
        raise error
    logger.error("request %s failed while %s", request_id, doing, exc_info=error)


def error_for(request_id: str, doing: str, error: BaseException) -> OctavoError:
    """Return an `OctavoError` unchanged. For another fault, log it and return a `RequestFailedError`."""
    if isinstance(error, OctavoError):
        return error
    log_fault(request_id, doing, error)
    return RequestFailedError(request_failed(request_id))
