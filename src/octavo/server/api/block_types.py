"""Checks types and fields of objects in a conversation, such as content blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

CACHE = "hint for a prompt cache: this server caches every prefix"
LABEL = "name or number of data that the API's own server stores"
MEDIA = "this server reads text only, no images, sound or files"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of objects of one type.

    read: Names of the fields that this server uses.
    harmless: Maps an ignored field to the reason for ignoring the field.
    unsupported: Maps a field to the allowed values, which turn the field off.
    """

    read: frozenset[str]
    harmless: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, given: Mapping[str, Any], place: str) -> None:
        """Raise `RequestError` if an unsupported field has a value that is not allowed. place: The object's path."""
        further = given.keys() - self.read - self.harmless.keys()
        for name in further & self.unsupported.keys():
            if not any(given[name] == neutral for neutral in self.unsupported[name]):
                where = f"{place}.{name}"
                raise RequestError(f"{where} is not supported by this server", parameter=where)
        if unknown := further - self.unsupported.keys():
            logger.debug("unknown fields of %s are ignored: %r", place, sorted(unknown)[:5])


@dataclass(frozen=True, slots=True)
class BlockTypes:
    """The object types that one place of a request accepts.

    taken: Maps an accepted type to its fields. refused: Maps a refused type to the reason.
    """

    taken: Mapping[str, Fields]
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, block: Any, place: str, default: str | None = None) -> str:
        """Check an object and return its type. default: Type of an object without the field `type`."""
        kind = block.get("type", default) if isinstance(block, dict) else None
        fields = self.taken.get(kind) if isinstance(kind, str) else None
        if isinstance(kind, str) and fields is not None:
            fields.check(block, place)
            return kind
        if isinstance(kind, str) and kind in self.refused:
            message = f"{place} is of type {kind!r}, which is not supported by this server: {self.refused[kind]}"
        else:
            got = f", got type {kind[:40]!r}" if isinstance(kind, str) else ""
            message = f"{place} must be an object of type {' or '.join(self.taken)}{got}"
        raise RequestError(message, parameter=place)


def fields(*read: str, harmless: Mapping[str, str] | None = None, **unsupported: tuple[Any, ...]) -> Fields:
    """Make `Fields`. The name `type` is added to `read`."""
    return Fields(frozenset({"type", *read}), harmless or {}, unsupported)


def text_field(given: Mapping[str, Any], name: str, place: str) -> str:
    """Return a string field."""
    text = given.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{place}.{name} must be a string", parameter=f"{place}.{name}")
    return text
