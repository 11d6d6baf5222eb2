"""Faults that concern one request: logged with its id, and reported to it only.

A loop over requests guards the work for each:

    try: ...
    except BaseException as error:
        log_fault(request_id, "it was rendered", error)

and fails that request with `request_failed(request_id)`.
"""

from __future__ import annotations

import logging

from octavo.errors import OctavoError, RequestFailedError
from octavo.outputs import ErrorCode

logger = logging.getLogger(__name__)


def request_failed(request_id: str) -> str:
    """Return an error text without server internals."""
    return f"request {request_id}: {ErrorCode.REQUEST_FAILED.text}"


def is_fault(error: BaseException) -> bool:
    """Return False for a request to exit. A Rust library's panic is a fault but no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def log_fault(request_id: str, doing: str, error: BaseException) -> None:
    """Log a fault; re-raise any other error."""
    if not is_fault(error):
        raise error
    logger.error("request %s failed while %s", request_id, doing, exc_info=error)


def error_for(request_id: str, doing: str, error: BaseException) -> OctavoError:
    """Return an `OctavoError`; log any other fault and return a `RequestFailedError`."""
    if isinstance(error, OctavoError):
        return error
    log_fault(request_id, doing, error)
    return RequestFailedError(request_failed(request_id))
