"""Configuration of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from octavo.config.fields import QUANTIZATIONS, not_negative, one_of, option, within
from octavo.errors import ConfigError
from octavo.sampling_params import MAX_DRAFTS

if TYPE_CHECKING:
    from collections.abc import Mapping

_METHODS = ("auto", "none", "ngram", "suffix", "draft_model", "quantized")
_METHODS_WITH_MODEL = ("draft_model", "suffix", "auto")
_METHOD_OF_PREFIX = {"prompt_lookup_": "ngram", "suffix_decoding_": "suffix"}
_VERIFICATIONS = ("exact", "rejection")
_MAX_LOOKUP = 32
_DEFAULT_LOOKUP = (2, 4)
_MAX_CACHED_REQUESTS = 1_000_000
_CACHED_BYTES = (1 << 16, 1 << 34)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are drafted. docs/speculation.md describes the fields.

    Outputs depend on drafts only with verification = "rejection".

    method: "auto" means "suffix" if a token's results do not depend on its batch, otherwise "none".
    quantization: Of the draft model. None means int4 for the method "quantized".
    prompt_lookup_min, prompt_lookup_max: n-gram lengths. None means 2 and 4, unless the other field conflicts.
    suffix_decoding_max_cached_requests: The oldest answers are dropped first.
    """

    method: str = option(
        "auto",
        "How to draft tokens, which one step then verifies together; no token depends on it. ngram: the "
        "continuation of the newest tokens where they occurred last in the request. suffix: their most frequent "
        "continuation in the request and in earlier answers. draft_model: another model. quantized: the model "
        "itself in int4. none: no drafts. Default: suffix with compiled kernels, else none.",
        choices=_METHODS,
        name="speculative_method",
        is_open=True,
    )
    num_speculative_tokens: int = option(
        8,
        "Maximum number of draft tokens of a request in a step; fewer are drafted if more would not pay. Default: 8.",
        is_open=True,
    )
    model: str | None = option(
        None,
        "A smaller model with the same vocabulary, for draft_model, or for suffix when it finds nothing. "
        "octavo-demo-draft is the built-in model's. Default: none.",
        unit="PATH_OR_ID",
        name="speculative_model",
        is_open=True,
    )
    quantization: str | None = None
    verification: str = "exact"
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_bytes: int = 32 << 20
    suffix_decoding_max_spec_factor: float = 2.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        one_of("method of speculative_config", self.method, _METHODS)
        one_of("verification of speculative_config", self.verification, _VERIFICATIONS)
        within("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFTS)
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if getattr(self, name) is not None:
                within(name, getattr(self, name), 1, _MAX_LOOKUP)
        within("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, _MAX_CACHED_REQUESTS)
        within("suffix_decoding_max_cached_bytes", self.suffix_decoding_max_cached_bytes, *_CACHED_BYTES)
        for name, most in (("suffix_decoding_max_spec_factor", MAX_DRAFTS), ("suffix_decoding_min_token_prob", 1)):
            not_negative(name, getattr(self, name))
            if getattr(self, name) > most:
                raise ConfigError(f"{name} must be at most {most}, got {getattr(self, name)}")
        self._check_fields_of_other_methods()
        if self.method == "none" and self.verification != "exact":
            raise ConfigError("verification has no effect with method none, which drafts no tokens")
        self._check_model()
        least, most = self.lookup_lengths
        if least > most:
            raise ConfigError(f"prompt_lookup_min ({least}) must be at most prompt_lookup_max ({most})")

    def _check_fields_of_other_methods(self) -> None:
        for each in fields(self):
            checked_method = "suffix" if self.method == "auto" else self.method
            method = next(
                (of for prefix, of in _METHOD_OF_PREFIX.items() if each.name.startswith(prefix)), checked_method
            )
            if method != checked_method and getattr(self, each.name) != each.default:
                raise ConfigError(f"{each.name} is a field of method {method}, but the method is {self.method}")

    def _check_model(self) -> None:
        if self.method == "draft_model" and self.model is None:
            raise ConfigError(
                "method draft_model needs a model: a directory in Hugging Face layout, a hub id, or "
                "octavo-demo-draft with the built-in model"
            )
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f"model of speculative_config must be a path or a hub id, got {self.model!r}")
        if self.model is not None and self.method not in _METHODS_WITH_MODEL:
            raise ConfigError(
                f"model is a field of method {', '.join(_METHODS_WITH_MODEL)}, but the method is {self.method}"
            )
        if self.quantization is None:
            return
        one_of("quantization of speculative_config", self.quantization, QUANTIZATIONS)
        if not self.drafts_by_model:
            raise ConfigError(f"quantization is of a model that drafts, but the method is {self.method}")

    @property
    def is_requested(self) -> bool:
        """True if the user asked for drafts."""
        return self.method not in {"auto", "none"} or self.model is not None

    @property
    def drafts_by_model(self) -> bool:
        """True if a draft model is loaded."""
        return self.method == "quantized" or self.model is not None

    def resolved(self, *, is_exact: bool) -> SpeculativeConfig | None:
        """Resolve the method "auto". Return None for "none". is_exact: tokens do not depend on their batch."""
        method = ("suffix" if is_exact else "none") if self.method == "auto" else self.method
        return None if method == "none" else replace(self, method=method)

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The (minimum, maximum) n-gram length."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is None:
            least = _DEFAULT_LOOKUP[0] if most is None else min(_DEFAULT_LOOKUP[0], most)
        return least, max(_DEFAULT_LOOKUP[1], least) if most is None else most

    @classmethod
    def parse(cls, given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig:
        """Accept an instance, a mapping, or None for the defaults. Raises `ConfigError`."""
        if given is None:
            return cls()
        if isinstance(given, SpeculativeConfig):
            return given
        names = tuple(each.name for each in fields(cls))
        if not hasattr(given, "keys") or "method" not in given:
            raise ConfigError(f"speculative_config must be an object with a method, got {given!r}")
        for name in given:
            one_of("a field of speculative_config", name, names)
        return cls(**given)
