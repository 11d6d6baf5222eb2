"""Imports run one way: read from the source, whether at run time or for types only."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "octavo"
DATA = {
    "errors",
    "faults",
    "capacity",
    "config",
    "sampling_params",
    "request",
    "outputs",
    "scheduler_output",
    "model_output",
    "events",
    "glimpse",
    "metrics",
    "logs",
}
# room -> rooms it may import, itself included; `grammars`, which reads by `gbnf`, and `turns` are tools of both sides
MAY_IMPORT = {
    "data": DATA,
    "core": DATA | {"core"},
    "gbnf": {"gbnf"},
    "lark": {"lark"},
    "turns": DATA | {"turns"},
    "grammars": DATA | {"gbnf", "grammars", "lark", "turns"},
    "engine": DATA | {"core", "engine", "grammars", "turns"},
    "journal": DATA | {"core", "journal"},
    "server": DATA | {"core", "engine", "server", "grammars", "lark", "journal"},  # which explains
    "kernels": DATA | {"kernels", "_kernels"},
    "models": DATA | {"kernels", "models"},
    "speculative": DATA | {"speculative"},
    "worker": DATA | {"kernels", "models", "worker", "grammars", "speculative"},
}
# Only these see both sides, and nobody imports them but each other.
JOINTS = {
    "build", "launch", "engine_main", "llm", "cli", "doctor", "assets", "__main__", "__init__", "compatibility",
    "progress", "garbage", "perplexity",
}  # fmt: skip
STANDARD_LIBRARY_ONLY = DATA | {"core", "gbnf", "lark"}
NO_TORCH = DATA | {
    "gbnf",
    "lark",
    "grammars",
    "turns",
    "core",
    "engine",
    "journal",
    "server",
    "cli",
    "assets",
    "progress",
    "garbage",
    "perplexity",
    "compatibility",
    "launch",
    "engine_main",
}


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(SOURCE).with_suffix("").parts[0], path) for path in sorted(SOURCE.rglob("*.py"))]


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "octavo"}
    return names


@pytest.mark.parametrize(("room", "path"), modules(), ids=str)
def test_imports_run_one_way(room, path):
    if room in JOINTS:
        return
    allowed = MAY_IMPORT["data" if room in DATA else room]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "octavo" and len(parts) > 1:
            assert parts[1] in allowed | {"__version__"}, f"{path} imports {name}"


@pytest.mark.parametrize(("room", "path"), modules(), ids=str)
def test_the_core_is_standard_library_and_the_engine_knows_no_torch(room, path):
    outside = {name.split(".")[0] for name in imports(path)} - {"octavo"}
    if room in STANDARD_LIBRARY_ONLY:
        assert outside <= sys.stdlib_module_names
        assert not outside & {"time", "random", "os", "socket", "threading"} or room == "config"
    if room in NO_TORCH:
        assert "torch" not in outside, f"{path} imports torch"


def test_every_room_is_known():
    assert {room for room, _ in modules()} <= set(MAY_IMPORT) | DATA | JOINTS


def test_no_code_runs_data():
    forbidden = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    for _, path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not {name.split(".")[0] for name in imports(path)} & forbidden, path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "torch.load"}, f"{path}: {called}"


def test_the_step_reads_in_one_look():
    tree = ast.parse((SOURCE / "engine" / "engine_core.py").read_text(encoding="utf-8"))
    step = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step")
    assert len(step.body) - 1 <= 10
    text = ast.unparse(step)
    order = ["scheduler.schedule", "executor.submit", "executor.collect", "scheduler.update_from_output"]
    places = [text.index(f"self.{name}(") for name in order]
    assert places == sorted(places)


def test_no_function_over_60_lines():
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
    }
    assert readers == {"config.py", "engine/remote_engine.py"}
