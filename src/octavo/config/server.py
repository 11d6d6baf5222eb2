"""A server's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from octavo.config.access import AccessConfig
from octavo.config.engine import DEFAULT_MAX_NUM_WAITING_TOKENS
from octavo.config.fields import at_least, not_negative, option
from octavo.errors import ConfigError
from octavo.sampling_params import POOLING

TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "generic",
    "hermes",
    "mistral",
    "qwen3_coder",
    "seed_oss",
    "minimax_m2",
    "minimax_m3",
    "glm45",
    "glm47",
    "hy_v3",
    "deepseek_v32",
    "deepseek_v4",
    "minicpm5",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "kimi_k3",
    "solar_open",
    "functionary_v3_1",
    "functionary_v3_2",
    "phi4_mini_json",
    "granite",
    "functools",
    "nemotron_json",
    "jamba",
    "minimax",
    "cohere_command3",
    "command_r",
    "apertus",
    "gigachat3",
    "gemma4",
    "openai",
    "muse_glimmer",
    "lfm2",
    "olmo3",
    "llama3_json",
    "pythonic",
)
REASONING_PARSERS = (
    "auto",
    "none",
    "think",
    "mistral",
    "seed_oss",
    "minimax_m3",
    "hy_v3",
    "cohere_command3",
    "apertus",
    "granite",
    "gemma4",
    "openai_gptoss",
    "kimi_k3",
    "muse_glimmer",
    "solar_open",
    "apriel",
)
REASONING_FIELDS = ("reasoning_content", "reasoning")
EMBEDDING_POOLING = ("auto", *POOLING)
METRICS_PREFIXES = ("octavo", "vllm", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(AccessConfig):
    """Access to one engine, and the form of its answers.

    max_num_waiting_tokens: Limit on the prompt tokens of all requests without output. Further requests get status 429.
    An unstreamed request has no output until its end.
    """

    served_model_names: tuple[str, ...] = option(
        (),
        "Name that clients use for the model; may be repeated. Default: the directory's name or the hub id.",
        name="served_model_name",
    )
    tool_call_parser: str = option(
        "auto",
        "Format in which the model writes tool calls. auto: detected from its chat template.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "Format in which the model marks its reasoning, which is returned separately. auto: detected from its "
        "chat template.",
        choices=REASONING_PARSERS,
    )
    reasoning_field: str = option(
        "reasoning_content",
        "Field of chat completions that contains the reasoning. vLLM calls it reasoning now, other servers "
        "reasoning_content.",
        choices=REASONING_FIELDS,
    )
    pooling: str = option(
        "auto",
        "How hidden states become an embedding. auto: as the checkpoint asks, else the last hidden state.",
        choices=EMBEDDING_POOLING,
    )
    stream_keep_alive_s: float = option(
        15.0,
        "A stream that has been silent for this long sends a comment, so that no proxy closes it.",
        name="stream_keep_alive",
        unit="SECONDS",
        low=0.001,
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Send a span for each request to an OpenTelemetry collector, such as http://localhost:4318/v1/traces. "
        "Default: none.",
        unit="URL",
    )
    metrics_prefix: str = option(
        "octavo",
        "Prefix of the metrics that vLLM has, too. vllm: for schedulers and dashboards that read vLLM's names. Other "
        "metrics always have the prefix octavo.",
        choices=METRICS_PREFIXES,
    )
    dashboard: bool = option(True, "Serve a live page of the engine at /dashboard.")
    max_num_waiting_tokens: int | None = DEFAULT_MAX_NUM_WAITING_TOKENS
    request_timeout_s: float = option(
        1800.0,
        "Maximum time of a request. A client may ask for less (X-Request-Timeout).",
        name="request_timeout",
        unit="SECONDS",
        panel="Limits",
        low=0.001,
    )
    max_unread_outputs: int = option(
        1024,
        "Maximum number of outputs of a stream that a slow client has not read; one more ends the stream.",
        panel="Limits",
        low=1,
    )
    max_request_logprobs: int = option(
        1 << 22,
        "Maximum number of log probabilities of a request: n x tokens x (logprobs + 1), over all prompts.",
        panel="Limits",
        low=1,
    )

    def __post_init__(self) -> None:
        AccessConfig.__post_init__(self)
        for name in ("max_unread_outputs", "max_request_logprobs"):
            at_least(name, getattr(self, name), 1)
        at_least("max_num_waiting_tokens", self.max_num_waiting_tokens, 1, may_be_none=True)
        not_negative("request_timeout_s", self.request_timeout_s)
        if not 0 < self.stream_keep_alive_s < math.inf:
            raise ConfigError(f"stream_keep_alive_s must be a number above 0, got {self.stream_keep_alive_s}")
