"""Structured output: which tokens may follow, for a JSON schema, a regular expression, a choice or a grammar.

Grammars are compiled and walked by llguidance (https://github.com/guidance-ai/llguidance), imported when the first
request asks for one. What may follow is a function of the tokens so far alone, so a schedule cannot change it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import OctavoError, RequestError
from octavo.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from octavo.sampling_params import StructuredOutputsParams

    Vocabulary = tuple[str, Iterable[int]]

logger = logging.getLogger(__name__)
_MAX_KEPT = 128  # compiled grammars, besides those that somebody waits for: one of a small schema takes 0.2 MB
_MAX_KEPT_CHARS = 1 << 20  # of their texts
_STACK_BYTES = 512 << 20  # of address space; 4000 rules in a chain take 8 MB, and there is room for 16,000 in a text
_MAX_WAITING = 1024  # grammars of one tenant that are not compiled yet
_PARAMETER = "structured_outputs"
# A grammar may take so much: 20 ms for a regular expression, 20 ms for a step, 50 MB of states.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 200_000,
}
# JSON comes on one line, with a space behind commas and colons if the model likes: where white space has no bound,
# small models fill an answer with it until they have no tokens left.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
ANY_TEXT = "TEXT: /(.|\\n)*/"  # how a grammar of text with calls in it names the text
_TEXT_RULE = re.compile(r"^TEXT: /.*/$", re.MULTILINE)
_FREE = "start: {} SPACE @answer\nfree[lazy]: ANY {}\nANY: /(.|\\n)*/\nSPACE: /\\s*/"
_COMMENTS = {"description", "title", "examples", "default", "$comment", "deprecated"}
_NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_VALUES = {"const", "enum", "required"}
_ANY_OBJECT = '{"type": "object"}'


class GrammarError(RequestError):
    """A grammar that cannot be compiled, or that took more than it may while it was walked."""


class Matcher:
    """The way of one output through its grammar. Walks on with `advance`; `allowed` says what may come next."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.num_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that came. Raises `GrammarError` for one that the grammar forbids, or beyond its limits."""
        with _told_apart():
            goes_on = not token_ids or self._matcher.consume_tokens(list(token_ids))
        if not goes_on:
            raise GrammarError(f"the grammar does not go on: {self._matcher.get_error()[:200]}", parameter=_PARAMETER)
        self.num_tokens += len(token_ids)

    def allowed(self) -> NDArray[np.bool_]:
        """Return bool [vocab]: the tokens that may come next, EOS among them where the text is complete.

        Raises `GrammarError` beyond its limits.
        """
        with _told_apart():
            mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(f"the grammar takes too much: {self._matcher.get_error()[:200]}", parameter=_PARAMETER)
        return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocab_size].view(np.bool_)


class _Compiled:
    """A grammar at its beginning. Made so that it can be known without being kept."""

    __slots__ = ("__weakref__", "matcher")

    def __init__(self, matcher: Any) -> None:
        self.matcher = matcher


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps those used last, and of whoever waits or runs.

    read_vocabulary: returns the text of tokenizer.json and the ids that end an answer. It is called for the first
    grammar: a vocabulary of 150,000 takes llguidance a second or two, and 110 MB.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._read_vocabulary = read_vocabulary
        self._vocab_size = vocab_size
        self._tokenizer: Any = None
        self._known: weakref.WeakValueDictionary[str, _Compiled] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()
        self._waited_for: dict[int, _Compiled] = {}  # by the id of what asks for it, as long as that lives
        self._num_kept_chars = 0
        self._lock = threading.Lock()

    def prepare(self, wanted: StructuredOutputsParams, tenant: str = "") -> Future[None]:
        """Compile a grammar in the background; what is wrong with it is raised by the result, as `GrammarError`.

        It is known as long as `wanted` lives, so that no step waits for a compiler, however many others come between.
        Tenants take turns, and the result says by `running()` when it is this one's.
        Raises `GrammarError` where there is no thread for it, `QueueFullError` where too many of the tenant wait.
        """
        with _told_apart():
            return _turns().submit(tenant, lambda: self._prepare(wanted))

    def compile(self, wanted: StructuredOutputsParams) -> Matcher:
        """Return a matcher at its beginning; waits where the grammar has not been prepared. Raises `GrammarError`."""
        with _told_apart():
            text = _grammar_text(_llguidance(), wanted)
            compiled = self._find(text) or _executor().submit(self._compile, wanted).result()
            return Matcher(compiled.matcher.deep_copy(), self._vocab_size)

    def let_go(self, wanted: int) -> None:
        """Hold no grammar any more for what had this id."""
        self._waited_for.pop(wanted, None)

    def _find(self, text: str) -> _Compiled | None:
        with self._lock:
            compiled = self._known.get(text)
            if compiled is not None:
                self._keep(text, compiled)
            return compiled

    def _keep(self, text: str, compiled: _Compiled) -> None:
        """Count it as the one used last, and forget others."""
        if self._kept.pop(text, None) is None:
            self._num_kept_chars += len(text)
        self._kept[text] = compiled
        while len(self._kept) > _MAX_KEPT or (self._num_kept_chars > _MAX_KEPT_CHARS and len(self._kept) > 1):
            self._num_kept_chars -= len(self._kept.popitem(last=False)[0])

    def _prepare(self, wanted: StructuredOutputsParams) -> None:
        compiled = self._compile(wanted)
        if self._waited_for.get(id(wanted)) is not compiled:
            self._waited_for[id(wanted)] = compiled
            weakref.finalize(wanted, _forget, weakref.ref(self), id(wanted)).atexit = False

    def _compile(self, wanted: StructuredOutputsParams) -> _Compiled:
        with _told_apart():
            llguidance = _llguidance()
            text = _grammar_text(llguidance, wanted)
            if known := self._find(text):
                return known
            limits = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(self._load(llguidance), text, log_level=0, limits=limits)
            if matcher.is_error():
                raise GrammarError(f"{wanted.kind}: {_first_line(matcher.get_error())}", parameter=_PARAMETER)
            compiled = _Compiled(matcher)
            with self._lock:
                self._known[text] = compiled
                self._keep(text, compiled)
            return compiled

    def _load(self, llguidance: Any) -> Any:
        if self._tokenizer is None:
            text, eos_token_ids = self._read_vocabulary()
            eos = sorted(eos_token_ids)
            if not eos:
                raise GrammarError("this model has no token that ends an answer", parameter=_PARAMETER)
            self._tokenizer = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
        return self._tokenizer


