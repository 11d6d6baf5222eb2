"""A kind of KV group that octavo does not have: rows read the positions of their own chunk, as in Llama 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo.data.kv_groups import register


@register
@dataclass(frozen=True, slots=True)
class ChunkedAttention:
    """The row at position p reads the positions of its chunk up to p. window: length of a chunk, in tokens."""

    name: ClassVar[str] = "chunked_attention"
    window: int

    @property
    def most_positions(self) -> int:
        return self.window

    def first_position(self, num_tokens: int) -> int:
        return num_tokens // self.window * self.window
