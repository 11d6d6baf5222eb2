"""A pytest plugin for tests that use openai-python: writes a line of JSON for each test to `--answers FILE`.

`openai_sdist.py` runs it in an environment that has neither octavo nor its dependencies. A line has, for a failed test,
the server's answer according to the client's exception, and for any test if there was an answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

ANSWER = "HTTP Response: "  # in the client's log, with its status


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare `--answers`."""
    parser.addoption("--answers", type=Path, required=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append the line of a test that has run, or that failed in its setup."""
    report = yield
    if report.when == "call" or not report.passed:
        line = {
            "file": item.location[0],
            "test": item.name,
            "outcome": report.outcome,
            "answered": ANSWER in report.caplog,
            "failure": told(call.excinfo.value) if report.failed and call.excinfo is not None else None,
        }
        with item.config.getoption("answers").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report


def told(error: BaseException) -> dict[str, object]:
    """Return the answer that a client's exception refers to; the status is None if there is no answer."""
    request, cause = getattr(error, "request", None), error.__cause__
    param = getattr(error, "param", None)
    if cause is not None and hasattr(cause, "errors"):  # pydantic's: the answer does not match its type
        param = ".".join(str(part) for part in cause.errors()[0]["loc"])
    return {
        "status": getattr(error, "status_code", None),
        "request": None if request is None else f"{request.method} {request.url.path}",
        "body": None if request is None else request.content.decode(errors="replace"),
        "code": getattr(error, "code", None),
        "param": param,
        "text": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
    }
