"""Logs a fault with its request's id. A fault fails only this request.

A loop guards the work for each request, and fails the request with the text `request_failed(request_id)`:

    try: ...
    except BaseException as error:
        log_fault(request_id, "it was rendered", error)
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
    """Return False for exceptions that end the process. A Rust panic, which is no `Exception`, is a fault."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def log_fault(request_id: str, doing: str, error: BaseException) -> None:
    """Log a fault of a request. Raise any other error again."""
    if not is_fault(error):
        raise error
    logger.error("request %s failed while %s", request_id, doing, exc_info=error)


def error_for(request_id: str, doing: str, error: BaseException) -> OctavoError:
    """Return an `OctavoError` unchanged. Log another fault, and return a `RequestFailedError`."""
    if isinstance(error, OctavoError):
        return error
    log_fault(request_id, doing, error)
    return RequestFailedError(request_failed(request_id))
