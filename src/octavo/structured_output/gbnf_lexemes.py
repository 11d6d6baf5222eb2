"""Find the parts of a grammar that can be one lexeme. One lexeme per character is exact, but slow.

llguidance's lexer takes the longest lexeme and never backtracks. A grammar without recursion becomes one lexeme. In a
recursive grammar, parts become lexemes only if the texts of all lexemes and single characters are prefix-free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.structured_output.gbnf_nodes import (
    Chars,
    Choice,
    Lexeme,
    Node,
    Ranges,
    Repeat,
    Rule,
    Rules,
    Sequence,
    regex,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Above these limits, an automaton could exceed the lexer's limits.
_MAX_CHARS = 1000
_MAX_DEPTH = 64
_MAX_STATES = 1000
_MAX_ROUNDS = 100
_MAX_WORK = 100_000  # units of about 5 us; other threads wait


class TooLargeError(Exception):
    """Too many states."""


class TooMuchWorkError(Exception):
    """Too much work."""


class _Work:
    def __init__(self) -> None:
        self._left = _MAX_WORK

    def do(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise TooMuchWorkError


def with_lexemes(rules: Rules) -> Rules:
    """Return an equivalent grammar with lexemes, if possible."""
    if any(level > _MAX_DEPTH for node in rules.values() for _, level in _nodes(node)):
        return rules
    sizes, work, root = _Sizes(rules), _Work(), Rule("root")
    try:
        if sizes.of(root) is not None and _fits(rules, root, work):
            return {"root": Lexeme(regex(root, rules))}
        return _Parts(rules, sizes, work).replaced()
    except TooMuchWorkError:
        return rules


def _fits(rules: Rules, node: Node, work: _Work) -> bool:
    try:
        _Automaton(rules, [node], work).continuing()
    except TooLargeError:
        return False
    return True


class _Sizes:
    """Sizes of nodes with all rules expanded, or None for recursive or too large nodes."""

    def __init__(self, rules: Rules) -> None:
        self._of_rules: dict[str, tuple[int, int]] = {}
        users: dict[str, list[str]] = {name: [] for name in rules}
        missing: dict[str, int] = {}
        for name, node in rules.items():
            used = {each.name for each, _ in _nodes(node) if isinstance(each, Rule)}
            missing[name] = len(used)
            for other in used:
                users[other].append(name)
        known = deque(name for name, count in missing.items() if not count)
        while known:
            name = known.popleft()
            size = self._measure(rules[name])
            if size is not None:
                self._of_rules[name] = size
            for user in users[name]:
                missing[user] -= 1
                if not missing[user]:
                    known.append(user)

    def of(self, node: Node) -> int | None:
        size = self._measure(node)
        return None if size is None else size[0]

    def _measure(self, root: Node) -> tuple[int, int] | None:
        num_chars = depth = 0
        left: list[tuple[Node, int, int]] = [(root, 1, 1)]
        while left:
            node, times, level = left.pop()
            match node:
                case Sequence(items) | Choice(items):
                    left += [(item, times, level + 1) for item in items]
                case Repeat(item, least, most):
                    left.append((item, times * max(least + 1 if most is None else most, 1), level + 1))
                case Rule(name):
                    if name not in self._of_rules:
                        return None
                    num_chars += times * self._of_rules[name][0]
                    level += self._of_rules[name][1]
                case Chars(ranges):
                    if not ranges:
                        return None
            num_chars, depth = num_chars + times, max(depth, level)
            if num_chars > _MAX_CHARS or depth > _MAX_DEPTH:
                return None
        return num_chars, depth


def _nodes(root: Node) -> Iterator[tuple[Node, int]]:
    left = [(root, 1)]
    while left:
        node, level = left.pop()
        yield node, level
        match node:
            case Sequence(items) | Choice(items):
                left += [(item, level + 1) for item in items]
            case Repeat(item):
                left.append((item, level + 1))


class _Automaton:
    def __init__(self, rules: Rules, parts: Iterable[Node], work: _Work) -> None:
        self._rules, self._work = rules, work
        self._edges: list[list[tuple[Ranges, int]]] = [[]]
        self._empty: list[list[int]] = [[]]
        self._ends: set[int] = set()  # states in which a part is complete
        self._owners: list[int] = [-1]  # by state: the index of its part
        for index, part in enumerate(parts):
            self._ends.add(self._add(part, self._branch(0)))
            self._owners += [index] * (len(self._edges) - len(self._owners))

    def continuing(self, *, until_found: bool = False) -> set[int]:
        """Return the indices of the parts that cannot be lexemes. Raises `TooLargeError`.

        Such a part matches the empty text, or a text that begins with a shorter match of any part.
        """
        start = self._closure([0])
        found = {self._owners[state] for state in start & self._ends}
        known, left = {start}, deque([start])
        while left and not (found and until_found):
            states = left.popleft()
            self._work.do(len(states))
            if states & self._ends:
                found |= {self._owners[state] for state in states if self._edges[state]}
            new = self._following(states) - known
            known |= new
            left += new
            if len(known) > _MAX_STATES:
                raise TooLargeError
        return found

    def first(self) -> Ranges:
        return tuple(each for state in self._closure([0]) for ranges, _ in self._edges[state] for each in ranges)

    def _following(self, states: frozenset[int]) -> set[frozenset[int]]:
        leaving = [edge for state in states for edge in self._edges[state]]
        edges = [(first, last, target) for ranges, target in leaving for first, last in ranges]
        places = sorted({first for first, _, _ in edges} | {last + 1 for _, last, _ in edges})
        targets = {frozenset(target for first, last, target in edges if first <= place <= last) for place in places} - {
            frozenset()
        }
        return {self._closure(each) for each in targets}

    def _closure(self, states: Iterable[int]) -> frozenset[int]:
        found = set(states)
        left = [*found]
        while left:
            new = [each for each in self._empty[left.pop()] if each not in found]
            found.update(new)
            left += new
        return frozenset(found)

    def _state(self) -> int:
        self._work.do(1)
        self._edges.append([])
        self._empty.append([])
        return len(self._edges) - 1

    def _branch(self, state: int) -> int:
        new = self._state()
        self._empty[state].append(new)
        return new

    def _add(self, node: Node, start: int) -> int:
        match node:
            case Chars(ranges):
                end = self._state()
                self._edges[start].append((ranges, end))
                return end
            case Sequence(items):
                for item in items:
                    start = self._add(item, start)
                return start
            case Choice(options):
                end = self._state()
                for option in options:
                    self._empty[self._add(option, self._branch(start))].append(end)
                return end
            case Rule(name):
                return self._add(self._rules[name], start)
            case Repeat(item, least, most):
                return self._add_repeated(item, start, least, most)
            case Lexeme():
                raise AssertionError("a lexeme consists of characters")

    def _add_repeated(self, item: Node, start: int, least: int, most: int | None) -> int:
        for _ in range(least):
            start = self._add(item, start)
        if most is None:
            again = self._branch(start)
            self._empty[self._add(item, again)].append(again)
            return again
        end = self._state()
        for _ in range(most - least):
            self._empty[start].append(end)
            start = self._add(item, self._branch(start))
        self._empty[start].append(end)
        return end


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    items: tuple[Node, ...]
    start: int
    stop: int

    @property
    def part(self) -> Sequence:
        return Sequence(self.items[self.start : self.stop])


class _Parts:
    def __init__(self, rules: Rules, sizes: _Sizes, work: _Work) -> None:
        self._rules, self._sizes, self._work = rules, sizes, work
        self._refused: set[tuple[int, int]] = set()  # (id of items, index at which no run may begin)
        self._ends_itself: dict[Sequence, bool] = {}
        self._runs: dict[Sequence, list[_Run]] = {}
        self._chars: set[Ranges] = set()

    def replaced(self) -> Rules:
        for _ in range(_MAX_ROUNDS):
            rules = self._replace()
            if not self._runs:
                break
            try:
                is_sound = not self._refuse()
            except TooLargeError:
                break
            if is_sound:
                return rules
        return self._rules

    def _replace(self) -> Rules:
        self._runs.clear()
        self._chars.clear()
        rules: Rules = {}
        left = ["root"]
        while left:
            name = left.pop()
            if name not in rules:
                rules[name] = self._rewritten(self._rules[name])
                left += [each.name for each, _ in _nodes(rules[name]) if isinstance(each, Rule)]
        return rules

    def _rewritten(self, node: Node) -> Node:
        match node:
            case Chars(ranges):
                self._chars.add(ranges)
                return node
            case Sequence(items):
                return Sequence(tuple(self._rewritten_items(items)))
            case Choice(options):
                return Choice(tuple(self._rewritten(option) for option in options))
            case Repeat(item, least, most):
                return Repeat(self._rewritten(item), least, most)
        return node

    def _rewritten_items(self, items: tuple[Node, ...]) -> Iterator[Node]:
        place = 0
        while place < len(items):
            run = self._find_run(items, place)
            if run is None:
                yield self._rewritten(items[place])
                place += 1
            else:
                self._runs.setdefault(run.part, []).append(run)
                yield Lexeme(regex(run.part, self._rules))
                place = run.stop

    def _find_run(self, items: tuple[Node, ...], start: int) -> _Run | None:
        """Return the shortest run from `start` with several characters that can be a lexeme."""
        if (id(items), start) in self._refused:
            return None
        for stop in range(start + (2 if isinstance(items[start], Chars) else 1), len(items) + 1):
            run = _Run(items, start, stop)
            size = self._sizes.of(run.part)
            if size is None:
                break
            self._work.do(size)
            if self._is_ended_by_itself(run.part):
                return run
        return None

    def _is_ended_by_itself(self, part: Sequence) -> bool:
        known = self._ends_itself.get(part)
        if known is None:
            try:
                known = not _Automaton(self._rules, [part], self._work).continuing(until_found=True)
            except TooLargeError:
                known = False
            self._ends_itself[part] = known
        return known

    def _refuse(self) -> bool:
        parts = [*self._runs]
        longer = _Automaton(self._rules, parts, self._work).continuing()
        chars = tuple(each for ranges in self._chars for each in ranges)
        refused = [
            part
            for index, part in enumerate(parts)
            if index in longer or _overlap(_Automaton(self._rules, [part], self._work).first(), chars)
        ]
        self._refused |= {(id(run.items), run.start) for part in refused for run in self._runs[part]}
        return bool(refused)


def _overlap(ranges: Ranges, others: Ranges) -> bool:
    return any(first <= end and begin <= last for first, last in ranges for begin, end in others)
