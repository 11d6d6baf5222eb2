"""Parameters of one request. Errors name the invalid field."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from json import dumps
from numbers import Integral, Real
from typing import Any, NoReturn

from octavo.errors import RequestError

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_GRAMMAR_CHARS = 1 << 16  # such a grammar compiles within seconds and within a thread's stack
MAX_CHOICES = 1000
POOLING = ("last", "mean")
MAX_LOGPROBS = 20  # vLLM's default
MAX_DRAFTS = 32
MAX_COUNT = 2**31 - 1  # the maximum of the worker's tensors
_STRUCTURED = "structured_outputs"
_STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")
_LEAST_TOP_P = 1e-9  # below the best token's probability in any vocabulary
_SAMPLING_EPS = 1e-5  # lower temperatures are greedy, as in vLLM


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class StructuredOutputsParams:
    """The structure that an answer must have. Exactly one of the first five fields, which are vLLM's, is set.

    json: JSON schema, as text or object. json_object: True for any JSON object. regex: Pattern of the whole
    answer. choice: Allowed answers. grammar: Grammar in Lark's or GBNF's notation. starts_after: Text such as
    "</think>" that ends a free part of the answer. The structure begins after the text. free_from: Text such as
    "<think>". Only an answer that begins with this text has a free part. Raises `RequestError`.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    starts_after: str | None = None
    free_from: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, dict):
            self.json = _dumps(self.json)
        if self.json_object is not None and not isinstance(self.json_object, bool):
            _refuse_structure("json_object", "true or false")
        given = [name for name in _STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"exactly one of json, json_object, regex, choice and grammar is needed, got {given or 'none'}",
                parameter=_STRUCTURED,
            )
        for name in ("json", "regex", "grammar", "starts_after", "free_from"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and 0 < len(text) <= MAX_GRAMMAR_CHARS):
                _refuse_structure(name, f"a text of 1 to {MAX_GRAMMAR_CHARS} characters")
        if self.free_from is not None and self.starts_after is None:
            _refuse_structure("free_from", "with starts_after")
        if self.choice is not None:
            self._check_choice(self.choice)

    @property
    def kind(self) -> str:
        """Given field's name."""
        return next(name for name in _STRUCTURES if getattr(self, name))

    @staticmethod
    def _check_choice(choice: list[str]) -> None:
        is_list = isinstance(choice, list) and 0 < len(choice) <= MAX_CHOICES
        if not is_list or not all(isinstance(text, str) and text for text in choice):
            _refuse_structure("choice", f"a list of 1 to {MAX_CHOICES} texts that are not empty")
        if sum(map(len, choice)) > MAX_GRAMMAR_CHARS:
            _refuse_structure("choice", f"at most {MAX_GRAMMAR_CHARS} characters in all")


def _dumps(schema: dict[str, Any]) -> str:
    try:
        return dumps(schema)
    except (RecursionError, TypeError, ValueError):
        _refuse_structure("json", "a JSON schema that is not nested too deeply")


def _refuse_structure(name: str, allowed: str) -> NoReturn:
    raise RequestError(f"{_STRUCTURED}.{name} must be {allowed}", parameter=_STRUCTURED)


@dataclass(frozen=True, slots=True)
class Limits:
    """The range of a number. is_open: True if `low` is excluded. is_whole: True for integers only."""

    low: float
    high: float
    is_whole: bool = True
    is_open: bool = False
    may_be_none: bool = False

    def holds(self, value: Any) -> bool:
        """Return True if a number is in the range, and False for NaN."""
        return bool(self.low <= value <= self.high) and not (self.is_open and value == self.low)


LIMITS: dict[str, Limits] = {
    "n": Limits(1, MAX_N),
    "max_tokens": Limits(1, MAX_COUNT, may_be_none=True),
    "min_tokens": Limits(0, MAX_COUNT),
    "temperature": Limits(0, 100, is_whole=False),
    "top_k": Limits(0, MAX_COUNT),
    "top_p": Limits(0, 1, is_whole=False),
    "min_p": Limits(0, 1, is_whole=False),
    "typical_p": Limits(0, 1, is_whole=False, is_open=True),
    "seed": Limits(-(2**63), 2**64 - 1, may_be_none=True),
    "presence_penalty": Limits(-2, 2, is_whole=False),
    "frequency_penalty": Limits(-2, 2, is_whole=False),
    "repetition_penalty": Limits(0, 100, is_whole=False, is_open=True),
    "logprobs": Limits(0, MAX_LOGPROBS, may_be_none=True),
    "prompt_logprobs": Limits(0, MAX_LOGPROBS, may_be_none=True),
    "num_speculative_tokens": Limits(0, MAX_DRAFTS, may_be_none=True),
}


