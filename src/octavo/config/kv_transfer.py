"""External stores of KV, and KV transfers between engines."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config.fields import at_least, check_choices, one_of, option, within
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_THREADS = 64
_MAX_PORT = 65535
_ADDRESS = re.compile(r"(\[[^\]]+\]|[^:\s]+):(\d{1,5})")
_DEFAULT_SEGMENT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """The engine's role and external stores of KV, by default none. The fastest store is asked first.

    mooncake_segment_bytes: With 0, only other engines lend memory.
    """

    disk_dir: Path | None = option(
        None,
        "Keep KV in files of this directory. They survive restarts, and all engines with this directory share "
        "them. Default: none.",
        unit="DIR",
        name="kv_disk_dir",
    )
    disk_bytes: int | None = option(
        None,
        "Maximum size of the files in kv_disk_dir. Default: 16 GiB, at most half of the free space.",
        unit="SIZE",
        name="kv_disk_bytes",
    )
    num_threads: int = option(
        2, "Number of concurrent loads from KV stores, each on its own thread.", name="kv_transfer_threads"
    )
    mooncake: str | None = option(
        None,
        "Share KV with other engines in the pool of the mooncake_master at this address. Needs octavo[mooncake]. "
        "Use it only in private networks: it has no authentication. Default: none.",
        unit="HOST:PORT",
        name="kv_mooncake",
    )
    mooncake_segment_bytes: int = option(
        _DEFAULT_SEGMENT_BYTES,
        "Memory that this engine lends to the pool of Mooncake, in addition to its own KV cache. Default: 1G.",
        unit="SIZE",
        name="kv_mooncake_segment_bytes",
    )
    mooncake_protocol: str = option(
        "tcp",
        "Transport of KV in the pool of Mooncake, and with kv_direct.",
        choices=("tcp", "rdma"),
        name="kv_mooncake_protocol",
    )
    role: str = option(
        "both",
        "Purpose of this engine with a router: to compute prompts for other engines (prefill), to answer with the"
        " KV that it gets from them (decode), or both.",
        choices=("both", "prefill", "decode"),
    )
    direct: bool = option(
        False,
        "Transfer KV from prefill to decode engines directly with Mooncake's TransferEngine. Needs "
        "octavo[mooncake]. Use it in private networks only.",
        name="kv_direct",
    )
    direct_bytes: int = option(
        _DEFAULT_SEGMENT_BYTES,
        "Memory of a prefill engine for KV that decode engines have not fetched yet. Default: 1G.",
        unit="SIZE",
        name="kv_direct_bytes",
    )

    @classmethod
    def parse(cls, given: KVTransferConfig | Mapping[str, Any] | None, **given_fields: Any) -> KVTransferConfig:
        """Accept an instance, a mapping of its fields, or None for the defaults.

        given_fields: Fields as keyword arguments; None is ignored. Raises `ConfigError` for an unknown field, or if
        both arguments have values.
        """
        given_fields = {name: value for name, value in given_fields.items() if value is not None}
        if given is None:
            return cls(**given_fields)
        if given_fields:
            raise ConfigError(f"kv_transfer_config and kv_{min(given_fields)} exclude each other: give one of them")
        if isinstance(given, KVTransferConfig):
            return given
        if not hasattr(given, "keys"):
            raise ConfigError(
                f"kv_transfer_config must be a KVTransferConfig or a mapping of its fields, got {given!r}"
            )
        names = tuple(each.name for each in fields(cls))
        for name in given:
            one_of("a field of kv_transfer_config", name, names)
        directory = given.get("disk_dir")
        return cls(**{**given, "disk_dir": None if directory is None else Path(directory)})

    @property
    def names_store(self) -> bool:
        """True if KV is stored elsewhere or passed to another engine."""
        return self.disk_dir is not None or self.mooncake is not None or self.direct

    def __post_init__(self) -> None:
        at_least("kv_disk_bytes", self.disk_bytes, 1, may_be_none=True)
        if self.disk_bytes is not None and self.disk_dir is None:
            raise ConfigError(f"kv_disk_bytes is {self.disk_bytes}, but kv_disk_dir is not set: give a directory")
        if self.disk_dir is not None and self.disk_dir.exists() and not self.disk_dir.is_dir():
            raise ConfigError(
                f"kv_disk_dir is {str(self.disk_dir)!r}, which is not a directory: give a directory, or a new path"
            )
        within("num_threads of kv_transfer", self.num_threads, 1, _MAX_THREADS)
        check_choices(self)
        at_least("mooncake_segment_bytes", self.mooncake_segment_bytes, 0)
        self._check_role()
        if self.mooncake is None:
            if self.mooncake_segment_bytes != _DEFAULT_SEGMENT_BYTES:
                raise ConfigError("mooncake_segment_bytes has no effect without mooncake")
            if self.mooncake_protocol != "tcp" and not self.direct:
                raise ConfigError("mooncake_protocol has no effect without mooncake or kv_direct")
            return
        address = _ADDRESS.fullmatch(self.mooncake)
        if address is None or int(address.group(2)) > _MAX_PORT:
            raise ConfigError(
                f"mooncake must be the address of a mooncake_master, HOST:PORT, got {self.mooncake!r}; the port is "
                "its option --rpc_port, by default 50051"
            )

    def _check_role(self) -> None:
        at_least("kv_direct_bytes", self.direct_bytes, 1)
        if self.direct_bytes != _DEFAULT_SEGMENT_BYTES and not (self.direct and self.role == "prefill"):
            raise ConfigError("kv_direct_bytes needs role prefill and kv_direct: only prefill engines use this memory")
        if self.role == "both":
            if self.direct:
                raise ConfigError("kv_direct needs role prefill or decode: an engine with role both transfers no KV")
        elif not self.names_store:
            raise ConfigError(
                f"role {self.role} needs a way to transfer KV from prefill to decode engines: a store of both "
                "engines (kv_disk_dir, kv_mooncake), or kv_direct"
            )
