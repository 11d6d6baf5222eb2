"""Rotary position embedding as a checkpoint asks for it: the old `rope_scaling` and the new `rope_parameters` keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from octavo.models.config_file import ConfigFile

RopeKind = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10_000.0  # of every family here, as in transformers
_PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
_UNSUPPORTED_KEYS = ("mrope_section", "llama_4_scaling_beta", "full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Numbers of one rotary embedding; a kind reads only those it is listed with.

    theta             all       base of the wavelengths
    factor            linear, llama3, yarn   how far positions are stretched
    low_freq_factor, high_freq_factor        llama3: where interpolation starts and ends
    original_max_position_embeddings         llama3, yarn: context before stretching
    attention_factor  yarn      multiplies cosines and sines; derived from the factor unless given
    beta_fast, beta_slow, truncate           yarn: ends of the ramp, in rotations; whether they are rounded
    """

    kind: RopeKind = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def max_context_tokens(self, max_position_embeddings: int) -> int:
        """Longest context that it was made for; linear and yarn scaling extend it (as vLLM reckons)."""
        if self.kind == "linear":
            return int(max_position_embeddings * self.factor)
        if self.kind == "yarn":
            return int(self.original_max_position_embeddings * self.factor)
        return max_position_embeddings


def read_rope(config: ConfigFile, max_position_embeddings: int, *, section: ConfigFile | None = None) -> RopeConfig:
    """Read either style; where both stand, `rope_scaling` wins and a theta inside wins, as in transformers.

    section: of the layers in question, where these have parameters of their own.
    """
    section = section or config.section("rope_scaling") or config.section("rope_parameters")
    theta = config.number("rope_theta", _DEFAULT_THETA)
    _refuse_unsupported(config)
    if section is None:
        return RopeConfig(theta=theta)
    _refuse_unsupported(section)
    theta = section.number("rope_theta", theta)
    key = "rope_type" if section.has("rope_type") else "type"
    match section.text(key, "default"):
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(kind="linear", theta=theta, factor=section.number("factor"))
        case "llama3":
            return _read_llama3(section, theta, _original_length(config, section, max_position_embeddings))
        case "yarn":
            original = _original_length(config, section, max_position_embeddings)
            return _read_yarn(section, theta, original, max_position_embeddings)
        case _:
            raise section.error(key, f"octavo supports the rope types {', '.join(SUPPORTED_KINDS)}")


def _refuse_unsupported(config: ConfigFile) -> None:
    for key in _PARTIAL_KEYS:
        if config.number(key, 1.0) != 1.0:
            raise config.error(key, "octavo rotates whole heads only")
    for key in _UNSUPPORTED_KEYS:
        if config.has(key):
            raise config.error(key, "octavo does not compute this rotary embedding yet")


def _original_length(config: ConfigFile, section: ConfigFile, max_position_embeddings: int) -> int:
    key = "original_max_position_embeddings"
    return config.count(key) if config.has(key) else section.count(key, max_position_embeddings)


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
        if mscale and mscale_all_dim:  # zero means "not given", as in transformers
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


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Temperature of attention (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
