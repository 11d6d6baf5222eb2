"""Makes `fakes` importable from every test: pytest puts this file's directory on the path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels_available import COMPILED

from octavo.config import kernels_required

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Where no compiler is at hand octavo warns that plain torch serves; every other warning stays an error."""
    if not COMPILED and not kernels_required():
        config.addinivalue_line(
            "filterwarnings", "ignore:octavo was installed without its compiled kernels:RuntimeWarning"
        )
