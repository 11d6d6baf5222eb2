"""An engine's checksums."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_COMPARED = ("weights", "tables", "logits", "draft")


@dataclass(frozen=True, slots=True)
class EngineFingerprint:
    """Checksums that an engine computes at its start from weights, tables and results.

    A checksum has 16 hexadecimal digits, equal at every start. If results depend on threads or memory addresses, the
    checksum is "".
    """

    kernels: str  # backend and instruction set
    num_threads: int
    weights: str = ""
    tables: str = ""  # of rotary tables and query scales for all positions
    first_rows: str = ""  # of the first rows of `tables`, equal for all model lengths
    logits: str = ""  # of a fixed prompt
    draft: str = ""  # of a draft model's weights and tables

    @property
    def summary(self) -> str:
        """Kernels and checksums, for a log line."""
        sums = ", ".join(f"{name} {value}" for name in _COMPARED if (value := getattr(self, name)))
        return f"kernels {self.kernels} on {self.num_threads} threads; {sums}"

    @property
    def kv_identity(self) -> str:
        """The checksums that must be equal in engines that share KV."""
        return f"weights {self.weights}, rows of tables {self.first_rows}, logits {self.logits}"

    def differences(self, other: EngineFingerprint) -> list[str]:
        """Return the differing checksums' names, except `first_rows`."""
        return [name for name in _COMPARED if getattr(self, name) != getattr(other, name)]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)
