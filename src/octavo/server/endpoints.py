"""Handlers of routes."""

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
    """A route's handler.

    handler: Takes the service, the HTTP request, and the checked body if `body` is not None.
    answer: Type of the answer, or None to omit the type from the OpenAPI document.
    query: Type whose fields are the query parameters, for the OpenAPI document. The handler checks them.
    may_be_text: True if the answer may also be plain text.
    """

    handler: Handler
    summary: str
    body: type[BaseModel] | None
    answer: Any
    is_streamed: bool
    query: type[BaseModel] | None
    may_be_text: bool

    @property
    def __wrapped__(self) -> Handler:
        """The handler, for `inspect.unwrap`."""
        return self.handler


def endpoint(
    *,
    body: type[BaseModel] | None = None,
    answer: Any = None,
    is_streamed: bool = False,
    query: type[BaseModel] | None = None,
    may_be_text: bool = False,
) -> Callable[[Handler], Endpoint]:
    """Return a decorator for a handler. The first line of the handler's docstring becomes the route's summary."""

    def declare(handler: Handler) -> Endpoint:
        summary = (handler.__doc__ or "").partition("\n")[0]
        return Endpoint(handler, summary, body, answer, is_streamed, query, may_be_text)

    return declare


def find_endpoint(route: Route) -> Endpoint:
    """Import a route's endpoint. Raises `ImportError` or `AttributeError`."""
    found: Endpoint = pkgutil.resolve_name(f"{_ROOM}.{route.endpoint}")
    return found
