"""Whether this installation has the compiled kernels, and number formats by name."""

from __future__ import annotations

import importlib.util

COMPILED = importlib.util.find_spec("octavo._kernels") is not None


def precision(name):
    """Return what a `ModelConfig` takes for a number format: that of activations and weights, or int8 weights."""
    return {"dtype": "bfloat16", "quantization": "int8"} if name == "int8" else {"dtype": name}
