"""The laws of the house that the source alone shows. Which room may import which: import-linter, in pyproject.toml."""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "octavo"
FACADES = {"__init__", "__main__", "assets", "compatibility", "errors"}  # beside the layers, or below all of them
STANDARD_LIBRARY_ONLY = {"errors", "config", "sampling_params", "outputs", "data", "core"}


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(SOURCE).with_suffix("").parts[0], path) for path in sorted(SOURCE.rglob("*.py"))]


LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.FunctionDef, ast.AsyncFunctionDef)


@functools.lru_cache(maxsize=1)  # all of them would be 200 MB
def nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, LOOKED_AT)]


@functools.cache
def imports(path: Path) -> frozenset[str]:
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "octavo"}
    return frozenset(names)


def test_the_core_is_standard_library():
    for room, path in modules():
        if room in STANDARD_LIBRARY_ONLY:
            outside = {name.split(".")[0] for name in imports(path)} - {"octavo"}
            assert outside <= sys.stdlib_module_names, path
            assert not outside & {"time", "random", "os", "socket", "threading"} or room == "config", path


def test_every_room_has_a_layer():
    pyproject = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    known = {module.strip().split(".")[1] for layer in layers for module in layer.split("|")}
    assert {room for room, _ in modules()} - known <= FACADES


def test_no_code_runs_data():
    forbidden = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for _, path in modules():
        assert not {name.split(".")[0] for name in imports(path)} & forbidden, path
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = ast.unparse(node.func) if last_name(node.func) in {"eval", "exec", "load"} else ""
                assert called not in {"eval", "exec", "torch.load"}, f"{path}: {called}"


def last_name(function: ast.Name | ast.Attribute) -> str:
    """Return what stands behind the last dot: to write all calls out takes seconds."""
    return function.id if isinstance(function, ast.Name) else function.attr


def test_the_step_reads_in_one_look():
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


def test_no_function_over_60_lines():
    for _, path in modules():
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                signature = node.body[0].lineno - node.lineno
                documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
                docstring = (node.body[0].end_lineno or 0) - node.body[0].lineno + 1 if documented else 0
                assert length - signature - docstring <= 60, f"{path}: {node.name} has {length} lines"


def test_settings_are_read_from_the_environment_in_one_place():
    """Another module only hands the environment on, to the engine process."""
    readers = {
        str(path.relative_to(SOURCE))
        for _, path in modules()
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
    }
    assert readers == {"config/environment.py", "engine/remote_engine.py"}
