"""Compiles and matches grammars with llguidance (https://github.com/guidance-ai/llguidance)."""

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.errors import OctavoError, RequestError
from octavo.runtime.turns import Turns
from octavo.structured_output.gbnf import is_gbnf, to_lark
from octavo.structured_output.json_schema import refuse_large_objects
from octavo.structured_output.lark import JSON_OPTIONS, by_id, free_start, whole_grammar
from octavo.structured_output.schema_faults import LENIENT, find_fault, find_fault_in_grammar, reason_of
from octavo.structured_output.schema_rewriting import rewritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from octavo.sampling_params import StructuredOutputsParams


logger = logging.getLogger(__name__)
_MAX_KEPT = 128
_MAX_KEPT_CHARS = 1 << 20
_STACK_BYTES = 512 << 20  # of address space, for up to 16,000 nested rules
_MAX_WAITING = 1024  # grammars per tenant
_LARGE_CHARS = 1 << 12  # shorter grammars process a token within 1 ms
_PARAMETER = "structured_outputs"
# These limits allow about 20 ms for a regular expression, 20 ms for a step, and 50 MB of states.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 200_000,
}
_MARKS = re.compile(r"(<[^<>\s]+>)")
_MAX_ERROR_CHARS = 500
_ANY_OBJECT = '{"type": "object"}'


class GrammarError(RequestError):
    """A grammar cannot be compiled, or exceeds its limits."""


class Matcher:
    """The position of one output in its grammar. Methods raise `GrammarError` if the grammar exceeds its limits.

    Other threads can run during `allowed`, and during `advance` if `large` is given.
    """

    def __init__(self, matcher: Any, vocab_size: int, large: _LargeSteps | None = None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._large = large
        self.num_tokens = 0

    @property
    def is_large(self) -> bool:
        """True if processing a token may take long."""
        return self._large is not None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advance over tokens. Raises `GrammarError` if a token is forbidden."""
        with _named_faults():
            if self._large is not None:
                continues = self._large.consume(self._matcher, token_ids)
            else:
                continues = not token_ids or self._matcher.consume_tokens(list(token_ids))
        if not continues:
            raise GrammarError(
                f"the grammar could not advance: {self._matcher.get_error()[:200]}", parameter=_PARAMETER
            )
        self.num_tokens += len(token_ids)

    def step_back(self, num_tokens: int) -> None:
        """Undo last tokens."""
        with _named_faults():
            goes_back = not num_tokens or self._matcher.rollback(num_tokens)
        if not goes_back:
            raise GrammarError(
                f"the grammar could not roll back: {self._matcher.get_error()[:200]}", parameter=_PARAMETER
            )
        self.num_tokens -= num_tokens

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return the length of the longest prefix of `token_ids` that the grammar allows next."""
        with _named_faults():
            return int(self._matcher.validate_tokens(list(token_ids)))

    def allowed(self) -> NDArray[np.bool_]:
        """Return a bool [vocab] mask of the tokens that may come next, with EOS if the text may end."""
        with _named_faults():
            mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(
                f"the grammar exceeds its limits: {self._matcher.get_error()[:200]}", parameter=_PARAMETER
            )
        return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocab_size].view(np.bool_)


