"""The parts of uvicorn that octavo overrides and uses exist. An incompatible uvicorn fails here, with the name."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.http.connection import BoundedHttpProtocol
from octavo.server.serving import GracefulServer

if TYPE_CHECKING:
    from collections.abc import Iterator

OVERRIDES = {BoundedHttpProtocol: HttpToolsProtocol, GracefulServer: uvicorn.Server}
HELD = {
    "cycle": RequestResponseCycle,
    "_answered": RequestResponseCycle,
    "flow": FlowControl,
    "server_state": ServerState,
}
PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def attributes(of: type) -> Iterator[ast.Attribute]:
    """Return every attribute access `a.b` in a class's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(of)))
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def has(of: type) -> set[str]:
    """Return the attributes of a class's instances: methods, fields, and assignments in methods."""
    assigned = {
        node.attr
        for each in of.__mro__[:-1]
        if each.__module__.startswith(("uvicorn", "octavo"))
        for node in attributes(each)
        if is_self(node.value) and isinstance(node.ctx, ast.Store)
    }
    return set(dir(of)) | assigned


def own(of: type) -> set[str]:
    """Return the attributes that a class has and its base does not."""
    stored = {node.attr for node in attributes(of) if is_self(node.value) and isinstance(node.ctx, ast.Store)}
    return (set(vars(of)) | stored) - has(OVERRIDES[of])


@pytest.mark.parametrize("of", OVERRIDES)
def test_uvicorn_has_every_attribute_that_octavo_uses(of: type) -> None:
    base, private = OVERRIDES[of], own(of)
    used = {node.attr for node in attributes(of) if is_self(node.value)} - private
    called = {node.attr for node in attributes(of) if is_super(node.value)}
    assert len(used) > 3
    assert (used | called) - has(base) == set(), (
        f"{base.__qualname__} of uvicorn {version('uvicorn')} has these no more"
    )
    for node in attributes(of):
        if isinstance(node.value, ast.Attribute) and is_self(node.value.value) and node.value.attr in HELD:
            held = HELD[node.value.attr]
            assert node.attr in has(held), f"{held.__qualname__} of uvicorn {version('uvicorn')} has no {node.attr}"


@pytest.mark.parametrize("of", OVERRIDES)
def test_overrides_have_same_parameters_as_uvicorn_methods(of: type) -> None:
    base = OVERRIDES[of]
    overridden = [name for name in vars(of) if callable(getattr(base, name, None)) and not name.startswith("__")]
    assert overridden
    for name in overridden:
        ours, theirs = (list(inspect.signature(getattr(each, name)).parameters) for each in (of, base))
        assert ours == theirs, f"{base.__qualname__}.{name} of uvicorn {version('uvicorn')}"


def test_installed_uvicorn_is_within_pinned_range() -> None:
    needed = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["server"]
    (wanted,) = (each.specifier for each in map(Requirement, needed) if each.name == "uvicorn")
    assert any(each.operator in {"<", "<="} for each in wanted), "no upper version"
    assert version("uvicorn") in wanted, "look at octavo.http.connection beside this uvicorn, then raise the bound"
