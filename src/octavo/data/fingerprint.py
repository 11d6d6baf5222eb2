"""An engine's checksums."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_COMPARED = ("weights", "tables", "logits", "draft")


@dataclass(frozen=True, slots=True)
class EngineFingerprint:
    """Checksums at an engine's start, of 16 hexadecimal digits each, or "".

    They are equal at every start, and missing if results depend on threads or memory addresses. kernels: backend and
    instruction set. num_threads: no checksum depends on it. tables: of rotary tables and query scales for all
    positions. first_rows: of a fixed number of rows, for all model lengths. logits: of a fixed prompt. draft: of a
    draft model's weights and tables.
    """

    kernels: str
    num_threads: int
    weights: str = ""
    tables: str = ""
    first_rows: str = ""
    logits: str = ""
    draft: str = ""

    @property
    def summary(self) -> str:
        """For the log."""
        sums = ", ".join(f"{name} {value}" for name in _COMPARED if (value := getattr(self, name)))
        return f"kernels {self.kernels} on {self.num_threads} threads; {sums}"

    @property
    def kv_identity(self) -> str:
        """What engines that share KV must have in common."""
        return f"weights {self.weights}, rows of tables {self.first_rows}, logits {self.logits}"

    def differences(self, other: EngineFingerprint) -> list[str]:
        """Return the checksums that differ, except `first_rows`."""
        return [name for name in _COMPARED if getattr(self, name) != getattr(other, name)]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)