class _LargeSteps:
    """Advances a matcher together with an unused matcher, because llguidance then releases the interpreter lock."""

    def __init__(self, llguidance: Any, tokenizer: Any) -> None:
        self._executor = llguidance.LLExecutor(1)
        self._other = llguidance.LLMatcher(tokenizer, "", log_level=0)

    def consume(self, matcher: Any, token_ids: Sequence[int]) -> bool:
        other = self._other.deep_copy()
        return all(self._executor.consume_token_par([(matcher, each), (other, each)])[0] for each in token_ids)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer's properties that grammars need.

    text: Content of tokenizer.json. num_ids: Number of token ids. The model's vocabulary may be larger or smaller.
    added_ids: Ids outside the trained vocabulary.
    """

    text: str
    num_ids: int
    eos_token_ids: frozenset[int]
    token_id: Callable[[str], int | None]
    added_ids: frozenset[int]


class _Compiled:
    __slots__ = ("__weakref__", "large", "matcher")

    def __init__(self, matcher: Any, large: _LargeSteps | None) -> None:
        self.matcher = matcher
        self.large = large


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Caches recent grammars and those of unfinished requests.

    read_vocabulary: Called by `read_ahead` or for the first grammar. Reading 150,000 tokens takes 110 MB and one or two
    seconds, and blocks other threads. vocab_size: Number of ids that the model can sample. Other ids are never allowed.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._read_vocabulary = read_vocabulary
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: Any = None
        self._large: _LargeSteps | None = None
        self._known: weakref.WeakValueDictionary[str, _Compiled] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, _Compiled] = OrderedDict()
        self._waited_for: dict[int, _Compiled] = {}  # by id() of the parameters
        self._num_kept_chars = 0
        self._lock = threading.Lock()

    def read_ahead(self) -> Future[None]:
        """Read the vocabulary in the background. If this fails, later requests raise the error."""
        return _executor().submit(self._read_ahead)

    def prepare(self, wanted: StructuredOutputsParams, tenant: str = "") -> Future[None]:
        """Start compiling a grammar in the background. If compiling fails, the future raises `GrammarError`.

        The grammar is kept while the object `wanted` exists. Raises `GrammarError` if no thread can start, and
        `QueueFullError` if too many of the tenant's grammars wait.
        """
        with _named_faults():
            return _turns().submit(tenant, lambda: self._prepare(wanted))

    def compile(self, wanted: StructuredOutputsParams) -> Matcher:
        """Compile a grammar and return a new matcher. Raises `GrammarError`."""
        with _named_faults():
            compiled = self._waited_for.get(id(wanted))
            if compiled is None:
                compiled = self._find(repr(wanted)) or _executor().submit(self._compile, wanted).result()
            return Matcher(compiled.matcher.deep_copy(), self._vocab_size, compiled.large)

    def release_unread(self, wanted: int) -> None:
        """Release the grammar for parameters with this id()."""
        self._waited_for.pop(wanted, None)

    def _find(self, text: str) -> _Compiled | None:
        with self._lock:
            compiled = self._known.get(text)
            if compiled is not None:
                self._keep(text, compiled)
            return compiled

    def _keep(self, text: str, compiled: _Compiled) -> None:
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
        with _named_faults():
            key = repr(wanted)
            if known := self._find(key):
                return known
            llguidance = _llguidance()
            structure = _structure_text(llguidance, wanted)
            tokenizer = self._load(llguidance)
            text = whole_grammar(structure, self._start(wanted), wanted.free_from)
            limits = llguidance.LLParserLimits(**_LIMITS)
            matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
            if not matcher.is_error():
                matcher.compute_bitmask()  # all copies share the result
            if matcher.is_error():
                raise _refusal(llguidance, wanted.kind, structure, matcher.get_error())
            compiled = _Compiled(matcher, self._large_steps(llguidance) if len(text) > _LARGE_CHARS else None)
            with self._lock:
                self._known[key] = compiled
                self._keep(key, compiled)
            return compiled

    def _large_steps(self, llguidance: Any) -> _LargeSteps:
        self._large = self._large or _LargeSteps(llguidance, self._tokenizer)
        return self._large

    def _read_ahead(self) -> None:
        with contextlib.suppress(RequestError), _named_faults():
            self._load(_llguidance())

    def _load(self, llguidance: Any) -> Any:
        if self._tokenizer is None:
            vocabulary = self._read_vocabulary()
            num_ids = max(vocabulary.num_ids, self._vocab_size)
            eos = sorted(each for each in vocabulary.eos_token_ids if each < min(vocabulary.num_ids, self._vocab_size))
            if not eos:
                raise GrammarError(
                    "this model has no end-of-text token, which structured outputs need", parameter=_PARAMETER
                )
            self._tokenizer = llguidance.LLTokenizer(vocabulary.text, n_vocab=num_ids, eos_token=eos)
            self._vocabulary = vocabulary
        return self._tokenizer

    def _start(self, wanted: StructuredOutputsParams) -> str:
        if wanted.starts_after is None:
            return "start: @answer"
        vocabulary, first = self._vocabulary, self._first_piece(wanted.starts_after)
        assert vocabulary is not None
        ends = None if self._token(first) is None else self._token_names(wanted.starts_after)
        opens = wanted.free_from and self._token_names(wanted.free_from)
        added = vocabulary.added_ids - vocabulary.eos_token_ids - {vocabulary.token_id(first)}
        between = sorted(each for each in added if each < self._vocab_size)
        is_exact = wanted.kind in {"choice", "regex", "grammar"}
        return free_start(wanted.starts_after, ends, opens, between, is_exact=is_exact)

    def _first_piece(self, text: str) -> str:
        return text if self._token(text) else next(filter(None, _MARKS.split(text)))

    def _token_names(self, text: str) -> str:
        if token := self._token(text):
            return token
        return " ".join(self._token(piece) or json.dumps(piece) for piece in _MARKS.split(text) if piece)

    def _token(self, text: str) -> str | None:
        assert self._vocabulary is not None
        token_id = self._vocabulary.token_id(text)
        return None if token_id is None or token_id >= self._vocab_size else by_id(token_id)


def _forget(compiler: weakref.ref[GrammarCompiler], wanted: int) -> None:
    if (there := compiler()) is not None:
        there.release_unread(wanted)


@functools.cache
def _turns() -> Turns:
    return Turns(
        _executor(), _MAX_WAITING, f"{_MAX_WAITING} grammars are waiting to be compiled, which is the limit", _PARAMETER
    )


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """One thread, with a large stack for llguidance's recursion."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="octavo-grammar")
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor


