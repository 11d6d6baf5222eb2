"""All HTTP routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo.http.apis import ANTHROPIC, OLLAMA, OPENAI, OPERATOR, RESPONSES, SGLANG, TGI, Api, api_below

if TYPE_CHECKING:
    from collections.abc import Iterator

_GET, _PROBE = ("GET",), ("GET", "HEAD")
_CHANGES = ("/api/push", "/api/create", "/api/copy", "/api/blobs/{digest:path}")  # change Ollama's models
_OLDER = ("/get_server_info",)
_SETTINGS = "read the server's settings; it needs read_metrics"
METRICS, DASHBOARD = "read the metrics; it needs read_metrics", "see the dashboard; it needs read_metrics"
_FEED, _REQUESTS = "/dashboard/events", "/dashboard/requests/"  # show the requests of all keys


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    endpoint: `module:name` below `octavo.server.api`.
    work: "answer" if a model generates text, "vectors" if a model embeds texts, "count" if no model runs. The tenant's
    limits apply only to routes with `work`.
    methods: Allowed HTTP methods. The OpenAPI document shows only the first.
    operators: If not "", the route needs `read_metrics`. The error for other keys contains this text.
    """

    path: str
    endpoint: str
    api: Api = OPENAI
    work: Literal["answer", "vectors", "count", ""] = ""
    methods: tuple[str, ...] = ("POST",)
    aliases: tuple[str, ...] = ()
    operators: str = ""
    is_described: bool = True

    @property
    def paths(self) -> tuple[str, ...]:
        """Path and aliases."""
        return (self.path, *self.aliases)


class Routes:
    """A list of routes. Starlette tries them in order. The router looks up exact paths."""

    def __init__(self, *routes: Route) -> None:
        self._routes = routes
        self._working = {path: route for route in routes if route.work for path in route.paths}
        self._operators = {path for route in routes if route.operators for path in route.paths}

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes)

    def find(self, path: str) -> Route | None:
        """Return the route at a path if it has `work`, otherwise None."""
        return self._working.get(path)

    def api(self, path: str) -> Api:
        """Return a path's API, even for unknown paths."""
        route = self.find(path)
        return api_below(path) if route is None else route.api

    def is_for_operators(self, path: str) -> bool:
        """Return True if a path needs `read_metrics`."""
        return path in self._operators or path == _FEED or path.startswith(_REQUESTS)


ROUTES = Routes(
    Route("/v1/chat/completions", "openai.chat:create_chat_completion", work="answer"),
    Route("/v1/completions", "openai.completions:create_completion", work="answer"),
    Route("/v1/responses", "openai.responses:create_response", RESPONSES, work="answer"),
    Route("/v1/responses/input_tokens", "openai.responses:count_input_tokens", work="count"),
    Route("/v1/embeddings", "openai.embeddings:create_embeddings", work="vectors"),
    Route("/v1/models", "openai.models:list_models", methods=_GET),
    Route("/v1/models/{model:path}", "openai.models:describe_model", methods=_GET),
    Route("/v1/messages", "anthropic.messages:create_message", ANTHROPIC, work="answer"),
    Route("/v1/messages/count_tokens", "anthropic.messages:count_tokens", ANTHROPIC, work="count"),
    Route("/tokenize", "tokenizing:tokenize", work="count"),
    Route("/detokenize", "tokenizing:detokenize", work="count"),
    Route("/generate", "tgi:generate", TGI, work="answer"),
    Route("/generate_stream", "tgi:generate_stream", TGI, work="answer"),
    Route("/", "tgi:generate_either", TGI, work="answer"),
    Route("/info", "tgi:info", TGI, methods=_GET),
    Route("/api/chat", "ollama.answers:chat", OLLAMA, work="answer"),
    Route("/api/generate", "ollama.answers:generate", OLLAMA, work="answer"),
    Route("/api/embed", "ollama.embeddings:embed", OLLAMA, work="vectors"),
    Route("/api/embeddings", "ollama.embeddings:embed_one", OLLAMA, work="vectors"),
    Route("/api/show", "ollama.models:show", OLLAMA, work="count"),
    Route("/api/tags", "ollama.models:tags", OLLAMA, methods=_PROBE),
    Route("/api/ps", "ollama.models:loaded", OLLAMA, methods=_GET),
    Route("/api/version", "ollama.models:version", OLLAMA, methods=_PROBE),
    Route("/api/pull", "ollama.models:refuse", OLLAMA, aliases=_CHANGES, is_described=False),
    Route("/api/delete", "ollama.models:refuse", OLLAMA, methods=("DELETE",), is_described=False),
    Route("/", "describing:front_page", methods=_PROBE, is_described=False),
    Route("/model_info", "describing:model_info", SGLANG, methods=_GET, aliases=("/get_model_info",)),
    Route("/server_info", "describing:server_info", OPERATOR, methods=_GET, aliases=_OLDER, operators=_SETTINGS),
    Route("/metrics", "operating:metrics", OPERATOR, methods=_GET, operators=METRICS),
    Route("/load", "loads:server_load", OPERATOR, methods=_GET, operators=METRICS),
    Route("/v1/loads", "loads:loads", SGLANG, methods=_GET, operators=METRICS),
    Route("/health", "operating:health", OPERATOR, methods=_PROBE),  # `wget --spider` and some balancers use HEAD
    Route("/live", "operating:live", OPERATOR, methods=_PROBE),
    Route("/ready", "operating:ready", OPERATOR, methods=_PROBE),
    Route("/version", "operating:version", OPERATOR, methods=_GET),
    Route("/openapi.json", "openapi:openapi", OPERATOR, methods=_GET),
)
