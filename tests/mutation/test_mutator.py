"""The mutants of some code, the choice of mutants to judge, and that a sweep finds out which are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutation.mutator import Module
from mutation.rooms import BY_NAME, ROOMS, paths_named, room_of_day
from mutation.selection import key_of, of_changed_lines, read_equivalent

TESTS = Path(__file__).resolve().parents[1]
NAME = "octavo.core.stop"  # any module: the source is given


def changes(source, name=NAME):
    return [(each.before, each.after) for each in Module(name, source).mutants()]


def body(*lines):
    return "\n    ".join(["def f(a, b):", *lines])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a(b)", ["pass"]),
        ("return a", ["pass"]),
        ("return a < b", ["pass", "return a <= b", "return a >= b"]),
        ("return a is b", ["pass", "return a is not b"]),
        ("return a + 1", ["pass", "return a - 1", "return a + 2", "return a + 0"]),
        ("return a and b", ["pass", "return a or b", "return b", "return a"]),
        ("return not a", ["pass", "return a"]),
        ("return True", ["pass", "return False"]),
        ("return a if b else 'text'", ["pass", "return a", "return 'text'", "return a if not b else 'text'"]),
        ("return [x for x in a if x]", ["pass", "return [x for x in a if not x]"]),
        ("return a[b:]", ["pass", "return a[b + 1:]"]),
        ("return range(a)", ["pass", "return range(a + 1)"]),
        ("return min(a, b)", ["pass", "return max(a, b)"]),
        ("return sorted(a, key=b)", ["pass", "return list(a)"]),
        ("a.x += b", ["pass", "a.x -= b"]),
        ("assert a", ["assert not a"]),
        ("return None", []),
        ("del a", []),
        ("del a[b]", ["pass"]),
        ("x: int", []),
        ('"""Text."""', []),
    ],
)
def test_statement_yields_expected_mutants(line, expected):
    assert changes(body(line)) == [(line if line != '"""Text."""' else "", after) for after in expected]


def test_async_functions_and_match_cases_are_mutated():
    source = (
        "async def f(a):\n    async for x in a:\n        await x\n    match a:\n        case 1 if x:\n            a()\n"
    )
    found = Module(NAME, source).mutants()
    assert {each.function for each in found} == {"f"}
    assert [(each.before, each.after) for each in found] == [
        ("async for x in a:", "pass"),
        ("await x", "pass"),
        ("case 1 if x:", "case 2 if x:"),
        ("case 1 if x:", "case 0 if x:"),
        ("case 1 if x:", "case 1 if not x:"),
        ("a()", "pass"),
    ]
    assert [each.lines for each in found[2:]] == [range(5, 6)] * 3 + [range(6, 7)]


def test_compound_statement_mutants_are_named_by_first_line():
    found = changes(body("if a:", "    b()", "else:", "    a()", "while b:", "    break"))
    assert found == [
        ("if a:", "if not a:"),
        ("b()", "pass"),
        ("a()", "pass"),
        ("while b:", "pass"),
        ("while b:", "while not b:"),
        ("break", "pass"),
    ]


def test_types_imports_and_decorators_are_not_mutated():
    assert not changes("if TYPE_CHECKING:\n    N = 1\nimport a\n@f(True)\nclass A(Base[1]):\n    x: Literal[1]\n")
    assert changes("def f(a: Literal[1] = 2) -> Literal[3]: ...") == [
        ("def f(a: Literal[1]=2) -> Literal[3]:", "def f(a: Literal[1]=3) -> Literal[3]:"),
        ("def f(a: Literal[1]=2) -> Literal[3]:", "def f(a: Literal[1]=1) -> Literal[3]:"),
    ]


def test_module_level_mutants_have_no_function_name():
    source = "N = 1\nclass A:\n    n = 2\n    def f(self, a=3):\n        def g():\n            return 4\n"
    found = Module(NAME, source).mutants()
    assert [each.function for each in found] == [""] * 4 + ["A.f"] * 5
    assert [found[4].lines, found[-1].lines] == [range(4, 7), range(6, 7)]


def test_mutant_patches_core_function_in_place(monkeypatch):
    from octavo.core.kv.content_pool import ContentPool
    from octavo.core.kv.host_block_pool import HostBlockPool

    function = ContentPool.take
    monkeypatch.setattr(function, "__code__", function.__code__)  # restored after the test
    module = Module("octavo.core.kv.content_pool")
    [mutant] = [
        each
        for each in module.mutants()
        if each.function == "ContentPool.take" and each.after == "if count >= self.num_free_blocks:"
    ]
    assert HostBlockPool(2).take(2) == [0, 1]
    mutant.patch()
    assert HostBlockPool(2).take(2) is None
    assert HostBlockPool(2).take(1) == [0]


@pytest.mark.sweep(16)
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_mutated_function_is_found_by_qualified_name(room):
    for module in room.read_modules():
        one_of_each = {each.function: each for each in module.mutants() if each.function}
        for mutant in one_of_each.values():
            assert mutant.function_object().__qualname__ == mutant.function


def test_mutants_do_not_change_syntax_tree():
    module = Module("octavo.core.scheduler")
    mutants = module.mutants()
    mutants[100].compiled()
    assert [key_of(each) for each in module.mutants()] == [key_of(each) for each in mutants]


def test_diff_selects_mutants_of_changed_statements():
    mutants = Module(NAME, "def f(a):\n    if (a and\n            b):\n        c()\n    d()\n").mutants()
    diff = "--- a/stop.py\n+++ b/src/octavo/core/stop.py\n@@ -3,0 +3 @@ def f\n+            b):\n@@ -9,2 +9,0 @@\n"
    assert {each.before for each in of_changed_lines(mutants, diff)} == {"if a and b:"}
    assert of_changed_lines(mutants, diff.replace("stop.py", "policy.py")) == []
    assert of_changed_lines(mutants, diff.replace("core", "router")) == []  # another file with that name


@pytest.mark.sweep(16)
@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_listed_equivalent_mutants_exist_and_have_reasons(room):
    known = read_equivalent(room.equivalent.read_text())
    files = {file for file, *_ in known}
    modules = [module for module in room.read_modules() if module.file in files]
    assert known.keys() <= {key_of(mutant) for module in modules for mutant in module.mutants()}
    assert all(len(reason) > 20 for reason in known.values())


def test_mutated_packages_list_existing_modules_and_tests():
    assert {module.file for module in BY_NAME["models"].read_modules()} == {"gguf_file.py", "rope.py"}
    policies = [module for module in BY_NAME["router"].read_modules() if module.file.startswith("policies/")]
    assert [policies[0].file, policies[0].name] == ["policies/__init__.py", "octavo.router.policies"]
    for room in ROOMS:
        for path in (*room.tests, *(each.removeprefix("tests/").partition("::")[0] for each in room.left_out)):
            assert (TESTS / path).exists(), f"{room.name}: {path}"


def test_files_are_selected_by_path_suffix():
    def found(*names):
        return {(room.name, path.name) for room, paths in paths_named(ROOMS, names) for path in paths}

    assert found("limiter.py", "router/proxy.py") == {("http", "limiter.py"), ("router", "proxy.py")}
    assert found("connection.py") == {("http", "connection.py"), ("router", "connection.py")}
    assert found("connection.py", "core/stop.py") > found("core/stop.py") == {("core", "stop.py")}
    with pytest.raises(ValueError, match=r"router/limiter\.py is no file of core, models"):
        found("stop.py", "router/limiter.py")


def test_days_rotate_through_all_mutated_packages():
    days = [f"2026-{day:03}" for day in range(1, 1 + len(ROOMS))]
    assert {room_of_day(day).name for day in days} == set(BY_NAME)
    assert room_of_day(f"2026-{1 + len(ROOMS):03}") == room_of_day("2026-001")


@pytest.mark.parametrize("day", ["2026", "2026-000", "2026-367", "26-007", "2026-7th"])
def test_invalid_day_is_refused(day):
    with pytest.raises(ValueError, match="such as 2026-007"):
        room_of_day(day)


WEAK_TEST = """
from octavo.core.kv.host_block_pool import HostBlockPool

