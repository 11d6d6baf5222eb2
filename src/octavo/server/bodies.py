"""Read and check request bodies."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from octavo.errors import RequestError
from octavo.http.body import read_timeout, received
from octavo.http.errors import MediaTypeError
from octavo.http.kv_transfer import read_kv_transfer
from octavo.runtime.text_work import entries_of_bytes, run_text_work
from octavo.server.json_structure import check_structure

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from octavo.server.service import Service

Schema = TypeVar("Schema", bound=BaseModel)
T = TypeVar("T")
_HUGE = 2**64


async def read_body(
    request: Request, schema: type[Schema], *, is_count: bool = False, any_type: bool = False
) -> Schema:
    """Read a JSON body and check it against `schema`.

    Sets `deadline` (on the event loop's clock), `is_count`, `num_body_bytes` and `kv_transfer` in `request.state`.
    Raises `RequestError`, `DeadlineError` and the errors of `received`.

    is_count: True if the request only counts tokens.
    any_type: True to accept any Content-Type, except from browsers.
    """
    service: Service = request.app.state.service
    config, state = service.config, request.state
    if not any_type or "origin" in request.headers:  # only browsers send Origin
        _check_media_type(request.headers.get("content-type"))
    state.kv_transfer = read_kv_transfer(request.headers, service.engine.client.capacity.role)
    async with received(request, config, service.limiter.body_bytes, service.timeouts) as chunks:
        state.is_count = is_count
        state.num_body_bytes = sum(map(len, chunks))
        timeout_s = read_timeout(request, config.request_timeout_s)
        state.deadline = asyncio.get_running_loop().time() + timeout_s
        return await look_at(request, lambda: parse(schema, _joined(chunks)))


def _joined(chunks: list[bytes]) -> bytes:
    body = b"".join(chunks)
    chunks.clear()
    return body


def _check_media_type(given: str | None) -> None:
    """Accept only JSON, because any web page can send forms or plain text without a CORS preflight request."""
    if given is None or given.partition(";")[0].strip().lower() != "application/json":
        said = "no Content-Type" if given is None else f"Content-Type {given[:60]!r}"
        raise MediaTypeError(f"the body must be sent as Content-Type: application/json, got {said}")


async def look_at(request: Request, work: Callable[[], T]) -> T:
    """Return the result of `work`, which reads the body of `request`. If the body is large, `work` runs on a thread."""
    state = request.state
    entries = entries_of_bytes(state.num_body_bytes)
    return await run_text_work(
        request.app.state.service.engine.text,
        entries,
        work,
        tenant=state.tenant.name,
        deadline=state.deadline,
        is_count=state.is_count,
    )


def parse(schema: type[Schema], body: bytes) -> Schema:
    """Parse and validate a JSON object. NaN and Infinity are invalid.

    Raises `RequestError` for the first invalid field.
    """
    check_structure(body)
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        name = _not_finite(body)
        message = f"the body is not valid JSON: {error}"
        raise RequestError(message if name is None else f"{name}: {message}", parameter=name) from None
    if not isinstance(values, dict):
        raise RequestError(f"the body must be a JSON object, got {type(values).__name__}")
    for name, value in values.items():
        if isinstance(value, int | float) and not -_HUGE < value < _HUGE:
            raise RequestError(f"{name} is out of range", parameter=name)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = field_name(first["loc"])
        raise RequestError(f"{name}: {first['msg']}", parameter=name) from None


def _not_finite(body: bytes) -> str | None:
    """Return the name of the first field with a number that is not finite, such as 1e999."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name, value in values.items() if isinstance(values, dict) else ():
        left: list[Any] = [value]
        while left:
            match left.pop():
                case float() as number if not math.isfinite(number):
                    return str(name)
                case dict() as inner:
                    left += inner.values()
                case list() as inner:
                    left += inner
    return None


def field_name(location: tuple[int | str, ...]) -> str:
    """Return a Pydantic location as a path, such as messages[0].content. Names of types are omitted."""
    name = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in {"str", "int", "float", "bool"}:
            name += f".{part}"
    return name