@contextlib.contextmanager
def _named_faults() -> Iterator[None]:
    try:
        yield
    except (OctavoError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic is not an `Exception`
        logger.warning("a grammar failed in llguidance: %r", error)
        message = f"the grammar cannot be used with this model: {_first_line(str(error))}"
        raise GrammarError(message, parameter=_PARAMETER) from None


def _llguidance() -> Any:
    try:
        import llguidance  # noqa: PLC0415 - optional
    except ImportError:
        raise RequestError(
            "structured outputs need llguidance: pip install 'octavo[structured]'", parameter=_PARAMETER
        ) from None
    return llguidance


def _structure_text(llguidance: Any, wanted: StructuredOutputsParams) -> str:
    matcher = llguidance.LLMatcher
    if wanted.json is not None:
        refuse_large_objects(wanted.json, wanted.kind, _PARAMETER)
    try:
        match wanted.kind:
            case "json":
                schema = json.loads(str(wanted.json))
                text = json.dumps(rewritten(schema)) if isinstance(schema, dict) else wanted.json
                return str(matcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
            case "json_object":
                return str(matcher.grammar_from_json_schema(_ANY_OBJECT, overrides=JSON_OPTIONS))
            case "regex":
                return str(matcher.grammar_from_regex(wanted.regex))
            case "choice":
                return str(llguidance.grammar_from("choice", json.dumps(wanted.choice)))
            case _:
                text = str(wanted.grammar)
                return str(llguidance.grammar_from("lark", to_lark(text) if is_gbnf(text) else text))
    except (ValueError, RecursionError, RequestError) as error:
        raise GrammarError(f"{wanted.kind}: {_first_line(str(error))}", parameter=_PARAMETER) from None


def _refusal(llguidance: Any, kind: str, structure: str, message: str) -> GrammarError:
    def check(schema: dict[str, Any]) -> str | None:
        options = {**JSON_OPTIONS, "lenient": LENIENT in schema}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        return str(messages[0]) if is_error else None

    parts = json.loads(structure)["grammars"] if structure.startswith("{") else [{"lark_grammar": structure}]
    for part in parts:
        schema: Any = part.get("json_schema")
        lark = str(part.get("lark_grammar") or "")
        fault = find_fault_in_grammar(lark, check) if schema is None else find_fault(schema, check)
        if fault is not None:
            return GrammarError(
                f"{fault.field or kind}: {fault}"[:_MAX_ERROR_CHARS], parameter=fault.field or _PARAMETER
            )
    return GrammarError(f"{kind}: {_first_line(message)}", parameter=_PARAMETER)


def _first_line(message: str) -> str:
    return reason_of(message)[:300]
