"""A Jinja sandbox that ends slow templates."""

from __future__ import annotations

from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.runtime.text_work import progress


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Checks the time limit at each attribute or item lookup. Every loop contains lookups."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `obj.attribute`."""
        progress()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up `obj[argument]`."""
        progress()
        return super().getitem(obj, argument)
