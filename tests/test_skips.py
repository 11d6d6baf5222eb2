"""A test that is skipped for an unlisted reason fails a run of CI."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from skips import fail_if_unexpected, unexpected


def test_only_unlisted_skip_reasons_are_unexpected():
    reasons = ["this processor has no amx", "there is no Mooncake", "this processor has no amx, nor a name"]
    assert unexpected(reasons) == ["there is no Mooncake", "this processor has no amx, nor a name"]


@pytest.mark.parametrize(
    ("reason", "before", "after"),
    [("this processor has no amx", 0, 0), ("nothing was installed", 0, 1), ("nothing was installed", 2, 2)],
)
def test_unlisted_skip_fails_passed_session(reason, before, after):
    lines = []
    reports = [SimpleNamespace(longrepr=("test_it.py", 3, f"Skipped: {reason}"))]
    reporter = SimpleNamespace(stats={"skipped": reports}, write_line=lines.append)
    session = SimpleNamespace(exitstatus=before)
    fail_if_unexpected(session, reporter)
    assert session.exitstatus == after
    assert [line.rpartition(": ")[2] for line in lines] == [reason] * (after > 0)
