"""What those who stand before the routes know of them: which take a place, how each spells errors, whose they are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from octavo.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

TGI_ROUTES = frozenset({"/generate", "/generate_stream", "/"})
# Those whose answers a model writes.
GENERATING = TGI_ROUTES | {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
_COUNTING = frozenset({"/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize"})
# How each whose requests take a place spells an error.
REFUSALS: dict[str, Callable[[HttpError], Response]] = {
    path: HttpError.tgi_response if path in TGI_ROUTES else partial(HttpError.response, path=path)
    for path in GENERATING | _COUNTING | {"/v1/embeddings"}
}
_OPERATORS = frozenset({"/metrics", "/server_info", "/get_server_info", "/dashboard/events"})
_OPERATORS_BELOW = "/dashboard/requests/"


def tells_of_all(path: str) -> bool:
    """Whether a route tells of all keys, or of how the server was started: it asks for one that may read metrics."""
    return path in _OPERATORS or path.startswith(_OPERATORS_BELOW)