class RequestOutputKind(Enum):
    """CUMULATIVE: Each output has all text so far. DELTA: Only the new text. FINAL_ONLY: One output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Names, defaults and meanings are those of vLLM and the OpenAI API.

    n: Number of output sequences. seed: Makes sampling reproducible. If None or -1, the engine draws a seed.
    temperature: 0 is greedy. top_p: 0 keeps only the most probable token. top_k 0 or -1, top_p 1, min_p 0 and typical_p
    1 keep all tokens. typical_p: TGI's locally typical sampling (`octavo.worker.typical`). max_tokens: None means up to
    the model's limit. logprobs, prompt_logprobs: Number of most probable tokens reported in addition to the chosen
    token, or None for no log probabilities. logit_bias: Token id -> number added to the logit. structured_outputs:
    Structure of the answer, which ends when the structure is complete. shown_special_token_ids: Special tokens shown
    despite skip_special_tokens. pooling: "last" or "mean" asks for the prompt's hidden states as one vector, and needs
    n and max_tokens 1. num_speculative_tokens: Maximum number of drafts in a step, or None for the engine's. Changes
    tokens only with rejection sampling.

    Numbers may be numpy numbers. Raises `RequestError` for an invalid value. Fields may be changed until the request is
    sent. The engine then checks and copies them.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    pooling: str | None = None
    num_speculative_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    shown_special_token_ids: list[int] = field(default_factory=list)
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._normalize()
        for name, limits in LIMITS.items():
            value = getattr(self, name)
            if not (value is None and limits.may_be_none):
                _check_number(name, value, limits)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")
        self._check_lists()
        if self.pooling is not None:
            if self.pooling not in POOLING:
                _refuse("pooling", self.pooling, " or ".join(POOLING))
            if (self.n, self.max_tokens) != (1, 1):
                raise RequestError("pooling needs n = 1 and max_tokens = 1", parameter="pooling")
            if self.structured_outputs is not None:
                raise RequestError("pooling generates no tokens: remove structured_outputs", parameter="pooling")
        if self.structured_outputs is not None:
            self._check_structure(self.structured_outputs)

    def _normalize(self) -> None:
        for name in LIMITS:
            setattr(self, name, plain_number(getattr(self, name)))
        for name in _FLAGS:
            setattr(self, name, _plain_flag(getattr(self, name)))
        if self.seed == -1:
            self.seed = None
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self.stop = _listed("stop", stop, "strings")
        self.stop_token_ids = _plain_ids("stop_token_ids", self.stop_token_ids)
        self.shown_special_token_ids = _plain_ids("shown_special_token_ids", self.shown_special_token_ids)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _plain_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            self.logit_bias = _plain_bias(self.logit_bias)
        if self.top_k == -1:
            self.top_k = 0
        if type(self.top_p) in (int, float) and self.top_p == 0:
            self.top_p = _LEAST_TOP_P
        if isinstance(self.temperature, (int, float)) and 0 < self.temperature < _SAMPLING_EPS:
            self.temperature = 0.0

    def _check_lists(self) -> None:
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            _refuse("stop", f"{len(self.stop_strings)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in self.stop_strings:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                _refuse("stop", text, f"strings of 1 to {MAX_STOP_STRING_CHARS} characters")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", parameter="stop")
        for name in ("stop_token_ids", "shown_special_token_ids"):
            for token_id in getattr(self, name):
                _check_int(name, token_id, 0)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias", token_id, 0)
            _check_number("logit_bias", bias, _BIAS_LIMITS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            _refuse("allowed_token_ids", [], "at least one token id")
        for token_id in self.allowed_token_ids or []:
            _check_int("allowed_token_ids", token_id, 0)

    def _check_structure(self, structure: object) -> None:
        if not isinstance(structure, StructuredOutputsParams):
            _refuse(_STRUCTURED, structure, "StructuredOutputsParams")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} cannot be used with structured_outputs: the structure ends the answer", parameter=name
                )

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as list."""
        assert isinstance(self.stop, list)
        return self.stop

    @property
    def least_output_tokens(self) -> int:
        """Number of output tokens that must fit, which is 1, or 0 if pooled."""
        return 0 if self.pooling is not None else 1

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always chosen."""
        return self.temperature == 0.0

    def replace(self, **values: Any) -> SamplingParams:
        """Return a copy with some fields changed."""
        return replace(self, **values)


_BIAS_LIMITS = Limits(-100, 100, is_whole=False)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


def plain_number(value: Any) -> Any:
    """Convert another library's number to a Python number, which can be sent to another process."""
    if type(value) in (int, float, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _plain_flag(value: Any) -> Any:
    is_flag = isinstance(value, Integral) or type(value).__name__ in ("bool", "bool_")  # numpy's bools are not Integral
    return bool(value) if is_flag and value in (0, 1) else value


def _plain_ids(name: str, values: Any) -> list[Any]:
    ids = _listed(name, values, "token ids")
    return ids if all(type(token_id) is int for token_id in ids) else [plain_number(token_id) for token_id in ids]


def _plain_bias(bias: Any) -> dict[Any, Any]:
    if not isinstance(bias, dict):
        _refuse("logit_bias", bias, "a dictionary of token ids and numbers")
    if all(type(token_id) is int for token_id in bias) and all(type(each) in (int, float) for each in bias.values()):
        return bias
    return {plain_number(token_id): plain_number(each) for token_id, each in bias.items()}


def _listed(name: str, values: Any, of: str) -> list[Any]:
    try:
        return [] if values is None else list(values)
    except TypeError:
        _refuse(name, values, f"a list of {of}")


def _refuse(name: str, value: object, allowed: str) -> NoReturn:
    raise RequestError(f"{name} must be {allowed}, got {value!r:.100}", parameter=name)


def _check_int(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        _refuse(name, value, f"an integer of {low} or more")


def _check_number(name: str, value: object, limits: Limits) -> None:
    is_number = isinstance(value, int if limits.is_whole else int | float) and not isinstance(value, bool)
    if is_number and limits.holds(value):
        return
    low, high = (limits.low, limits.high) if limits.is_whole else (f"{limits.low:g}", f"{limits.high:g}")
    kind = "an integer" if limits.is_whole else "a number"
    _refuse(name, value, f"{kind} above {low} and up to {high}" if limits.is_open else f"{kind} from {low} to {high}")
