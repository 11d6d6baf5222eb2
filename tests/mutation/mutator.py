"""Every mutant of a module: its syntax tree with one change.

Statements are removed, conditions negated, operands dropped, operators swapped, numbers and bounds changed by one. The
same source gives the same mutants in the same order. Not changed: annotations, decorators, imports, strings, `del` of
names (a note to the linter), and guards against bugs that do not exist: an assertion is negated but not removed, and
`strict` of zip stays.
"""

from __future__ import annotations

import ast
import copy
import importlib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType

SOURCE = Path(__file__).resolve().parents[2] / "src"

_SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter"}
_REMOVED = (
    ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Delete,
    ast.For, ast.AsyncFor, ast.While,
)  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITH_HEADER = (ast.If, ast.While, ast.For, ast.AsyncFor, ast.With, ast.AsyncWith, ast.match_case)
_BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}
_WRAPPERS = ("fget", "__func__", "func", "__wrapped__")  # of properties, methods, cached properties, and any other
_UNTOUCHED = {"annotation", "returns", "decorator_list", "ctx", "type_params", "bases"}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a node in a tree."""

    parent: ast.AST
    field: str
    index: int | None = None

    def put(self, node: Any) -> Any:
        """Put another node there; return the previous one."""
        if self.index is None:
            present = getattr(self.parent, self.field)
            setattr(self.parent, self.field, node)
        else:
            nodes = getattr(self.parent, self.field)
            present, nodes[self.index] = nodes[self.index], node
        return present


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change in the statement at `lines` of a module. before, after: that statement, normalised.

    function: the qualified name of the function that contains it, "" for code that runs when the module is imported.
    """

    module: Module
    function: str
    lines: range
    before: str
    after: str
    place: Place
    node: Any

    def compiled(self) -> CodeType:
        """Compile the whole module with the change."""
        return self._compiled(lambda: self.module.tree)

    def _compiled(self, tree: Callable[[], ast.Module]) -> CodeType:
        present = self.place.put(self.node)
        try:
            return compile(ast.fix_missing_locations(tree()), str(self.module.path), "exec", annotations.compiler_flag)
        finally:
            self.place.put(present)

    def function_object(self) -> Any:
        """Return the function in this process, which must have imported its module."""
        return _function_in(vars(importlib.import_module(self.module.name)), self.function)

    def patch(self) -> None:
        """Change the function in this process."""
        names = dict(vars(importlib.import_module(self.module.name)))
        function = self.function_object()
        holds_class = "__class__" in function.__code__.co_freevars
        exec(self._compiled(lambda: _alone(self.module.tree, self.function, holds_class=holds_class)), names)
        mutated = _function_in(names, self.function)
        function.__code__ = mutated.__code__
        function.__defaults__, function.__kwdefaults__ = mutated.__defaults__, mutated.__kwdefaults__

    @property
    def title(self) -> str:
        """The place as text."""
        return f"{self.module.file}:{self.lines.start} {self.function or 'module'}"


class Module:
    """A module, by its name.

    file: its path in `folder`, by default the folder that contains it.
    """

    def __init__(self, name: str, source: str | None = None, folder: Path | None = None) -> None:
        self.name = name
        path = SOURCE / name.replace(".", "/")
        self.path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.file = self.path.relative_to(folder or self.path.parent).as_posix()
        self.tree = ast.parse(self.path.read_text() if source is None else source)

    def mutants(self) -> list[Mutant]:
        """Return all mutants, from the top of the file to the bottom."""
        return list(self._of_block(self.tree, "body", "", "", holds_functions=True))

    def _of_block(
        self, parent: ast.AST, field: str, prefix: str, function: str, *, holds_functions: bool = False
    ) -> Iterator[Mutant]:
        """Yield the mutants of a block of statements. holds_functions: its functions can be patched by their name."""
        for index, statement in enumerate(getattr(parent, field)):
            if isinstance(statement, ast.Import | ast.ImportFrom) or _is_for_types_only(statement):
                continue
            is_end = isinstance(parent, _FUNCTIONS) and statement is parent.body[-1]
            if function and not (is_end and _returns_none(statement)):
                yield from self._of_removal(statement, Place(parent, field, index), function)
            inner, holder = prefix, function
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                inner = f"{prefix}.{statement.name}" if prefix else statement.name
            if holds_functions and isinstance(statement, _FUNCTIONS):
                holder = inner
            yield from self._of_expressions(statement, statement, holder)
            is_class = isinstance(statement, ast.ClassDef)
            for name in sorted(_BLOCKS & set(statement._fields), key=statement._fields.index):
                yield from self._of_block(statement, name, inner, holder, holds_functions=is_class)

    def _of_removal(self, statement: ast.stmt, place: Place, function: str) -> Iterator[Mutant]:
        if not isinstance(statement, _REMOVED) or _is_without_effect(statement):
            return
        yield self._mutant(statement, function, place, ast.Pass(), "pass")

    def _of_expressions(self, node: ast.AST, statement: ast.stmt, function: str) -> Iterator[Mutant]:
        """Yield the mutants of a node's expressions, including nested ones, but not those of statements within it."""
        if isinstance(node, ast.AugAssign):
            yield from self._of_place(Place(node, "op"), statement, function, _swaps(node.op))
        for field, value in ast.iter_fields(node):
            if field in _UNTOUCHED or (node is statement and field in _BLOCKS):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST):
                    continue
                place = Place(node, field, index if isinstance(value, list) else None)
                if isinstance(child, ast.expr):
                    nodes = chain(_variants_there(child, node, field), _variants(child))
                    yield from self._of_place(place, statement, function, nodes)
                yield from self._of_expressions(child, statement, function)

    def _of_place(self, place: Place, statement: ast.stmt, function: str, nodes: Iterator[Any]) -> Iterator[Mutant]:
        for node in nodes:
            present = place.put(node)
            after = _header(statement)
            place.put(present)
            yield self._mutant(statement, function, place, node, after)

    def _mutant(self, statement: ast.stmt, function: str, place: Place, node: Any, after: str) -> Mutant:
        first = _first_line(statement)
        if isinstance(statement, _WITH_HEADER):
            end = max(statement.body[0].lineno, first + 1)
        elif isinstance(statement, ast.Match):
            end = max(_first_line(statement.cases[0]), first + 1)
        else:
            end = (statement.end_lineno or first) + 1
        lines = range(first, end)  # of a function whose defaults change, all lines
        return Mutant(self, function, lines, _header(statement), after, place, node)


