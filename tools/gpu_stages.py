"""The stages of `tools/gpu_check.py`, and the conditions for their entries."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from gpu_compile import compiled
from gpu_correctness import correctness
from gpu_engine import peers, tokens, workloads
from gpu_exactness import exactness
from gpu_graphs import graphs
from gpu_memory import carried, memory, swap
from gpu_service import restart, soak
from gpu_speed import peaks, shares
from gpu_transformers import transformers

from octavo.kernels import triton as kernels_in_triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_device import Check, Entries

MOST_UNITS_OFF = 8.0

STAGES: dict[str, Callable[[Check, Entries], None]] = {
    "compiled": compiled,
    "peaks": peaks,
    "exactness": exactness,
    "correctness": correctness,
    "shares": shares,
    "tokens": tokens,
    "workloads": workloads,
    "peers": peers,
    "graphs": graphs,
    "transformers": transformers,
    "memory": memory,
    "swap": swap,
    "restart": restart,
    "carried": carried,
    "soak": soak,
}


def identity(check: Check, entries: Entries) -> None:
    """Record the device, versions and code that results depend on. Only results with equal ones may be combined."""
    code = hashlib.sha256()
    folder = Path(kernels_in_triton.__path__[0])
    for path in (*sorted(folder.glob("*.py")), *sorted(Path(__file__).parent.glob("gpu_*.py"))):
        code.update(path.name.encode() + path.read_bytes())
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    found = {"device": check.device_name, **versions, "code": code.hexdigest()}
    entries.add("identity", lambda: found)


def failures(stage: dict[str, Any]) -> list[str]:
    """Return the names of a stage's entries that are wrong, or that have an error instead of a result."""
    return [
        name for name, entry in stage.items() if isinstance(entry, dict) and ("error" in entry or not _is_right(entry))
    ]


def _is_right(entry: dict[str, Any]) -> bool:
    """Return True if an entry meets all conditions."""
    is_near = entry.get("units_off", 0.0) <= MOST_UNITS_OFF
    return bool(entry.get("is_equal", True) and entry.get("is_right", True) and is_near)
