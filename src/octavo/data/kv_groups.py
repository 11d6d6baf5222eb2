"""A KV group consists of layers that keep KV of the same positions, in the group's own blocks.

The first group keeps all positions, and lookups find prefixes by the first group's blocks. Bounded groups, for example
of sliding-window layers, keep only positions that later tokens can still read. The last group may have recurrent
states: one block per sequence. A new kind needs a `register`ed class and a kernel.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol, TypeVar

NO_BLOCK = -1  # in a block table, for a block that is not held


class KVGroupKind(Protocol):
    """Which positions a token attends to in the layers of a group."""

    name: ClassVar[str]  # for journals and messages

    @property
    def most_positions(self) -> int | None:
        """Maximum number of positions that a token attends to, including the token's, or None for no limit."""
        ...

    def first_position(self, num_tokens: int) -> int:
        """Return the first position that the token at position `num_tokens` attends to.

        Never decreases as `num_tokens` grows.
        """
        ...


_Kind = TypeVar("_Kind", bound=type[KVGroupKind])
_KINDS: dict[str, type[KVGroupKind]] = {}


def register(kind: _Kind) -> _Kind:
    """Register a kind, as class decorator."""
    _KINDS[kind.name] = kind
    return kind


def kind_named(name: str) -> type[KVGroupKind]:
    """Return the kind with this name. Raises KeyError if unknown."""
    return _KINDS[name]


@register
@dataclass(frozen=True, slots=True)
class FullAttention:
    """A token attends to all positions up to its own."""

    name: ClassVar[str] = "full_attention"

    @property
    def most_positions(self) -> None:
        """No limit."""
        return

    def first_position(self, num_tokens: int) -> int:
        """Return 0."""
        del num_tokens
        return 0


@register
@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The token at position p attends to the positions max(0, p - window + 1) to p."""

    name: ClassVar[str] = "sliding_window"
    window: int  # the largest window of the layers, in tokens

    @property
    def most_positions(self) -> int:
        """Window in tokens."""
        return self.window

    def first_position(self, num_tokens: int) -> int:
        """See `KVGroupKind`."""
        return max(num_tokens - self.window + 1, 0)

    def __str__(self) -> str:
        return f"a sliding window of {self.window} tokens"


@register
@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """A token reads the state after the previous token, and replaces it."""

    name: ClassVar[str] = "recurrent_states"

    @property
    def most_positions(self) -> int:
        """The token's own position."""
        return 1

    def first_position(self, num_tokens: int) -> int:
        """Return `num_tokens`."""
        return num_tokens


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """A KV group's kind and block count. num_host_blocks: Blocks in host memory, only of recurrent states."""

    kind: KVGroupKind
    num_blocks: int
    num_host_blocks: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        in_host = {"num_host_blocks": self.num_host_blocks} if self.num_host_blocks else {}
        return {"kind": self.kind.name, "num_blocks": self.num_blocks, **in_host, **asdict(self.kind)}  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> KVGroupSpec:
        """Read a result of `to_json`. Raises KeyError if the kind is unknown."""
        options = dict(fields)
        kind, num_blocks = kind_named(options.pop("kind")), options.pop("num_blocks")
        num_host_blocks = options.pop("num_host_blocks", 0)
        return cls(kind(**options), num_blocks, num_host_blocks)


def num_blocks_read(kind: KVGroupKind, block_size: int) -> int | None:
    """Return the maximum number of blocks that one token reads, or None for no limit."""
    most = kind.most_positions
    return None if most is None else -(-(most - 1) // block_size) + 1


def longest_hit(
    kind: KVGroupKind,
    is_there: list[bool],
    num_tokens: int,
    block_size: int,
    *,
    first_block: int = 0,
    limit: int | None = None,
) -> int:
    """Return the length of the longest usable prefix hit, in blocks from `first_block` on.

    A hit is usable if all blocks that the next token reads are present.

    is_there: True for each present block, from `first_block` on. All earlier blocks are present.
    num_tokens: Length of the sequence. The last token is always computed. limit: Maximum result.
    """
    run = longest = 0
    for count, has_block in enumerate(is_there[:limit], 1):
        run = run + 1 if has_block else 0
        num_computed = min((first_block + count) * block_size, num_tokens - 1)
        first_read = kind.first_position(num_computed) // block_size
        if run >= min(count, first_block + count - first_read):
            longest = count
    return longest
