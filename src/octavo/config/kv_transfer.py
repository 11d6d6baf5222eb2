"""Where KV is kept outside of an engine's own memory, and how it moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - commands read the types of fields

from octavo.config.fields import at_least, option, within
from octavo.errors import ConfigError

_MAX_THREADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Stores of KV outside, the fastest first where there are several; none by default.

    disk_dir: a directory for blocks on disk; disk_bytes bounds it, None: 16 GiB, at most half of what is free there.
    num_threads: so many loads go on at once; saves have a thread of their own.
    """

    disk_dir: Path | None = option(
        None,
        "Keep KV in files of this directory, over restarts and for every engine that is given it. Default: do not.",
        unit="DIR",
        name="kv_disk_dir",
    )
    disk_bytes: int | None = option(
        None,
        "Let files in kv_disk_dir take so many bytes. Default: 16 GiB, at most half of what is free there.",
        unit="BYTES",
        name="kv_disk_bytes",
    )
    num_threads: int = option(
        2, "Loads from stores of KV that go on at once, each on a thread of its own.", name="kv_transfer_threads"
    )

    @property
    def names_store(self) -> bool:
        """Whether there is any store."""
        return self.disk_dir is not None

    def __post_init__(self) -> None:
        at_least("kv_disk_bytes", self.disk_bytes, 1, may_be_none=True)
        if self.disk_bytes is not None and self.disk_dir is None:
            raise ConfigError(f"kv_disk_bytes is {self.disk_bytes}, but there is no kv_disk_dir: name a directory")
        if self.disk_dir is not None and self.disk_dir.exists() and not self.disk_dir.is_dir():
            raise ConfigError(f"kv_disk_dir is {str(self.disk_dir)!r}, which is no directory: name one, or a new path")
        within("num_threads of kv_transfer", self.num_threads, 1, _MAX_THREADS)
