"""A router's configuration."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - read at run time
from urllib.parse import urlsplit

from octavo.config.access import AccessConfig
from octavo.config.fields import at_least, option
from octavo.errors import ConfigError

ROUTING_POLICIES = ("cache_aware", "least_loaded", "round_robin", "affinity")
ASSUMED_REQUEST_TIMEOUT_S = 1800.0  # of an engine that does not publish its limit
REQUEST_TIMEOUT_MARGIN_S = 30.0  # so that an engine's answer or error arrives before the router's timeout
_MAX_PORT = 65535
_TIMEOUTS = (
    "request_timeout_s",  # default of engine_first_byte_timeout_s
    "engine_first_byte_timeout_s",
    "engine_connect_timeout_s",
    "engine_idle_timeout_s",
)
_NAME_AND_PORT = re.compile(r"\[?[^\[\]/@\s]+\]?:[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(AccessConfig):
    """Engines, routing and timeouts.

    max_open_requests: With None, only the engines refuse excess requests.
    client_key: Key that engines get instead of a client's key, if only this router may send requests to them.
    balance_tokens, balance_ratio: See `octavo.router.policies.cache_aware`.
    """

    engines: tuple[str, ...] = option(
        (), "Address of an engine, such as http://10.0.0.1:8000; may be repeated.", name="engine", unit="URL"
    )
    engines_file: Path | None = option(
        None,
        "File with the address of one engine per line. It is read again when it changes. Default: none.",
        unit="FILE",
    )
    engines_dns: str | None = option(
        None, "A DNS name. All its addresses are engines. It is resolved repeatedly. Default: none.", unit="NAME:PORT"
    )
    engines_ray: str | None = option(
        None,
        "Use the engines of `octavo serve --launcher ray` on this Ray cluster: the address of its head node, or auto "
        "for the cluster of this machine. Default: none.",
        unit="HOST:PORT",
    )
    engine_api_key: str | None = option(
        None,
        "Key for the router's own requests to engines: metrics, models, roles. Clients' keys are passed on. "
        "OCTAVO_ROUTE_ENGINE_API_KEY in the environment keeps it from other users of the machine. Default: none.",
        shows_value=False,
    )
    policy: str = option("cache_aware", "How to choose the engine for a request.", choices=ROUTING_POLICIES)
    session_header: str = option(
        "x-session-id",
        "Header that names a session for the policy affinity. Without it: the body's user, prompt_cache_key or "
        "cache_salt.",
        unit="NAME",
    )
    balance_tokens: int = option(
        4096,
        "Under cache_aware an engine gets no more requests for its cached prefixes if it has this many more "
        "tokens to compute than another engine, and",
        unit="TOKENS",
        low=0,
    )
    balance_ratio: float = option(1.5, "this many times as many.", unit="RATIO", low=1.0)
    max_prefix_entries: int = option(
        1 << 18, "Number of most recently used prompt pieces that cache_aware remembers, about 400 bytes each.", low=1
    )
    state_file: Path | None = option(
        None,
        "File that keeps the prefixes of cache_aware, as hashes, over a restart of the router. Default: none.",
        unit="FILE",
    )
    min_prefill_tokens: int = option(
        256,
        "Minimum number of prompt tokens, not cached by the engine of --role decode, for which an engine of "
        "--role prefill computes the prompt.",
        unit="TOKENS",
        low=0,
    )
    health_interval_s: float = option(
        1.0, "Time between two readiness checks of an engine.", name="health_interval", unit="SECONDS", low=0.001
    )
    health_timeout_s: float = option(
        3.0,
        "An engine that does not answer two checks in a row within this time is lost, with its requests.",
        name="health_timeout",
        unit="SECONDS",
        low=0.001,
    )
    engine_connect_timeout_s: float = option(
        10.0,
        "Maximum time to connect to an engine, TLS included.",
        name="engine_connect_timeout",
        unit="SECONDS",
        low=0.001,
        panel="Limits",
    )
    engine_first_byte_timeout_s: float | None = option(
        None,
        "Maximum time until an engine's answer begins; an unstreamed answer begins when it is complete. After that "
        "another engine is asked. Default: --request-timeout, else the engine's own limit and 30 s.",
        name="engine_first_byte_timeout",
        unit="SECONDS",
        low=0.001,
        panel="Limits",
    )
    engine_idle_timeout_s: float = option(
        300.0,
        "Maximum time between two pieces of an engine's answer. octavo's streams are silent for at most 15 s.",
        name="engine_idle_timeout",
        unit="SECONDS",
        low=0.001,
        panel="Limits",
    )
    request_timeout_s: float | None = option(
        None,
        "Maximum time of a request over all engines that are asked. A client may ask for less (X-Request-Timeout). "
        "Default: 30 s more than the longest --request-timeout of the engines; 1800 s are assumed for an engine that "
        "does not publish it.",
        name="request_timeout",
        unit="SECONDS",
        low=0.001,
        panel="Limits",
    )
    max_answer_bytes: int = option(
        64 << 20,
        "Maximum size of a stream's event, and of a JSON answer that the router holds until it is complete. A "
        "larger JSON answer is passed on as it arrives.",
        unit="SIZE",
        panel="Limits",
    )
    max_open_requests: int | None = None
    client_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        AccessConfig.__post_init__(self)
        object.__setattr__(self, "engines", tuple(map(engine_url, self.engines)))
        if self.engines_dns is not None and not _is_name_and_port(self.engines_dns):
            raise ConfigError(f"engines_dns must be a name and a port, like engines.local:8000, got {self.engines_dns}")
        if not self.engines and {self.engines_file, self.engines_dns, self.engines_ray} == {None}:
            raise ConfigError(
                "a router needs engines: --engine URL, --engines-file FILE, --engines-dns NAME:PORT or --engines-ray "
                "HOST:PORT"
            )
        if self.state_file is not None and self.policy != "cache_aware":
            raise ConfigError(f"state_file needs the policy cache_aware, got {self.policy}")
        for name in ("balance_tokens", "max_prefix_entries", "min_prefill_tokens"):
            at_least(name, getattr(self, name), 0)
        at_least("max_answer_bytes", self.max_answer_bytes, 1)
        if self.engine_first_byte_timeout_s is None:
            object.__setattr__(self, "engine_first_byte_timeout_s", self.request_timeout_s)
        for name in ("health_interval_s", "health_timeout_s", "balance_ratio", *_TIMEOUTS):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {value}")
        object.__setattr__(self, "session_header", self.session_header.lower())


def _is_name_and_port(text: str) -> bool:
    name, _, port = text.rpartition(":")
    try:
        name.strip("[]").encode("idna")
    except UnicodeError:
        return False
    return _NAME_AND_PORT.fullmatch(text) is not None and 0 < int(port) <= _MAX_PORT


def engine_url(text: str) -> str:
    """Normalize an engine's address. Raises `ConfigError`."""
    try:
        parts = urlsplit(text)
        is_right = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_right = False
    if not is_right or parts.query or parts.fragment or parts.path not in {"", "/"} or parts.username is not None:
        raise ConfigError(f"the address of an engine is like http://10.0.0.1:8000, got {text!r:.200}")
    return f"{parts.scheme}://{parts.netloc.lower()}"