def _variants(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the replacements of an expression that are possible at any place."""
    match node:
        case ast.Compare(left, ops, comparators):
            for index, op in enumerate(ops):
                for swapped in _swaps(op):
                    yield ast.Compare(left, [*ops[:index], swapped, *ops[index + 1 :]], comparators)
        case ast.BinOp(left, op, right):
            yield from (ast.BinOp(left, swapped, right) for swapped in _swaps(op))
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Call(ast.Name(name), args, keywords) if name in _CALLS:
            yield ast.Call(ast.Name(_CALLS[name], ast.Load()), args, [] if name == "sorted" else keywords)
        case ast.BoolOp(op, values):
            yield from (ast.BoolOp(swapped, values) for swapped in _swaps(op))
            for index in range(len(values)):
                rest = values[:index] + values[index + 1 :]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)


def _variants_there(node: ast.expr, parent: ast.AST, field: str) -> Iterator[ast.expr]:
    """Yield the replacements of an expression that its place allows: as a condition, or as a bound."""
    if field in {"test", "ifs", "guard"} and not isinstance(node, ast.Compare) and not _is_not(node):
        yield ast.UnaryOp(ast.Not(), node)
    is_bound = field in {"lower", "upper"} or (field == "args" and _is_call_of(parent, "range"))
    if is_bound and not isinstance(node, ast.Constant | ast.Starred):
        yield ast.BinOp(node, ast.Add(), ast.Constant(1))


def _swaps(op: ast.AST) -> Iterator[Any]:
    return (kind() for kind in _SWAPPED.get(type(op), ()))


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_call_of(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_for_types_only(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"


def _returns_none(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return) and ast.unparse(statement) in {"return", "return None"}


def _is_without_effect(statement: ast.stmt) -> bool:
    """Return True for docstrings, `...`, declarations without a value, and `del` of names."""
    match statement:
        case ast.Expr(ast.Constant()):
            return True
        case ast.AnnAssign(value=None):
            return True
        case ast.Delete(targets):
            return all(isinstance(target, ast.Name) for target in targets)
    return False


def _first_line(statement: Any) -> int:
    return statement.pattern.lineno if isinstance(statement, ast.match_case) else statement.lineno


def _header(statement: Any) -> str:
    """Return a statement in normal form, without the statements within it."""
    if isinstance(statement, ast.Match):
        return f"match {ast.unparse(statement.subject)}:"
    if not hasattr(statement, "body"):
        return ast.unparse(statement)
    alone: Any = copy.copy(statement)
    for field in _BLOCKS & set(statement._fields):
        setattr(alone, field, [])
    alone.body = [ast.Pass()]
    if hasattr(alone, "decorator_list"):
        alone.decorator_list = []
    return ast.unparse(alone).removesuffix("pass").strip()


def _alone(tree: ast.Module, qualified_name: str, *, holds_class: bool) -> ast.Module:
    """Return a module that has only one function, in its class: it compiles faster, and to the same code.

    holds_class: compile the function with a cell for its class, even if the mutant no longer calls `super()`.
    """
    *classes, name = qualified_name.split(".")
    nodes = [tree]
    for each in (*classes, name):
        nodes.append(next(node for node in nodes[-1].body if getattr(node, "name", None) == each))
    inner = copy.copy(nodes.pop())
    inner.decorator_list = []
    if holds_class:
        inner.body = [*inner.body, *ast.parse("if False:\n    __class__").body]
    for node in reversed(nodes[1:]):
        outer = copy.copy(node)
        outer.body, outer.decorator_list = [inner], []
        inner = outer
    return ast.Module([inner], [])


def _function_in(names: Mapping[str, Any], qualified_name: str) -> Any:
    """Return the function with this qualified name, without its decorators."""
    first, *rest = qualified_name.split(".")
    found = names[first]
    for name in rest:
        found = vars(found)[name]
    while (inner := next((getattr(found, name) for name in _WRAPPERS if hasattr(found, name)), None)) is not None:
        found = inner
    return found
