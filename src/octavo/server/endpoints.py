"""The declaration of a route's handler and types in the route's file."""

from __future__ import annotations

import pkgutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.responses import Response

if TYPE_CHECKING:
    from pydantic import BaseModel

    from octavo.http.routes import Route

Handler: TypeAlias = Callable[..., Awaitable[Response]]
_ROOM = "octavo.server.api"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A handler and its types.

    handler: called with the service, the HTTP request, and the checked body if there is one.
    summary: the route's description in the OpenAPI document.
    body: the model that checks the request's body; None: the request has none. answer: the type of an answer in the
    document; None: the answer has no body.
    is_streamed: the answer may come as a stream of events.
    """

    handler: Handler
    summary: str
    body: type[BaseModel] | None
    answer: Any
    is_streamed: bool

    @property
    def __wrapped__(self) -> Handler:
        """The handler, as `inspect.unwrap` asks for it."""
        return self.handler


def endpoint(
    *, body: type[BaseModel] | None = None, answer: Any = None, is_streamed: bool = False
) -> Callable[[Handler], Endpoint]:
    """Declare a handler as an endpoint; the first line of its docstring is the summary. Arguments: see `Endpoint`."""

    def declare(handler: Handler) -> Endpoint:
        summary = (handler.__doc__ or "").partition("\n")[0]
        return Endpoint(handler, summary, body, answer, is_streamed)

    return declare


def find_endpoint(route: Route) -> Endpoint:
    """Import the endpoint that a route names. Raises `ImportError` or `AttributeError` if there is none."""
    found: Endpoint = pkgutil.resolve_name(f"{_ROOM}.{route.endpoint}")
    return found
