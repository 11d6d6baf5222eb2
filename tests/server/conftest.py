"""Fixtures of the server's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from running import run_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """Run one server for all tests that do not change it."""
    with run_server() as running:
        yield running
