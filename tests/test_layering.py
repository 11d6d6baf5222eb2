"""Rules that the source alone shows. import-linter, in pyproject.toml, checks which room may import which."""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "octavo"
FACADES = {"__init__", "__main__", "assets", "compatibility", "errors"}  # not layers, or below all of them
STANDARD_LIBRARY_ONLY = {"errors", "config", "sampling_params", "outputs", "data", "core"}


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(SOURCE).with_suffix("").parts[0], path) for path in sorted(SOURCE.rglob("*.py"))]


@dataclass(frozen=True, slots=True)
class Module:
    """Facts about a file. calls: names of functions that run data. functions: lines of bodies without docstrings."""

    imports: frozenset[str]
    calls: frozenset[str]
    attributes: frozenset[str]
    functions: tuple[tuple[str, int], ...]


@functools.cache
def read(path: Path) -> Module:
    imports, calls, attributes, functions = set(), set(), set(), []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                imports |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                assert node.level == 0, f"{path}: relative import"
                imports.add(node.module or "")
                imports |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "octavo"}
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in {"eval", "exec", "load"}:
                calls.add(ast.unparse(node.func))
            case ast.Attribute():
                attributes.add(node.attr)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions.append((node.name, length_of(node)))
    return Module(frozenset(imports), frozenset(calls), frozenset(attributes), tuple(functions))


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first, last = function.body[0], function.body[-1]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return (last.end_lineno or 0) - first.lineno + 1 - ((first.end_lineno or 0) - first.lineno + 1) * documented


def test_core_imports_only_standard_library():
    for room, path in modules():
        if room in STANDARD_LIBRARY_ONLY:
            outside = {name.split(".")[0] for name in read(path).imports} - {"octavo"}
            assert outside <= sys.stdlib_module_names, path
            assert not outside & {"time", "random", "os", "socket", "threading"} or room == "config", path


def test_every_package_has_import_layer():
    pyproject = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    known = {module.strip().split(".")[1] for layer in layers for module in layer.split("|")}
    assert {room for room, _ in modules()} - known <= FACADES


def test_no_module_unpickles_or_evaluates_data():
    forbidden = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for _, path in modules():
        assert not {name.split(".")[0] for name in read(path).imports} & forbidden, path
        assert not read(path).calls & {"eval", "exec", "torch.load"}, path


def test_engine_step_is_short_and_calls_in_order():
    tree = ast.parse((SOURCE / "engine" / "engine_core.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert len(functions["step"].body) - 1 <= 10
    for name, order in (
        ("step", ["self._submit_next", "self.executor.collect", "scheduler.update_from_output"]),
        ("_submit_next", ["self.scheduler.schedule", "self.executor.submit"]),
    ):
        text = ast.unparse(functions[name])
        places = [text.index(f"{called}(") for called in order]
        assert places == sorted(places)


def test_no_function_is_longer_than_60_lines():
    for _, path in modules():
        assert not [(name, length) for name, length in read(path).functions if length > 60], path


def test_only_environment_module_reads_environment_settings():
    """Another module only passes the environment on, to the engine process."""
    asked = {"environ", "environb", "getenv"}
    readers = {str(path.relative_to(SOURCE)) for _, path in modules() if read(path).attributes & asked}
    assert readers == {"config/environment.py", "engine/core_life.py"}
