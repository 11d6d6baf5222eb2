"""Publishing of KV events."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from octavo.config.fields import at_least, one_of
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TCP = re.compile(r"tcp://(\*|\[[^\]]+\]|[^:/\s]+):(\d{1,5})")
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """How the engine publishes changes of its prefix cache. Fields and defaults are vLLM's.

    publisher: "zmq", "null", or None for "zmq" if enable_kv_cache_events is True.
    endpoint: tcp://HOST:PORT or ipc://PATH. The engine binds an endpoint with *, ::, or ipc, and connects to any other.
    replay_endpoint: The engine answers requests for earlier batches here. None disables them.
    buffer_steps: Number of batches that can be replayed.
    hwm: Number of batches that are kept for a slow subscriber before it loses batches.
    max_queue_size: Number of batches that wait for the publishing thread. Further batches are dropped.
    topic: First frame of each message. Subscribers filter by it.
    data_parallel_rank: Number of the replica, which each batch contains.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0

    @classmethod
    def parse(cls, given: KVEventsConfig | Mapping[str, Any] | None) -> KVEventsConfig:
        """Accept an instance, a mapping of its fields, or None for the defaults. Raises `ConfigError`."""
        if given is None:
            return cls()
        if isinstance(given, KVEventsConfig):
            return given
        if not hasattr(given, "keys"):
            raise ConfigError(f"kv_events_config must be an object with fields of KVEventsConfig, got {given!r}")
        for name in given:
            one_of("a field of kv_events_config", name, tuple(each.name for each in fields(cls)))
        return cls(**given)

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise ConfigError(f"enable_kv_cache_events must be true or false, got {self.enable_kv_cache_events!r}")
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        one_of("publisher of kv_events_config", self.publisher, ("zmq", "null"))
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            at_least(f"{name} of kv_events_config", getattr(self, name), 1)
        at_least("data_parallel_rank of kv_events_config", self.data_parallel_rank, 0)
        if not isinstance(self.topic, str):
            raise ConfigError(f"topic of kv_events_config must be a text, got {self.topic!r}")
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint)
            if self.replay_endpoint == self.endpoint:
                raise ConfigError(f"endpoint and replay_endpoint of kv_events_config are both {self.endpoint}")

    @property
    def is_active(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def of_replicas(self, count: int) -> list[KVEventsConfig]:
        """Return the configuration of each replica: its ports are higher by its number, as in vLLM.

        An ipc path gets a suffix instead. Raises `ConfigError` if two replicas would have the same endpoint.
        """
        configs = [
            replace(
                self,
                endpoint=_moved(self.endpoint, rank),
                replay_endpoint=None if self.replay_endpoint is None else _moved(self.replay_endpoint, rank),
                data_parallel_rank=rank,
            )
            for rank in range(count)
        ]
        ends = [end for each in configs for end in (each.endpoint, each.replay_endpoint) if end is not None]
        if len(set(ends)) < len(ends):
            raise ConfigError(
                f"endpoint and replay_endpoint of kv_events_config must differ by at least {count} ports, because "
                f"replica number i uses both ports plus i; got {self.endpoint} and {self.replay_endpoint}"
            )
        return configs


def _check_endpoint(name: str, endpoint: object) -> None:
    tcp = _TCP.fullmatch(endpoint) if isinstance(endpoint, str) else None
    is_tcp = tcp is not None and 1 <= int(tcp.group(2)) <= _MAX_PORT
    if not is_tcp and not (isinstance(endpoint, str) and endpoint.removeprefix("ipc://") not in ("", endpoint)):
        raise ConfigError(
            f"{name} of kv_events_config must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH, got {endpoint!r}"
        )


def _moved(endpoint: str, rank: int) -> str:
    if rank == 0:
        return endpoint
    if (tcp := _TCP.fullmatch(endpoint)) is None:
        return f"{endpoint}_dp{rank}"
    moved = f"tcp://{tcp.group(1)}:{int(tcp.group(2)) + rank}"
    _check_endpoint(f"replica {rank}'s endpoint", moved)
    return moved
