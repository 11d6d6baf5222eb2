"""Whether this installation has the compiled kernels."""

from __future__ import annotations

import importlib.util

COMPILED = importlib.util.find_spec("octavo._kernels") is not None
