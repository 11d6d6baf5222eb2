"""A plugin of pytest for tests that use openai-python: `--answers FILE` gets a line of JSON for each test.

`openai_sdist.py` starts it in an environment that has neither octavo nor what octavo needs. It tells what the server
answered where a test failed, as the client's exception has it, and whether there was an answer at all.
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
    """Append the line of a test that has run, or that could not."""
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
    """Return what the answer was that a client's exception is about; a status of None: it is about none."""
    request, cause = getattr(error, "request", None), error.__cause__
    param = getattr(error, "param", None)
    if cause is not None and hasattr(cause, "errors"):  # pydantic's: the answer is not of its type, and where
        param = ".".join(str(part) for part in cause.errors()[0]["loc"])
    return {
        "status": getattr(error, "status_code", None),
        "request": None if request is None else f"{request.method} {request.url.path}",
        "body": None if request is None else request.content.decode(errors="replace"),
        "code": getattr(error, "code", None),
        "param": param,
        "text": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
    }
