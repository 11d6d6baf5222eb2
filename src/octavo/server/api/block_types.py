"""Types of the parts, blocks and items of a conversation: which are read, and which are refused by name."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

# Why fields of a type never change an answer here.
CACHE = "advice to a prompt cache: here every prefix is cached"
LABEL = "names or counts what the API's own server keeps"
# Why types are refused.
MEDIA = "this server reads text, no images, sound or files"


@dataclass(frozen=True, slots=True)
class Fields:
    """What an object may hold.

    read: fields that are read. harmless: name -> why it changes nothing. unsupported: name -> the values that change
    nothing; any other is refused.
    """

    read: frozenset[str]
    harmless: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, given: Mapping[str, Any], place: str) -> None:
        """Raise `RequestError` for a field that would change the answer and is not read; what is unknown is ignored."""
        further = given.keys() - self.read - self.harmless.keys()
        for name in further & self.unsupported.keys():
            if not any(given[name] == neutral for neutral in self.unsupported[name]):
                where = f"{place}.{name}"
                raise RequestError(f"{where} is not supported by this server", parameter=where)
        if unknown := further - self.unsupported.keys():
            logger.debug("unknown fields of %s are ignored: %r", place, sorted(unknown)[:5])


@dataclass(frozen=True, slots=True)
class BlockTypes:
    """What may stand in one place of a conversation. taken: type -> its fields. refused: type -> why."""

    taken: Mapping[str, Fields]
    refused: Mapping[str, str] = field(default_factory=dict)

    def check(self, block: Any, place: str, default: str | None = None) -> str:
        """Return the type of a block, whose fields are checked. default: what one without a type is.

        Raises `RequestError` for a type that is not taken.
        """
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
    """Describe a type; its own name is always read. unsupported: see `Fields`."""
    return Fields(frozenset({"type", *read}), harmless or {}, unsupported)


def text_field(given: Mapping[str, Any], name: str, place: str) -> str:
    """Return a field that must be text. Raises `RequestError`."""
    text = given.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{place}.{name} must be a string", parameter=f"{place}.{name}")
    return text
