"""A Jinja sandbox that ends slow templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.runtime.text_work import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Checks the time limit at each attribute or item lookup, and at each piece of output."""

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join the pieces that a template yields."""
        return "".join(_checked(pieces))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `obj.attribute`."""
        progress()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up `obj[argument]`."""
        progress()
        return super().getitem(obj, argument)


def _checked(pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        progress()
        yield piece
