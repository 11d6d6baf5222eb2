"""Whether this installation has the compiled kernels, and number formats by name."""

from __future__ import annotations

import importlib.util

COMPILED = importlib.util.find_spec("octavo._kernels") is not None


def precision(name):
    """Return what a `ModelConfig` takes for a number format: that of activations and weights, or of rounded weights."""
    return {"dtype": "bfloat16", "quantization": name} if name in {"int8", "int4"} else {"dtype": name}
