"""Headers for clients."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_OF_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
_OF_ROUTER = frozenset({b"x-request-id", b"date", b"server"})
_MAX_DIGITS = 9
_MAX_DATE_BYTES = 64


def of_connection(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the names of headers that concern only the connection (RFC 9110, section 7.6.1)."""
    named = {each.strip().lower() for name, value in headers if name == b"connection" for each in value.split(b",")}
    return _OF_CONNECTION | named


def headers_for_client(
    headers: list[tuple[bytes, bytes]], engine_url: str, *, has_length: bool
) -> list[tuple[bytes, bytes]]:
    """Return the headers of an engine's answer, changed for the client.

    - Removed: headers that concern only the connection, headers that the router sets (`X-Request-Id`, `Date`,
      `Server`), and an invalid `Retry-After`.
    - If a `Location` begins with the engine's address, the address is removed.

    headers: Names in lower case.
    has_length: True to keep `Content-Length`.
    """
    origin = engine_url.encode()
    dropped = of_connection(headers) | _OF_ROUTER | (set() if has_length else {b"content-length"})
    return [
        (name, value.removeprefix(origin) if name == b"location" else value)
        for name, value in headers
        if name not in dropped and not (name == b"retry-after" and retry_after_s(value) is None)
    ]


def retry_after_s(value: bytes) -> float | None:
    """Return a `Retry-After` in seconds: 0 for a past date, None for an invalid value."""
    text = value.strip()
    if text.isdigit():
        return float(text) if len(text) <= _MAX_DIGITS else None
    if len(text) > _MAX_DATE_BYTES:
        return None
    try:
        date = parsedate_to_datetime(text.decode("latin-1"))
    except (ValueError, OverflowError):  # a year exceeds a C integer
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max((date - datetime.now(UTC)).total_seconds(), 0.0)
