"""Configuration common to server and router."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - read at run time

from octavo.config.engine import DEFAULT_MAX_NUM_WAITING
from octavo.config.fields import at_least, check_choices, not_negative, option
from octavo.config.step_defaults import CPU_DEFAULTS
from octavo.errors import ConfigError

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
DEFAULT_MAX_BODY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access, limits and timeouts. None means no limit.

    operator_key: Additional key with which a router reads this server's metrics.
    max_open_requests: Limit on open output streams. Further requests get status 429.
    """

    grace_s: float = option(
        5.0,
        "Time that open requests have to finish after the order to stop; new requests are refused.",
        name="shutdown_timeout",
        unit="SECONDS",
        low=0.0,
    )
    log_level: str = option("info", "Minimum severity of messages to log.", choices=LOG_LEVELS)
    api_key: str | None = option(
        None,
        "Key that clients must send. On the command line other users of the machine can read it (ps); "
        "OCTAVO_API_KEY in the environment or --api-keys FILE keep it private. Default: none.",
        panel="Access",
        shows_value=False,
    )
    api_keys_file: Path | None = option(
        None,
        "File of keys, each with a share and limits (`octavo keys add`). SIGHUP reloads it. Default: none.",
        name="api_keys",
        unit="FILE",
        panel="Access",
    )
    operator_key: str | None = field(default=None, repr=False)
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "Address or network of a trusted proxy: the audit log uses the client addresses in its X-Forwarded-For; "
        "may be repeated. Default: no proxy is trusted.",
        unit="ADDRESS",
        panel="Access",
    )
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        "Name to accept in the header Host; may be repeated. Default: any, or on loopback its own names only.",
        name="allowed_host",
        unit="NAME",
        panel="Access",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin of pages that may call the server from a browser, such as https://example.org; * for any; may be "
        "repeated. Default: none.",
        name="allowed_origin",
        unit="URL",
        panel="Access",
    )
    ssl_certfile: Path | None = option(None, "Certificate for TLS. Default: no TLS.", unit="FILE", panel="Access")
    ssl_keyfile: Path | None = option(None, "Its private key. Default: no TLS.", unit="FILE", panel="Access")
    max_open_requests: int | None = CPU_DEFAULTS.max_num_seqs + DEFAULT_MAX_NUM_WAITING
    max_body_bytes: int = option(DEFAULT_MAX_BODY_BYTES, "Maximum size of a request body.", unit="SIZE", panel="Limits")
    body_timeout_s: float = option(
        30.0,
        "Time in which a request's headers, and then its body, must arrive.",
        name="body_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )
    idle_timeout_s: float = option(
        60.0,
        "Time in which a client must read the waiting output, or 16 KiB of it; else its connection is closed (on "
        "Linux).",
        name="idle_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )
    keep_alive_timeout_s: float = option(
        75.0,
        "Maximum time that a connection is idle between two requests. Set it longer than that of a proxy in front"
        " of the server.",
        name="keep_alive_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )

    def __post_init__(self) -> None:
        at_least("max_body_bytes", self.max_body_bytes, 1)
        at_least("max_open_requests", self.max_open_requests, 1, may_be_none=True)
        for name in ("body_timeout_s", "idle_timeout_s", "grace_s"):
            not_negative(name, getattr(self, name))
        _check_addresses("forwarded_allow_ips", self.forwarded_allow_ips)
        if not 0 < self.keep_alive_timeout_s < math.inf:
            raise ConfigError(f"keep_alive_timeout_s must be a number above 0, got {self.keep_alive_timeout_s}")
        check_choices(self)
        for name in ("allowed_hosts", "allowed_origins"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(each.strip().lower().rstrip("/") for each in given))
        if self.api_key is not None and self.api_keys_file is not None:
            raise ConfigError("api_key and api_keys exclude each other: give one of them")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs a certificate and its key: ssl_certfile and ssl_keyfile")

    @property
    def requires_key(self) -> bool:
        """True if clients need keys."""
        return self.api_key is not None or self.api_keys_file is not None


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            raise ConfigError(f"{name} must be addresses or networks: {error}") from None
