"""What those who stand before the routes know of them: which take a place, how each spells errors, whose they are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from octavo.http.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

OLLAMA_TAG = ":latest"  # what its clients write behind a name without a tag
TGI_ROUTES = frozenset({"/generate", "/generate_stream", "/"})
# Those whose answers a model writes.
_OPENAI_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
GENERATING = TGI_ROUTES | _OPENAI_ROUTES | {"/v1/messages", "/api/chat", "/api/generate"}
_EMBEDDING = frozenset({"/v1/embeddings", "/api/embed", "/api/embeddings"})
_COUNTING = frozenset({"/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize"})
# How each whose requests take a place, or have a body that is read, spells an error.
REFUSALS: dict[str, Callable[[HttpError], Response]] = {
    path: HttpError.tgi_response if path in TGI_ROUTES else partial(HttpError.response, path=path)
    for path in GENERATING | _COUNTING | _EMBEDDING | {"/api/show"}
}
_OPERATORS = frozenset({"/metrics", "/server_info", "/get_server_info", "/dashboard/events"})
_OPERATORS_BELOW = "/dashboard/requests/"


def tells_of_all(path: str) -> bool:
    """Whether a route tells of all keys, or of how the server was started: it asks for one that may read metrics."""
    return path in _OPERATORS or path.startswith(_OPERATORS_BELOW)
