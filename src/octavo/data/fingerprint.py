"""Checksums of an engine's weights, tables and results. They are equal at every start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_COMPARED = ("weights", "tables", "logits", "draft")


@dataclass(frozen=True, slots=True)
class EngineFingerprint:
    """Checksums of an engine's numbers, taken at its start; each is 16 hexadecimal digits, or "" if there is none.

    kernels: backend and instruction set.
    num_threads: threads that compute an operation together; results of exact kernels do not depend on it.
    weights: of packed weights and norms.
    tables: of rotary tables and query scales, whose length is the largest sequence length.
    first_rows: of the first rows of these tables; their number is the same for every length. All rows were computed
    twice and compared.
    logits: of the last token of a fixed prompt; "" if results depend on threads or memory addresses.
    draft: of the weights and tables of a draft model.
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
        """One line for the log."""
        sums = ", ".join(f"{name} {value}" for name in _COMPARED if (value := getattr(self, name)))
        return f"kernels {self.kernels} on {self.num_threads} threads; {sums}"

    @property
    def kv_identity(self) -> str:
        """The checksums that engines must have in common to share KV. They do not depend on the sequence length."""
        return f"weights {self.weights}, rows of tables {self.first_rows}, logits {self.logits}"

    def differences(self, other: EngineFingerprint) -> list[str]:
        """Return the names of the checksums that differ from those of another start."""
        return [name for name in _COMPARED if getattr(self, name) != getattr(other, name)]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)
