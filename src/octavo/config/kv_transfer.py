"""Where KV is kept outside of an engine's own memory, and how it moves."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config.fields import option, within

_MAX_THREADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Stores of KV outside, the fastest first where there are several; none by default.

    num_threads: so many loads go on at once; saves have a thread of their own.
    """

    num_threads: int = option(
        2, "Loads from stores of KV that go on at once, each on a thread of its own.", name="kv_transfer_threads"
    )

    def __post_init__(self) -> None:
        within("num_threads of kv_transfer", self.num_threads, 1, _MAX_THREADS)
