"""The names in the documents exist: classes, methods, fields, statuses, modules, files, links, flags and figures.

There is no list of names here. The documents are parsed, and the code is parsed or imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer

from octavo.models.family_parts import family_parts
from octavo.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "octavo"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"octavo(?:\.\w+)+")
MEMBER = re.compile(r"([A-Z]\w*)\.(\w+)(?:\(\))?")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")


def every_page(function):
    return pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())(function)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def table(text: str) -> list[list[str]]:
    """Return the cells of a page's table rows, without header rows and rules."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row] for row in rows]
    rules = {index for index, row in enumerate(cells) if all(set(cell) <= set("-:") for cell in row)}
    return [row for index, row in enumerate(cells) if index not in rules and index + 1 not in rules]


# --- the code, read from its source


@dataclass
class Class:
    bases: list[str]
    methods: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


@cache
def classes() -> dict[str, list[Class]]:
    """Return every class of the package by its simple name, with its own members."""
    found: dict[str, list[Class]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(read_class(node))
    return found


def read_class(node: ast.ClassDef) -> Class:
    result = Class([ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases])
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            is_property = any("property" in ast.unparse(each) for each in item.decorator_list)
            (result.fields if is_property else result.methods).add(item.name)
            result.fields |= {
                target.attr
                for statement in ast.walk(item)
                if isinstance(statement, ast.Assign | ast.AnnAssign)
                for target in written(statement)
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
        elif isinstance(item, ast.Assign | ast.AnnAssign):
            result.fields |= {target.id for target in written(item) if isinstance(target, ast.Name)}
    return result


def written(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]


def members(name: str, kind: str) -> set[str]:
    """Return the methods or fields of a class, including inherited ones."""
    return {
        member
        for each in classes().get(name, [])
        for member in getattr(each, kind) | {m for base in each.bases if base != name for m in members(base, kind)}
    }


def assert_method(class_name: str, method: str) -> None:
    assert class_name in classes(), f"there is no class {class_name}"
    assert method in members(class_name, "methods"), f"{class_name} has no method {method}"


def assert_member(class_name: str, member: str) -> None:
    assert class_name in classes(), f"there is no class {class_name}"
    known = members(class_name, "fields") | members(class_name, "methods")
    assert member in known, f"{class_name} has no {member}"


def resolve(name: str) -> object:
    """Import a dotted name. Attributes that only instances have are looked up in the source."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module_name = ".".join(parts[:length])
        try:
            value: object = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not (error.name and module_name.startswith(error.name)):
                raise
            continue
        for index, part in enumerate(parts[length:], start=length):
            if not hasattr(value, part) and inspect.isclass(value) and index == len(parts) - 1:
                assert_member(value.__name__, part)
                return None
            assert hasattr(value, part), f"{'.'.join(parts[:index])} has no {part}"
            value = getattr(value, part)
        return value
    raise AssertionError(f"{name} cannot be imported")


@cache
def imports_of_room(room: str) -> set[str]:
    """Return the dotted names of all octavo modules that a module or package imports."""
    base = SOURCE.joinpath(*room.split(".")[1:])
    paths = list(base.rglob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
    names: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    return names


def does_import(room: str, target: str) -> bool:
    return any(name == target or name.startswith(f"{target}.") for name in imports_of_room(room))


# --- diagrams


@cache
def diagrams(kind: str) -> list[list[str]]:
    """Return the lines of every Mermaid diagram of a kind in all documents, without their first lines."""
    found = []
    for page in PAGES:
        for text in blocks(page, "mermaid"):
            first, *lines = [line.strip() for line in text.splitlines() if line.strip()]
            if first.split()[0] == kind:
                found.append([line for line in lines if not line.startswith(("%%", "direction "))])
    return found


def test_every_diagram_kind_exists_and_is_parsed():
    kinds = {text.split()[0] for page in PAGES for text in blocks(page, "mermaid")}
    assert kinds == {"flowchart", "classDiagram", "sequenceDiagram", "stateDiagram-v2"}
    assert all(diagrams(kind) for kind in kinds)


@pytest.mark.parametrize("lines", diagrams("classDiagram"))
def test_class_diagrams_match_classes(lines):
    current = ""
    for line in lines:
        if opened := re.fullmatch(r"class (\w+)( \{)?", line):
            assert opened[1] in classes(), f"there is no class {opened[1]}"
            current = opened[1] if opened[2] else ""
        elif line == "}":
            current = ""
        elif method := re.fullmatch(r"\+(\w+)\(\)", line):
            assert_method(current, method[1])
        elif named := re.fullmatch(r"\+(\w+)( .+)?", line):
            assert named[1] in members(current, "fields"), f"{current} has no field {named[1]}"
        else:
            arrow = re.fullmatch(r"(\w+) (-->|<\|--|<\|\.\.) (\w+)", line)
            assert arrow, f"not understood: {line}"
            left, kind, right = arrow.groups()
            assert {left, right} <= set(classes()), line
            if kind == "<|--":
                assert any(left in each.bases for each in classes()[right]), f"{right} does not inherit from {left}"
            if kind == "<|..":
                assert members(left, "methods") <= members(right, "methods"), f"{right} does not implement {left}"


@pytest.mark.parametrize("lines", diagrams("flowchart"))
def test_layer_diagrams_match_imports(lines):
    node = r"(\w+)(?:\[\"([\w.]+)\"\])?"
    modules: dict[str, str] = {}
    arrows = []
    for line in lines:
        found = re.fullmatch(f"{node}(?: --> {node})?", line)
        assert found, f"not understood: {line}"
        source, source_module, target, target_module = found.groups()
        modules |= {name: module for name, module in ((source, source_module), (target, target_module)) if module}
        if target:
            arrows.append((source, target))
    assert arrows
    for module in modules.values():
        assert isinstance(resolve(module), ModuleType)
    for source, target in arrows:
        assert does_import(modules[source], modules[target]), f"{modules[source]} does not import {modules[target]}"
        assert not does_import(modules[target], modules[source]), f"{modules[target]} imports {modules[source]}"


@pytest.mark.parametrize("lines", diagrams("sequenceDiagram"))
def test_sequence_diagrams_call_existing_methods(lines):
    participants: dict[str, str] = {}
    for line in lines:
        if participant := re.fullmatch(r"participant (\w+) as (\w+)", line):
            assert participant[2] in classes(), f"there is no class {participant[2]}"
            participants[participant[1]] = participant[2]
        elif call := re.fullmatch(r"(\w+)->>(\w+): (\w+)\(\)", line):
            assert call[1] in participants, line
            assert_method(participants[call[2]], call[3])
        else:
            answer = re.fullmatch(r"(\w+)-->>(\w+): (\w+)", line)
            assert answer, f"not understood: {line}"
            assert {answer[1], answer[2]} <= set(participants), line
            assert answer[3] in classes(), f"there is no class {answer[3]}"


@pytest.mark.parametrize("lines", diagrams("stateDiagram-v2"))
def test_state_diagrams_match_request_statuses(lines):
    from octavo.data.request import RequestStatus

    states: set[str] = set()
    for line in lines:
        if alone := re.fullmatch(r"\w+", line):
            states.add(alone[0])
            continue
        arrow = re.fullmatch(r"(\[\*\]|\w+) --> (\[\*\]|\w+)(?: : (\w+)\.(\w+))?", line)
        assert arrow, f"not understood: {line}"
        states |= {arrow[1], arrow[2]} - {"[*]"}
        if arrow[3]:
            assert_method(arrow[3], arrow[4])
        if arrow[2] == "[*]":
            assert RequestStatus[arrow[1]].is_finished
    assert states == {status.name for status in RequestStatus}


# --- names in prose and tables


@every_page
def test_dotted_names_can_be_imported(page):
    for name in {name for code in INLINE.findall(prose(page)) for name in DOTTED.findall(code)}:
        if name != "octavo._kernels":  # not compiled on every machine
            resolve(name)


@every_page
def test_named_members_of_classes_exist(page):
    text = prose(page)
    if page.name == "names.md":  # the first columns have names of other engines
        text = "\n".join("|".join(row[2:]) for row in table(text))
    for code in INLINE.findall(text):
        found = MEMBER.fullmatch(code)
        if found and found[1] in classes():
            assert_member(found[1], found[2])


@every_page
def test_named_paths_exist(page):
    if page.name == "CHANGELOG.md":
        return  # it also names files of the past
    folders = "|".join(
        path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name != "build"
    )
    for code in INLINE.findall(prose(page)):
        for path in re.findall(rf"(?<![\w./])(?:{folders})/[\w./*-]+", code):
            assert [*ROOT.glob(path.rstrip("."))], f"there is no {path}"


@every_page
def test_named_tests_exist(page):
    for path, name in {pair for code in INLINE.findall(prose(page)) for pair in re.findall(r"(\S+\.py)::(\w+)", code)}:
        functions = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        assert name in {each.name for each in functions if isinstance(each, ast.FunctionDef)}, f"{path} has no {name}"


def test_names_page_maps_180_distinct_terms_to_octavo_names():
    text = (DOCS / "names.md").read_text(encoding="utf-8")
    built = [row for row in table(text.split("\n## Not built yet\n")[0]) if len(row) == 4]
    terms = [term for row in built for term in INLINE.findall(row[0])]
    assert len(terms) >= 180
    assert len(terms) == len(set(terms)), f"twice: {sorted({term for term in terms if terms.count(term) > 1})}"
    for _, _, ours, _ in built:
        assert re.fullmatch(r"`octavo(\.\w+)+`", ours), ours


def test_compatibility_page_lists_accepted_arguments():
    from octavo.compatibility import ACCEPTED_ARGUMENTS

    text = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    listed = {
        name: rest for name, *rest in table(section(text, "Arguments accepted at values that change nothing here"))
    }
    assert listed == {
        f"`{name}`": [
            "any" if accepted.values is None else ", ".join(f"`{value!r}`" for value in accepted.values),
            accepted.reason,
        ]
        for name, accepted in ACCEPTED_ARGUMENTS.items()
    }


def test_compatibility_page_lists_arguments_of_LLM():
    from octavo import LLM

    text = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    listed = {row[0]: row[1] for row in table(section(text, "Arguments of LLM that do the same"))}
    parameters = inspect.signature(LLM).parameters.values()
    assert listed == {
        f"`{each.name}`": f"`{str(each.default)!r}`" if isinstance(each.default, str) else f"`{each.default!r}`"
        for each in parameters
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    }


def test_model_guide_names_every_supported_architecture():
    from octavo.models.registry import FAMILIES
    from octavo.models.text_part import TEXT_PARTS

    rows = table(section((DOCS / "your_own_model.md").read_text(encoding="utf-8"), "What runs"))
    named = {name for runs, *_ in rows for name in re.findall(r"`(\w+For\w+)`", runs)}
    assert named == {*FAMILIES, *TEXT_PARTS}


# --- files and links


def targets(page: Path) -> set[tuple[Path, str]]:
    """Return the files that a page links to, with their anchors."""
    links = [link for link in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]
    return {
        ((page.parent / path.replace("%20", " ")).resolve() if path else page, anchor)
        for path, _, anchor in (link.partition("#") for link in links)
    }


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_relative_links_resolve(page):
    for path, anchor in targets(page):
        assert path.exists(), f"{page.relative_to(ROOT)} links to {path}, which is not there"
        if anchor:
            assert anchor in anchors(path), f"{path} has no heading #{anchor}"


def test_chinese_tour_names_only_files_of_english_tour():
    def files(page):
        return {path for path, _ in targets(page) if path.suffix in {".py", ".h"}}

    assert files(DOCS / "tour.md") >= files(DOCS / "zh" / "tour.md")
    assert len(files(DOCS / "zh" / "tour.md")) >= 40


# --- commands and snippets


@every_page
def test_python_snippets_compile_and_use_existing_names(page):
    for text in blocks(page, "python"):
        tree = ast.parse(text)
        compile(tree, str(page), "exec")
        names: dict[str, object] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "octavo":
                names |= {alias.asname or alias.name: resolve(f"{node.module}.{alias.name}") for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                parameters = inspect.signature(names[node.func.id]).parameters  # type: ignore[arg-type]
                assert {keyword.arg for keyword in node.keywords} <= set(parameters), ast.unparse(node)


@cache
def command_line():
    from octavo.cli import app

    return typer.main.get_command(app)


def flags_of(command) -> set[str]:
    own = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    return own | {"--help"}


def all_flags(command) -> set[str]:
    return flags_of(command).union(*(all_flags(each) for each in getattr(command, "commands", {}).values()))


def octavo_commands(page: Path) -> list[str]:
    """Return the commands in shell blocks and inline code that run octavo."""
    lines = [
        line for language in ("sh", "bash", "console") for text in blocks(page, language) for line in text.splitlines()
    ]
    return [line for line in (*lines, *INLINE.findall(prose(page))) if re.match(r"(\S+/)?octavo [a-z-]", line)]


@every_page
def test_commands_and_flags_exist(page):
    for line in octavo_commands(page):
        command = command_line()
        words = [word for word in shlex.split(line, comments=True)[1:] if word]
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if getattr(command, "commands", None) and words and not words[0].startswith("-"):
            raise AssertionError(f"{line}: there is no command {words[0]}")
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in flags_of(command), f"{line}: there is no option {word}"


@every_page
def test_inline_flags_exist(page):
    if page.name == "CHANGELOG.md":
        return  # it also names options of the past
    for code in INLINE.findall(prose(page)):
        if FLAG.fullmatch(code):
            assert code in all_flags(command_line()), f"no command has the option {code}"


@every_page
def test_make_targets_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    for code in (*INLINE.findall(prose(page)), *lines):
        if found := re.match(r"make ((?:[a-z-]+ ?)+)", code):
            assert set(found[1].split()) <= known, code


# --- figures


@pytest.fixture
def worked(monkeypatch):
    folder = ROOT / "examples" / "worked"
    monkeypatch.syspath_prepend(str(folder))

    def run(name: str):
        sys.modules.pop(name, None)
        return importlib.import_module(name).run()

    return run


@pytest.mark.parametrize("page", [DOCS / "questions.md", DOCS / "zh" / "questions.md"], ids=["en", "zh"])
def test_figures_in_questions_match_worked_examples(page, worked):
    text = " ".join(page.read_text(encoding="utf-8").split())
    batching, shared, chunked = worked("static_and_continuous"), worked("shared_blocks"), worked("chunked_prefill")
    chunks, (busy, slots), five = chunked["chunks"], batching["busy_of_one_batch"], batching["steps_of_five"]
    mixed, budget, hits = worked("mixed_batch"), worked("token_budget"), worked("full_hit")
    drafts = worked("speculation")
    expected = [
        f"{batching['static_occupancy'] * 100:.1f} %",
        f"{batching['continuous_occupancy'] * 100:.1f} %",
        *map(str, (busy, slots)),
        *map(str, five.values()),
        str(batching["static_steps"]),
        str(batching["continuous_steps"]),
        *map(str, mixed["step_totals"]),
        f"{sum_of(mixed['mixed'])} = {mixed['mixed_total']}",
        f"{sum_of(budget['scheduled'])} = {budget['total']}",
        str(shared["table_a"]),
        str(shared["table_b"]),
        f"{{{', '.join(map(str, shared['free_after_a']))}}}",
        f"{sum(chunks):,}",
        f"{chunks[0]:,}",
        str(len(chunks)),
        f"{' + '.join(format(count, ',') for count in chunked['beside_two_decodes'][0])}",
        str(hits["blocks_of_16"]["from_cache"]),
        str(hits["blocks_of_16"]["copied"]),
        str(hits["blocks_of_256"]["from_cache"]),
        " ".join(str(token) for token in drafts["exact"] if token >= 0),
        f"{drafts['tokens_per_step']:.2f}",
    ]
    missing = [figure for figure in expected if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\d)", text)]
    assert not missing


def sum_of(scheduled: dict[str, int]) -> str:
    return " + ".join(map(str, scheduled.values()))


def test_questions_state_correct_kv_bytes_per_token():
    from octavo.models.architecture import Architecture
    from octavo.models.attention import AttentionConfig
    from octavo.models.decoder_layer import LayerConfig
    from octavo.models.gated_mlp import GatedMLPConfig
    from octavo.models.rope_config import RopeConfig

    attention = AttentionConfig(num_heads=14, num_kv_heads=2, head_dim=64, rope=RopeConfig())
    layer = LayerConfig(attention=attention, mlp=GatedMLPConfig(intermediate_size=4864))
    shape = dict.fromkeys(Architecture.__dataclass_fields__)
    architecture = Architecture(**{**shape, "layers": (layer,) * 24})
    figure = f"{architecture.kv_layout.bytes_per_token('bfloat16'):,}"
    for page in (DOCS / "questions.md", DOCS / "zh" / "questions.md"):
        assert figure in page.read_text(encoding="utf-8")


# --- what runs


def test_architecture_table_matches_registry():
    """A failure prints the expected rows, to be copied."""
    expected = []
    for name in sorted(FAMILIES):
        always, optional = family_parts(name)
        expected.append(f"| `{name}` | {', '.join(always)} | {', '.join(optional)} |")
    lines = (DOCS / "your_own_model.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(r"\| `\w+ForCausalLM` \|", line)] == expected, "\n".join(expected)


def test_readme_names_every_family():
    """Each family's own name has to appear, in any spelling: Gemma 2, Phi-3."""
    rows = table(section((ROOT / "README.md").read_text(encoding="utf-8"), "Does it run my model?"))
    works = re.sub(r"\W", "", " ".join(models for _, models, _ in rows)).lower()
    missing = [name for name in FAMILIES if name.removesuffix("ForCausalLM").lower() not in works]
    assert not missing, f"README's table of what works does not name {missing}"
