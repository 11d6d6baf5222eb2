"""Makes `fakes` importable from every test: pytest puts this file's directory on the path."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from kernels_available import COMPILED

from octavo.config import kernels_required

if TYPE_CHECKING:
    import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep the user's cache directory out of it; and where no compiler is at hand octavo warns that plain torch serves.

    Every other warning stays an error.
    """
    folder = tempfile.TemporaryDirectory(prefix="octavo-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    config.add_cleanup(folder.cleanup)
    if not COMPILED and not kernels_required():
        config.addinivalue_line(
            "filterwarnings", "ignore:octavo was installed without its compiled kernels:RuntimeWarning"
        )
