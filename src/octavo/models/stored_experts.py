"""Finds each expert's part of a layer's tensors.

transformers stores [experts, rows, columns], with the gates' rows before those of `up`. gpt-oss, recognized by its
biases, alternates these rows, and stores floats as [experts, columns, rows].
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

_ALL_EXPERTS = re.compile(
    r"(?P<experts>.*\.mlp\.experts\.)(?P<part>gate_up|up|down)_proj(?P<kind>_bias|_blocks|_scales)?"
)
_KINDS = {None: "weight", "_bias": "bias", "_blocks": "weight_blocks", "_scales": "weight_scales"}
_PARTS = {"gate_up": ("gate_proj", "up_proj"), "up": ("up_proj",), "down": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One expert's rows of a stored tensor. is_transposed: rows are stored as columns."""

    stored: str
    expert: int
    rows: slice
    is_transposed: bool

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view."""
        own = tensor[self.expert]
        return (own.T if self.is_transposed else own)[self.rows]

    def shape(self, stored_shape: Sequence[int]) -> list[int]:
        """Return the view's shape."""
        rows, *columns = reversed(stored_shape[1:]) if self.is_transposed else stored_shape[1:]
        return [len(range(rows)[self.rows]), *columns]


def find_expert_parts(
    directory: Path, names: Iterable[str], shape_of: Callable[[str], Sequence[int]]
) -> Iterator[tuple[str, ExpertPart]]:
    """Yield each expert's tensor name and part. Raises `ModelError` if a shape cannot be divided."""
    names = set(names)
    for name in sorted(names):
        if (match := _ALL_EXPERTS.fullmatch(name)) is None:
            continue
        experts, parts, kind = match["experts"], _PARTS[match["part"]], _KINDS[match["kind"]]
        alternates = f"{experts}gate_up_proj_bias" in names
        is_transposed = alternates and kind == "weight"
        shape = shape_of(name)
        all_rows = shape[-1 if is_transposed else 1] if len(shape) > 1 else 1
        if len(shape) < (2 if kind == "bias" else 3) or all_rows % len(parts):
            raise ModelError(f"{directory}: {name} has shape {list(shape)}, not {len(parts)} x rows for each expert")
        num_rows = all_rows // len(parts)
        for expert in range(shape[0]):
            for index, part in enumerate(parts):
                in_order = slice(index * num_rows, (index + 1) * num_rows)
                rows = slice(index, None, len(parts)) if alternates else in_order
                yield f"{experts}{expert}.{part}.{kind}", ExpertPart(name, expert, rows, is_transposed)
