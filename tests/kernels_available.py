"""Whether this installation has the compiled kernels, and number formats by name."""

from __future__ import annotations

import importlib.util

from octavo.config import QUANTIZATIONS

HAS_TORCH = importlib.util.find_spec("torch") is not None  # without it only rooms that import no tensors are tested
COMPILED = HAS_TORCH and importlib.util.find_spec("octavo._kernels") is not None
if HAS_TORCH:
    from octavo.kernels import instruction_sets

    INSTRUCTION_SETS = instruction_sets()
else:
    INSTRUCTION_SETS = ()

_INT8_KV = " with int8 KV"


def precision(name):
    """Return `ModelConfig` options for a number format: the dtype of activations and weights, or of rounded weights."""
    name = name.removesuffix(_INT8_KV)
    return {"dtype": "bfloat16", "quantization": name} if name in QUANTIZATIONS else {"dtype": name}


def kv_precision(name):
    """Return `CacheConfig` options for it."""
    return {"kv_cache_dtype": "int8" if name.endswith(_INT8_KV) else "auto"}
