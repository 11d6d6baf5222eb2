"""Resolves schema references."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote


def resolve(reference: str, root: Any) -> Any:
    """Return the target of a reference, such as `#/$defs/name`, or None if missing or external."""
    if not reference.startswith("#") or (len(reference) > 1 and reference[1] != "/"):
        return None
    for key in reference[1:].split("/")[1:]:
        plain = key.replace("~1", "/").replace("~0", "~")
        match root:
            case dict():
                root = root.get(plain, root.get(unquote(plain)))
            case list() if plain.isdecimal() and int(plain) < len(root):
                root = root[int(plain)]
            case _:
                return None
    return root
