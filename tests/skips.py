"""The reasons for which tests are skipped, and those that CI accepts.

CI installs all requirements of tests. A reason that is not listed here means that a package is missing, or that a test
can no longer run: then CI fails.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

# Regular expressions of whole reasons that depend on the machine, or concern a case without a claim.
EXPECTED = (
    r"this processor has no \w+",
    r"nothing is promised for \w+",
    r"kernels are compiled here",
    r"it is in int4 already",
    r"Python 3\.14 collects in increments",
    r"it is given the memory",
    r"a store has no such process",
    r"a GPU rounds to bfloat16 by itself",
    r"no file system may be mounted here",
    r"no socket of both families",
    r"only root may give files away",
    r"the limit of \d+ s for this run has passed",
    r"it needs a checkpoint that `make real` has not fetched",
    r"it needs \w+, which `make peers` has not fetched",
)


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test was skipped, without pytest's prefix."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def count_reasons(reports: Iterable[pytest.TestReport]) -> Counter[str]:
    """Return how many tests were skipped for each reason."""
    return Counter(map(reason_of, reports))


def unexpected(reasons: Iterable[str]) -> list[str]:
    """Return the reasons that CI does not accept, sorted."""
    return sorted(reason for reason in reasons if not any(re.fullmatch(each, reason) for each in EXPECTED))


def fail_if_unexpected(session: pytest.Session, reporter: pytest.TerminalReporter) -> None:
    """Print each unexpected reason. A session that passed until now fails."""
    reasons = unexpected(count_reasons(reporter.stats.get("skipped", ())))
    if reasons and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    for reason in reasons:
        reporter.write_line(f"FAILED: a test was skipped, and tests/skips.py does not list the reason: {reason}")
