"""Formats log lines as text or JSON."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from octavo.config import LOG_FORMATS
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)
AUDIT = "octavo.audit"
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


class Fields(dict[str, Any]):
    """A message of several fields. A text line shows them as JSON, a JSON line contains them."""

    def __str__(self) -> str:
        return json.dumps(self)


class TextFormatter(logging.Formatter):
    """Lines like `2026-11-22T20:15:05.123+00:00 ERROR octavo.http.errors: what happened [request id]`."""

    def __init__(self, process: str = "") -> None:
        place = f"{process}: " if process else ""
        super().__init__(f"%(asctime)s %(levelname)s {place}%(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, _datefmt: str | None = None) -> str:  # noqa: N802
        """Format the time."""
        return _time_of(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """Return the line without a traceback."""
        line, about = super().formatMessage(record), request_id.get()
        return line if about is None or isinstance(record.msg, Fields) else f"{line} [{about}]"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Format as JSON."""
        line: dict[str, Any] = {"time": _time_of(record), "level": record.levelname.lower(), "logger": record.name}
        if self._process:
            line["process"] = self._process
        if (about := request_id.get()) is not None:
            line["request_id"] = about
        if isinstance(record.msg, Fields):
            line |= record.msg
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _AuditHandler(logging.handlers.WatchedFileHandler):
    """Writes to a file that may be rotated. A failed write is logged but fails no request."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # Python 3.14's `logging` handles this error
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            line = self.format(record)
            logger.error("the audit log %s cannot be written (%s): %s", self.baseFilename, error.strerror, line)
        else:
            super().handleError(record)


def configure(level: int | str, style: str, *, process: str = "", audit_file: Path | None = None) -> None:
    """Log to standard error, unless the root logger has handlers.

    style: one of `LOG_FORMATS`. process: this process's name in log lines, or "" if the user started it. audit_file:
    receives the lines of the logger `AUDIT`, as JSON, for any `level`, and instead of standard error. Raises
    `ConfigError` if the file cannot be opened.
    """
    formatter = JsonFormatter(process) if style == "json" else TextFormatter(process)
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler])
    if audit_file is None:
        return
    try:
        to_file = _AuditHandler(audit_file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the audit log {audit_file} cannot be written: {error.strerror}") from None
    to_file.setFormatter(JsonFormatter())
    audit = logging.getLogger(AUDIT)
    audit.handlers[:] = [to_file]
    audit.setLevel(logging.INFO)
    audit.propagate = False


def in_use() -> tuple[int, str]:
    """Return the level and style, for a child process."""
    root = logging.getLogger()
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return root.getEffectiveLevel(), LOG_FORMATS[is_json]


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