def _forget(compiler: weakref.ref[GrammarCompiler], wanted: int) -> None:
    """Let the grammar go of what is gone now."""
    if (there := compiler()) is not None:
        there.let_go(wanted)


@functools.cache
def _turns() -> Turns:
    """Return who waits for the one thread that compiles."""
    return Turns(_executor(), _MAX_WAITING, f"{_MAX_WAITING} grammars wait to be compiled already", _PARAMETER)


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """Return the one thread that compiles. llguidance recurses over rules: its stack has room for the longest text."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor.submit(int).result()  # the thread is made now, with that stack
    finally:
        threading.stack_size(before)
    return executor


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    """Make whatever llguidance raises a `GrammarError`, panics included: it is one request's trouble."""
    try:
        yield
    except (OctavoError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic is none of `Exception`
        logger.warning("a grammar failed: %r", error)
        message = f"the grammar cannot be used with this model: {_first_line(str(error))}"
        raise GrammarError(message, parameter=_PARAMETER) from None


def _llguidance() -> Any:
    try:
        import llguidance  # noqa: PLC0415 - optional, and only for those who ask for it
    except ImportError:
        raise RequestError(
            "structured outputs need llguidance: pip install 'octavo[structured]'", parameter=_PARAMETER
        ) from None
    return llguidance


def lark_json(schema: str | dict[str, Any]) -> str:
    """Return how a grammar in Lark's notation names JSON of a schema, spelled as `json` structures are."""
    fields = json.loads(schema) if isinstance(schema, str) else schema
    return "%json " + json.dumps({**_bare(fields), "x-guidance": _JSON_OPTIONS})


def _bare(schema: Any) -> Any:
    """Leave out of a schema what only people read: tools are described at length, and a grammar has a limit."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _bare(each) for name, each in value.items()}
        if key in _NAMED_SCHEMAS and isinstance(value, dict)
        else (value if key in _VALUES else _bare(value))
        for key, value in schema.items()
        if key not in _COMMENTS
    }


def _grammar_text(llguidance: Any, wanted: StructuredOutputsParams) -> str:
    """Return what llguidance compiles."""
    text = _structure_text(llguidance, wanted)
    if wanted.starts_after is None:
        return text
    begin = "free" if wanted.free_from is None else f"({json.dumps(wanted.free_from)} free)?"
    free = _FREE.format(begin, json.dumps(wanted.starts_after))
    if wanted.free_from is not None:  # text that a grammar allows is none that begins so: it would be both
        begins_so = f"/{re.escape(wanted.free_from)}(.|\\n)*/"
        text = _TEXT_RULE.sub(lambda rule: f"{rule.group()} & ~{begins_so}", text)
    inner = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    return json.dumps({"grammars": [{"name": "all", "lark_grammar": free}, {**inner[0], "name": "answer"}, *inner[1:]]})


def _structure_text(llguidance: Any, wanted: StructuredOutputsParams) -> str:
    matcher = llguidance.LLMatcher
    try:
        match wanted.kind:
            case "json":
                return str(matcher.grammar_from_json_schema(wanted.json, overrides=_JSON_OPTIONS))
            case "json_object":
                return str(matcher.grammar_from_json_schema(_ANY_OBJECT, overrides=_JSON_OPTIONS))
            case "regex":
                return str(matcher.grammar_from_regex(wanted.regex))
            case "choice":
                return str(llguidance.grammar_from("choice", json.dumps(wanted.choice)))
            case _:
                return str(llguidance.grammar_from("grammar", wanted.grammar))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{wanted.kind}: {_first_line(str(error))}", parameter=_PARAMETER) from None


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
