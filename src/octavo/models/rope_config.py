"""Reads the parameters of rotary embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]
SUPPORTED_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_DEFAULT_THETA = 10_000.0  # as in transformers
_PARTIAL, _QUERY_SCALE = "partial_rotary_factor", "llama_4_scaling_beta"
_UNSUPPORTED_KEYS = ("mrope_section", "full_attention", "sliding_attention", "short_mscale", "long_mscale")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of one rotary embedding.

    partial_rotary_factor             rotated share of a head, from the first dimension on
    interleaved                       neighbouring dimensions rotate together, otherwise a head's halves
    query_scale_beta                  factor of queries at position p is 1 + beta * ln(1 + floor(p / original))
    low_freq_factor, high_freq_factor llama3: bounds of interpolation
    original_max_position_embeddings  llama3, yarn, longrope: context before stretching
    attention_factor                  yarn, longrope: multiplies cosines and sines
    beta_fast, beta_slow              yarn: ends of the ramp, in rotations
    truncate                          yarn: round the ends of the ramp
    short_factors, long_factors       longrope: a factor for each wavelength
    """

    kind: RopeKind = "default"
    theta: float = _DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    query_scale_beta: float = 0.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Return the rotated dimensions. "proportional" rotates some of them by zero."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)

    def check(self, config: ConfigFile, head_dim: int) -> None:
        """Raise `ModelError` if heads cannot be rotated."""
        rotary_dim, factors = self.rotary_dim(head_dim), len(self.short_factors)
        if rotary_dim % 2 or not rotary_dim:
            raise config.error(_PARTIAL, f"rotates {rotary_dim} of {head_dim} dimensions of a head; it must be even")
        if self.kind == "proportional" and int(head_dim * self.partial_rotary_factor) < 2:
            raise config.error(_PARTIAL, f"{self.partial_rotary_factor:g} of a head's {head_dim} dimensions is no pair")
        if self.kind == "longrope" and factors != rotary_dim // 2:
            raise config.error("rope_scaling", f"must have {rotary_dim // 2} factors, one for each pair, not {factors}")

    def within(self, max_model_len: int) -> RopeConfig:
        """Return the parameters for sequences of at most `max_model_len` tokens.

        As in vLLM, longrope's factors depend on `max_model_len`. If they depended on a sequence's length, earlier keys
        would become wrong.
        """
        if self.kind != "longrope":
            return self
        factors = self.long_factors if max_model_len > self.original_max_position_embeddings else self.short_factors
        return replace(self, short_factors=factors, long_factors=factors)

    def max_context_tokens(self, max_position_embeddings: int) -> int:
        """Return the longest context, which linear and yarn extend, as in vLLM."""
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings


def read_rope(
    config: ConfigFile,
    max_position_embeddings: int,
    *,
    section: ConfigFile | None = None,
    is_partial: bool = False,
    scales_queries: bool = False,
) -> RopeConfig:
    """Read `rope_scaling`, otherwise `rope_parameters`. A nested `rope_theta` wins, as in transformers.

    section: replaces both. is_partial: allow partly rotated heads. scales_queries: allow `query_scale_beta`.
    """
    section = section or config.section("rope_scaling") or config.section("rope_parameters")
    sections = [config] if section is None else [config, section]
    theta, rotary_factor = config.number("rope_theta", _DEFAULT_THETA), 1.0
    for each in sections:
        _refuse_unsupported(each, is_partial=is_partial, scales_queries=scales_queries)
        rotary_factor = each.number(_PARTIAL, rotary_factor)
        if rotary_factor > 1.0:
            raise each.error(_PARTIAL, "must not be above 1")
    rope = (
        RopeConfig(theta=theta) if section is None else _read_section(config, section, theta, max_position_embeddings)
    )
    if section is not None and scales_queries and section.has(_QUERY_SCALE):
        original = _original_length(config, section, max_position_embeddings)
        beta = section.number(_QUERY_SCALE)
        rope = replace(rope, query_scale_beta=beta, original_max_position_embeddings=original)
    return replace(rope, partial_rotary_factor=rotary_factor)


def _read_section(config: ConfigFile, section: ConfigFile, theta: float, max_position_embeddings: int) -> RopeConfig:
    theta = section.number("rope_theta", theta)
    key = "rope_type" if section.has("rope_type") else "type"
    match section.text(key, "default"):
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(kind="linear", theta=theta, factor=section.number("factor"))
        case "proportional":
            return RopeConfig(kind="proportional", theta=theta, factor=section.number("factor", 1.0))
        case "llama3":
            return _read_llama3(section, theta, _original_length(config, section, max_position_embeddings))
        case "yarn":
            original = _original_length(config, section, max_position_embeddings)
            return _read_yarn(section, theta, original, max_position_embeddings)
        case "longrope" | "su":
            return _read_longrope(section, theta, _original_length(config, section, None), max_position_embeddings)
        case _:
            raise section.error(key, f"octavo supports the rope types {', '.join(SUPPORTED_KINDS)}")


def _refuse_unsupported(config: ConfigFile, *, is_partial: bool, scales_queries: bool) -> None:
    for key in ("rotary_pct",) if is_partial else (_PARTIAL, "rotary_pct"):
        if config.number(key, 1.0) != 1.0:
            raise config.error(key, "octavo rotates whole heads of this family only")
    for key in _UNSUPPORTED_KEYS if scales_queries else (*_UNSUPPORTED_KEYS, _QUERY_SCALE):
        if config.has(key):
            raise config.error(key, "octavo does not support this rotary embedding for this family")


def _original_length(config: ConfigFile, section: ConfigFile, default: int | None) -> int:
    key = "original_max_position_embeddings"
    if config.has(key):
        return config.count(key)
    return section.count(key) if default is None else section.count(key, default)


def _read_llama3(section: ConfigFile, theta: float, original: int) -> RopeConfig:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"must be above low_freq_factor = {low:g}")
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


def _read_yarn(section: ConfigFile, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    factor = section.number("factor", max_position_embeddings / original)
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = section.values.get("mscale"), section.values.get("mscale_all_dim")
        if mscale and mscale_all_dim:  # as in transformers, zero counts as missing
            over, under = section.number("mscale"), section.number("mscale_all_dim")
            attention_factor = _yarn_mscale(factor, over) / _yarn_mscale(factor, under)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    beta_fast, beta_slow = section.number("beta_fast", 32.0), section.number("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise section.error("beta_fast", f"must not be below beta_slow = {beta_slow:g}")
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=section.flag("truncate", default=True),
    )


def _read_longrope(section: ConfigFile, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    factor = section.number("factor", max_position_embeddings / original)
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = section.numbers("short_factor"), section.numbers("long_factor")
    if len(short) != len(long):
        raise section.error("long_factor", f"must have {len(short)} numbers, like short_factor")
    return RopeConfig(
        kind="longrope",
        theta=theta,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        short_factors=short,
        long_factors=long,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Return the attention temperature (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
