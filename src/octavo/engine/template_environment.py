"""Jinja's sandbox for templates whose time is bounded: a conversation of many messages may be walked in any way."""

from __future__ import annotations

from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.runtime.text_work import progress


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Ends a template where nobody waits for it, or it takes too long: no loop does without looking something up."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up `obj.attribute`."""
        progress()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up `obj[argument]`."""
        progress()
        return super().getitem(obj, argument)
