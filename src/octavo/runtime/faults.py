"""What goes wrong in the work for one request alone: logged once, under its id, and told to it and nobody else.

What is done for many requests in one loop is done for each behind

    try: ...
    except BaseException as error:
        log_fault(request_id, "what was done", error)

and ends that request with `request_failed(request_id)`.
"""

from __future__ import annotations

import logging

from octavo.errors import OctavoError, RequestFailedError
from octavo.outputs import ErrorCode

logger = logging.getLogger(__name__)


def request_failed(request_id: str) -> str:
    """Return the `error` of a request that ends so: it names the request, and nothing of the server's."""
    return f"request {request_id}: {ErrorCode.REQUEST_FAILED.text}"


def is_fault(error: BaseException) -> bool:
    """Whether something went wrong: else somebody wants an end. A panic of a library in Rust is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def log_fault(request_id: str, doing: str, error: BaseException) -> None:
    """Log what went wrong; raise again what is no fault."""
    if not is_fault(error):
        raise error
    logger.error("request %s failed while %s", request_id, doing, exc_info=error)


def error_for(request_id: str, doing: str, error: BaseException) -> OctavoError:
    """Return what a request hears of an error: that itself if octavo raised it on purpose, else it is logged."""
    if isinstance(error, OctavoError):
        return error
    log_fault(request_id, doing, error)
    return RequestFailedError(request_failed(request_id))
