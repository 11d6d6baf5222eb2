"""The configuration of a server."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - commands read the types of fields

from octavo.config.engine import DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_WAITING, DEFAULT_MAX_NUM_WAITING_TOKENS
from octavo.config.fields import at_least, check_choices, not_negative, option
from octavo.errors import ConfigError
from octavo.sampling_params import POOLING

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
DEFAULT_MAX_BODY_BYTES = 8 << 20
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "none", "think")
REASONING_FIELDS = ("reasoning_content", "reasoning")
EMBEDDING_POOLING = ("auto", *POOLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Who is let in, and how much is taken from each. Every limit is finite unless it is None.

    served_model_names: () for the model's own. api_keys_file: a key for each tenant (`octavo.server.access.tenants`);
    neither it nor api_key: nobody is asked.
    max_open_requests: output streams that may run and wait, max_num_waiting_tokens: tokens of prompts of which no
    output was told yet (of answers that are not streamed: until their end); more are refused with 429.
    request_timeout_s: also where a request's X-Request-Timeout asks for more.
    tool_call_parser, reasoning_parser: see `octavo.server.answers.tools`. allowed_hosts, allowed_origins: see
    `octavo.server.access.origins`.
    """

    served_model_names: tuple[str, ...] = option(
        (),
        "Name that clients use for the model; may be given again. Default: the directory's name or the hub id.",
        name="served_model_name",
    )
    grace_s: float = option(
        5.0,
        "When told to stop, how long open requests may go on before they are ended; new ones are refused.",
        name="shutdown_timeout",
        unit="SECONDS",
        low=0.0,
    )
    tool_call_parser: str = option(
        "auto", "How the model writes calls of tools; auto looks at its chat template.", choices=TOOL_CALL_PARSERS
    )
    reasoning_parser: str = option(
        "auto",
        "Whether <think>...</think> is split off as reasoning_content; auto looks at the chat template.",
        choices=REASONING_PARSERS,
    )
    reasoning_field: str = option(
        "reasoning_content",
        "The field of chat completions that has it: vLLM calls it reasoning now, others reasoning_content.",
        choices=REASONING_FIELDS,
    )
    pooling: str = option(
        "auto",
        "How hidden states become an embedding; auto does as the checkpoint asks, else it takes the last one.",
        choices=EMBEDDING_POOLING,
    )
    stream_keep_alive_s: float = option(
        15.0,
        "A stream that has told nothing for so long sends a comment, so that no proxy ends it.",
        name="stream_keep_alive",
        unit="SECONDS",
        low=0.001,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Send a span for each request to an OpenTelemetry collector, like http://localhost:4318/v1/traces. "
        "Default: none are made.",
        unit="URL",
    )
    dashboard: bool = option(True, "Whether there is a page at /dashboard that shows what happens.")
    log_level: str = option("info", "How much is logged.", choices=LOG_LEVELS)
    api_key: str | None = option(
        None,
        "Key that clients must send. Every user of the machine can read it here (ps): OCTAVO_API_KEY in the "
        "environment or --api-keys FILE keep it. Default: none.",
        panel="Access",
        shows_value=False,
    )
    api_keys_file: Path | None = option(
        None,
        "File of keys with a share and limits for each (`octavo keys add`); SIGHUP reads it anew. Default: none.",
        name="api_keys",
        unit="FILE",
        panel="Access",
    )
    forwarded_allow_ips: tuple[str, ...] = option(
        (),
        "Address or network of a proxy: the audit log has the clients that its X-Forwarded-For names; may be "
        "given again. Default: none is believed.",
        unit="ADDRESS",
        panel="Access",
    )
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        "Name to answer to, as in the header Host; may be given again. Default: any, or on loopback its names only.",
        name="allowed_host",
        unit="NAME",
        panel="Access",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin of pages that may ask from a browser, like https://example.org; * for any; may be given "
        "again. Default: none.",
        name="allowed_origin",
        unit="URL",
        panel="Access",
    )
    ssl_certfile: Path | None = option(None, "Certificate for TLS. Default: no TLS.", unit="FILE", panel="Access")
    ssl_keyfile: Path | None = option(None, "Its private key. Default: no TLS.", unit="FILE", panel="Access")
    max_open_requests: int | None = DEFAULT_MAX_NUM_SEQS + DEFAULT_MAX_NUM_WAITING
    max_num_waiting_tokens: int | None = DEFAULT_MAX_NUM_WAITING_TOKENS
    max_body_bytes: int = option(DEFAULT_MAX_BODY_BYTES, "Largest request body.", unit="SIZE", panel="Limits")
    request_timeout_s: float = option(
        1800.0,
        "The longest that a request may take; a client may ask for less (X-Request-Timeout).",
        name="request_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )
    body_timeout_s: float = option(
        30.0,
        "Within this time a request's headers, and then its body, have to arrive.",
        name="body_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )
    idle_timeout_s: float = option(
        60.0,
        "Within this time a client has to take what waits for it, or 16 KiB of it; else its connection ends "
        "(on Linux).",
        name="idle_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )
    keep_alive_timeout_s: float = option(
        75.0,
        "So long may a connection be idle between two requests; longer than a proxy before it keeps one.",
        name="keep_alive_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )
    max_unread_outputs: int = option(
        1024,
        "Outputs of a stream that wait for a client who reads too slowly; one more ends it.",
        panel="Limits",
        low=1,
    )
    max_request_logprobs: int = option(
        1 << 22,
        "Log probabilities that a request may bring: n x tokens x (logprobs + 1), over all prompts.",
        panel="Limits",
        low=1,
    )

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_unread_outputs", "max_request_logprobs"):
            at_least(name, getattr(self, name), 1)
        for name in ("max_open_requests", "max_num_waiting_tokens"):
            at_least(name, getattr(self, name), 1, may_be_none=True)
        for name in ("request_timeout_s", "body_timeout_s", "idle_timeout_s", "grace_s"):
            not_negative(name, getattr(self, name))
        _check_addresses("forwarded_allow_ips", self.forwarded_allow_ips)
        for name in ("stream_keep_alive_s", "keep_alive_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, got {getattr(self, name)}")
        check_choices(self)
        for name in ("allowed_hosts", "allowed_origins"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, tuple(each.strip().lower().rstrip("/") for each in given))
        if self.api_key is not None and self.api_keys_file is not None:
            raise ConfigError("give one API key or a file of them, not both")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("TLS needs a certificate and its key: ssl_certfile and ssl_keyfile")

    @property
    def asks_for_key(self) -> bool:
        """Whether nobody gets in without one."""
        return self.api_key is not None or self.api_keys_file is not None


def _check_addresses(name: str, addresses: tuple[str, ...]) -> None:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            raise ConfigError(f"{name} must be addresses or networks: {error}") from None
