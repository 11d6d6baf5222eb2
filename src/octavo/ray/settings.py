"""Messages between a router's process and the driver, its child process that uses Ray. Each message is a line of JSON."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """The first message to the driver.

    address: Of the cluster. None starts a cluster on this machine.
    words: Command line of an engine after `serve`, without host, port and number of threads.
    environment: Variables of an engine.
    num_threads: Of an engine. None divides the CPUs of the nodes.
    uses_gpu: None means True if the cluster has GPUs.
    timeout_s: Limit on connecting, and on finding room for the first engines.
    stop_s: Time in which a stopped engine's requests end.
    """

    address: str | None
    words: tuple[str, ...]
    environment: dict[str, str]
    num_replicas: int
    min_replicas: int
    max_replicas: int
    target_queue_time_s: float
    num_threads: int | None
    num_ranks: int
    uses_gpu: bool | None
    operator_key: str | None
    timeout_s: float
    stop_s: float
    log_level: str
    log_format: str


class Order(msgspec.Struct, frozen=True, omit_defaults=True):
    """A later message to the driver.

    reload: True lets engines read the API keys again.
    silent: Address of an engine to kill, because it does not respond.
    words: Replaces `Settings.words`. All engines are replaced one after another.
    """

    reload: bool = False
    silent: str | None = None
    words: tuple[str, ...] | None = None


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message from the driver.

    urls: Addresses of the engines that accept requests.
    is_placed: True if all first engines have their place in the cluster.
    was_ready: True if an engine was ready.
    failure: Why no engine can run.
    """

    urls: tuple[str, ...] | None = None
    is_placed: bool = False
    was_ready: bool = False
    failure: str | None = None