def test_take():
    pool = HostBlockPool(3)
    assert pool.take(2) == [0, 1]
    pool.release([0])
    assert pool.take(9) is None
"""
SWEEP = """
import sys
from pathlib import Path
from mutation.checks import Judges
from mutation.mutator import Module
from mutation.sweep import Sweep

module = Module("octavo.core.kv.content_pool")
functions = {"ContentPool.take", "ContentPool.cached_blocks", ""}
mutants = [each for each in module.mutants() if each.function in functions]
for verdict in Sweep([module], Judges((sys.argv[1],), Path(sys.argv[1]))).judge(mutants):
    print(verdict.killed_by, "|", verdict.num_checks, "|", verdict.mutant.function, "|", verdict.mutant.after)
"""


@pytest.mark.turn(8)
def test_sweep_distinguishes_killed_surviving_and_unreached_mutants(tmp_path):
    (tmp_path / "test_weak.py").write_text(WEAK_TEST)
    command = [sys.executable, "-c", SWEEP, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent, env=environment)
    assert done.returncode == 0, done.stderr
    outcomes = {}
    for line in done.stdout.splitlines():
        killed_by, num_checks, function, after = line.split(" | ")
        outcomes[function, after] = (killed_by.rpartition("::")[2], int(num_checks))
    assert outcomes["ContentPool.take", "if count <= self.num_free_blocks:"] == ("test_take", 1)
    assert outcomes["ContentPool.take", "if count >= self.num_free_blocks:"] == ("None", 1)  # survives
    assert outcomes["ContentPool.cached_blocks", "pass"] == ("None", 0)  # is not reached
