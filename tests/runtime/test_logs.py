"""Log lines for machines and for people, and the file of the audit log."""

from __future__ import annotations

import errno
import json
import logging
from datetime import datetime
from types import SimpleNamespace

import pytest

from octavo.errors import ConfigError
from octavo.runtime import logs


def record(message: object, *arguments: object, level: int = logging.ERROR, exc_info=None) -> logging.LogRecord:
    return logging.LogRecord("octavo.there", level, "file", 1, message, arguments, exc_info)


@pytest.fixture
def about():
    token = logs.request_id.set("request-1")
    yield "request-1"
    logs.request_id.reset(token)


def test_json_formatter_writes_one_complete_line(about):
    try:
        int("two\nlines")
    except ValueError as error:
        text = logs.JsonFormatter("engine").format(record("%d failed", 3, exc_info=(type(error), error, None)))
    assert "\n" not in text
    line = json.loads(text)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    assert "two\\nlines" in line.pop("exception")
    wanted = {"level": "error", "logger": "octavo.there", "process": "engine", "message": "3 failed"}
    assert line == {**wanted, "request_id": about}


def test_text_formatter_writes_level_logger_and_request_id(about):
    time, line = logs.TextFormatter().format(record("%d failed", 3)).split(" ", 1)
    assert datetime.fromisoformat(time).utcoffset() is not None
    assert line == f"ERROR octavo.there: 3 failed [{about}]"


def test_log_line_without_request_has_no_request_id():
    assert logs.TextFormatter("engine").format(record("x")).endswith("ERROR engine: octavo.there: x")
    assert "request_id" not in json.loads(logs.JsonFormatter().format(record("x")))


def test_fields_become_json_keys():
    message = logs.Fields({"status": 200})
    assert json.loads(logs.JsonFormatter().format(record(message)))["status"] == 200
    assert logs.TextFormatter().format(record(message)).endswith(': {"status": 200}')


@pytest.fixture
def audit():
    logger = logging.getLogger(logs.AUDIT)
    before = logger.level, logger.propagate
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:] = []
    logger.level, logger.propagate = before


def test_audit_log_ignores_level_and_survives_rotation(audit, tmp_path, caplog):
    path = tmp_path / "audit.jsonl"
    logs.configure("WARNING", "text", audit_file=path)
    audit.info(logs.Fields({"status": 200}))
    path.rename(tmp_path / "audit.1")  # as logrotate does
    audit.info(logs.Fields({"status": 404}))
    for name, status in (("audit.1", 200), ("audit.jsonl", 404)):
        assert json.loads((tmp_path / name).read_text())["status"] == status
    assert not caplog.records


def test_missing_audit_directory_diverts_line_to_log(audit, tmp_path, caplog):
    folder = tmp_path / "log"
    folder.mkdir()
    logs.configure("WARNING", "text", audit_file=folder / "audit.jsonl")
    folder.rename(tmp_path / "elsewhere")  # now the file can be neither found nor created
    audit.info(logs.Fields({"status": 404}))
    (line,) = caplog.messages
    assert "audit log" in line
    assert '"status": 404' in line
    folder.mkdir()
    audit.info(logs.Fields({"status": 500}))
    assert json.loads((folder / "audit.jsonl").read_text())["status"] == 500


def test_full_disk_diverts_audit_line_to_log(audit, tmp_path, caplog, monkeypatch):
    def full(_text):
        raise OSError(errno.ENOSPC, "No space left on device")

    logs.configure("WARNING", "text", audit_file=tmp_path / "audit.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(audit.handlers[0], "stream", SimpleNamespace(write=full, flush=list, close=list))
        audit.info(logs.Fields({"status": 404}))
    (line,) = caplog.messages
    assert "cannot be written (No space left on device)" in line
    assert '"status": 404' in line


def test_unwritable_audit_file_raises_config_error(audit, tmp_path):
    with pytest.raises(ConfigError, match="audit log"):
        logs.configure("INFO", "text", audit_file=tmp_path)
    assert not audit.handlers
